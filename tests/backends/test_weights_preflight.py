"""Preflight of the transports, the digest, and sizes of checkpoints."""
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from safetensors.torch import save_file

from penstock.backends.engines.options import EnginesOptions
from penstock.backends.engines.transport_preflight import (
    EngineSites,
    check_libraries,
    check_transport,
    model_size_bytes,
    sites_of,
)
from penstock.backends.weights.builtin import in_units
from penstock.backends.weights.digest import PIECE_BYTES, PlacedDigest, StreamDigest, digest_of
from penstock.backends.weights.service_messages import Libraries
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

HUGE_BYTES = 10**16
SMALL_BYTES = 1000


def test_auto_takes_shared_memory_where_there_is_room(tmp_path: Path) -> None:
    choice = check_transport("auto", size_bytes=SMALL_BYTES, folder=tmp_path)
    assert choice.transport == "shared_memory"
    assert "3 copies of the weights need 3.0 kB (1.0 kB each)" in choice.reason


def test_auto_falls_back_to_disk_and_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "no_shm"
    choice = check_transport("auto", size_bytes=SMALL_BYTES, folder=tmp_path / "w", shared_folder=missing)
    assert choice.transport == "disk"
    assert f"there is no {missing}" in choice.reason


def test_too_little_shared_memory_says_what_there_is_what_is_needed_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserFault) as caught:
        check_transport("shared_memory", size_bytes=HUGE_BYTES, folder=tmp_path, num_copies=2)
    message = str(caught.value)
    assert "/dev/shm has " in message
    assert "2 copies of the weights need 20000 TB" in message
    assert "--shm-size=18626452g" in message
    assert "weights.transport: disk" in message


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"the disk of .* has .* free, and 3 copies"):
        check_transport("disk", size_bytes=HUGE_BYTES, folder=tmp_path)


def test_auto_names_both_reasons_when_neither_works(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"neither way: /dev/shm has .*; and the disk of"):
        check_transport("auto", size_bytes=HUGE_BYTES, folder=tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserFault, match=r"cannot be written to .*/file/weights .*run\.folder"):
        check_transport("disk", size_bytes=SMALL_BYTES, folder=tmp_path / "file" / "weights")


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    check_transport("disk", size_bytes=SMALL_BYTES, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_size_of_a_checkpoint_follows_the_dtype_it_is_held_in(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4, dtype=torch.float16)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(5), "c": torch.tensor(1.0)}, tmp_path / "model-2.safetensors")
    assert model_size_bytes(tmp_path, "float32") == 4 * 18
    assert model_size_bytes(tmp_path, "bfloat16") == 2 * 18


def test_a_folder_without_weights_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"has no \*\.safetensors"):
        model_size_bytes(tmp_path, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"neither weights nor a pointer to them")
    with pytest.raises(UserFault, match=r"model\.safetensors is no safetensors file"):
        model_size_bytes(tmp_path, "float32")


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17])
def test_a_digest_does_not_depend_on_how_the_bytes_arrive(size: int) -> None:
    data = memoryview(os.urandom(size))
    stream = StreamDigest()
    for start in range(0, size, 3_000_001):
        stream.update(data[start : start + 3_000_001])
    assert stream.hexdigest() == digest_of(data, num_threads=1) == digest_of(data, num_threads=4)
    with PlacedDigest(size, lambda start, size_bytes: data[start : start + size_bytes]) as placed:
        for start in reversed(range(0, size, 3_000_001)):
            placed.wrote(start, min(3_000_001, size - start))
        assert placed.hexdigest() == stream.hexdigest()


def test_sizes_are_readable() -> None:
    assert [in_units(n) for n in (0, 999, 1000, 64_000_000, 1_234_000_000)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "64.0 MB",
        "1.2 GB",
    ]


