"""The Buffer's backend: batches come back from the ledger as they were, and trained samples are kept as Parquet."""

from __future__ import annotations

import subprocess
import sys
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import ledger_entries as make
import pyarrow.parquet as pq
import pytest

from penstock.backends.ledger.backend import LedgerBackend
from penstock.backends.ledger.memory import MemoryStore
from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.sqlite import SqliteReader, SqliteStore
from penstock.messages.commands import ArchiveSamples, FetchBatch
from penstock.messages.ledger import GroupRecorded, PayloadsReleased, VersionRecorded
from penstock.messages.local import BatchFetched, SamplesArchived

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import Group

TIMEOUT_S = 60


class Listener:
    """What the Buffer's shell hears."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()

    def next(self) -> LocalEvent | BaseException:
        return self.heard.get(timeout=TIMEOUT_S)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LedgerStore:
    store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "ledger.sqlite")
    store.claim(1)
    store.commit(make.whole_run())
    return store


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "samples"


@pytest.fixture
def backend(store: LedgerStore, listener: Listener, folder: Path) -> Generator[LedgerBackend]:
    backend = LedgerBackend(store, folder)
    backend.start(listener.heard.put, listener.heard.put)
    yield backend
    backend.close(TIMEOUT_S)


def kept(folder: Path, first: int, last: int) -> list[dict[str, Any]]:
    table = cast("Any", pq).read_table(folder / f"steps-{first:07d}-{last:07d}.parquet")
    return cast("list[dict[str, Any]]", table.to_pylist())


def payload(entry: GroupRecorded) -> Group:
    assert entry.payload is not None
    return entry.payload


def test_a_batch_comes_back_unchanged_and_in_its_order(backend: LedgerBackend, listener: Listener) -> None:
    backend.execute(FetchBatch(version=2, group_ids=(4, 3)))
    groups = (payload(make.admitted(4, version=1)), payload(make.admitted(3)))
    assert listener.next() == BatchFetched(version=2, groups=groups)


def test_a_batch_whose_payload_is_gone_is_told_as_gone(backend: LedgerBackend, listener: Listener) -> None:
    backend.execute(FetchBatch(version=1, group_ids=(0, 1)))
    assert listener.next() == BatchFetched(version=1, groups=(), is_gone=True)


def test_trained_samples_are_kept_as_they_were(backend: LedgerBackend, listener: Listener, folder: Path) -> None:
    backend.execute(ArchiveSamples(2, 2))
    assert listener.next() == SamplesArchived(last_version=2)
    rows = kept(folder, 2, 2)
    assert [(row["group_id"], row["sample_index"]) for row in rows] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert rows[3] == {
        "group_id": 4,
        "sample_index": 1,
        "version": 2,
        "staleness": 0,
        "attempt": 1,
        "engine": "engine_worker/0",
        "row": 4,
        "epoch": 0,
        "prompt": "2 + 2 =",
        "prompt_tokens": [7, 8],
        "label": "4",
        "metadata": '{"a": 1}',
        "response_tokens": [4, 1, 1],
        "logprobs": [-0.5, -1.0, -1.5],
        "loss_mask": None,
        "spans": [{"version": 1, "num_tokens": 3}],
        "part_lengths": [3],
        "part_contexts": None,
        "outcome": "completed",
        "outcome_detail": "end_token",
        "loss": "",
        "teacher_logprobs": None,
        "part_experts": None,
        "part_kept": None,
        "prompt_media": None,
        "part_media": None,
        "reward": 0.5,
        "reward_components": [("format", 1.0)],
        "counted": None,
    }
    assert rows[0]["staleness"] == 1


def test_tokens_that_the_model_did_not_make_are_marked_in_the_archive(listener: Listener, folder: Path) -> None:
    entries: list[LedgerEntry] = [make.run(), VersionRecorded(version=0), make.granted(0, 2)]
    entries += [make.admitted(0, loss_mask=b"\1\0\1"), make.admitted(1), make.leased(1, 0, 1), make.trained(1, 0, 1)]
    store = MemoryStore()
    store.claim(1)
    store.commit(entries)
    backend = LedgerBackend(store, folder)
    backend.start(listener.heard.put, listener.heard.put)
    backend.execute(ArchiveSamples(1, 1))
    assert listener.next() == SamplesArchived(last_version=1)
    backend.close(TIMEOUT_S)
    assert [row["loss_mask"] for row in kept(folder, 1, 1)] == [[1, 0, 1], [1, 0, 1], None, None]


def test_steps_archived_again_are_in_one_file(listener: Listener, folder: Path) -> None:
    store = MemoryStore()
    store.claim(1)
    store.commit(make.whole_run()[:-1])
    backend = LedgerBackend(store, folder)
    backend.start(listener.heard.put, listener.heard.put)
    for first, last in ((1, 1), (1, 1), (1, 2), (2, 2)):
        backend.execute(ArchiveSamples(first, last))
        assert listener.next() == SamplesArchived(last_version=last)
    backend.close(TIMEOUT_S)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["steps-0000001-0000002.parquet", "steps-0000002-0000002.parquet"]


@pytest.mark.parametrize("command", [ArchiveSamples(3, 2), ArchiveSamples(7, 9)])
def test_an_empty_range_is_answered_without_a_file(
    backend: LedgerBackend, listener: Listener, folder: Path, command: ArchiveSamples
) -> None:
    backend.execute(command)
    assert listener.next() == SamplesArchived(last_version=command.last_version)
    assert not folder.exists()


def test_without_a_folder_nothing_is_kept_and_the_answer_is_there_at_once(
    store: LedgerStore, listener: Listener
) -> None:
    backend = LedgerBackend(store, None)
    backend.start(listener.heard.put, listener.heard.put)
    backend.execute(ArchiveSamples(1, 2))
    assert listener.heard.get_nowait() == SamplesArchived(last_version=2)
    backend.close(TIMEOUT_S)


def test_samples_that_were_released_too_early_fail_the_buffer_and_leave_no_file(
    backend: LedgerBackend, store: LedgerStore, listener: Listener, folder: Path
) -> None:
    store.commit([PayloadsReleased(through_version=2)])
    backend.execute(ArchiveSamples(1, 2))
    assert isinstance(listener.next(), LedgerStoreError)
    assert not [path for path in folder.iterdir() if path.suffix == ".parquet" and not path.name.startswith(".")]


def test_a_folder_that_cannot_be_written_fails_the_buffer(listener: Listener, tmp_path: Path) -> None:
    store = MemoryStore()
    store.claim(1)
    store.commit(make.whole_run())
    (tmp_path / "file").touch()
    backend = LedgerBackend(store, tmp_path / "file")
    backend.start(listener.heard.put, listener.heard.put)
    backend.execute(ArchiveSamples(2, 2))
    assert isinstance(listener.next(), OSError)
    backend.close(TIMEOUT_S)


def test_the_archive_reads_while_the_buffer_goes_on_writing(tmp_path: Path, listener: Listener) -> None:
    store = SqliteStore(tmp_path / "ledger.sqlite")
    store.claim(1)
    store.commit(make.whole_run()[:-1])
    backend = LedgerBackend(store, tmp_path / "samples")
    backend.start(listener.heard.put, listener.heard.put)
    backend.execute(ArchiveSamples(1, 2))
    for version in range(3, 60):
        store.commit([VersionRecorded(version=version)])
    assert listener.next() == SamplesArchived(last_version=2)
    backend.close(TIMEOUT_S)
    versions = [e.version for e in SqliteReader(tmp_path / "ledger.sqlite").entries() if isinstance(e, VersionRecorded)]
    assert versions == [0, 1, *range(3, 60)]


def test_the_buffer_starts_without_what_only_the_archive_needs() -> None:
    program = "import sys, penstock.backends.ledger.backend; print({'numpy', 'pyarrow'} & set(sys.modules))"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert said.stdout.strip() == "set()"
