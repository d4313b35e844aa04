"""Torch's profiler around a stretch of one thread, whose trace becomes a file in the run's folder.

Invariants:

* A trace is written beside its name and renamed, so whoever sees the name sees a whole file.
* A profile that cannot be made or written is said in the log, and ends no run.
"""

# What torch documents for snapshots has names of private functions, typed in part only:
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from torch.profiler import profile

PROFILE_FOLDER: Final = "profiles"
"""In a run's folder."""
TRACE_SUFFIX: Final = ".json.gz"
"""Of a trace in Chrome's format, for ui.perfetto.dev."""
SNAPSHOT_SUFFIX: Final = ".pickle"
"""Of a history of CUDA's allocator, for pytorch.org/memory_viz."""
NO_SNAPSHOT: Final = "no snapshot of memory is written: it is CUDA's allocator whose history it has, and this is a CPU"
MAX_HISTORY: Final = 200_000
"""Allocations in a snapshot; the oldest are dropped."""
_log: Final = logging.getLogger(__name__)


def profile_files(run_folder: Path) -> list[Path]:
    """The traces and snapshots of a run that are whole, relative to its folder, by name."""
    folder = run_folder / PROFILE_FOLDER
    found = [path.relative_to(run_folder) for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return sorted(p for p in found if p.name.endswith((TRACE_SUFFIX, SNAPSHOT_SUFFIX)) and not p.name.startswith("."))


class ThreadProfiler:
    """Profiles the thread that calls it, again and again; one profile at a time in a process."""

    def __init__(self, run_folder: Path, *, stacks: bool, memory: bool, is_cuda: bool) -> None:
        """
        Args:
            run_folder: of the run.
            stacks: whether operators name the lines that called them.
            memory: whether allocations are recorded; on a GPU with a snapshot of what its allocator has done. That
                there is none on a CPU is said once.
            is_cuda: whether the thread's work is on a GPU.
        """
        self._folder = run_folder / PROFILE_FOLDER
        self._stacks, self._memory, self._is_cuda = stacks, memory, is_cuda
        self.writes_snapshots = memory and is_cuda
        if memory and not is_cuda:
            _log.info("profile: %s", NO_SNAPSHOT)
        self._running: profile | None = None

    @property
    def is_running(self) -> bool:
        """Whether it profiles now."""
        return self._running is not None

    def start(self) -> None:
        """Profile this thread from here on."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        try:
            self._running = profile(
                activities=activities, record_shapes=True, with_stack=self._stacks, profile_memory=self._memory
            )
            self._running.start()
            if self.writes_snapshots:
                torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY)  # documented so
        except RuntimeError as error:
            self._running = None
            _log.warning("no profile was begun: %s", error)

    def stop(self, name: str) -> None:
        """End the profile, if there is one, and write what it has found.

        Args:
            name: of the file, without its suffix.
        """
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = self._folder / f".{name}{TRACE_SUFFIX}"
            running.export_chrome_trace(str(partial))
            partial.replace(self._folder / f"{name}{TRACE_SUFFIX}")
            if self.writes_snapshots:
                self._write_snapshot(name)
        except (OSError, RuntimeError) as error:
            _log.warning("the profile %s could not be written: %s", name, error)

    def _write_snapshot(self, name: str) -> None:
        import torch

        partial = self._folder / f".{name}{SNAPSHOT_SUFFIX}"
        torch.cuda.memory._dump_snapshot(str(partial))  # type: ignore[no-untyped-call]  # documented so
        torch.cuda.memory._record_memory_history(enabled=None)  # likewise
        partial.replace(self._folder / f"{name}{SNAPSHOT_SUFFIX}")

    @contextmanager
    def around(self, name: str) -> Generator[None]:
        """Profile what is inside; it is written also where that fails."""
        self.start()
        try:
            yield
        finally:
            self.stop(name)
