"""What benchmarks share: arms that take turns, a warm-up that is not counted, and a result that is judged and kept.

A benchmark says what it claims in its docstring, gives its own options and what measures, and leaves the rest to
:class:`Benchmark`. Its exit code is 1 where a claim is missed, 3 where one cannot be told from noise.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import os
import resource
import shlex
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec
from rich.console import Console

from penstock.benchmarks._progress import in_turn, say
from penstock.benchmarks._results import (
    HISTORY,
    Claim,
    Figure,
    Result,
    history_of,
    last_alike,
    markdown,
    remember,
    show,
)
from penstock.benchmarks._statistics import UNTOLD, estimate, judge
from penstock.runtime.observability.facts import git_state, installed_packages
from penstock.runtime.observability.summary import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.benchmarks._statistics import Verdict

MISSED: Final = 1
NOT_TOLD: Final = 3
"""Exit codes; 2 is a fault of the user."""
T = TypeVar("T")


class Turn(NamedTuple, Generic[T]):
    """One repetition of one arm."""

    value: T
    wall_s: float
    cpu_s: float
    """Of this process, and of its children that ended in the turn."""


Turns = dict[str, list[Turn[T]]]
"""By arm; the repetitions of all arms with one number were made one after the other."""


class Measured(NamedTuple):
    """What a benchmark hands over."""

    figures: list[Figure]
    claims: list[Claim]
    not_measured: tuple[str, ...] = ()


def interleaved(arms: Mapping[str, Callable[[], T]], repetitions: int, *, warm_up: int = 1) -> Turns[T]:
    """Every arm in turn, again and again; the first rounds warm up and are not counted.

    Args:
        arms: what one repetition of each does, and what it gives.
        repetitions: of each arm that count.
        warm_up: those before.
    """
    found: Turns[T] = {name: [] for name in arms}
    rounds = [(number, name) for number in range(-warm_up, repetitions) for name in arms]
    for number, name in in_turn(rounds, _said):
        cpu_s, began_s = cpu_seconds(), time.perf_counter()
        value = arms[name]()
        turn = Turn(value, time.perf_counter() - began_s, cpu_seconds() - cpu_s)
        if number >= 0:
            found[name].append(turn)
    return found


def in_folders(arms: Mapping[str, Callable[[Path], T]], repetitions: int) -> Turns[T]:
    """Arms that are whole runs, each time in a new folder; their processes start anew, so nothing is warmed up."""
    with tempfile.TemporaryDirectory() as parent:
        folders = map(Path(parent).joinpath, map(str, itertools.count()))

        def act(arm: Callable[[Path], T]) -> Callable[[], T]:
            return lambda: arm(next(folders))

        return interleaved({name: act(arm) for name, arm in arms.items()}, repetitions, warm_up=0)


def _said(part: tuple[int, str]) -> str:
    number, name = part
    return f"{name}, {'to warm up' if number < 0 else f'repetition {number + 1}'}"


def cpu_seconds() -> float:
    """CPU time so far of this process, all threads, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def figures(turns: Turns[T], unit: str, value: Callable[[T], float], name: str = "{}") -> list[Figure]:
    """One quantity of each arm.

    Args:
        turns: of the arms.
        unit: with what it is of: ``CPU µs a message``.
        value: the quantity in what an arm gave.
        name: of the figure, with ``{}`` for the arm's.
    """
    found: list[Figure] = []
    for arm, made in turns.items():
        values = [value(turn.value) for turn in made]
        wall_s, cpu_s = (statistics.median(part) for part in zip(*((t.wall_s, t.cpu_s) for t in made), strict=True))
        figure = Figure(
            name=name.format(arm), unit=unit, values=values, estimate=estimate(values), wall_s=wall_s, cpu_s=cpu_s
        )
        found.append(figure)
    return found


def plain_figure(name: str, unit: str, values: Sequence[float]) -> Figure:
    """A quantity that is no arm's."""
    return Figure(name=name, unit=unit, values=list(values), estimate=estimate(values))


def pairs(over: Figure, under: Figure) -> list[float]:
    """Ratios of two arms, each of repetitions that were made one after the other."""
    return [one / other for one, other in zip(over.values, under.values, strict=True)]


def claim(text: str, values: Sequence[float], *, at_least: float | None = None, at_most: float | None = None) -> Claim:
    """Judge a quantity; its interval decides, not its median."""
    found = estimate(values)
    bounds = (("at least", at_least), ("at most", at_most))
    return Claim(
        text=text,
        values=list(values),
        estimate=found,
        wanted=", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None),
        verdict=judge(found, at_least=at_least, at_most=at_most),
    )


