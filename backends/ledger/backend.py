"""The Buffer's backend: batches read back from the ledger, and samples kept for good.

A batch is read on the caller's thread and with the caller's handle: its answer says what the ledger holds after
everything that was committed before. An archive takes long (the first one loads pyarrow), so it has a thread and a
handle of its own; its payloads stay until it is acknowledged, because only then the Buffer releases them.

| waits for | who ends it |
|---|---|
| the archive under way, in ``close`` | its thread; after the timeout it is left to end with the process |
| answers that are not written yet, in ``close`` | their thread, likewise |
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.backends.ledger.protocol import PayloadGoneError
from penstock.messages.base import Metric
from penstock.messages.commands import ArchiveGroups, ArchiveSamples, FetchBatch, KeepAnswers
from penstock.messages.local import BatchFetched, SamplesArchived

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.ledger.evaluation_answers import AnswerFiles
    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import BufferCommand


class LedgerBackend:
    """Carries out the Buffer's commands on its ledger. Implements ``penstock.backends.protocol.Backend``."""

    def __init__(self, store: LedgerStore, archive_folder: Path | None, answers: AnswerFiles | None = None) -> None:
        """
        Args:
            store: the handle that the Buffer's process commits to; it stays the caller's to close.
            archive_folder: where Parquet files of trained samples go; None keeps none.
            answers: where answers of evaluations go; None keeps none.
        """
        self._store = store
        self._folder = archive_folder
        self._answers = answers
        self._asked: SimpleQueue[ArchiveSamples | ArchiveGroups | None] = SimpleQueue()
        self._num_asked = 0
        self._num_written = 0
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._fail = fail

    def execute(self, command: BufferCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`. A batch is read before this returns.

        Raises:
            LedgerStoreError: the ledger cannot be read.
        """
        match command:
            case FetchBatch():
                self._emit(self._fetch(command))
            case ArchiveSamples():
                if self._folder is None or command.first_version > command.last_version:
                    self._emit(SamplesArchived(last_version=command.last_version))
                else:
                    self._begin(command, self._folder)
            case ArchiveGroups():
                assert self._folder is not None, "a run that collects has a place for it"
                self._begin(command, self._folder)
            case KeepAnswers():
                if self._answers is not None:
                    self._answers.keep(command, self._fail)

    def _fetch(self, command: FetchBatch) -> BatchFetched:
        try:
            return BatchFetched(version=command.version, groups=self._store.payloads(command.group_ids))
        except PayloadGoneError:  # a checkpoint that covers the batch was recorded in the turn that asked for it
            return BatchFetched(version=command.version, groups=(), is_gone=True)

    def gauges(self) -> tuple[Metric, ...]:
        """Archives that are asked for and not written yet, and answers of evaluations so far."""
        waiting = Metric("ledger/archives_waiting", self._num_asked - self._num_written)
        if self._answers is None:
            return (waiting,)
        return (waiting, Metric("evaluation/answers", self._answers.num_answers))

    def close(self, timeout_s: float) -> None:
        """Let the archive under way come to its end, and the answers that wait to be written."""
        if self._answers is not None:
            self._answers.close(timeout_s)
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(timeout_s)

    def _begin(self, command: ArchiveSamples | ArchiveGroups, folder: Path) -> None:
        self._num_asked += 1
        self._asked.put(command)
        if self._thread is None:
            self._thread = threading.Thread(target=self._archive, args=(folder,), name="archive", daemon=True)
            self._thread.start()

    def _archive(self, folder: Path) -> None:
        from penstock.backends.ledger.archive import (
            archive_groups,
            archive_samples,
        )  # numpy and pyarrow: the Buffer starts without

        try:
            reader = self._store.reader()
            try:
                while (command := self._asked.get()) is not None:
                    if isinstance(command, ArchiveGroups):
                        archive_groups(reader, folder, command.group_ids)
                    else:
                        archive_samples(reader, folder, command.first_version, command.last_version)
                    self._num_written += 1
                    last = 0 if isinstance(command, ArchiveGroups) else command.last_version
                    self._emit(SamplesArchived(last_version=last))
            finally:
                reader.close()
        except BaseException as error:
            self._fail(error)