def test_preflight_and_sweep_import_no_torch() -> None:
    program = (
        "import sys, penstock.backends.engines.transport_preflight, penstock.backends.weights.segments; "
        "print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "False\n"


# --- transports that push, and SGLang servers ---------------------------------------------------------------------

SERVERS = EngineSites()


@pytest.mark.parametrize("wanted", ["distributed", "tensor"])
def test_what_pushes_needs_memory_of_the_process(wanted: Literal["distributed", "tensor"], tmp_path: Path) -> None:
    assert check_transport(wanted, size_bytes=1000, folder=tmp_path, engines=SERVERS).transport == wanted
    with pytest.raises(UserFault, match=f"weights.transport is {wanted}, .* set weights.transport: disk"):
        check_transport(wanted, size_bytes=1 << 50, folder=tmp_path, engines=SERVERS)


def test_auto_takes_the_disk_where_ray_may_put_engines_on_another_machine(tmp_path: Path) -> None:
    """A run over two nodes once went on at half its speed: the engine on the other one never got a version."""
    placed = sites_of(EnginesOptions(), "10.0.0.6:6379")
    choice = check_transport("auto", size_bytes=1000, folder=tmp_path, engines=placed)
    assert choice.transport == "disk"
    assert choice.reason.startswith("Ray may put engines on another machine than the learner")
    assert (
        check_transport("shared_memory", size_bytes=1000, folder=tmp_path, engines=placed).transport == "shared_memory"
    )
    assert check_transport("auto", size_bytes=1000, folder=tmp_path, engines=sites_of(EnginesOptions())).transport == (
        "shared_memory"
    )


def test_auto_takes_the_disk_when_a_server_is_on_another_machine(tmp_path: Path) -> None:
    elsewhere = EngineSites(addresses=("http://127.0.0.1:1", "http://10.0.0.7:30000"))
    choice = check_transport("auto", size_bytes=1000, folder=tmp_path, engines=elsewhere)
    assert choice.transport == "disk"
    assert "http://10.0.0.7:30000 is on another machine and cannot read shared memory" in choice.reason
    assert check_transport("auto", size_bytes=1000, folder=tmp_path, engines=SERVERS).transport == "shared_memory"


def test_shared_memory_for_a_server_elsewhere_is_refused_with_what_to_set(tmp_path: Path) -> None:
    elsewhere = EngineSites(addresses=("http://10.0.0.7:30000",))
    with pytest.raises(UserFault, match=r"cannot read shared memory. Set weights.transport: disk"):
        check_transport("shared_memory", size_bytes=1000, folder=tmp_path, engines=elsewhere)


@pytest.mark.parametrize("address", ["http://10.0.0.7:30000", "http://gpu-1:30000", "http://[fe80::1]:30000"])
def test_what_comes_by_memory_is_refused_for_a_server_elsewhere(tmp_path: Path, address: str) -> None:
    elsewhere = EngineSites(addresses=(address,))
    with pytest.raises(UserFault, match="not on the loopback"):
        check_transport("tensor", size_bytes=1000, folder=tmp_path, engines=elsewhere)
    with pytest.raises(UserFault, match=r"is network, .* is on another machine and cannot read it"):
        check_transport("network", size_bytes=1000, folder=tmp_path, engines=elsewhere)
    assert check_transport("distributed", size_bytes=1000, folder=tmp_path, engines=elsewhere)


@pytest.mark.parametrize("address", ["http://127.0.0.1:30000", "http://localhost:30000", "http://[::1]:30000"])
def test_what_comes_by_memory_is_carried_to_a_server_on_the_loopback(tmp_path: Path, address: str) -> None:
    here = EngineSites(addresses=(address,))
    for transport in ("tensor", "network"):
        assert check_transport(transport, size_bytes=1000, folder=tmp_path, engines=here).transport == transport


def test_two_versions_of_nccl_are_refused_and_two_of_torch_are_told_of() -> None:
    ours = Libraries(torch="2.13.0+cu130", nccl="2.29.7")
    assert not check_libraries(ours, Libraries(torch="2.13.0", nccl="2.29.7"), "nccl")
    with pytest.raises(UserFault, match=r"the learner has 2.29.7, the server 2.30.1"):
        check_libraries(ours, Libraries(torch="2.13.0", nccl="2.30.1"), "nccl")
    assert not check_libraries(ours, Libraries(torch="2.13.0", nccl="2.30.1"), "gloo")
    assert "2.14.1" in check_libraries(ours, Libraries(torch="2.14.1", nccl="2.29.7"), "nccl")
    assert "not known" in check_libraries(ours, None, "nccl")
