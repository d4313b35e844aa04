"""Both transports, with real segments and files, real processes, and real signals. What every transport must do is in
``test_contracts.py``."""
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from penstock.backends.weights.disk import FILE_NAME, DiskExporter
from penstock.backends.weights.lease import read_lease
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.segments import SHARED_FOLDER, segment_name, segments_of, sweep
from penstock.backends.weights.shared_memory import SharedMemoryExporter
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.weights import Canary, WeightManifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.weights.protocol import WeightExporter

TIMEOUT_S = 60
CANARY = Canary(tokens=pack_tokens([1, 2]), logprobs=pack_floats([-0.5]))


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"test{uuid.uuid4().hex[:12]}"
    yield name
    sweep(name)


@pytest.fixture(params=["shared_memory", "disk"])
def exporter(request: pytest.FixtureRequest, run_id: str, tmp_path: Path) -> Iterator[WeightExporter]:
    opened = open_exporter(request.param, run_id=run_id, learner_epoch=1, folder=tmp_path)
    yield opened
    opened.close()


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(7, 5, generator=generator)
    return {
        "model.embed_tokens.weight": table,
        "model.norm.weight": torch.randn(5, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(3.25, dtype=torch.float64),
        "steps": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 3, generator=generator).to(torch.float16),
        "empty": torch.empty(0, 4),
        "across": torch.randn(4, 6, generator=generator).t(),
        "lm_head.weight": table,
    }


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name], tensor), name


def path_of(manifest: WeightManifest) -> Path:
    path = Path(manifest.location)
    return path / FILE_NAME if manifest.transport == "disk" else path


def test_what_is_fetched_is_what_was_exported(exporter: WeightExporter) -> None:
    manifest = exporter.export(weights(), version=4, publish=2, canary=CANARY)
    fetched = open_fetcher().fetch(manifest)
    assert_same(fetched.tensors, weights())
    assert fetched.digest == manifest.digest
    assert (manifest.version, manifest.publish, manifest.learner_epoch, manifest.canary) == (4, 2, 1, CANARY)


class _Stream:
    """Comes in another order than the file's."""

    def __init__(self, tensors: dict[str, torch.Tensor], announced: dict[str, torch.Tensor] | None = None) -> None:
        self.shapes = {name: t.to("meta") for name, t in (announced or tensors).items()}
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in reversed(self._tensors.items()):
            passing = tensor.clone()
            yield name, passing
            passing.zero_()  # it is used before the next is asked for


def test_weights_that_come_one_after_the_other_make_the_same_file(exporter: WeightExporter) -> None:
    expected = weights() | {"large": torch.arange(5 << 20, dtype=torch.float32)}  # of several pieces of the digest
    del expected["lm_head.weight"]
    whole = exporter.export(expected, version=1, publish=1, canary=None)
    streamed = exporter.export(_Stream(expected), version=2, publish=1, canary=None)
    assert (streamed.digest, streamed.size_bytes) == (whole.digest, whole.size_bytes)
    assert_same(open_fetcher().fetch(streamed).tensors, expected)


def test_what_comes_has_to_be_what_was_announced(exporter: WeightExporter) -> None:
    kept = exporter.export({"a": torch.ones(3)}, version=1, publish=1, canary=None)
    announced = {"a": torch.ones(3), "b": torch.ones(2)}
    for given in ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(4)}, announced | {"c": torch.ones(1)}):
        with pytest.raises(ValueError, match="announced"):
            exporter.export(_Stream(given, announced), version=2, publish=1, canary=None)
    folder = path_of(kept).parent.parent if kept.transport == "disk" else SHARED_FOLDER
    assert not [path for path in folder.iterdir() if path.name.endswith("-2-1.partial") and "test" in str(path)]


def test_what_was_written_is_a_safetensors_file(exporter: WeightExporter) -> None:
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    expected = weights()
    del expected["lm_head.weight"]
    assert_same(load_file(path_of(manifest)), expected)


def test_both_transports_give_the_same_digest(run_id: str, tmp_path: Path) -> None:
    shared = SharedMemoryExporter(run_id, 0).export(weights(), version=0, publish=0, canary=None)
    disk = DiskExporter(tmp_path, 0).export(weights(), version=0, publish=0, canary=None)
    assert shared.digest == disk.digest


def test_equal_tensors_that_are_not_tied_stay_apart(exporter: WeightExporter) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)[:2]}
    fetched = open_fetcher().fetch(exporter.export(tensors, version=0, publish=0, canary=None)).tensors
    assert_same(fetched, tensors)
    assert fetched["a"].data_ptr() != fetched["b"].data_ptr()


