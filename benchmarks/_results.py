"""What a benchmark has found: a struct, as JSON, on the terminal and in Markdown, and beside what it found before.

Only results of the same machine are compared, of a benchmark whose code (comments and layout aside) and arguments are
the same; what is compared with is the last of them in the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from penstock.benchmarks._statistics import Estimate, Verdict, differs, shown_from
from penstock.messages.errors import UserFault
from penstock.runtime.observability.facts import Package
from penstock.runtime.observability.jsonl import JsonLinesWriter, read_rows
from penstock.runtime.observability.page import render_page
from penstock.runtime.observability.report import machine_text
from penstock.runtime.observability.summary import MachineFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

HISTORY: Final = "benchmarks/history"
"""Where results go, in the working folder; ``--history`` names another."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of one arm."""

    name: str
    unit: str
    values: list[float]
    """One for each repetition, in their order."""
    estimate: Estimate
    wall_s: float | None = None
    """Of a turn of the arm, median; None where the quantity comes from elsewhere."""
    cpu_s: float | None = None
    """Likewise, of this process and its children that ended in the turn."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What is claimed about a figure, or about a ratio or share of arms that took turns."""

    text: str
    values: list[float]
    estimate: Estimate
    wanted: str
    """``at least 600``."""
    verdict: Verdict


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one benchmark."""

    benchmark: str
    claim: str
    """The first paragraph of its docstring."""
    edition: str
    """A digest of its code."""
    arguments: str
    """What decides what is measured, how often and where to aside."""
    command: str
    at: str
    """ISO 8601 with the offset to UTC."""
    machine: MachineFacts
    processor: str
    load: float
    """Processes that wanted a core in the minute before it began: other work."""
    packages: tuple[Package, ...]
    git_commit: str
    git_is_dirty: bool
    wall_s: float
    cpu_s: float
    """Of it all, start and warm-up included."""
    figures: list[Figure]
    claims: list[Claim]
    not_measured: list[str]

    @property
    def verdicts(self) -> set[Verdict]:
        return {claim.verdict for claim in self.claims}


def history_of(benchmark: str, folder: Path) -> list[Result]:
    """Its results, oldest first.

    Raises:
        UserFault: a line of them cannot be read.
    """
    file = _history_file(benchmark, folder)
    return list(read_rows(file, Result)) if file.exists() else []


def _history_file(benchmark: str, folder: Path) -> Path:
    return folder / f"{benchmark}.jsonl"


def remember(result: Result, folder: Path) -> None:
    """Add a result to the history."""
    writer = JsonLinesWriter(_history_file(result.benchmark, folder), lines_per_write=1)
    try:
        writer.append(result)
    finally:
        writer.close()


def last_alike(result: Result, history: Sequence[Result]) -> Result | None:
    """The last result that this one may be compared with, if any."""
    return next((each for each in reversed(history) if is_alike(each, result)), None)


def is_alike(one: Result, other: Result) -> bool:
    """Whether the two measured the same on the same machine; what is measured may have changed meanwhile."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("benchmark", "edition", "arguments", "machine", "processor")
    )


def change_text(before: Estimate, after: Estimate) -> str:
    """How a figure has changed between two results, if that can be told."""
    verdict = differs(before, after)
    ratio = f"{after.median / before.median:.3g}×, " if before.median else ""
    would = f" (one of {shown_from(before, after):.0%} would show)" if verdict.startswith("no difference") else ""
    return f"{ratio}{verdict}{would}"


