"""A stop-watch around the observer of every actor of a run: what it takes where it works, between everything else that
fills the caches, and not in a loop of its own.

It is put into the processes of a run from outside, by :func:`environment`: Python imports ``sitecustomize`` when it
starts. What each process has counted stands in memory that it shares with a file; nothing is written on the way.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import msgspec

from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.span_file import SpanFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header

FOLDER_VARIABLE: Final = "PENSTOCK_STOP_WATCH"
INTERRUPTED_NS: Final = 500_000
"""What takes longer had to wait for a core meanwhile, and is left out."""
OBSERVED_NS, EXPORTED_NS, NUM_COUNTERS = 0, 1, 2


class Watched(msgspec.Struct, frozen=True):
    """Seconds of all processes of a run."""

    observers_s: float
    """By the clock, while no one else had the core."""
    exporters_s: float
    """CPU time of the threads that write spans, up to the last that they wrote."""


def environment(folder: Path) -> Mapping[str, str]:
    """Variables for a run whose processes are watched; ``folder`` is new."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(f"import {__name__}\n{__name__}.start()\n")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def read(folder: Path) -> Watched:
    """What the processes of a run that has ended have counted."""
    counters = [memoryview(file.read_bytes()).cast("Q") for file in folder.glob("*.counters")]
    if not counters:
        raise RuntimeError(f"no process has counted in {folder}: was sitecustomize.py there not imported?")
    seconds = [sum(each[place] for each in counters) / 1e9 for place in (OBSERVED_NS, EXPORTED_NS)]
    return Watched(*seconds)


def start() -> None:
    """Watch what observers this process will have."""
    observe, write = EventObserver.handled, SpanFile.write
    counters: list[memoryview] = []  # of this process, which is a fork of the one that has called this

    def handled(self: EventObserver, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        began_ns = time.perf_counter_ns()
        observe(self, event, header, commands)
        took_ns = time.perf_counter_ns() - began_ns
        if took_ns < INTERRUPTED_NS:
            if not counters:
                counters.append(_shared())
            counters[0][OBSERVED_NS] += took_ns

    def written(self: SpanFile, spans: Sequence[bytes]) -> None:
        write(self, spans)
        if counters:
            counters[0][EXPORTED_NS] = time.thread_time_ns()

    patch.object(EventObserver, "handled", handled).start()
    patch.object(SpanFile, "write", written).start()


def _shared() -> memoryview:
    path = Path(os.environ[FOLDER_VARIABLE]) / f"{os.getpid()}.counters"
    path.write_bytes(bytes(8 * NUM_COUNTERS))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
