"""Two futures of a recorded run, played side by side from one of its steps, and what they come to.

Both have the same past, the same random numbers, and the same actors replaced at the fork: what differs between them
follows from the overrides alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.messages.errors import UserFault
from penstock.messages.names import BUFFER, LEARNER, is_engine
from penstock.messages.operator import OperatorAnswered
from penstock.runtime.hosts.virtual.accounting import RunAccounts
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.hosts.virtual.process import Process, Status
from penstock.runtime.hosts.virtual.simulate import PATIENCE_S, rare_collections
from penstock.runtime.observability.figures import RunFigures
from penstock.runtime.observability.summary import wasted_tokens
from penstock.runtime.observability.texts import duration_text
from penstock.runtime.observability.trackers import read_activity, read_steps
from penstock.runtime.prediction.forking.decisions import Decisions, Difference, first_difference
from penstock.runtime.prediction.forking.past import changed_plan, check_update_modes
from penstock.runtime.prediction.forking.restore import Restored
from penstock.runtime.prediction.steady import Lanes, Steady, StepSeen, lanes_at, steady_of
from penstock.runtime.run.wiring import build_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from penstock.messages.base import Event
    from penstock.messages.training import Balance, StepReported
    from penstock.runtime.prediction.forking.changes import Change
    from penstock.runtime.prediction.forking.past import Past
    from penstock.runtime.run.plan import RunPlan
    from penstock.runtime.scenario import Scenario

TELL_AGAIN_S: Final = 0.01
SLICE_S: Final = 5.0
"""Virtual time after which the futures are compared."""
AS_IT_WAS: Final = "as it was"
RECORDED: Final = "as recorded"


class Waste(msgspec.Struct, frozen=True):
    """Tokens of samples that ended untrained."""

    cause: str
    num_tokens: int


class Future(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps after the fork come to."""

    label: str
    figures: Steady
    waste: tuple[Waste, ...]
    """Since the fork, the largest first."""
    rest_s: float | None
    """From the fork to the last step of the run; None: it is not known."""
    step_ends_s: tuple[float, ...]
    """Of each step, seconds since the fork."""


class Futures(msgspec.Struct, frozen=True, kw_only=True):
    """Both, and the recorded one where there is one."""

    step: int
    at_s: float
    last_step: int
    """Figures are of the steps after the fork up to this one."""
    was: Future
    other: Future
    recorded: Future | None
    replaced: tuple[str, ...]
    """Actors that were replaced at the fork in both."""
    assumed: tuple[str, ...]


