"""A real run of ``penstock run`` or ``penstock resume`` in a process of its own, for a test to watch and disturb."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from host_harness import HOST

from penstock.runtime.observability.summary import RunSummary, read_summary
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

SCENARIOS = Path(__file__).parents[2] / "scenarios"
RUN_TIMEOUT_S = 240.0
"""From its start to its end. A test's own timeout is longer than those of its runs together, so that the run's output
tells what was wrong: tests/unit/test_house_timeouts.py."""
STOP_TIMEOUT_S = 60.0
"""For the stop of a run whose test has failed."""
USUAL = (f"runtime.host={HOST}", "observability.report=false")
"""For all runs; a test that looks at the report asks for it."""
ENDING_CHARS = 3000


class LiveRun:
    """One run; a context manager that leaves no process behind."""

    def __init__(
        self,
        scenario: str | Path,
        parent: Path,
        overrides: Sequence[str],
        *,
        timeout_s: float = RUN_TIMEOUT_S,
        through: Sequence[str] = (),
    ) -> None:
        """``through`` stands before the command: what runs it somewhere else."""
        path = scenario if isinstance(scenario, Path) else SCENARIOS / scenario
        self._begin(parent, ["run", str(path), f"run.folder={parent}", *USUAL, *overrides], timeout_s, through)

    @classmethod
    def resumed(cls, folder: Path, overrides: Sequence[str] = ()) -> Self:
        """``penstock resume`` of this run."""
        run = cls.__new__(cls)
        run._begin(folder.parent, ["resume", str(folder), *overrides], RUN_TIMEOUT_S)
        return run

    def _begin(self, parent: Path, arguments: Sequence[str], timeout_s: float, through: Sequence[str] = ()) -> None:
        self.parent = parent
        self._seen: tuple[list[int], int] = [], 0
        """Size of the file of steps, and how many are in it."""
        self._deadline_s = time.monotonic() + timeout_s
        numbers = (number for number in itertools.count() if not (parent / f"output-{number}.txt").exists())
        self._output_path = parent / f"output-{next(numbers)}.txt"
        self._output = self._output_path.open("x")
        self.process = subprocess.Popen(
            [*through, sys.executable, "-m", "penstock.runtime.cli", *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # what the test has to say is in its own error
                self.process.kill()
                self.process.wait(STOP_TIMEOUT_S)
        self._output.close()

    @property
    def output(self) -> str:
        """Everything it has printed."""
        return self._output_path.read_text()

    @property
    def ending(self) -> str:
        """The last of it, for the message of a test that fails."""
        return self.output[-ENDING_CHARS:]

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        (record,) = self.parent.glob("*/run.json")
        return record.parent

    def await_steps(self, number: int = 0, *, more: int = 0) -> None:
        """Until so many steps are recorded, or so many more than now."""
        number = self._num_steps() + more if more else number
        while self._num_steps() < number:
            assert self.process.poll() is None, self.ending
            assert time.monotonic() < self._deadline_s, self.ending
            time.sleep(0.1)  # between two looks at a file; nothing is timed by it

    @property
    def log(self) -> str:
        """The driver's."""
        return (self.folder / "logs" / "driver.log").read_text()

    def await_log(self, pattern: str) -> None:
        """Until this is found in the driver's log."""
        while re.search(pattern, self.log) is None:
            assert self.process.poll() is None, self.ending
            assert time.monotonic() < self._deadline_s, self.log[-ENDING_CHARS:]
            time.sleep(0.1)  # between two looks at a file; nothing is timed by it

    def await_file(self, name: str) -> None:
        """Until this file is in the run's folder."""
        while not list(self.parent.glob(f"*/{name}")):
            assert self.process.poll() is None, self.ending
            assert time.monotonic() < self._deadline_s, self.ending
            time.sleep(0.1)  # between two looks at a file; nothing is timed by it

    def pid_of(self, actor: str) -> int:
        """The process of the newest incarnation of an actor, from the driver's log."""
        found = re.findall(rf"\b{re.escape(actor)} \d+ is process (\d+)", self.log)
        assert found, f"{actor} is not in the driver's log"
        return int(found[-1])

    def finish(self) -> RunSummary:
        """Wait for the end, which must be a good one."""
        code = self.process.wait(max(1.0, self._deadline_s - time.monotonic()))
        assert code == 0, self.ending
        summary = read_summary(self.folder)
        assert summary is not None
        return summary

    def interrupt(self) -> RunSummary:
        """End it as control-C does, and wait for that."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(max(1.0, self._deadline_s - time.monotonic()))
        summary = read_summary(self.folder)
        assert summary is not None, self.ending
        return summary

    def _num_steps(self) -> int:
        """Reads the file again only when it has grown: a test that waits leaves the cores to its run."""
        sizes = [file.stat().st_size for file in self.parent.glob("*/metrics.jsonl")]
        if sizes and sizes != self._seen[0]:
            self._seen = sizes, len(read_steps(self.folder))
        return self._seen[1]
