"""Keeps what a run writes of events and spans within ``observability.max_disk_gb``.

Invariants:

* Closed segments are compressed, and removed, the oldest of all writers first, while all that counts is above the
  budget less what the writers may add until the next look: the newest lines are always there.
* ``removed.json`` says up to when something is missing before the first byte of it goes (:mod:`.removed`).
* Counted and never removed: logs of processes, which have bounds of their own, the time accounting, whose sums are
  the run's, and recordings, which are of no use without their beginning: they end at half of the budget. These are
  not compressed either: they grow fast, and tokens hardly shrink. The ledger, checkpoints and what was asked for
  (samples, dumps, profiles, trackers) do not count.
* A disk that is full or gone ends nothing here: the next look tries again. The thread ends with
  :meth:`DiskKeeper.close`, which waits :data:`CLOSE_S` for its last look.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault
from penstock.runtime.observability.nvml import GPU_FILE
from penstock.runtime.observability.recording import FULL_FILE, RECORDING_FOLDER
from penstock.runtime.observability.removed import Removed, read_removed, write_removed
from penstock.runtime.observability.segments import COMPRESSED, SEGMENT, SUFFIX, close_file, files_in, plain_segments
from penstock.runtime.observability.traces import TRACES_FOLDER
from penstock.runtime.observability.trackers import ACTIVITY_FILE, EVENTS_FILE, EVENTS_FOLDER

if TYPE_CHECKING:
    from pathlib import Path

LOGS_FOLDER: Final = "logs"
LOOK_EVERY_S: Final = 0.5
LOOKS_PER_ROUND: Final = 100
"""Of so many looks one goes over all files; the others over those that were closed since."""
CLOSE_S: Final = 10.0
DEAD_AFTER_S: Final = 60.0
"""The file of an incarnation that was replaced is closed when nothing was written for so long."""
RESERVE: Final = 1 / 8
"""Share of the budget for what writers have open and add between two looks."""
RECORDING_SHARE: Final = 1 / 2
"""Of the budget, that a recording may take."""
COMPRESSION_LEVEL: Final = 1
PARTIAL: Final = ".partial"
_KEPT: Final = ACTIVITY_FILE.removesuffix(SUFFIX)
_INCARNATION: Final = re.compile(r"(?P<actor>.+)-(?P<epoch>\d+)\.jsonl")


class DiskKeeper:
    """Keeps one run within its budget. The files are written by others, in this process or not."""

    def __init__(self, run_folder: Path, max_disk_gb: float | None) -> None:
        """
        Args:
            run_folder: of the run.
            max_disk_gb: None: there is nothing to do.
        """
        self._folder = run_folder
        self._recording = run_folder / RECORDING_FOLDER
        self._folders = (run_folder / EVENTS_FOLDER, run_folder / TRACES_FOLDER)
        self._num_recorded = 0
        self._max_disk_gb = max_disk_gb
        self._num_looks = 0
        self._told: set[str] = set()
        self._news: list[str] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look again and again, on a thread."""
        if self._max_disk_gb is None:
            return
        self._thread = threading.Thread(target=self._run, name="disk-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look a last time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def take_news(self) -> list[str]:
        """What a person should know, each once. From any thread."""
        news, self._news = self._news, []
        return news

    def look(self) -> None:
        """Compress what is closed, and remove what is too much. What cannot be done now is left for later."""
        if self._max_disk_gb is None:
            return
        is_round = self._num_looks % LOOKS_PER_ROUND == 0
        self._num_looks += 1
        closed = [file for folder in (self._folder, *self._folders) for file in plain_segments(folder)]
        before, self._num_recorded = self._num_recorded, len(plain_segments(self._recording))
        if not closed and not is_round and before == self._num_recorded:
            return
        for step in (partial(self._compress, closed, is_round), partial(self._remove, self._max_disk_gb)):
            try:
                step()
            except (OSError, UserFault) as error:  # the disk may be full: then at least what is too much goes
                self._tell(f"events and spans may take more than observability.max_disk_gb: {error}")

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()
        self.look()

    def _counted(self) -> list[tuple[float, Path, int]]:
        """All files that count: the time of the last line, name and bytes, by their time."""
        folders = (*self._folders, self._recording, self._folder / LOGS_FOLDER)
        found = [each for folder in folders for each in folder.glob("*")]
        names = (EVENTS_FILE, ACTIVITY_FILE, GPU_FILE)
        found += [each for name in names for each in self._folder.glob(f"{name.removesuffix(SUFFIX)}.*")]
        stats = ((file, _stat(file)) for file in found)
        return sorted((stat.st_mtime, file, stat.st_size) for file, stat in stats if stat is not None)

    def _compress(self, closed: list[Path], is_round: bool) -> None:
        for folder in self._folders if is_round else ():
            _close_dead(folder)
        for file in closed:
            _compress(file)

    def _remove(self, max_disk_gb: float) -> None:
        files, allowed = self._counted(), max_disk_gb * 1e9
        total = sum(size for _, _, size in files)
        victims: list[tuple[float, Path]] = []
        for at, file, size in files:
            is_kept = not SEGMENT.fullmatch(file.name) or file.name.startswith(_KEPT) or file.parent == self._recording
            if total > allowed * (1 - RESERVE) and not is_kept:
                victims.append((at, file))
                total -= size
        if sum(size for _, file, size in files if file.parent == self._recording) > allowed * RECORDING_SHARE:
            (self._recording / FULL_FILE).touch()
            self._tell("the recording for penstock replay ends here: it has come to half of observability.max_disk_gb")
        if total > allowed:
            self._tell("logs and time accounting alone take more than observability.max_disk_gb; they are left alone")
        if victims:
            self._record(victims, max_disk_gb)
        for _, file in victims:
            file.unlink(missing_ok=True)

    def _record(self, victims: list[tuple[float, Path]], max_disk_gb: float) -> None:
        """Before they go: a kill in between may say too much, and never too little."""
        before = read_removed(self._folder) or Removed(max_disk_gb=max_disk_gb)
        spans = [at for at, file in victims if file.parent.name == TRACES_FOLDER]
        events = [at for at, file in victims if file.parent.name != TRACES_FOLDER]
        removed = Removed(
            max_disk_gb=max_disk_gb,
            events_until=max([before.events_until, *events]),
            spans_until=max([before.spans_until, *spans]),
        )
        write_removed(self._folder, removed)
        self._tell(f"the oldest events and spans are removed from now on: observability.max_disk_gb is {max_disk_gb:g}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._news.append(text)


def _close_dead(folder: Path) -> None:
    """Close the files of incarnations that were replaced a while ago."""
    matches = ((_INCARNATION.fullmatch(file.name), file) for file in files_in(folder))
    found = [(match["actor"], int(match["epoch"]), file) for match, file in matches if match is not None]
    newest = {actor: epoch for actor, epoch, _ in sorted(found)}
    for actor, epoch, file in found:
        stat = _stat(file)
        if epoch < newest[actor] and stat is not None and stat.st_mtime < time.time() - DEAD_AFTER_S:
            close_file(file)


def _compress(segment: Path) -> None:
    """Compress a segment, or end what a kill has left half done of that. Its time stays that of its last line."""
    packed = segment.with_name(segment.name + COMPRESSED)
    if not packed.exists():
        unfinished, stat = packed.with_name(packed.name + PARTIAL), segment.stat()
        with segment.open("rb") as source, unfinished.open("wb") as file:
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=COMPRESSION_LEVEL, mtime=0) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        os.utime(unfinished, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        unfinished.replace(packed)
    segment.unlink()


def _stat(file: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return file.stat()
    return None
