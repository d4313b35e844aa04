"""The profile of an embedded engine: a trace of the first decode steps under each version that is asked for.

Not thread-safe: the decoding thread calls everything.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.profiler import record_function

from penstock.backends.profiling import ThreadProfiler

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from penstock.backends.engines.options import EngineProfileOptions


class EngineProfile:
    """Traces of an engine's decode passes, under the versions that the scenario names."""

    def __init__(self, options: EngineProfileOptions, run_folder: Path, name: str, *, is_cuda: bool) -> None:
        """
        Args:
            options: which versions, and how much of them.
            run_folder: where traces are written.
            name: of the engine.
            is_cuda: whether it is on a GPU.
        """
        self._options = options
        self._name = name.replace("/", "-")
        self._profiler = ThreadProfiler(run_folder, stacks=options.stacks, memory=options.memory, is_cuda=is_cuda)
        self._version: int | None = None
        """Whose tokens are to be profiled; None: those of none."""
        self._num_passes = 0

    def serve(self, version: int) -> None:
        """From here on tokens are of this version."""
        self.end()
        self._version = version if self._options.takes(version) else None
        self._num_passes = 0

    @contextmanager
    def step(self) -> Generator[None]:
        """Around one decode step. A profile begins with the first that there is to do."""
        if self._version is None:
            yield
            return
        if not self._profiler.is_running:
            self._profiler.start()
        with record_function("decode step"):
            yield
        self._num_passes += 1
        if self._num_passes >= self._options.max_passes:
            self.end()

    def end(self) -> None:
        """Write what there is."""
        if self._version is not None and self._num_passes:
            self._profiler.stop(f"{self._name}-step-{self._version + 1:07d}")
        self._version = None
