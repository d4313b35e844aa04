"""The process of one tracker: it reads what the run writes, and tells the tracker.

Invariants:

* The files are the queue: what a slow tracker has not been told yet waits in ``metrics.jsonl``, and nothing is dropped
  before the end of the run.
* What a tracker raises costs that one call. It is counted, and the first time is told with its place.

| wait | who ends it |
|---|---|
| for an order | the driver, whose death ends this process too |
| for the tracker | it; past the deadline at the end of the run the driver kills this process |
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.processes.frames import Ready, frame
from penstock.backends.processes.function_child import line_to_parent, load_failure, orders_of
from penstock.backends.processes.user_code import told
from penstock.backends.trackers.protocol import TrackedRun, TrackedSample
from penstock.backends.trackers.spec import TRACKERS, folder_name
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.runtime.observability.evaluation_log import EvaluationLog
from penstock.runtime.observability.evaluations import EvaluationRow
from penstock.runtime.observability.facts import LANES_FILE, REPORT_FILE, SCENARIO_FILE
from penstock.runtime.observability.following import LineFollower
from penstock.runtime.observability.samples import shown_samples
from penstock.runtime.observability.summary import SUMMARY_FILE
from penstock.runtime.observability.trackers import METRICS_FILE, StepRow, is_evaluation_line
from penstock.runtime.safe_text import without_credentials
from penstock.runtime.scenario.run_options import TrackerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULE: Final = "penstock.runtime.observability.tracker_process"
TRACKERS_FOLDER: Final = "trackers"
"""In a run's folder, with a folder for each tracker."""
MAX_TEXT: Final = 24_000
"""Characters of a prompt or a response that a tracker is given."""


class Setup(msgspec.Struct, frozen=True):
    """What the driver gives the process on its command line."""

    run_folder: str
    tracker: TrackerOptions
    is_evaluation_log: bool
    """Its name is that of ``evaluation.log_function``."""
    position: int
    """Of ``metrics.jsonl``: what stands before it was told by an earlier drive of this run."""
    resumes: bool


class Grown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver → process: there are new lines."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Driver → process: the run is over, and every file of it is written."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Process → driver: an order is done."""

    num_told: int
    """Lines of ``metrics.jsonl`` that the tracker has taken, since the process began."""
    num_failed: int
    """Calls of the tracker that raised something."""
    reason: str
    """Of the first of them."""


ORDERS: Final[msgspec.msgpack.Decoder[list[Grown | Ended]]] = msgspec.msgpack.Decoder(list[Grown | Ended])


class Teller:
    """Tells one tracker what a run's folder says."""

    def __init__(self, setup: Setup) -> None:
        """
        Raises:
            UserFault: the tracker cannot be opened. It may raise anything else, too.
        """
        self.num_told = 0
        self.num_failed = 0
        self.reason = ""
        self._folder = Path(setup.run_folder)
        self._options = options = setup.tracker
        self._start = setup.position
        self._lines = LineFollower(self._folder / METRICS_FILE)
        self._version = -1
        self._shown: tuple[int, Sequence[TrackedSample]] = (-1, ())
        own = self._folder / TRACKERS_FOLDER / folder_name(options.name)
        own.mkdir(parents=True, exist_ok=True)
        run = TrackedRun(
            tracker=options.name,
            name=self._folder.name,
            run_folder=self._folder,
            folder=own,
            scenario=_scenario(self._folder),
            options=options.options,
            resumes=setup.resumes,
        )
        self._log = EvaluationLog(options.name, self._folder) if setup.is_evaluation_log else None
        self._tracker = self._log or TRACKERS.spec(options.name).open(run)

    @property
    def progress(self) -> Progress:
        return Progress(self.num_told, self.num_failed, self.reason)

    def tell(self) -> None:
        """What is new in ``metrics.jsonl``. Of a version that is trained again the first report counts."""
        position = self._lines.position
        for line in self._lines.more():
            is_new, position = position >= self._start, position + len(line) + 1
            if is_evaluation_line(line):
                evaluation = msgspec.json.decode(line, type=EvaluationRow)
                if is_new:
                    self._line(evaluation.version, evaluation.metrics)
                    if self._log is not None:
                        for finished in self._log.finished(evaluation):
                            self._call(partial(self._log.call, finished))
                continue
            row = msgspec.json.decode(line, type=StepRow)
            if row.version <= self._version:
                continue
            self._version = row.version
            if is_new:
                self._step(row)

    def finish(self) -> None:
        """What is left, the newest samples, and the files of the end."""
        self.tell()
        self._samples()
        files = [file for name in (REPORT_FILE, LANES_FILE, SUMMARY_FILE) if (file := self._folder / name).exists()]
        summary = msgspec.json.decode((self._folder / SUMMARY_FILE).read_bytes(), type=dict[str, Any])
        self._call(partial(self._tracker.finish, summary, files))

    def _step(self, row: StepRow) -> None:
        run = {"at_s": row.at_s, "training_s": row.training_s, "tokens_generated": row.tokens_generated}
        self._line(row.version, {**row.metrics, **{f"run/{name}": float(value) for name, value in run.items()}})
        if self._options.samples and row.version % self._options.samples_every == 0:
            self._samples()

    def _line(self, version: int, metrics: dict[str, float | None] | dict[str, float]) -> None:
        finite = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
        self.num_told += self._call(partial(self._tracker.metrics, version, finite))

    def _samples(self) -> None:
        # What became of samples is recorded in bundles, often after the figures of their step: a short run's are all
        # new at its end.
        if self._options.samples:
            found = tracked_samples(self._folder, self._options.samples)
            if found and (self._version, found) != self._shown:
                self._shown = self._version, found
                self._call(partial(self._tracker.samples, max(0, self._version), found))

    def _call(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except BaseException as error:  # a tracker may raise anything; it is counted, and told
            self.num_failed += 1
            self.reason = self.reason or told(error)
            return False
        return True


def tracked_samples(run_folder: Path, limit: int) -> Sequence[TrackedSample]:
    """The newest samples that a run has kept, at most so many."""
    return [
        TrackedSample(
            name=each.name,
            prompt=each.kept.prompt[:MAX_TEXT],
            response=each.kept.response[:MAX_TEXT],
            label=each.kept.label,
            reward=each.kept.reward,
            components=each.kept.components,
            fate=each.fate,
            reason=each.kept.reason,
        )
        for each in shown_samples(run_folder, limit)
    ]


def _scenario(run_folder: Path) -> dict[str, Any]:
    import yaml  # here, as readers of this module's structs need none

    text = without_credentials((run_folder / SCENARIO_FILE).read_text(encoding="utf-8"))
    return dict(yaml.safe_load(text))


def main() -> None:
    """Argument: a :class:`Setup` as JSON."""
    line, (given,) = line_to_parent()
    setup = msgspec.json.decode(given, type=Setup)
    try:
        teller = Teller(setup)
    except BaseException as error:  # foreign code may raise anything while it is set up
        line.sendall(frame([load_failure(error, setup.tracker.name)]))
        return
    line.sendall(frame([Ready()]))
    for order in orders_of(line, ORDERS):
        try:
            teller.tell() if isinstance(order, Grown) else teller.finish()
        except (UserFault, OSError, *UNREADABLE) as error:  # of the run's files
            teller.num_failed += 1
            teller.reason = teller.reason or told(error)
        line.sendall(frame([teller.progress]))


if __name__ == "__main__":
    main()