class _Play(IdleWatcher):
    """One future under way."""

    def __init__(
        self,
        past: Past,
        scenario: Scenario,
        successors: RunPlan,
        actors: Collection[str],
        *,
        replaced: Collection[str],
        validate: bool,
    ) -> None:
        self.restored = Restored(past, scenario, successors, replaced=replaced, validate=validate)
        self.host = self.restored.host
        self.decisions = Decisions(actors)
        self.steps: list[StepSeen] = []
        self.lanes: list[Lanes] = []
        self.refusals: list[str] = []
        self._at_s = past.at_s
        figures = RunFigures(progress_tokens=scenario.engines.progress_tokens)
        self._accounts = RunAccounts(self.host.clock, figures, on_step=self._seen, begins_s=past.at_s)
        self._accounts.step_times += [past.at_s] * past.step
        self._accounts.progress_s = past.at_s
        self.host.watch(self._accounts, events=False)
        self.host.watch(self.decisions)
        self.host.watch(self, events=False)
        report = self.restored.noted.report
        if report is None or report.version != past.step:
            raise UserFault(
                f"--fork: when the Buffer heard first of step {past.step} is not in the recording, as its process was "
                "killed then, and what is has it trained again; fork at another step"
            )
        self.restored.go_on()
        for process in self.restored.processes.values():
            self._accounts.turned(process)
        self._note(past.at_s, report)

    def _seen(self, report: StepReported) -> None:
        self._note(self._accounts.progress_s, report)

    def _note(self, at_s: float, report: StepReported) -> None:
        engines, learner = self._accounts.shares_of(is_engine), self._accounts.shares_of(LEARNER.__eq__)
        self.steps.append(StepSeen(at_s, report.staleness_counts, report.response_lengths, report.balance))
        self.lanes.append(Lanes(engines.seconds, engines.occupied_s, learner.seconds))

    def tell(self, event: Event) -> None:
        """Tell the Buffer: at once, or, where the fork builds it anew, as soon as its successor is there."""
        process = self.host.supervisor.processes.get(BUFFER)
        if process is not None and process.status is Status.RUNNING:
            self.host.say(BUFFER, event)
        else:
            self.host.clock.at(self.host.clock.now_s + TELL_AGAIN_S, _Play.tell, self, event)

    def heard(self, process: Process, event: Event) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        if isinstance(event, OperatorAnswered) and not event.accepted:
            self.refusals.append(event.text)

    def advance(self, until_s: float) -> bool:
        """Go on to this time; whether the run has come to its end.

        Raises:
            UserFault: it stands still, or ended otherwise than completed, or refuses what was asked for.
        """
        host = self.host
        ending = host.ending or host.run(until_s)
        if self.refusals:
            raise UserFault(f"--fork: the run refuses it: {self.refusals[0]}")
        if ending is None and host.clock.now_s - self._accounts.progress_s > PATIENCE_S:
            raise UserFault(f"--fork: no step for {duration_text(PATIENCE_S)} of virtual time\n{host.story()}")
        if ending is not None and not ending.completed:
            raise UserFault(f"--fork: the simulation did not complete: {ending.story}")
        return ending is not None

    def future(self, label: str, num_steps: int) -> Future:
        """Of so many steps after the fork."""
        steps, lanes = self.steps[: num_steps + 1], self.lanes
        return Future(
            label=label,
            figures=steady_of(steps, lanes[0], lanes[num_steps]),
            waste=_waste(steps[0].balance, steps[-1].balance),
            rest_s=self.steps[-1].at_s - self._at_s,
            step_ends_s=tuple(step.at_s - self._at_s for step in self.steps[1:]),
        )


def _waste(before: Balance, after: Balance) -> tuple[Waste, ...]:
    was = {(each.state, each.cause): each.num_tokens for each in wasted_tokens(before)}
    found = [
        Waste(f"{each.state}: {each.cause}" if each.cause else str(each.state), more)
        for each in wasted_tokens(after)
        if (more := each.num_tokens - was.get((each.state, each.cause), 0)) > 0
    ]
    return tuple(sorted(found, key=lambda waste: -waste.num_tokens))


def play_futures(
    past: Past, change: Change, *, on_step: Callable[[int], None] = lambda _: None, validate: bool = False
) -> tuple[Futures, Difference | None, tuple[Decisions, Decisions]]:
    """Play a run twice from a step: as it was, and with what is to change.

    Args:
        past: of the recorded run.
        change: what is asked for.
        on_step: hears how many steps are trained in both.
        validate: assert the invariants of every actor after every event.

    Returns:
        What they come to; the first decision in which they differ; and what each has decided.

    Raises:
        UserFault: the past does not come out again; a future does not come to its end; the run refuses the change; or
            nothing is left of it.
    """
    check_update_modes(past, change)
    plan = changed_plan(past.plan, change)
    replaced = _replaced(past, plan, change)
    actors = [name for name in past.began if not is_engine(name) or name in change.engines]
    with rare_collections():
        plays = (
            _Play(past, change.before, past.plan, actors, replaced=replaced, validate=validate),
            _Play(past, change.after, plan, actors, replaced=replaced, validate=validate),
        )
        for play in plays:
            for name in replaced:
                play.host.supervisor.give_up(play.restored.processes[name], "a fork builds it anew")
        if change.counts_engines and not change.is_elastic:
            plays[1].host.supervisor.want_engines(change.engines)
        for each in change.events:
            plays[1].tell(each)
        difference = _side_by_side(past, plays, actors, on_step)
    return _summed_up(past, change, plays, replaced), difference, (plays[0].decisions, plays[1].decisions)