def test_a_parameter_that_requires_grad_is_exported(exporter: WeightExporter) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    fetched = open_fetcher().fetch(exporter.export({"p": parameter}, version=0, publish=0, canary=None))
    assert torch.equal(fetched.tensors["p"], parameter.detach())
    assert not fetched.tensors["p"].requires_grad


@pytest.mark.parametrize("place", ["header", "data"])
def test_one_flipped_bit_is_caught(exporter: WeightExporter, place: str) -> None:
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    data = bytearray(path_of(manifest).read_bytes())
    data[20 if place == "header" else len(data) - 3] ^= 0x10
    path_of(manifest).write_bytes(data)
    with pytest.raises(WeightFetchError, match="digest"):
        open_fetcher().fetch(manifest)


def test_a_file_that_was_cut_short_is_caught(exporter: WeightExporter) -> None:
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    os.truncate(path_of(manifest), manifest.size_bytes - 1)
    with pytest.raises(WeightFetchError, match=f"should have {manifest.size_bytes} bytes"):
        open_fetcher().fetch(manifest)


def test_release_frees_older_versions_and_never_the_newest(exporter: WeightExporter) -> None:
    manifests = [exporter.export(weights(v), version=v, publish=v, canary=None) for v in range(3)]
    exporter.release(below_version=100)
    for manifest in manifests[:2]:
        with pytest.raises(WeightFetchError, match="released"):
            open_fetcher().fetch(manifest)
    assert_same(open_fetcher().fetch(manifests[2]).tensors, weights(2))


def test_an_export_that_was_made_again_is_not_released_as_its_own_predecessor(exporter: WeightExporter) -> None:
    exporter.export(weights(0), version=1, publish=1, canary=None)
    manifest = exporter.export(weights(1), version=1, publish=1, canary=None)
    exporter.release(below_version=9)
    assert_same(open_fetcher().fetch(manifest).tensors, weights(1))


def test_release_keeps_versions_at_the_bound(exporter: WeightExporter) -> None:
    manifests = [exporter.export(weights(v), version=v, publish=v, canary=None) for v in range(3)]
    exporter.release(below_version=1)
    assert [path_of(manifest).exists() for manifest in manifests] == [False, True, True]


def test_a_segment_that_a_killed_learner_had_half_written_is_no_export(run_id: str) -> None:
    half = SHARED_FOLDER / f"penstock-{run_id}-1-8-4.partial"
    old = SharedMemoryExporter(run_id, 1).export(weights(0), version=7, publish=3, canary=None)
    half.write_bytes(b"half")
    with pytest.raises(WeightFetchError, match="no shared-memory segment"):
        open_fetcher().fetch(msgspec.structs.replace(old, location=str(half)))
    successor = SharedMemoryExporter(run_id, 2)
    successor.release(below_version=100)
    assert not half.exists()
    assert_same(open_fetcher().fetch(old).tensors, weights(0))


def test_nobody_can_have_a_file_of_an_exports_name_there_first(run_id: str, tmp_path: Path) -> None:
    taken = tmp_path / f"penstock-{run_id}-1-0-0"
    taken.mkdir()
    (tmp_path / f"{taken.name}.partial").mkdir()
    exporter = SharedMemoryExporter(run_id, 1, tmp_path)
    locations = {exporter.export(weights(), version=0, publish=0, canary=None).location for _ in range(2)}
    assert len(locations) == 2
    assert len(list(tmp_path.glob(f"{taken.name}.{'[0-9a-f]' * 16}"))) == 1, "the one before is removed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_has_put_there_is_no_segment_of_the_run(run_id: str, tmp_path: Path) -> None:
    path = tmp_path / segment_name(run_id, 1, 0, 0)
    path.touch()
    os.chown(path, 65534, 65534)
    assert segments_of(run_id, tmp_path) == []
    assert sweep(run_id, tmp_path) == 0
    assert path.exists()


