"""Segments of shared memory that are written again, and digests that are made while the weights change already."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from penstock.backends.weights import positioned, segment_file
from penstock.backends.weights.digest import digest_of
from penstock.backends.weights.pages import WORTH_BYTES
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.segments import segments_of, sweep
from penstock.backends.weights.shared_memory import SharedMemoryExporter
from penstock.backends.weights.transports import open_fetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.weights.protocol import FetchedWeights
    from penstock.messages.weights import WeightManifest

TIMEOUT_S = 60
NUM = WORTH_BYTES // 4 + 12_345


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test{uuid.uuid4().hex[:12]}"
    yield name
    sweep(name)


def weights(value: float, num: int = NUM) -> dict[str, torch.Tensor]:
    return {"w": torch.full((num,), value), "across": torch.arange(12.0).reshape(3, 4).t() * value}


def inode_of(manifest: WeightManifest) -> int:
    return Path(manifest.location).stat().st_ino


class Publishes:
    """Exports one version after the other; what is older than the newest is released."""

    def __init__(self, run_id: str) -> None:
        self.exporter = SharedMemoryExporter(run_id, 1)
        self._version = -1

    def next(self, num: int = NUM) -> WeightManifest:
        self._version += 1
        manifest = self.exporter.export(weights(self._version, num), version=self._version, publish=0, canary=None)
        self.exporter.release(self._version)
        return manifest


def holds(manifest: WeightManifest, value: float) -> bool:
    """Whether an engine that fetches it now has these weights."""
    fetched = open_fetcher().fetch(manifest)
    same = all(torch.equal(fetched.tensors[name], tensor) for name, tensor in weights(value).items())
    fetched.close()
    return same


def test_a_segment_that_nobody_has_any_more_is_written_again(run_id: str) -> None:
    publishes = Publishes(run_id)
    manifests: list[WeightManifest] = []
    inodes: list[int] = []
    for version in range(5):
        manifests.append(publishes.next())
        inodes.append(inode_of(manifests[-1]))
        assert holds(manifests[-1], version)
    assert len(set(inodes)) == 2, "two take turns"
    assert len({manifest.location for manifest in manifests}) == 5, "each has a name of its own"
    for old in manifests[:-1]:
        with pytest.raises(WeightFetchError, match="released"):
            open_fetcher().fetch(old)
    assert len(segments_of(run_id)) == 2
    publishes.exporter.close()
    assert not segments_of(run_id)


def test_the_bytes_are_those_of_a_fresh_segment(run_id: str) -> None:
    publishes = Publishes(run_id)
    again = [publishes.next() for _ in range(3)][-1]
    fresh = SharedMemoryExporter(f"{run_id}-b", 1)
    assert fresh.export(weights(2), version=2, publish=0, canary=None).digest == again.digest
    assert digest_of(memoryview(Path(again.location).read_bytes())) == again.digest
    fresh.close()


def test_what_an_engine_still_has_is_never_written_again(run_id: str) -> None:
    publishes = Publishes(run_id)
    first = publishes.next()
    fetched = open_fetcher().fetch(first)
    kept = fetched.tensors["w"]
    fetched.close()  # a view of it lives on
    inodes = {inode_of(publishes.next()) for _ in range(4)}
    assert torch.equal(kept, weights(0)["w"])
    assert len(inodes) == 2, "the others go on taking turns"


def test_an_engine_that_has_only_opened_it_reads_no_mixture(run_id: str) -> None:
    """It is between opening and mapping when the segment is released."""
    publishes = Publishes(run_id)
    first = publishes.next()
    descriptor = os.open(first.location, os.O_RDONLY)
    for _ in range(3):
        publishes.next()
    data = os.pread(descriptor, first.size_bytes, 0)
    os.close(descriptor)
    assert digest_of(memoryview(data)) == first.digest


HOLD = """
import sys, msgspec
from penstock.backends.weights.transports import open_fetcher
from penstock.messages.weights import WeightManifest
fetched = open_fetcher().fetch(msgspec.json.decode(sys.argv[1], type=WeightManifest))
print("has it", flush=True)
sys.stdin.readline()
print(fetched.digest_now(), flush=True)
"""


def test_another_process_that_has_it_keeps_its_bytes_and_its_death_frees_them(run_id: str) -> None:
    publishes = Publishes(run_id)
    first = publishes.next()
    inode = inode_of(first)
    program = [sys.executable, "-c", HOLD, msgspec.json.encode(first).decode()]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "has it\n"
        second = publishes.next()
        held = inode_of(second)
        assert inode_of(publishes.next()) != inode
        assert engine.communicate("\n", timeout=TIMEOUT_S)[0] == f"{first.digest}\n"
    assert inode_of(publishes.next()) == held, "which nobody had"


def test_weights_of_another_size_make_a_segment_of_their_own(run_id: str) -> None:
    publishes = Publishes(run_id)
    publishes.next()
    publishes.next()
    larger = publishes.next(NUM + 1)
    fetched = open_fetcher().fetch(larger)
    assert len(fetched.tensors["w"]) == NUM + 1
    assert len(segments_of(run_id)) == 2


def test_a_segment_that_was_swept_away_is_made_anew(run_id: str) -> None:
    publishes = Publishes(run_id)
    publishes.next()
    publishes.next()
    sweep(run_id)
    assert holds(publishes.next(), 2)


def test_what_is_kept_for_its_pages_goes_with_the_next_incarnation(run_id: str) -> None:
    publishes = Publishes(run_id)
    publishes.next()
    newest = publishes.next()
    SharedMemoryExporter(run_id, 2)
    assert [segment.path for segment in segments_of(run_id)] == [Path(newest.location)]
    assert holds(publishes.next(), 2), "a predecessor that was only asleep makes another"


def test_weights_may_change_while_the_digest_is_made(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def slow(descriptor: int, start: int, size_bytes: int) -> bytes:
        assert goes_on.wait(TIMEOUT_S)
        return os.pread(descriptor, size_bytes, start)

    monkeypatch.setattr("penstock.backends.weights.shared_memory.read_back", slow)
    exporter, tensors = SharedMemoryExporter(run_id, 1), weights(1.0)
    begun = exporter.begin(tensors, version=1, publish=1, canary=None)
    for tensor in tensors.values():
        tensor.zero_()
    exporter.release(below_version=1)
    goes_on.set()
    manifest = begun.manifest()
    assert holds(manifest, 1.0)
    exporter.close()


def test_the_export_that_a_new_one_replaces_stays_until_engines_can_be_told_of_it(run_id: str) -> None:
    old = SharedMemoryExporter(run_id, 1).export(weights(1.0), version=1, publish=1, canary=None)
    exporter = SharedMemoryExporter(run_id, 2)
    begun = exporter.begin(weights(1.0), version=1, publish=2, canary=None)
    assert holds(old, 1.0)
    assert holds(begun.manifest(), 1.0)
    assert not Path(old.location).exists()
    exporter.close()


class Moments:
    """Stands for a module, and does something before one of the calls of these of its functions."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.num = 0
        self._at, self._act = at, act

    def of(self, module: object, *names: str) -> object:
        def around(call: Callable[..., object]) -> Callable[..., object]:
            def stepped(*args: object, **kwargs: object) -> object:
                self.num += 1
                if self.num == self._at:
                    self._act()
                return call(*args, **kwargs)

            return stepped

        stand_in = SimpleNamespace(**vars(module))
        for name in names:
            setattr(stand_in, name, around(getattr(module, name)))
        return stand_in