class Part(NamedTuple):
    """A table."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _interval(found: Estimate) -> str:
    return f"{_number(found.low)} … {_number(found.high)}" if found.num_repetitions > 1 else ""


def _intervals(found: Sequence[Estimate]) -> tuple[str, list[str]]:
    """The heading of their column, and each of them; what they all cover stands in the heading. Of one is none."""
    coverages = [f" ({each.coverage:.0%} of {each.num_repetitions})" for each in found]
    told = {coverage for coverage, each in zip(coverages, found, strict=True) if each.num_repetitions > 1}
    if len(told) == 1:
        return f"interval{told.pop()}", [_interval(each) for each in found]
    return "interval", [_interval(each) and _interval(each) + text for each, text in zip(found, coverages, strict=True)]


def _parts(result: Result, before: Result | None) -> Iterator[Part]:
    heading, intervals = _intervals([f.estimate for f in result.figures])
    rows = [
        (f.name, f.unit, _number(f.estimate.median), interval, _number(f.wall_s), _number(f.cpu_s))
        for f, interval in zip(result.figures, intervals, strict=True)
    ]
    yield Part(result.benchmark, ("what", "unit", "median", heading, "wall s a turn", "CPU s a turn"), rows)
    if result.claims:
        heading, intervals = _intervals([c.estimate for c in result.claims])
        claims = [
            (c.text, _number(c.estimate.median), interval, c.wanted, c.verdict)
            for c, interval in zip(result.claims, intervals, strict=True)
        ]
        yield Part("claims", ("claim", "median", heading, "wanted", "verdict"), claims)
    if before is not None:
        earlier = {(f.name, f.unit): f.estimate for f in before.figures}
        changed = [
            (f.name, f.unit, _number(was.median), _number(f.estimate.median), change_text(was, f.estimate))
            for f in result.figures
            if (was := earlier.get((f.name, f.unit))) is not None
        ]
        yield Part(f"since {before.at}", ("what", "unit", "before", "now", "change"), changed)


def _notes(result: Result) -> Iterator[str]:
    packages = ", ".join(f"{package.name} {package.version}" for package in result.packages)
    commit = f", commit {result.git_commit[:12]}{' with changes' if result.git_is_dirty else ''}"
    spent = f"{result.wall_s:.0f} s, {result.cpu_s:.0f} CPU-s, load {result.load:.1f} before"
    yield f"`{result.command}`: {result.at}, {spent}"
    yield f"{machine_text(result.machine)}, {result.processor}, Python {result.machine.python}; {packages}" + (
        commit if result.git_commit else ""
    )
    for what in result.not_measured:
        yield f"Not measured: {what}"


def show(result: Result, before: Result | None, console: Console) -> None:
    """On the terminal."""
    for title, headings, rows in _parts(result, before):
        table = Table(title=Text(title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for note in _notes(result):
        console.print(note, markup=False, highlight=False)


def markdown(result: Result, before: Result | None = None) -> str:
    """For a page."""
    lines = [f"## {result.benchmark}", "", result.claim]
    for title, headings, rows in _parts(result, before):
        lines += ["", *([f"**{title}**", ""] if title != result.benchmark else ())]
        lines += [_row(headings), "|" + "---|" * len(headings), *map(_row, rows)]
    return "\n".join([*lines, "", *(f"* {note}" for note in _notes(result))]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;').replace(chr(10), ' ') for cell in cells)} |"


def page(results: Iterable[Result], not_run: Iterable[str]) -> str:
    """One page of results, and of what there is no result of."""
    head = "# Benchmarks\n\nMade from results of `penstock bench`; nothing in it is written by hand.\n\n"
    rest = "".join(f"* {line}\n" for line in not_run) or "* Everything was.\n"
    return head + "\n".join(map(markdown, results)) + f"\n## What was not measured\n\n{rest}"


def read_result(file: Path) -> Result:
    """What ``--output`` wrote.

    Raises:
        UserFault: it is no result.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserFault(f"{file}: not a result of penstock bench --output: {error}") from None


def html(title: str, results: Sequence[Result], not_run: Sequence[str]) -> str:
    """The same as a page that works offline, to be attached somewhere."""
    sections = [
        (each.benchmark, _unquoted(each.claim), list(_parts(each, None)), list(map(_unquoted, _notes(each))))
        for each in results
    ]
    return render_page("benchmarks.html.j2", name=title, sections=sections, absent=not_run)


def _unquoted(text: str) -> str:
    """Without Markdown's marks of code."""
    return text.replace("`", "")
