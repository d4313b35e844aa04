"""The accounts of a run, in time and in tokens, without remainder: of a live, a finished, a killed or a simulated one.

Invariants:

* The states of a lane add up to the wall time of the run, from its start to its end; of a run that goes on, to the
  moment up to which most is known. What is missing stands in ``remainder_s``.
* Tokens are counted where they arrive: ``generated = trained + evaluated + wasted by cause + in the system``, exactly.
  The figures are those of the run's :class:`~penstock.messages.training.Balance`, or of the ledger that it is the fold
  of, and no engine's own count is among them.
* What was made and never arrived is an estimate with a name of its own, beside these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.names import is_engine
from penstock.messages.samples import TerminalState
from penstock.messages.training import Activity, Balance
from penstock.runtime.observability.facts import read_starts
from penstock.runtime.observability.lanes import lane_order
from penstock.runtime.observability.ledger_counts import ledger_counts
from penstock.runtime.observability.shares import Shares
from penstock.runtime.observability.summary import USEFUL, generated_tokens, read_summary, trained_tokens
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.trackers import ActivityRow

LOST: Final = "lost"
"""The state of tokens that engines made and that never arrived."""
KILLED_ENGINES: Final = "killed_engines"
"""Its cause: made since the last report of an engine that was killed."""
NOT_HANDED_OVER: Final = "not_handed_over"
"""Its cause: reported by engines and in no response that arrived, when the run had ended."""


class LaneAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one lane: an engine, a teacher, a reward model, the learner's ranks, or the Scorer's workers."""

    name: str
    num_devices: int
    """Devices that it has all the time: GPUs, or processes where there are none."""
    seconds: dict[Activity, float]
    """Wall time in each state, in seconds, of the lane and not of each of its devices."""
    occupied_s: float
    """Of the working time, as much as its slots or workers were in use."""
    wall_s: float
    """Of the run."""

    @property
    def remainder_s(self) -> float:
        """Wall time of which nothing is known; below 0 where states overlap."""
        return self.wall_s - sum(self.seconds.values())


