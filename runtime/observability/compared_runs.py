"""The runs of a comparison: read from their folders, gathered into arms, and what told them apart.

Invariant: runs of one arm differ in their scenarios in nothing but the seed, and what only names or watches a run; and
they ran the same model with the same software on the same machine, as far as they wrote it down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.facts import SCENARIO_FILE, read_starts
from penstock.runtime.observability.operations import policies_of
from penstock.runtime.observability.report import machine_text
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.safe_text import without_credentials
from penstock.runtime.scenario.keys import dotted, show
from penstock.runtime.scenario.source import read_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.runtime.observability.evaluations import EvaluationRow
    from penstock.runtime.observability.facts import RunFacts, Start
    from penstock.runtime.observability.summary import HeldPolicy, RunSummary
    from penstock.runtime.observability.trackers import StepRow
    from penstock.runtime.scenario.source import KeyPath, Plain

SEED: Final = "run.seed"
_WITHIN_AN_ARM: Final = (SEED, "run.name", "run.folder", "observability.")
"""Keys in which runs of one arm may differ; with a dot at the end a block."""
NOT_RECORDED: Final = "not recorded"
UNSET: Final = ""


class ComparedRun(NamedTuple):
    """What the comparison knows of a run."""

    name: str
    folder: Path
    keys: dict[str, str]
    """Of its scenario, with their values as text."""
    starts: list[Start]
    summary: RunSummary | None
    """None while it goes on, and where it was cut off."""
    steps: list[StepRow]
    evaluations: list[EvaluationRow]
    policies: tuple[HeldPolicy, ...]
    """That held; none where no start is recorded."""

    @property
    def seed(self) -> str:
        """As the scenario has it."""
        return self.keys.get(SEED, "0")


class ComparedArm(NamedTuple):
    """Runs whose scenarios differ in nothing but the seed."""

    name: str
    """``A``, ``B``, … in the order in which the runs were named."""
    runs: list[ComparedRun]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not the same in all runs."""

    name: str
    values: tuple[tuple[str, ...], ...]
    """By arm: each value that its runs have; empty texts for what a run does not have."""


_CIRCUMSTANCES: Final[dict[str, Callable[[RunFacts], str]]] = {
    "model": lambda facts: facts.model,
    "machine": lambda facts: f"{machine_text(facts.machine)}, Python {facts.machine.python}",
    "software": lambda facts: ", ".join(f"{each.name} {each.version}" for each in facts.packages),
}
"""What a run of the same scenario can differ in so far that it is another experiment."""
_COMMIT: Final = "commit"
_SWITCHED: Final = "policies switched to"
"""While the run went on, by an operator."""


def read_arms(run_folders: Sequence[Path]) -> list[ComparedArm]:
    """The runs in these folders as arms.

    Raises:
        UserFault: fewer than two runs, or one of them twice; a file of a run is missing or damaged, and is named.
    """
    resolved = [folder.resolve() for folder in run_folders]
    if len(resolved) < 2:
        raise UserFault("a comparison is of two runs or more: penstock compare RUN RUN")
    for folder, given in zip(resolved, run_folders, strict=True):
        if resolved.count(folder) > 1:
            raise UserFault(f"{given} is named twice; a run is compared with others")
    names = [folder.name for folder in resolved]
    gathered: dict[tuple[tuple[str, str], ...], list[ComparedRun]] = {}
    for folder, given in zip(resolved, run_folders, strict=True):
        run = _read(given, folder.name if names.count(folder.name) == 1 else str(given))
        gathered.setdefault(_identity(run), []).append(run)
    return [ComparedArm(_letters(place), runs) for place, runs in enumerate(gathered.values())]


def key_differences(arms: Sequence[ComparedArm]) -> tuple[Difference, ...]:
    """The keys in which the scenarios differ. (In what only some have, such as a dataset, null says no more than
    nothing.)"""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.keys)
    found = _differences(keys, arms, lambda run, key: run.keys.get(key, UNSET))
    return tuple(each for each in found if {value for values in each.values for value in values} != {UNSET, show(None)})


def circumstance_differences(arms: Sequence[ComparedArm]) -> tuple[Difference, ...]:
    """What else was not the same: of the last start of each run."""
    return _differences([*_CIRCUMSTANCES, _SWITCHED, _COMMIT], arms, circumstance)


def circumstance(run: ComparedRun, name: str) -> str:
    """One of the circumstances of a run's last start."""
    if not run.starts:
        return NOT_RECORDED
    if name == _SWITCHED:
        return ", then ".join(f"{each.policy}, η = {each.max_staleness}" for each in run.policies[1:]) or "none"
    facts = run.starts[-1].facts
    if name == _COMMIT:
        return f"{facts.git_commit[:12]}{' and changes that are in no commit' * facts.git_is_dirty}"
    return _CIRCUMSTANCES[name](facts)


def circumstances_changed(run: ComparedRun) -> list[str]:
    """Those that were not the same at all starts of one run."""
    return [name for name, text_of in _CIRCUMSTANCES.items() if len({text_of(start.facts) for start in run.starts}) > 1]


def may_differ_within_an_arm(key: str) -> bool:
    """Whether a key is the seed, or only names or watches a run."""
    return any(key.startswith(each) if each.endswith(".") else key == each for each in _WITHIN_AN_ARM)


def _read(folder: Path, name: str) -> ComparedRun:
    return ComparedRun(
        name=name,
        folder=folder,
        keys=dict(_leaves(read_source(folder / SCENARIO_FILE).data, ())),
        starts=read_starts(folder),
        summary=read_summary(folder),
        steps=read_steps(folder),
        evaluations=read_evaluations(folder),
        policies=policies_of(folder),
    )


def _identity(run: ComparedRun) -> tuple[tuple[str, str], ...]:
    """The same for runs of one arm."""
    keys = [(key, value) for key, value in run.keys.items() if not may_differ_within_an_arm(key)]
    return tuple(sorted([*keys, *((f"({name})", circumstance(run, name)) for name in (*_CIRCUMSTANCES, _SWITCHED))]))


def _differences(
    names: Sequence[str] | dict[str, None], arms: Sequence[ComparedArm], value_of: Callable[[ComparedRun, str], str]
) -> tuple[Difference, ...]:
    def of_arms(name: str) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(dict.fromkeys(value_of(run, name) for run in arm.runs)) for arm in arms)

    found = (Difference(name=name, values=of_arms(name)) for name in names)
    return tuple(each for each in found if len({value for values in each.values for value in values}) > 1)


def _leaves(value: Plain, path: KeyPath) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for place, inner in enumerate(value):
            yield from _leaves(inner, (*path, place))
    elif isinstance(value, str | list):
        text = value if isinstance(value, str) else f"[{', '.join(map(str, value))}]"
        yield dotted(path), without_credentials(text)
    else:
        yield dotted(path), show(value)


def _letters(place: int) -> str:
    """``A`` to ``Z``, then ``AA``."""
    text = ""
    while place >= 0:
        text, place = chr(ord("A") + place % 26) + text, place // 26 - 1
    return text