def test_an_export_whose_place_is_taken_away_is_the_documented_error(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("pathlib.Path.rename", refuse)
    with pytest.raises(WeightExportError, match="cannot be made: Operation not permitted"):
        SharedMemoryExporter(run_id, 1, tmp_path).export(weights(), version=0, publish=0, canary=None)
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_half_written_segments(run_id: str) -> None:
    (SHARED_FOLDER / f"penstock-{run_id}-1-8-4.partial").write_bytes(b"half")
    assert sweep(run_id) == 1
    assert not segments_of(run_id)


def flip_last_bit(file: BinaryIO) -> None:
    file.seek(-1, os.SEEK_END)
    last = file.read(1)[0]
    file.seek(-1, os.SEEK_END)
    file.write(bytes([last ^ 1]))
    file.flush()


def test_a_change_after_the_fetch_shows_in_the_digest_exactly_where_it_reaches_the_tensors(
    exporter: WeightExporter,
) -> None:
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    with path_of(manifest).open("r+b") as file:  # before the fetch: afterwards it would wait for it to be closed
        fetched = open_fetcher().fetch(manifest)
        before = {name: tensor.clone() for name, tensor in fetched.tensors.items()}
        flip_last_bit(file)
    changed = [name for name, tensor in fetched.tensors.items() if not torch.equal(tensor, before[name])]
    assert bool(changed) == (fetched.digest_now() != manifest.digest) == (manifest.transport == "shared_memory")


class HashedBytes:
    """Counts what goes into the digests of weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sizes: list[int] = []
        sha256 = hashlib.sha256

        def counted(data: bytes | memoryview[int]) -> object:
            self._sizes.append(len(data))
            return sha256(data)

        monkeypatch.setattr("penstock.backends.weights.digest.hashlib", SimpleNamespace(sha256=counted))

    def taken(self, manifest: WeightManifest) -> int:
        """How often the whole publish was hashed since this was asked last."""
        pieces, rest = self._sizes.count(manifest.size_bytes), len(self._sizes)
        self._sizes.clear()
        assert rest == 2 * pieces, "each is one piece, and the digest over it"
        return pieces


def test_an_engine_hashes_a_segment_once_unless_somebody_opens_it_for_writing(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, hashed = SharedMemoryExporter(run_id, 1), HashedBytes(monkeypatch)
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    assert hashed.taken(manifest) == 1
    fetched, other = (open_fetcher().fetch(manifest) for _ in range(2))
    assert hashed.taken(manifest) == 2, "each engine, when it fetches"
    assert fetched.digest_now() == other.digest_now() == manifest.digest
    assert hashed.taken(manifest) == 0, "nobody can have changed it"
    with pytest.raises(BlockingIOError):
        os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK)
    assert fetched.digest_now() == other.digest_now() == manifest.digest
    assert hashed.taken(manifest) == 2, "somebody came"
    with Path(manifest.location).open("r+b") as file:
        flip_last_bit(file)
    assert fetched.digest_now() == other.digest_now() != manifest.digest
    assert hashed.taken(manifest) == 2, "and may come again"
    with pytest.raises(WeightFetchError, match="were changed on the way"):
        open_fetcher().fetch(manifest)
    exporter.close()


def test_a_segment_that_is_let_go_keeps_nobody_waiting(run_id: str) -> None:
    exporter = SharedMemoryExporter(run_id, 1)
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    fetched = open_fetcher().fetch(manifest)
    fetched.close()
    fetched.close()
    os.close(os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK))
    dropped = open_fetcher().fetch(manifest)
    del dropped  # an engine that ends without closing it
    gc.collect()
    os.close(os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK))
    exporter.close()


def test_a_lease_tells_whether_anybody_can_have_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"here")
    descriptor = os.open(path, os.O_RDONLY)
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    assert read_lease(descriptor) is None, "a mapping that can be written to lives"
    mapping.close()
    lease = read_lease(descriptor)
    assert lease is not None
    path.read_bytes()
    path.rename(tmp_path / "other")
    assert lease.is_whole()
    with pytest.raises(BlockingIOError):
        os.open(tmp_path / "other", os.O_WRONLY | os.O_NONBLOCK)
    assert not lease.is_whole()
    lease.release()
    assert not lease.is_whole()
    os.close(descriptor)


def test_what_was_fetched_outlives_its_release(exporter: WeightExporter) -> None:
    fetched = open_fetcher().fetch(exporter.export(weights(0), version=0, publish=0, canary=None))
    exporter.export(weights(1), version=1, publish=1, canary=None)
    exporter.close()
    assert_same(fetched.tensors, weights(0))


def test_a_view_that_was_kept_past_close_still_holds_its_values(exporter: WeightExporter) -> None:
    fetched = open_fetcher().fetch(exporter.export(weights(), version=0, publish=0, canary=None))
    kept = fetched.tensors["half"]
    fetched.close()
    fetched.close()
    assert not fetched.tensors
    assert torch.equal(kept, weights()["half"])


def test_an_empty_set_and_an_unknown_dtype_are_refused(exporter: WeightExporter) -> None:
    with pytest.raises(WeightExportError, match="no tensors"):
        exporter.export({}, version=0, publish=0, canary=None)
    with pytest.raises(WeightExportError, match=r"z has dtype torch\.complex64"):
        exporter.export({"z": torch.zeros(2, dtype=torch.complex64)}, version=0, publish=0, canary=None)


def successor_of(exporter: WeightExporter, run_id: str, manifest: WeightManifest, epoch: int) -> WeightExporter:
    """What a later incarnation of the learner opens while, or after, this one exports."""
    if manifest.transport == "disk":
        return open_exporter("disk", run_id=run_id, learner_epoch=epoch, folder=Path(manifest.location).parent)
    return open_exporter("shared_memory", run_id=run_id, learner_epoch=epoch, folder=Path())


def test_a_new_incarnation_keeps_an_old_export_until_it_has_exported_that_version(
    exporter: WeightExporter, run_id: str
) -> None:
    old = exporter.export(weights(0), version=7, publish=3, canary=None)
    successor = successor_of(exporter, run_id, old, 2)
    assert_same(open_fetcher().fetch(old).tensors, weights(0))
    successor.export(weights(1), version=6, publish=10, canary=None)
    assert_same(open_fetcher().fetch(old).tensors, weights(0))
    new = successor.export(weights(2), version=7, publish=11, canary=None)
    with pytest.raises(WeightFetchError, match="gone"):
        open_fetcher().fetch(old)
    assert_same(open_fetcher().fetch(new).tensors, weights(2))


def test_a_release_frees_what_earlier_incarnations_left(exporter: WeightExporter, run_id: str) -> None:
    first = exporter.export(weights(0), version=6, publish=3, canary=None)
    second = exporter.export(weights(1), version=7, publish=4, canary=None)
    successor = successor_of(exporter, run_id, first, 2)
    own = successor.export(weights(2), version=5, publish=10, canary=None)
    successor.release(below_version=7)
    assert [path_of(manifest).exists() for manifest in (first, second, own)] == [False, True, True]


def test_an_incarnation_without_an_export_of_its_own_never_releases_the_newest_it_found(
    exporter: WeightExporter, run_id: str
) -> None:
    highest = exporter.export(weights(0), version=7, publish=3, canary=None)
    second = successor_of(exporter, run_id, highest, 2)
    lower = second.export(weights(1), version=5, publish=10, canary=None)
    third = successor_of(exporter, run_id, highest, 3)
    third.release(below_version=100)
    assert [path_of(manifest).exists() for manifest in (highest, lower)] == [True, False]


def test_a_predecessor_that_wakes_up_takes_nothing_of_its_successor(exporter: WeightExporter, run_id: str) -> None:
    old = exporter.export(weights(0), version=7, publish=3, canary=None)
    new = successor_of(exporter, run_id, old, 2).export(weights(1), version=7, publish=10, canary=None)
    late = exporter.export(weights(2), version=8, publish=4, canary=None)
    exporter.release(below_version=9)
    exporter.close()
    assert [path_of(manifest).exists() for manifest in (new, late)] == [True, False]


def test_what_a_predecessor_exported_after_its_loss_goes_too(exporter: WeightExporter, run_id: str) -> None:
    old = exporter.export(weights(0), version=7, publish=3, canary=None)
    successor = successor_of(exporter, run_id, old, 2)
    late = exporter.export(weights(2), version=8, publish=4, canary=None)
    successor.export(weights(1), version=8, publish=10, canary=None)
    assert not path_of(late).exists()


def test_close_removes_what_earlier_incarnations_left(exporter: WeightExporter, run_id: str) -> None:
    old = exporter.export(weights(0), version=7, publish=3, canary=None)
    successor = successor_of(exporter, run_id, old, 2)
    own = successor.export(weights(1), version=5, publish=10, canary=None)
    successor.close()
    assert [path_of(manifest).exists() for manifest in (old, own)] == [False, False]


def test_a_transport_that_nobody_knows_is_named(exporter: WeightExporter) -> None:
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    with pytest.raises(WeightFetchError, match="'pigeon'"):
        open_fetcher().fetch(msgspec.structs.replace(manifest, transport="pigeon"))


def test_an_export_to_disk_that_broke_off_is_never_seen(tmp_path: Path) -> None:
    exporter = DiskExporter(tmp_path, learner_epoch=0)
    with pytest.raises(NotImplementedError, match="meta"):
        exporter.export({"a": torch.empty(3, device="meta")}, version=0, publish=0, canary=None)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_learner_had_half_written_goes_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "weights-0-3-3.partial").mkdir()
    (tmp_path / "notes").mkdir()
    DiskExporter(tmp_path, learner_epoch=1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightExportError, match="cannot be used for weights"):
        open_exporter("disk", run_id="r", learner_epoch=0, folder=tmp_path / "file" / "weights")


def test_a_run_id_with_a_slash_is_refused() -> None:
    with pytest.raises(ValueError, match="run id"):
        SharedMemoryExporter("../x", 0)


def test_a_location_outside_the_run_is_not_mapped(run_id: str) -> None:
    manifest = SharedMemoryExporter(run_id, 0).export(weights(), version=0, publish=0, canary=None)
    with pytest.raises(WeightFetchError, match="no shared-memory segment"):
        open_fetcher().fetch(msgspec.structs.replace(manifest, location="/etc/passwd"))


def run_python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


EXPORT_AND_WAIT = """
    import sys, torch
    from penstock.backends.weights.shared_memory import SharedMemoryExporter
    exporter = SharedMemoryExporter(sys.argv[1], 0)
    exporter.export({"w": torch.ones(1000)}, version=0, publish=0, canary=None)
    print("exported", flush=True)
    sys.stdin.read()
"""


def test_sweep_removes_what_a_killed_exporter_left_and_nothing_of_other_runs(run_id: str) -> None:
    other = SharedMemoryExporter(f"{run_id}-1", 0)
    other.export(weights(), version=0, publish=0, canary=None)
    child = run_python(EXPORT_AND_WAIT, run_id)
    assert child.stdout is not None
    assert child.stdout.readline() == "exported\n"
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=TIMEOUT_S)
    assert len(segments_of(run_id)) == 1
    assert sweep(run_id) == 1
    assert not segments_of(run_id)
    assert len(segments_of(f"{run_id}-1")) == 1
    other.close()
    assert sweep(run_id) == 0


FETCH_AND_END = """
    import sys, msgspec
    from penstock.backends.weights.transports import open_fetcher
    from penstock.messages.weights import WeightManifest
    manifest = msgspec.json.decode(sys.argv[1], type=WeightManifest)
    print(float(open_fetcher().fetch(manifest).tensors["steps"].sum()))
"""


def test_an_engine_that_ends_takes_no_segment_with_it(run_id: str) -> None:
    exporter = SharedMemoryExporter(run_id, 0)
    manifest = exporter.export(weights(), version=0, publish=0, canary=None)
    child = run_python(FETCH_AND_END, msgspec.json.encode(manifest).decode())
    assert child.communicate(timeout=TIMEOUT_S)[0] == "15.0\n"
    assert child.returncode == 0
    assert_same(open_fetcher().fetch(manifest).tensors, weights())
    exporter.close()


EXPORT_TO_TINY = """
    import sys, torch
    from pathlib import Path
    from penstock.backends.weights.protocol import WeightExportError
    from penstock.backends.weights.shared_memory import SharedMemoryExporter
    folder = Path(sys.argv[1])
    exporter = SharedMemoryExporter("tiny", 0, folder)
    exporter.export({"w": torch.ones(100_000)}, version=0, publish=0, canary=None)
    for version, num_weights in enumerate(map(int, sys.argv[2:]), 1):
        across = torch.ones(num_weights // 2, 2)
        for tensor in (across, across.t()):  # written, and mapped
            try:
                exporter.export({"w": tensor}, version=version, publish=version, canary=None)
            except WeightExportError as error:
                print(error)
            print(len(list(folder.iterdir())))
"""


def test_a_full_shared_memory_is_an_error_and_no_signal(tmp_path: Path) -> None:
    program, sizes = textwrap.dedent(EXPORT_TO_TINY), (1_000_000, 9_000_000)
    # The second has pages that are made ahead, if it is mapped.
    script = 'mount -t tmpfs -o size=1m none "$1" || exit 77; folder=$1; shift; exec "$1" -c "$2" "$folder" "$3" "$4"'
    shell = ["sh", "-c", script, "sh", str(tmp_path), sys.executable, program, *map(str, sizes)]
    ended = subprocess.run(["unshare", "-m", *shell], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip(f"this user may not mount a tmpfs of its own: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for num_weights, message in zip((sizes[0], sizes[0], sizes[1], sizes[1]), lines[::2], strict=True):
        assert f"has no room for {4 * num_weights // 1000:,}," in message
        assert "weights.transport: disk" in message
    assert lines[1::2] == ["1"] * 4


def test_segments_live_in_dev_shm_and_only_their_owner_reads_them(run_id: str) -> None:
    SharedMemoryExporter(run_id, 3).export(weights(), version=4, publish=5, canary=None)
    (path,) = SHARED_FOLDER.glob(f"penstock-{run_id}-3-4-5.*")
    assert path.stat().st_mode & 0o777 == 0o600