class Waste(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were made and are of no use, and what they have cost."""

    state: str
    """Terminal state of their samples, or ``lost``."""
    cause: str
    num_tokens: int
    device_s: float
    """See :func:`waste_of`."""
    is_estimate: bool = False
    """They never arrived, so nobody has counted them."""


class TokenAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that the model made, by what became of them."""

    generated: int
    """Of every response that has come to the Buffer."""
    trained: int
    evaluated: int
    in_system: int
    """They have come and not ended."""
    wasted: tuple[Waste, ...]
    """They have come and ended otherwise: the largest waste first."""
    lost: tuple[Waste, ...]
    """Estimates of what never came: beside the balance, and no part of ``generated``."""

    @property
    def num_wasted(self) -> int:
        """Of all causes, estimates aside."""
        return sum(waste.num_tokens for waste in self.wasted)

    @property
    def num_lost(self) -> int:
        """Of all estimates."""
        return sum(waste.num_tokens for waste in self.lost)

    @property
    def remainder(self) -> int:
        """0, unless tokens are counted twice or not at all."""
        return self.generated - self.trained - self.evaluated - self.num_wasted - self.in_system


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time and the tokens of a run went."""

    wall_s: float
    """From the start of the run to its end, or up to where most is known."""
    has_ended: bool
    lanes: tuple[LaneAccount, ...]
    """Lanes of everything whose time is accounted, in the order of the report."""
    tokens: TokenAccount

    @property
    def waste(self) -> tuple[Waste, ...]:
        """All of it, what was lost too, dearest first."""
        return tuple(sorted((*self.tokens.wasted, *self.tokens.lost), key=lambda each: -each.device_s))


def read_accounts(
    run_folder: Path, *, lanes: Mapping[str, Sequence[ActivityRow]] | None = None, balance: Balance | None = None
) -> Accounts:
    """The accounts of a run, from its folder alone.

    Args:
        run_folder: of the run.
        lanes: where somebody has read them already.
        balance: likewise.

    Raises:
        UserFault: a file of the run is damaged; the message names it.
    """
    summary, starts = read_summary(run_folder), read_starts(run_folder)
    if lanes is None:
        lanes = read_activity(run_folder)
    if balance is None:
        balance = _balance(run_folder, summary)
    devices = starts[-1].facts.devices if starts else {}
    wall_s = summary.wall_s if summary else max((rows[-1].end_s for rows in lanes.values() if rows), default=0.0)
    accounts = tuple(_lanes(lanes, devices, wall_s))
    return Accounts(
        wall_s=wall_s,
        has_ended=summary is not None,
        lanes=accounts,
        tokens=token_account(balance, accounts, summary),
    )


def token_account(balance: Balance, lanes: Sequence[LaneAccount], summary: RunSummary | None) -> TokenAccount:
    """The tokens of a balance, with what they have cost in the time of these lanes."""
    evaluated = sum(count.num_made_tokens for count in balance.ended if count.state == TerminalState.EVALUATED)
    generated = generated_tokens(balance)
    lost = {} if summary is None else _lost(generated, summary)
    wasted, lost_ones = waste_of(balance, lost, working_device_s(lanes), generated)
    return TokenAccount(
        generated=generated,
        trained=trained_tokens(balance),
        evaluated=evaluated,
        in_system=balance.in_system_tokens,
        wasted=wasted,
        lost=lost_ones,
    )


def working_device_s(lanes: Sequence[LaneAccount]) -> float:
    """Device-seconds in which engines decoded."""
    return sum(lane.num_devices * lane.seconds[Activity.WORKING] for lane in lanes if is_engine(lane.name))


def waste_of(
    balance: Balance, lost: Mapping[str, int], device_s: float, generated: int
) -> tuple[tuple[Waste, ...], tuple[Waste, ...]]:
    """What was wasted, and what was lost, each by cause and the largest first.

    Device-seconds are attributed by tokens: every token that engines made, whatever became of it, has cost the same
    share of the time in which engines were working (a state of their lanes, times the devices of each). So a cause
    costs ``working device-seconds × its tokens ÷ (generated + lost)``. Working time in which slots stood empty is in
    the price, since the devices were taken; waiting and starting are not. A token late in a long response costs more
    than this says, and one of an engine that is faster than others less.

    Args:
        balance: what has arrived.
        lost: estimates of what did not, by cause.
        device_s: in which engines were working.
        generated: tokens that have arrived.
    """
    price_s = device_s / max(1, generated + sum(lost.values()))
    wasted = [
        Waste(
            state=count.state, cause=count.cause, num_tokens=count.num_made_tokens,
            device_s=price_s * count.num_made_tokens,
        )
        for count in balance.ended
        if count.state not in USEFUL and count.num_made_tokens
    ]  # fmt: skip
    lost_ones = [
        Waste(state=LOST, cause=cause, num_tokens=number, device_s=price_s * number, is_estimate=True)
        for cause, number in lost.items()
        if number
    ]
    return _largest_first(wasted), _largest_first(lost_ones)


def _largest_first(waste: list[Waste]) -> tuple[Waste, ...]:
    return tuple(sorted(waste, key=lambda each: (-each.num_tokens, each.state, each.cause)))


def _lost(generated: int, summary: RunSummary) -> dict[str, int]:
    return {
        KILLED_ENGINES: summary.tokens_lost_estimate,
        NOT_HANDED_OVER: max(0, summary.tokens_reported - generated),
    }


def _lanes(
    lanes: Mapping[str, Sequence[ActivityRow]], devices: Mapping[str, int], wall_s: float
) -> Iterator[LaneAccount]:
    for name in sorted({*lanes, *devices}, key=lane_order):
        shares = Shares(lanes.get(name, ()))
        yield LaneAccount(
            name=name,
            num_devices=devices.get(name, 1),
            seconds=shares.seconds,
            occupied_s=shares.occupied_s,
            wall_s=wall_s,
        )


def _balance(run_folder: Path, summary: RunSummary | None) -> Balance:
    """As the Buffer said at the end; before, as the ledger stands, which knows more than the last step. A simulated run
    that was cut off has neither."""
    if summary is not None:
        return summary.balance
    path = run_folder / LEDGER_FILE
    if path.exists():
        with asked_ledger(path) as database:
            return ledger_counts(database).balance()
    steps = read_steps(run_folder)
    return steps[-1].balance if steps else Balance(issued=0, in_system=0, ended=(), generated_tokens=0)
