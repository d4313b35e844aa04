"""``penstock bench --all``: every benchmark in a process of its own, none beyond its deadline, and one page of results.

Waits: a benchmark is waited for until its deadline. Then, and whenever one is over, every process that has come from it
is killed: they are known by a variable that all of them inherit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from typing import IO, TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
from rich.table import Table
from rich.text import Text

from penstock.backends.processes.process_facts import how_it_ended, kill, marked_processes
from penstock.benchmarks._harness import MISSED, NOT_TOLD
from penstock.benchmarks._progress import in_turn, wait_for
from penstock.benchmarks._results import Result, page
from penstock.runtime.cli.benches import Benchmark, registered
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

DEADLINE_S: Final = 3600.0
QUICK_DEADLINE_S: Final = 300.0
MARK: Final = "PENSTOCK_BENCHMARK"
KEPT_LINES: Final = 20
"""Of what a benchmark says on stderr, for why it failed."""
LAST_WORDS_S: Final = 5.0
"""For the rest of what it said, when it is over."""
FAULT: Final = "penstock: "
"""How a message about a fault of the user begins: with exit code 2 it is why a benchmark cannot run here."""

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
        deadline_s: for each.
    """
    into.mkdir(parents=True, exist_ok=True)
    deadline_s = deadline_s or (QUICK_DEADLINE_S if is_quick else DEADLINE_S)
    outcomes: list[Outcome] = []
    for name, found in in_turn(registered().items(), lambda item: f"{item[0]}: {item[1].doc}"):
        outcomes.append(_run(name, found, into, is_quick=is_quick, deadline_s=deadline_s))
    table = Table("benchmark", "ended", "s", "why", title="All benchmarks")
    for outcome in outcomes:
        table.add_row(outcome.name, outcome.ending, f"{outcome.wall_s:.0f}", Text(outcome.why))
    console.print(table)
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    absent = [f"`{each.name}`: {each.ending}. {each.why}" for each in outcomes if each.result is None]
    (into / "benchmarks.md").write_text(page(results, absent))
    console.print(f"results, history and benchmarks.md are in {into}", markup=False)
    endings = {outcome.ending for outcome in outcomes}
    if endings & {"failed", "past its deadline", "missed"}:
        return MISSED
    return NOT_TOLD if "not told" in endings else 0


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
        code, said = _watched(name, [*command_of(name), *arguments], deadline_s)
    except subprocess.TimeoutExpired:
        return Outcome(name, "past its deadline", f"killed after {deadline_s:g} s", time.monotonic() - began_s)
    result = msgspec.json.decode(output.read_bytes(), type=Result) if output.exists() else None
    ending, why = _ending(code, said, result)
    return Outcome(name, ending, why, time.monotonic() - began_s, result)


def _ending(code: int, said: Sequence[str], result: Result | None) -> tuple[Ending, str]:
    fault = next((line.removeprefix(FAULT) for line in said if line.startswith(FAULT)), "")
    if code == 2 and fault:
        return "skipped", fault
    if result is not None and code in (0, MISSED, NOT_TOLD):
        judged = "; ".join(f"{claim.text}: {claim.verdict}" for claim in result.claims if claim.verdict != "met")
        return ("missed" if code == MISSED else "not told" if code == NOT_TOLD else "held"), judged
    return ("held", "") if code == 0 else ("failed", f"{how_it_ended(code)}: {said[-1] if said else 'it said nothing'}")


def _watched(name: str, command: list[str], deadline_s: float) -> tuple[int, list[str]]:
    """Exit code, and the last lines of stderr.

    Raises:
        subprocess.TimeoutExpired: it was not over in time; it is killed.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, MARK: mark}
    )
    said: deque[str] = deque(maxlen=KEPT_LINES)
    assert process.stderr is not None
    relay = threading.Thread(target=_relay, args=(name, process.stderr, said), daemon=True)
    relay.start()
    try:
        code = wait_for(process, deadline_s, name)
    finally:
        for pid, start_ticks in marked_processes([f"{MARK}={mark}".encode()]).items():
            kill(pid, start_ticks)
        relay.join(LAST_WORDS_S)
    return code, list(said)


def _relay(name: str, stderr: IO[bytes], said: deque[str]) -> None:
    """Show what it is at, as it comes; ends with the last process that can write there."""
    with stderr:
        for raw in stderr:
            if line := terminal_text(raw.decode(errors="replace").rstrip()):
                said.append(line)
                sys.stderr.write(terminal_lines(f"{name}: {line}\n"))