def fact(text: str, *, holds: bool) -> Claim:
    """What is so or is not, whatever the noise: one look decides."""
    return Claim(
        text=text, values=[float(holds)], estimate=estimate([float(holds)]), wanted="so",
        verdict="met" if holds else "missed",
    )  # fmt: skip


class Benchmark:
    """One of them: its command line, its measurement, its result."""

    def __init__(
        self, file: str, doc: str | None, *, repetitions: int, name: str | None = None, prog: str | None = None
    ) -> None:
        """
        Args:
            file: of its module, whose code is its edition.
            doc: of its module; the first paragraph is what it claims.
            repetitions: of each arm, unless it is told otherwise.
            name: of its results; None: that of its file.
            prog: the command that runs it; None: ``penstock bench`` with its name.
        """
        self._file, self._doc = Path(file), doc or ""
        self._name = name or self._file.stem
        self.parser = argparse.ArgumentParser(
            prog=prog or f"penstock bench {self._name}",
            description=self._doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.option("--repetitions", type=int, default=repetitions, help=f"of each arm (default: {repetitions})")
        self.option("--output", type=Path, default=None, metavar="FILE", help="write JSON here, Markdown beside it")
        self.option(
            "--history", type=Path, default=Path(HISTORY), metavar="FOLDER", help=f"of all results (default: {HISTORY})"
        )

    @property
    def option(self) -> Callable[..., argparse.Action]:
        """As ``argparse`` has it."""
        return self.parser.add_argument

    def run(self, argv: Sequence[str] | None, measure: Callable[[argparse.Namespace], Measured]) -> int:
        """Measure, print, keep and compare; the exit code."""
        given = self.parser.parse_args(argv)
        if given.repetitions < 1:
            self.parser.error(
                f"--repetitions {given.repetitions}: at least one is needed, and five to conclude anything"
            )
        # What could fail about files fails before anything is measured.
        history = history_of(self._name, given.history)
        if given.output is not None:
            given.output.parent.mkdir(parents=True, exist_ok=True)
        load, began_s, at = os.getloadavg()[0], time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
        cpu_s = cpu_seconds()
        measured = measure(given)
        git = git_state(Path(__file__).resolve().parent)
        result = Result(
            benchmark=self._name,
            claim=" ".join(self._doc.partition("\n\n")[0].split()),
            edition=edition_of(self._file),
            arguments=_deciding(given),
            command=command_text(self.parser.prog, argv or ()),
            at=at,
            machine=machine_facts(),
            processor=_processor(),
            load=load,
            packages=installed_packages(),
            git_commit=git.commit,
            git_is_dirty=git.is_dirty,
            wall_s=time.perf_counter() - began_s,
            cpu_s=cpu_seconds() - cpu_s,
            figures=measured.figures,
            claims=measured.claims,
            not_measured=list(measured.not_measured),
        )
        before = last_alike(result, history)
        remember(result, given.history)
        say(
            f"kept in {given.history}"
            + ("" if before else ", as the first of its kind: there is nothing to compare with")
        )
        show(result, before, Console())
        if given.output is not None:
            given.output.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
            given.output.with_suffix(".md").write_text(markdown(result, before))
        return exit_code(result.verdicts)


def exit_code(verdicts: set[Verdict]) -> int:
    """Of a benchmark with these verdicts."""
    if "missed" in verdicts:
        return MISSED
    return NOT_TOLD if verdicts & {*UNTOLD} else 0


def edition_of(file: Path) -> str:
    """Digest of what a module does; comments and layout are no part of it."""
    return hashlib.blake2b(ast.dump(ast.parse(file.read_text())).encode(), digest_size=8).hexdigest()


def command_text(prog: str, arguments: Sequence[str]) -> str:
    """The command as anybody gives it: without ``--history``, and of files elsewhere the name alone."""
    said = iter(arguments)
    kept: list[str] = []
    for word in said:
        if word == "--history":
            next(said, None)
        elif not word.startswith("--history="):
            option, is_joined, value = word.rpartition("=")
            kept.append(option + is_joined + Path(value).name if Path(value).is_absolute() else word)
    return shlex.join([*prog.split(), *kept])


def _deciding(given: argparse.Namespace) -> str:
    return " ".join(
        f"{name}={value}" for name, value in sorted(vars(given).items())
        if name not in ("repetitions", "output", "history")
    )  # fmt: skip


def _processor() -> str:
    """What the kernel calls it; empty where it says nothing."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""
