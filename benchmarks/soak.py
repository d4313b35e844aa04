"""A run at full speed stays what it was: no process needs more memory or more open files the longer it goes on.

How it is measured:

* The run of ``penstock bench control_plane`` for ``--minutes``: engines and learner are modelled and take no time, so
  each hour sees more samples than most runs ever train. CURVE, ledger, event log and traces are on, as by default.
* Every few seconds, of each process: the memory that is its own (``RssAnon`` of ``/proc``; pages of files that are
  mapped come and go) and the number of its open files. The looks are cut in fifths. The first, in which processes take
  what they need, does not count; of each other one the median does.
* A process rises whenever it holds more at once than ever before, and stays there: glibc keeps what was freed
  (``runtime/hosts/processes/freed_memory.py``). That is rare, and bounded by what may be outstanding. What is never
  forgotten makes it rise from each fifth to the next. So three times the middle one of the three rises is its **steady
  growth**, which is judged; what it has grown by in all is told, and may not be more than glibc keeps.
* Steady growth is told for each million samples as well, so that what an hour hides can be seen, and the course of each
  process is drawn.
* What lies in the run's folder in the end, by part. Events and traces keep to ``observability.max_disk_gb``.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import psutil

from penstock.api import run
from penstock.benchmarks._harness import Benchmark, Measured, fact, plain_figure
from penstock.benchmarks._progress import say
from penstock.benchmarks.control_plane import GROUPS_PER_BATCH, SCENARIO
from penstock.runtime.hosts.processes.freed_memory import KEPT_BYTES
from penstock.runtime.launch.runs import read_record
from penstock.runtime.observability.disk_budget import LOGS_FOLDER
from penstock.runtime.observability.following import StepFollower
from penstock.runtime.observability.texts import sparkline

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from penstock.benchmarks._results import Claim
    from penstock.runtime.launch.handle import Run

QUICK: Final = ("--repetitions", "1", "--minutes", "0.25", "--every", "1")
QUICK_S: Final = 40
MOST_GROWTH: Final = 0.05
"""Steady, of the memory of a process, from the first looks that count to the last."""
LEAST_MB: Final = 5.0
"""Growth that is none, as allocators round."""
SAMPLES_PER_GROUP: Final = 8
START_TIMEOUT_S: Final = 120.0
"""For the first step."""
COURSE_WIDTH: Final = 60
"""Of a drawn course, in characters."""
DRIVER: Final = "driver"
T = TypeVar("T")
_LOG: Final = re.compile(r"(?P<actor>.+)-\d+\.log")
_OWN: Final = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


class Look(NamedTuple):
    """At one process."""

    own_mb: float
    num_files: int


class Soaked(NamedTuple):
    """A run that is over."""

    looks: dict[str, list[Look]]
    """By actor, in their order."""
    num_samples: int
    """Trained between the middle of the first looks that count and that of the last."""
    samples_per_s: float
    disk_mb: dict[str, float]
    """By part of the run's folder."""


class Course(NamedTuple):
    """What the looks at one process come to."""

    before: Look
    after: Look
    steady_mb: float
    """What it has grown by without its largest rises."""

    @property
    def growth_mb(self) -> float:
        return self.after.own_mb - self.before.own_mb

    @property
    def is_flat(self) -> bool:
        """Neither more memory nor more files."""
        grows = self.steady_mb > max(LEAST_MB, MOST_GROWTH * self.before.own_mb) or self.growth_mb > KEPT_BYTES / 1e6
        return not grows and self.after.num_files <= self.before.num_files


def course_of(looks: Sequence[Look]) -> Course:
    """Usual memory and most files, of the second fifth of the looks and of the last, and what lies between."""
    usual = [_usual(part) for part in _later_fifths(looks)]
    rises = [after.own_mb - before.own_mb for before, after in pairwise(usual)]
    return Course(usual[0], usual[-1], len(rises) * statistics.median(rises))


def soaked(folder: Path, *, minutes: float, every_s: float) -> Soaked:
    """Run for so long from the first step on, look, and end it.

    Raises:
        RuntimeError: no step came, or the run ended by itself.
    """
    trained = run(
        _written(folder / "scenario.yaml"),
        {"run.num_steps": 10**9, "run.folder": str(folder), "runtime.host": "local"},
        wait=False,
        progress=False,
    )
    looks: dict[str, list[Look]] = {}
    versions: list[int] = []
    steps, version = StepFollower(trained.folder), 0
    began_s = time.monotonic()
    try:
        while not (version := max((step.version for step in steps.more()), default=0)):
            if time.monotonic() > began_s + START_TIMEOUT_S:
                raise RuntimeError(f"no step after {START_TIMEOUT_S:g} s: {trained.status.story}")
            _end_is_none(trained, 0.2)
        began_s = time.monotonic()
        while (left_s := began_s + 60 * minutes - time.monotonic()) > 0:
            for actor, look in looked_at(trained):
                looks.setdefault(actor, []).append(look)
            version = max((step.version for step in steps.more()), default=version)
            versions.append(version)
            if len(versions) % 12 == 0:
                own_mb = sum(each[-1].own_mb for each in looks.values())
                say(f"step {version:,}, {own_mb:,.0f} MB in all, {left_s:.0f} s to go")
            _end_is_none(trained, min(every_s, max(0.1, left_s)))
    finally:
        took_s = time.monotonic() - began_s
        trained.stop()
    early, *_, late = (statistics.median(each) for each in _later_fifths(versions))
    return Soaked(
        looks,
        round((late - early) * GROUPS_PER_BATCH * SAMPLES_PER_GROUP),
        versions[-1] * GROUPS_PER_BATCH * SAMPLES_PER_GROUP / took_s,
        _disk_mb(trained.folder),
    )


