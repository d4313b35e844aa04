"""The thread that writes checkpoints while training goes on.

Invariants:

* One checkpoint is written at a time: ``begin`` after ``wait`` only.
* Each ends in exactly one call of ``done`` or ``fail``, on this thread.

| wait | who ends it |
|---|---|
| ``wait`` | the thread, when the disk has everything or refuses; it ends with the process |
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from penstock.messages.local import CheckpointWritten

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.learners.checkpoints.folder import CheckpointFolder, Snapshot
    from penstock.backends.protocol import Fail

_log: Final = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes snapshots to a folder, one after the other."""

    def __init__(self, folder: CheckpointFolder, *, done: Callable[[CheckpointWritten], None], fail: Fail) -> None:
        self._folder = folder
        self._done = done
        self._fail = fail
        self._thread: threading.Thread | None = None
        self.saved = CheckpointWritten(version=-1, path="")
        """The newest that lies on disk whole."""

    def begin(self, snapshot: Snapshot) -> None:
        """Write it, beginning now."""
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, snapshot: Snapshot) -> None:
        began_s = time.perf_counter()
        try:
            path = self._folder.write(snapshot)
        except BaseException as error:
            # The thread's only way to tell; and the learner must not go on as if it had been saved.
            self._fail(error)
            return
        self.saved = CheckpointWritten(version=snapshot.facts.version, path=str(path))
        _log.info("%s: %d bytes written in %.2f s", path, snapshot.size_bytes, time.perf_counter() - began_s)
        self._done(self.saved)
