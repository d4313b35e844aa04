"""``penstock bench --all``: every benchmark in a process of its own, none beyond its deadline, and one page of results.

The page is written anew after each of them, so whatever ends the rest takes nothing of what was found.

Waits: a benchmark is waited for until its deadline (:mod:`penstock.benchmarks._processes`). With ``--quick`` all of
them end within :data:`QUICK_ALL_S`: each has its ``QUICK_S``, and, where other work slows it down, of what others have
left up to :data:`MOST_TIMES` as much.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from penstock.benchmarks._harness import MISSED, NOT_TOLD
from penstock.benchmarks._processes import FAULT, failure_text, watched
from penstock.benchmarks._progress import in_turn, say
from penstock.benchmarks._results import Result, page, read_result
from penstock.messages.errors import UserFault
from penstock.runtime.cli.benches import Benchmark, registered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

DEADLINE_S: Final = 3600.0
QUICK_ALL_S: Final = 1200.0
"""What all quick forms take at most; a test adds up what they are given."""
MOST_TIMES: Final = 3.0
"""As long as it is given, that one may take while time is left over."""

Ending = Literal["held", "missed", "not told", "failed", "past its deadline", "skipped"]


class Outcome(NamedTuple):
    """What became of one benchmark."""

    name: str
    ending: Ending
    why: str
    wall_s: float = 0.0
    result: Result | None = None


def run_all(console: Console, into: Path, *, is_quick: bool, deadline_s: float | None) -> int:
    """One after the other; 1 where one failed or a claim was missed, 3 where one cannot be told from noise.

    Args:
        console: for the table at the end.
        into: folder of the results, their history and the page.
        is_quick: with the arguments of each that take a minute or so.
        deadline_s: for each; None: its own.
    """
    into.mkdir(parents=True, exist_ok=True)
    known = registered()
    budgets = budgets_of(known, is_quick=is_quick, deadline_s=deadline_s)
    given = Allowance(budgets, QUICK_ALL_S if is_quick and deadline_s is None else 0.0)
    console.print(_plan(budgets, given.left_s))
    outcomes: list[Outcome] = []
    for name in in_turn(budgets, lambda name: f"{name}, is given {_text(budgets[name])}: {known[name].doc}"):
        outcomes.append(_run(name, known[name], into, is_quick=is_quick, deadline_s=given.limit_s(name)))
        given.took(name, outcomes[-1].wall_s)
        rest = f"the rest takes {_text(given.left_s)} at most"
        say(f"{name}: {outcomes[-1].ending} after {outcomes[-1].wall_s:.0f} s; {rest}")
        _write_page(outcomes, into)
    table = Table("benchmark", "ended", "s", "given", "why", title="All benchmarks")
    for outcome in outcomes:
        limit = f"{budgets[outcome.name]:.0f}"
        table.add_row(outcome.name, outcome.ending, f"{outcome.wall_s:.0f}", limit, Text(outcome.why))
    console.print(table)
    console.print(f"results, history and benchmarks.md are in {into}", markup=False)
    endings = {outcome.ending for outcome in outcomes}
    if endings & {"failed", "past its deadline", "missed"}:
        return MISSED
    return NOT_TOLD if "not told" in endings else 0


class Allowance:
    """What is left of the time of all, and so how long one may take."""

    def __init__(self, budgets: Mapping[str, float], all_s: float) -> None:
        """
        Args:
            budgets: seconds that each is given.
            all_s: for all together: one that is slow may have of what others leave; 0: each has its own alone.
        """
        self._is_shared = all_s > 0
        self._budgets = dict(budgets)
        self._spare_s = max(0.0, all_s - sum(budgets.values()))

    @property
    def left_s(self) -> float:
        """For all that have not been run."""
        return sum(self._budgets.values()) + self._spare_s

    def limit_s(self, name: str) -> float:
        """After which this one is killed."""
        return min(MOST_TIMES * self._budgets[name], self._budgets[name] + self._spare_s)

    def took(self, name: str, wall_s: float) -> None:
        """It is over."""
        budget_s = self._budgets.pop(name)
        if self._is_shared:
            self._spare_s = max(0.0, self._spare_s + budget_s - wall_s)


def budgets_of(known: Mapping[str, Benchmark], *, is_quick: bool, deadline_s: float | None) -> dict[str, float]:
    """Seconds that each is given; 0 for what has no quick form, which is skipped.

    Args:
        known: benchmarks by name.
        is_quick: each has its ``QUICK_S``; otherwise :data:`DEADLINE_S`.
        deadline_s: instead of both; None: these.
    """
    if not is_quick:
        return dict.fromkeys(known, deadline_s or DEADLINE_S)
    return {name: 0.0 if each.quick is None else deadline_s or each.quick_s for name, each in known.items()}


def _plan(budgets: Mapping[str, float], all_s: float) -> Table:
    table = Table("benchmark", "is given", title=f"In all at most {_text(all_s)}")
    for name, budget_s in budgets.items():
        table.add_row(name, _text(budget_s) if budget_s else "skipped: no quick form")
    return table


def _text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _write_page(outcomes: Sequence[Outcome], into: Path) -> None:
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    absent = [f"`{each.name}`: {each.ending}. {each.why}" for each in outcomes if each.result is None]
    (into / "benchmarks.md").write_text(page(results, absent))


def kept_page(folder: Path) -> str:
    """The page of results that are kept in a folder, ``NAME.json`` of each benchmark: ``docs/benchmarks.md``."""
    known = registered()
    files = {name: folder / f"{name}.json" for name in known}
    absent = [f"`{name}`: {known[name].doc}" for name, file in files.items() if not file.exists()]
    return page((read_result(file) for file in files.values() if file.exists()), absent)


def command_of(name: str) -> list[str]:
    """What runs a benchmark in a process of its own."""
    return [sys.executable, "-m", "penstock.runtime.cli", "bench", name]


def _run(name: str, found: Benchmark, into: Path, *, is_quick: bool, deadline_s: float) -> Outcome:
    if is_quick and found.quick is None:
        return Outcome(name, "skipped", "it has no quick form")
    output = into / f"{name}.json"
    output.unlink(missing_ok=True)  # that of another time is not this one's
    arguments = list(found.quick or ()) if is_quick else []
    if found.is_on_harness:
        arguments += ["--output", str(output), "--history", str(into)]
    began_s = time.monotonic()
    try:
        code, said = watched(name, [*command_of(name), *arguments], deadline_s)
    except subprocess.TimeoutExpired:
        form = " --quick" if is_quick else ""
        why = f"killed after {deadline_s:g} s; penstock bench {name}{form} has no limit, --deadline gives each another"
        return Outcome(name, "past its deadline", why, time.monotonic() - began_s)
    try:
        result = read_result(output) if output.exists() else None
    except UserFault as fault:  # it was stopped while it wrote
        return Outcome(name, "failed", str(fault), time.monotonic() - began_s)
    ending, why = _ending(code, said, result)
    return Outcome(name, ending, why, time.monotonic() - began_s, result)


def _ending(code: int, said: Sequence[str], result: Result | None) -> tuple[Ending, str]:
    fault = next((line.removeprefix(FAULT) for line in said if line.startswith(FAULT)), "")
    if code == 2 and fault:
        return "skipped", fault
    if result is not None and code in (0, MISSED, NOT_TOLD):
        judged = "; ".join(f"{claim.text}: {claim.verdict}" for claim in result.claims if claim.verdict != "met")
        return ("missed" if code == MISSED else "not told" if code == NOT_TOLD else "held"), judged
    return ("held", "") if code == 0 else ("failed", failure_text(code, said))