def _end_is_none(trained: Run, wait_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        trained.wait(timeout_s=wait_s, progress=False)
        raise RuntimeError(f"the run has ended by itself: {trained.status.story}")


def looked_at(trained: Run) -> Iterable[tuple[str, Look]]:
    """Every actor of a run that goes on, and its driver; a process that ends meanwhile is left out."""
    driver = psutil.Process(read_record(trained.folder).pid)
    for process in (driver, *driver.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            files = _files_of(process.pid)
            actor = DRIVER if process == driver else _actor_of(files, trained.folder / LOGS_FOLDER)
            found = _OWN.search(Path(f"/proc/{process.pid}/status").read_text())
            if actor and found:
                yield actor, Look(int(found[1]) / 1000, len(files))


def measure(given: argparse.Namespace) -> Measured:
    """One run for each repetition."""
    made: list[Soaked] = []
    for number in range(given.repetitions):
        say(f"{number + 1} of {given.repetitions}: a run of {given.minutes:g} minutes")
        with tempfile.TemporaryDirectory() as folder:
            made.append(soaked(Path(folder), minutes=given.minutes, every_s=given.every))
    found = [plain_figure("speed", "samples/s", [each.samples_per_s for each in made])]
    claims: list[Claim] = []
    for actor in made[0].looks:
        courses = [course_of(each.looks[actor]) for each in made]
        own_mb = [look.own_mb for look in made[-1].looks[actor]]
        say(f"{sparkline(own_mb, COURSE_WIDTH)} {own_mb[0]:.0f} to {own_mb[-1]:.0f} MB: {actor}")
        found += [
            plain_figure(f"{actor}: its own memory, early", "MB", [each.before.own_mb for each in courses]),
            plain_figure(f"{actor}: more of it, late", "MB", [each.growth_mb for each in courses]),
            plain_figure(
                f"{actor}: more of it steadily", "MB a million samples",
                [1e6 * course.steady_mb / max(1, each.num_samples) for course, each in zip(courses, made, strict=True)],
            ),
            plain_figure(f"{actor}: open files, late", "files", [float(each.after.num_files) for each in courses]),
        ]  # fmt: skip
        claims.append(fact(f"{actor}: no more memory, no more files", holds=all(each.is_flat for each in courses)))
    for part in made[0].disk_mb:
        found.append(plain_figure(f"disk: {part}", "MB", [each.disk_mb.get(part, 0.0) for each in made]))
    return Measured(found, claims, ("Ray's own processes", "real engines and learners"))


def _later_fifths(values: Sequence[T]) -> list[Sequence[T]]:
    """The second to the last; of too few the whole, and the last one for those that are missing."""
    size = max(1, len(values) // 5)
    first, *more = (values[number * size : (number + 1) * size] for number in (1, 2, 3))
    return [first or values, *(each or values[-1:] for each in more), values[-size:]]


def _usual(looks: Sequence[Look]) -> Look:
    return Look(statistics.median(each.own_mb for each in looks), max(each.num_files for each in looks))


def _written(file: Path) -> Path:
    file.write_text(SCENARIO)
    return file


def _files_of(pid: int) -> list[str]:
    found: list[str] = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed since
            found.append(os.readlink(entry.path))
    return found


def _actor_of(files: Sequence[str], logs: Path) -> str | None:
    names = (_LOG.fullmatch(Path(file).name) for file in files if Path(file).parent == logs)
    return next((found["actor"] for found in names if found), None)


def _disk_mb(folder: Path) -> dict[str, float]:
    sizes: dict[str, float] = {}
    for file in folder.rglob("*"):
        if file.is_file():
            part = file.relative_to(folder).parts[0].partition(".")[0]
            sizes[part] = sizes.get(part, 0.0) + file.stat().st_size / 1e6
    return dict(sorted(sizes.items(), key=lambda each: -each[1])[:6])


def main(argv: list[str] | None = None) -> int:
    """Run, look and judge; 1 where a process has grown."""
    benchmark = Benchmark(__file__, __doc__, repetitions=1)
    benchmark.option("--minutes", type=float, default=55.0, help="of the run (default: 55)")
    benchmark.option("--every", type=float, default=5.0, metavar="SECONDS", help="a look (default: 5)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