@pytest.mark.parametrize("loads", ["at once", "at the end"])
@pytest.mark.parametrize("at", range(1, 10))
def test_an_engine_that_comes_at_any_moment_of_the_reuse_knows_what_it_has_loaded(
    at: int, loads: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked the segment up before that was released, and opens it while the exporter asks the kernel whether
    anybody has it, opens it, and writes. (The name that it had then is made anew here: to look up and to open is one
    call.)"""
    publishes = Publishes(run_id)
    old = publishes.next()
    publishes.next()
    (spare,) = (segment.path for segment in segments_of(run_id) if segment.is_partial)
    inode = spare.stat().st_ino
    found: list[tuple[torch.Tensor, str]] = []
    refused: list[str] = []
    late: list[FetchedWeights] = []

    def load(fetched: FetchedWeights) -> None:
        loaded = fetched.tensors["w"].clone()
        found.append((loaded, fetched.digest_now()))
        fetched.close()

    def open_it() -> None:
        (path,) = (each.path for each in segments_of(run_id) if each.path.stat().st_ino == inode)
        os.link(path, old.location)
        try:
            fetched = open_fetcher().fetch(old)
        except WeightFetchError as error:
            refused.append(str(error))
        else:
            load(fetched) if loads == "at once" else late.append(fetched)
        os.unlink(old.location)

    def come() -> None:
        engine.start()
        engine.join(0.2)  # it may have to wait until the exporter gives its lease back

    engine = threading.Thread(target=open_it)
    moments = Moments(at, come)
    monkeypatch.setattr(segment_file, "os", moments.of(os, "open", "close"))
    monkeypatch.setattr(segment_file, "fcntl", moments.of(fcntl, "fcntl"))
    monkeypatch.setattr(segment_file, "put", moments.of(positioned, "put").put)  # type: ignore[attr-defined]
    newest = publishes.next()
    assert moments.num >= at
    engine.join(TIMEOUT_S)
    for fetched in late:
        load(fetched)
    monkeypatch.undo()
    assert len(found) + len(refused) == 1
    assert all("digest" in reason for reason in refused)
    for tensor, digest in found:
        assert digest != old.digest or torch.equal(tensor, weights(0)["w"])
    assert holds(newest, 2)