def _replaced(past: Past, plan: RunPlan, change: Change) -> tuple[str, ...]:
    """Actors that are built otherwise by the other plan, or whose engines are opened otherwise."""
    found: list[str] = []
    for name, began in past.began.items():
        if is_engine(name) and name not in change.engines:
            continue  # it leaves
        was: Any = build_machine(name, past.plan, epoch=began.epoch)
        now: Any = build_machine(name, plan, epoch=began.epoch)
        if was.settings != now.settings or (change.reopens_engines and is_engine(name)):
            found.append(name)
    if BUFFER in found and past.ledger.snapshot is not None:
        raise UserFault(
            "--fork: the Buffer has to be built anew from its ledger, and this one had read a snapshot in place of it; "
            "fork at a step before the run was resumed"
        )
    assert LEARNER not in found, "no key that may change is one of its settings"
    return tuple(found)


def _side_by_side(
    past: Past, plays: tuple[_Play, _Play], actors: Sequence[str], on_step: Callable[[int], None]
) -> Difference | None:
    """Play both to their ends; the first difference."""
    first, second = (play.decisions for play in plays)
    until_s, difference, have_ended = past.at_s, None, False
    while not have_ended:
        until_s += SLICE_S
        ended = [play.advance(until_s) for play in plays]
        have_ended = all(ended)
        if difference is None:
            difference = first_difference(first, second, actors, has_ended=have_ended)
            if difference is not None:
                first.stop()
                second.stop()
        on_step(min(len(play.steps) - 1 for play in plays))
    return difference


def _summed_up(past: Past, change: Change, plays: tuple[_Play, _Play], replaced: tuple[str, ...]) -> Futures:
    """Figures of the steps that all columns have, without the last, for which nothing more is granted; but of half of
    them at least."""
    rows = {row.version: row for row in read_steps(past.folder)}
    last = max((version for version in rows if all(each in rows for each in range(past.step, version))), default=0)
    ages = [each.staleness.max_staleness or 0 for each in (change.before, change.after)]
    num_left = min(len(play.steps) - 1 for play in plays)
    if num_left < 1:
        raise UserFault(f"--fork: step {past.step} is the last one, so nothing is left to be forked")
    num_steps = max((num_left + 1) // 2, num_left - 1 - max(ages))
    recorded = None
    if past.step in rows and last > past.step:
        num_steps = min(num_steps, last - past.step)
        recorded = _recorded(past, num_steps, is_whole=last >= past.plan.scenario.run.num_steps)
    return Futures(
        step=past.step,
        at_s=past.at_s,
        last_step=past.step + num_steps,
        was=plays[0].future(AS_IT_WAS, num_steps),
        other=plays[1].future(" ".join(change.overrides), num_steps),
        recorded=recorded,
        replaced=replaced,
        assumed=_assumed(past, change, replaced),
    )


def _recorded(past: Past, num_steps: int, *, is_whole: bool) -> Future:
    """What the run itself did in these steps."""
    rows = [row for row in read_steps(past.folder) if row.version >= past.step]
    used, activity = rows[: num_steps + 1], read_activity(past.folder)
    seen = [StepSeen(row.at_s, row.staleness_counts, row.response_lengths, row.balance) for row in used]
    return Future(
        label=RECORDED,
        figures=steady_of(seen, lanes_at(activity, seen[0].at_s), lanes_at(activity, seen[-1].at_s)),
        waste=_waste(seen[0].balance, seen[-1].balance),
        rest_s=rows[-1].at_s - rows[0].at_s if is_whole else None,
        step_ends_s=tuple(row.at_s - rows[0].at_s for row in rows[1:]),
    )


def _assumed(past: Past, change: Change, replaced: tuple[str, ...]) -> tuple[str, ...]:
    """What people should know of how the futures were made."""
    whose = "the run's own models" if change.own_models else "modelled: lengths, rewards and times are drawn by chance"
    texts = [
        *past.notes,
        f"from the fork on engines, learner and rewards are {whose}",
        "what was on its way arrives at the fork, and no fault comes after it",
        *change.doubts,
        *(
            ["the priority of rows is modelled: those that earn least come first"]
            if past.plan.scenario.prompt_source.priority
            else []
        ),
    ]
    if replaced:
        named = ", ".join(replaced)
        texts.append(f"replaced at the fork, at once and in both futures, as they are built otherwise: {named}")
    return tuple(texts)
