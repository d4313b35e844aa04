"""The trackers of a run, from the driver's side.

Invariants:

* Nothing here blocks before the end of the run: a process is told that there are new lines, at most one such word is
  under way to it, and it reads them from the run's file.
* ``finish`` returns within the longest ``timeout_s`` of the trackers, whatever they do; then their processes are gone.
* Whatever goes wrong with a tracker is told once while the run goes on, and once at its end.

| wait | who ends it |
|---|---|
| for the trackers at the end of a run | they; each at the latest its ``timeout_s`` |
"""

from __future__ import annotations

import time
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.processes.frames import LoadFailed, Ready
from penstock.backends.processes.function_process import FunctionProcess
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.trackers.spec import TRACKERS
from penstock.runtime.observability.evaluation_log import KEY
from penstock.runtime.observability.tracker_process import MODULE, Ended, Grown, Progress, Setup
from penstock.runtime.observability.trackers import METRICS_FILE
from penstock.runtime.scenario.run_options import TrackerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType


_SAID: Final[msgspec.msgpack.Decoder[list[Ready | LoadFailed | Progress]]] = msgspec.msgpack.Decoder(
    list[Ready | LoadFailed | Progress]
)


class _Tracking:
    """One tracker's process."""

    def __init__(self, setup: Setup, pass_env: Sequence[str]) -> None:
        self.options = setup.tracker
        self.is_evaluation_log = setup.is_evaluation_log
        self.is_over = False
        """Nothing more comes of it."""
        self.progress = Progress(0, 0, "")
        self._num_asked = 0
        self._is_behind = False
        self._has_complained = False
        self.process = FunctionProcess[Progress](
            MODULE,
            msgspec.json.encode(setup).decode(),
            said=_SAID,
            variables=(*TRACKERS.spec(self.options.name).variables, *pass_env),
            name=self.options.name,
            has_own_tmp=True,  # wandb stages each table and file in it, and is killed like every tracker
        )

    def grown(self) -> None:
        """There are new lines."""
        if self._num_asked:
            self._is_behind = True
        elif not self.is_over:
            self._ask(Grown())

    def end_of_run(self) -> None:
        """Every file is written."""
        self._is_behind = False
        if not self.is_over:
            self._ask(Ended())

    def _ask(self, order: Grown | Ended) -> None:
        self._num_asked += 1
        self.process.send([order])

    def hear(self) -> Iterator[str]:
        """Take what it has said; what the user should know of it."""
        if self.is_over:
            return
        reason = ""
        try:
            for progress in self.process.heard():
                self.progress = progress
                self._num_asked -= 1
        except UserCodeError as error:
            reason = f"it could not be opened: {error}"
        if self.progress.num_failed and not self._has_complained:
            self._has_complained = True
            yield f"it failed, and is told the rest all the same: {self.progress.reason}"
        if reason or self.process.is_gone:
            self.is_over = True
            how = self.process.end()
            yield reason or f"its process {how}; it is told nothing more"
        elif self._is_behind and not self._num_asked:
            self._is_behind = False
            self._ask(Grown())

    @property
    def num_asked(self) -> int:
        """Words to it that it has not answered."""
        return self._num_asked

    @property
    def is_done(self) -> bool:
        """It has done all that it was asked to, or never will."""
        return self.is_over or not self._num_asked

    def last_word(self) -> Iterator[str]:
        """The end of the process, and what it has not done."""
        progress = self.progress
        if not self.is_done:
            yield (
                f"it was not done {self.options.timeout_s:g} s after the run and was ended; it took "
                f"{progress.num_told} lines of {METRICS_FILE} that are known of (observability.trackers: timeout_s)"
            )
        elif progress.num_failed > 1:
            yield f"{progress.num_failed} of its calls failed, the first with: {progress.reason}"
        self.is_over = True
        self.process.end()


class Trackers:
    """All of them. For one thread; in a ``with`` block, after which no process is left."""

    def __init__(
        self,
        run_folder: Path,
        trackers: Sequence[TrackerOptions],
        *,
        pass_env: Sequence[str] = (),
        evaluation_log: str | None = None,
        resumes: bool,
    ) -> None:
        """
        Args:
            run_folder: of the run.
            trackers: as the scenario names them.
            pass_env: ``runtime.pass_env``.
            evaluation_log: ``evaluation.log_function``.
            resumes: an earlier drive has told them of what stands in the files by now.
        """
        file = run_folder / METRICS_FILE
        position = file.stat().st_size if resumes and file.exists() else 0
        logs = [] if evaluation_log is None else [TrackerOptions(name=evaluation_log, samples=0)]
        self.each = [
            _Tracking(Setup(str(run_folder.absolute()), each, is_log, position, resumes), pass_env)
            for each, is_log in [*((each, False) for each in trackers), *((each, True) for each in logs)]
        ]

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for each in self.each:
            each.process.end()

    @property
    def pids(self) -> list[int]:
        """Of their processes."""
        return [each.process.pid for each in self.each]

    def grown(self) -> None:
        """A line was added to ``metrics.jsonl``."""
        for each in self.each:
            each.grown()

    def hear(self) -> list[str]:
        """What has gone wrong since the last call, a sentence each."""
        return [_named(each, text) for each in self.each for text in each.hear()]

    def finish(self) -> list[str]:
        """Tell them the rest, wait for them, and end their processes; what has gone wrong since the last call."""
        found: list[str] = []
        began_s = time.monotonic()
        for each in self.each:
            each.end_of_run()
        with DefaultSelector() as selector:
            for each in self.each:
                if not each.is_over:
                    selector.register(each.process.socket, EVENT_READ, each)
            while waits := [key.data for key in selector.get_map().values()]:
                next_s = min(each.options.timeout_s for each in waits) + began_s
                selector.select(max(0.0, next_s - time.monotonic()))
                for each in waits:
                    socket = each.process.socket
                    texts = list(each.hear())
                    found += [_named(each, text) for text in texts]
                    if each.is_done or time.monotonic() >= began_s + each.options.timeout_s:
                        selector.unregister(socket)
                        found += [_named(each, text) for text in each.last_word()]
        return found


def _named(tracking: _Tracking, text: str) -> str:
    what = KEY if tracking.is_evaluation_log else "tracker"
    return f"{what} {tracking.options.name}: {text}"
