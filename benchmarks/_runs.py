"""Real runs for benchmarks: each in a process of its own through the command line, read back from its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.benchmarks._progress import wait_for
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.runtime.observability.summary import RunSummary
    from penstock.runtime.observability.trackers import ActivityRow, StepRow

RUN_TIMEOUT_S = 900.0


class FinishedRun:
    """What a run left in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[StepRow] = read_steps(folder)
        self.activity: list[ActivityRow] = [row for lane in read_activity(folder).values() for row in lane]
        summary = read_summary(folder)
        if summary is None or not summary.completed:
            raise RuntimeError(f"the run in {folder} did not complete: {summary.story if summary else 'no summary'}")
        self.summary: RunSummary = summary


def run(
    scenario: str | Path, overrides: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None
) -> FinishedRun:
    """Run a scenario; ``folder`` is new and becomes the parent of the run's own.

    Args:
        scenario: a file, or the text of one.
        overrides: over it.
        folder: of the scenario and the run.
        environment: variables beside those of this process.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    folder.mkdir(parents=True)
    if isinstance(scenario, Path):
        file = scenario
    else:
        file = folder / "scenario.yaml"
        file.write_text(scenario)
    command = [sys.executable, "-m", "penstock.runtime.cli", "run", str(file), f"run.folder={folder}", *overrides]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
        code = wait_for(process, RUN_TIMEOUT_S, "the run")
        output.seek(0)
        if code:
            raise RuntimeError(f"exit code {code}\n{output.read()[-4000:]}")
    (made,) = (path.parent for path in folder.glob("*/summary.json"))
    return FinishedRun(made)
