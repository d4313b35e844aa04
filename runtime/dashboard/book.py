"""What the dashboard has read of a run, so that each line is read once however often somebody looks.

Invariants:

* A book holds what its files held when it was last asked. A file that became shorter is another one: a new book is
  begun.
* It may be asked from several threads.
"""

from __future__ import annotations

import threading
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.messages.training import Activity
from penstock.runtime.observability.evaluations import EvaluationRow
from penstock.runtime.observability.following import LineFollower
from penstock.runtime.observability.nvml import GPU_FILE, GpuRow
from penstock.runtime.observability.trackers import (
    ACTIVITY_FILE,
    METRICS_FILE,
    ActivityRow,
    StepRow,
    is_evaluation_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BOOKS: Final = 16
STATES: Final = tuple(Activity)

RowT = TypeVar("RowT")


class Lane(msgspec.Struct, eq=False):
    """The spans of an actor in the order of time, which tile it; each column has one entry a span."""

    states: bytearray
    """Places in :data:`STATES`."""
    ends_s: array[float]
    occupancies: array[float]


class RunBook:
    """One run. Ask :func:`book_of` for it."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._folder = folder
        self._clear()

    def _clear(self) -> None:
        names = (METRICS_FILE, ACTIVITY_FILE, GPU_FILE)
        self._files = {name: LineFollower(self._folder / name) for name in names}
        self._steps: dict[int, StepRow] = {}
        self._evaluations: dict[int, EvaluationRow] = {}
        self._lanes: dict[str, Lane] = {}
        self._gpus: dict[int, list[GpuRow]] = {}

    def steps(self) -> list[StepRow]:
        """By version, without the ids of groups. A version that was trained again stands as it was first.

        Raises:
            UserFault: the file is damaged, here and below.
        """
        with self._lock:
            self._read_metrics()
            return list(self._steps.values())

    def evaluations(self) -> list[EvaluationRow]:
        """By number."""
        with self._lock:
            self._read_metrics()
            return [self._evaluations[number] for number in sorted(self._evaluations)]

    def lanes(self) -> dict[str, Lane]:
        """By actor."""
        with self._lock:
            for line in self._more(ACTIVITY_FILE):
                row = self._row(ACTIVITY_FILE, line, ActivityRow)
                lane = self._lanes.setdefault(row.actor, Lane(bytearray(), array("d"), array("d")))
                lane.states.append(STATES.index(row.activity))
                lane.ends_s.append(row.end_s)
                lane.occupancies.append(row.occupancy)
            # Copies, which are cheap: the lanes grow while somebody looks.
            return {
                name: Lane(each.states[:], each.ends_s[:], each.occupancies[:]) for name, each in self._lanes.items()
            }

    def gpus(self) -> dict[int, list[GpuRow]]:
        """NVML's samples by GPU."""
        with self._lock:
            for line in self._more(GPU_FILE):
                row = self._row(GPU_FILE, line, GpuRow)
                self._gpus.setdefault(row.gpu, []).append(row)
            return {gpu: rows[:] for gpu, rows in sorted(self._gpus.items())}

    def _read_metrics(self) -> None:
        for line in self._more(METRICS_FILE):
            if is_evaluation_line(line):
                evaluation = self._row(METRICS_FILE, line, EvaluationRow)
                self._evaluations[evaluation.evaluation] = evaluation
                continue
            step = self._row(METRICS_FILE, line, StepRow)
            self._steps.setdefault(step.version, msgspec.structs.replace(step, group_ids=()))

    def _more(self, name: str) -> Iterator[bytes]:
        if self._files[name].has_shrunk():
            self._clear()
        return iter(self._files[name].more())

    def _row(self, name: str, line: bytes, kind: type[RowT]) -> RowT:
        try:
            return msgspec.json.decode(line, type=kind)
        except UNREADABLE as error:
            raise UserFault(f"{self._folder / name}, before byte {self._files[name].position}: {error}") from error


@lru_cache(maxsize=MAX_BOOKS)
def book_of(folder: Path) -> RunBook:
    """The book of the run in this folder; the same one for whoever asks."""
    return RunBook(folder)
