"""What an operator changed while a run went on, as the ledger has it: policies, pauses of new grants, engines.

It reads ``ledger.sqlite`` alone, also of a run that goes on, and of one that was copied from elsewhere.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.texts import counted
from penstock.runtime.observability.charts import STEPS, Mark
from penstock.runtime.observability.facts import read_starts
from penstock.runtime.observability.summary import HeldPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.observability.charts import Chart
    from penstock.runtime.observability.facts import Start

_AT: Final = "(SELECT coalesce(max(version), 0) FROM steps WHERE steps.sequence < {0}.sequence), {0}.recorded_at"
_POLICIES: Final = (
    f"SELECT sequence, {_AT.format('policies')}, policy, max_staleness, update_mode, on_stale FROM policies "
    "ORDER BY sequence"
)
_PAUSES: Final = f"SELECT sequence, {_AT.format('pauses')}, is_paused FROM pauses ORDER BY sequence"
_WHY: Final = (
    "(SELECT coalesce(json_extract(entry_json(body), '$.reason'), '') FROM entries "
    "WHERE entries.sequence = engines.sequence)"
)
_ENGINES: Final = f"SELECT sequence, {_AT.format('engines')}, names, {_WHY} FROM engines ORDER BY sequence"
_HAS: Final = "SELECT count(*) FROM sqlite_master WHERE name = ?"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One change that was recorded."""

    sequence: int
    """Of its entry in the ledger."""
    version: int
    """Batches trained by then."""
    recorded_at: float
    """Unix time, seconds."""


class PolicySwitch(Operation, frozen=True, kw_only=True):
    """What is granted from here on follows this policy."""

    policy: str
    max_staleness: int
    update_mode: str
    on_stale: str

    @property
    def label(self) -> str:
        """For a chart."""
        return f"{self.policy}, η = {self.max_staleness}"


class Pause(Operation, frozen=True, kw_only=True):
    """From here on nothing more is granted, or it is again."""

    is_paused: bool

    @property
    def label(self) -> str:
        """For a chart."""
        return "grants paused" if self.is_paused else "grants go on"


class Scaling(Operation, frozen=True, kw_only=True):
    """From here on these are the engines of the run."""

    engines: tuple[str, ...]
    reason: str
    """Of what ``engines.scale: by_bound`` decided, or why an engine was given up; empty where an operator decided, or
    the scenario."""

    @property
    def label(self) -> str:
        """For a chart."""
        return f"engines: {len(self.engines)}"


AnyOperation = PolicySwitch | Pause | Scaling


def read_operations(run_folder: Path) -> list[AnyOperation]:
    """All that are recorded, oldest first; none of a run that has no ledger yet.

    Raises:
        UserFault: the ledger cannot be read.
    """
    path = run_folder / LEDGER_FILE
    if not path.is_file():
        return []
    with asked_ledger(path) as database:
        found: list[AnyOperation] = [
            PolicySwitch(
                sequence=sequence,
                version=version,
                recorded_at=at,
                policy=policy,
                max_staleness=bound,
                update_mode=mode,
                on_stale=on_stale,
            )
            for sequence, version, at, policy, bound, mode, on_stale in database.execute(_POLICIES)
        ]
        if database.execute(_HAS, ("engines",)).fetchone()[0]:  # an older ledger has no such table
            found += [
                Scaling(
                    sequence=sequence,
                    version=version,
                    recorded_at=at,
                    engines=msgspec.json.decode(names, type=tuple[str, ...]),
                    reason=reason,
                )
                for sequence, version, at, names, reason in list(database.execute(_ENGINES))
            ]
        if database.execute(_HAS, ("pauses",)).fetchone()[0]:
            found += [
                Pause(sequence=sequence, version=version, recorded_at=at, is_paused=bool(is_paused))
                for sequence, version, at, is_paused in database.execute(_PAUSES)
            ]
    return sorted(found, key=lambda operation: operation.sequence)


def policies_of(run_folder: Path) -> tuple[HeldPolicy, ...]:
    """The scenario's policy, and those that an operator switched to; none of a run that was not started.

    Raises:
        UserFault: a file of the run is damaged.
    """
    starts, operations = read_starts(run_folder), read_operations(run_folder)
    if not starts:
        return ()
    switches = [each for each in operations if isinstance(each, PolicySwitch)]
    before = [each for each in starts if not switches or _began_at(each) <= switches[0].recorded_at] or starts[:1]
    facts = before[-1].facts  # a resumed run may have another scenario
    held = [HeldPolicy(from_step=1, policy=facts.policy, max_staleness=facts.staleness_bound)]
    held += [
        HeldPolicy(from_step=each.version + 1, policy=each.policy, max_staleness=each.max_staleness)
        for each in switches
    ]
    return tuple(held)


def _began_at(start: Start) -> float:
    """Unix time, seconds."""
    return datetime.fromisoformat(start.at).timestamp()


def policy_in_force(operations: Sequence[AnyOperation]) -> PolicySwitch | None:
    """The last switch; None: the scenario's own policy holds."""
    return next((each for each in reversed(operations) if isinstance(each, PolicySwitch)), None)


def pause_in_force(operations: Sequence[AnyOperation]) -> Pause | None:
    """The pause that has not been ended."""
    last = next((each for each in reversed(operations) if isinstance(each, Pause)), None)
    return last if last is not None and last.is_paused else None


def engines_in_force(operations: Sequence[AnyOperation]) -> tuple[str, ...] | None:
    """The engines that are recorded; None: none are, so the scenario's hold."""
    return next((each.engines for each in reversed(operations) if isinstance(each, Scaling)), None)


def scalings_of(operations: Sequence[AnyOperation]) -> tuple[str, ...]:
    """How many engines there were from which step on, and why, in words: each change after the start."""
    scalings = [each for each in operations if isinstance(each, Scaling)]
    return tuple(
        f"step {each.version}: {len(before.engines)} → {counted(len(each.engines), 'engine')}, "
        f"{each.reason or 'as an operator has said'}"
        for before, each in pairwise(scalings)
    )


def marked(charts: Sequence[Chart], operations: Sequence[AnyOperation]) -> list[Chart]:
    """The charts over steps with what an operator changed on the way, each before the step that came after it."""
    changes = [each for each in operations if not isinstance(each, Scaling) or each.version]
    marks = [Mark(x=each.version + 0.5, label=each.label) for each in changes]
    return [msgspec.structs.replace(chart, marks=marks) if chart.x_label == STEPS else chart for chart in charts]
