"""Whether weights of this size can be carried to these engines, asked before anything starts.

What fits where:

* ``shared_memory`` needs ``/dev/shm`` and engines on the learner's machine.
* ``disk`` fits every engine that sees the run's folder.
* ``distributed`` and ``tensor`` need memory in the learner's process for the snapshots. Embedded engines beside SGLang
  servers pull the bytes. ``tensor`` needs every server on the loopback of the learner's machine.
* ``none`` is what a run gets whose engines hold no weights, whatever it asks for.
* ``auto`` takes ``shared_memory`` or ``disk``. It never takes a transport that pushes: what a learner pushed ends with
  it, so an engine that starts while there is no learner would have nothing to load.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
import psutil

from penstock.backends.engines.options import engine_groups, kinds
from penstock.backends.weights.segments import SHARED_FOLDER

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.options import EnginesOptions
    from penstock.backends.weights.service_messages import Libraries

NUM_COPIES: Final = 3
"""Kept at once: the newest, the one before (engines may still read it), and the one being written."""

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}
_HEADER_BYTES: Final = 8
_LFS_POINTER: Final = b"version https://git-lfs"


Transport = Literal["shared_memory", "disk", "distributed", "tensor", "none"]


class TransportUnfitError(ValueError):
    """The transport that the scenario wants cannot work here. The message says what to do."""


class TransportChoice(NamedTuple):
    """The transport to use, and why it."""

    transport: Transport
    reason: str


class EngineSites(NamedTuple):
    """The engines that weights are carried to."""

    kinds: frozenset[str] = frozenset({"torch"})
    """Backends of the engines."""
    addresses: tuple[str, ...] = ()
    """Of servers that run already."""


EMBEDDED: Final = EngineSites()


def sites_of(options: EnginesOptions) -> EngineSites:
    """The engines of a scenario."""
    addresses = tuple(address for group in engine_groups(options) for address in group.addresses)
    return EngineSites(kinds(options), addresses)


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_transport(
    wanted: Literal["auto", "shared_memory", "disk", "distributed", "tensor"],
    *,
    size_bytes: int,
    folder: Path,
    num_copies: int = NUM_COPIES,
    shared_folder: Path = SHARED_FOLDER,
    engines: EngineSites = EMBEDDED,
) -> TransportChoice:
    """Decide how weights of ``size_bytes`` travel; ``folder`` is where ``disk`` would write.

    ``auto`` takes shared memory where there is room for ``num_copies`` and no server on another machine, and disk
    otherwise; ``reason`` says which and why, and is worth a line in the log.

    Raises:
        TransportUnfitError: the wanted transport, or with ``auto`` either, cannot work.
    """
    if engines.kinds == frozenset({"recorded"}):
        return TransportChoice("none", "no engine of the run holds weights")
    need_bytes = size_bytes * num_copies
    need = f"{num_copies} copies of the weights need {in_units(need_bytes)} ({in_units(size_bytes)} each)"
    if wanted == "tensor":
        for address in engines.addresses:
            check_loopback(address)
    if wanted in ("distributed", "tensor"):
        return TransportChoice(wanted, _check_memory(wanted, need_bytes, need))
    if wanted == "disk":
        return TransportChoice("disk", _check_disk(folder, need_bytes, need))
    try:
        return TransportChoice("shared_memory", _check_shared(shared_folder, need_bytes, need, engines))
    except TransportUnfitError as no_shared_memory:
        if wanted == "shared_memory":
            more = f"Give the machine more (docker run --shm-size={_gibibytes(need_bytes)}g), or set"
            fix = "Set" if _elsewhere(engines) else more
            raise TransportUnfitError(
                f"weights.transport is shared_memory, but {no_shared_memory}. {fix} weights.transport: disk"
            ) from None
        try:
            return TransportChoice("disk", f"{no_shared_memory}; {_check_disk(folder, need_bytes, need)}")
        except TransportUnfitError as no_disk:
            raise TransportUnfitError(f"weights can go neither way: {no_shared_memory}; and {no_disk}") from None


def check_loopback(url: str) -> None:
    """Raise unless the server is on this machine: it unpickles what it gets, and a handle means nothing elsewhere.

    Raises:
        TransportUnfitError: it is not.
    """
    if not _is_loopback(url):
        raise TransportUnfitError(
            f"weights.transport is tensor, and the server at {url} is not on the loopback of the learner's "
            "machine; set weights.transport: distributed, or disk"
        )


def check_libraries(ours: Libraries, theirs: Libraries | None, backend: Literal["gloo", "nccl"]) -> str:
    """Whether learner and server can be in one process group; what is worth a line in the log, or nothing.

    NCCL wants one version on all ranks. That two versions of torch find each other is seen for gloo of the same version
    only; where they differ the first update shows it, within its deadline.

    Raises:
        TransportUnfitError: their versions of NCCL differ.
    """
    if theirs is None:
        return "the server's versions of torch and NCCL are not known; the first update will show whether they fit"
    if backend == "nccl" and ours.nccl != theirs.nccl:
        raise TransportUnfitError(
            f"weights.transport is distributed, and NCCL wants one version on all ranks: the learner has "
            f"{ours.nccl or 'none'}, the server {theirs.nccl or 'none'}. Build the server's environment with the "
            "learner's version, or set weights.transport: disk"
        )
    if ours.torch.partition("+")[0] != theirs.torch.partition("+")[0]:
        return f"torch is {ours.torch} in the learner and {theirs.torch} in the server; the first update will show"
    return ""


def model_size_bytes(folder: Path, dtype: Literal["float32", "bfloat16"]) -> int:
    """Size of a checkpoint's weights once they are held as ``dtype``; reads only the headers of its files.

    Raises:
        ValueError: the folder has no safetensors files, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} has no *.safetensors file. If it has pytorch_model.bin, load it with transformers and call "
            "save_pretrained to write it anew"
        )
    return sum(_num_elements(path) for path in files) * _ITEM_BYTES[dtype]


def in_units(size_bytes: int) -> str:
    """A size for people, in powers of 1000."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def _elsewhere(engines: EngineSites) -> str:
    """A server that runs on another machine; empty when none does."""
    return next((address for address in engines.addresses if not _is_loopback(address)), "")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_memory(transport: str, need_bytes: int, need: str) -> str:
    free_bytes = psutil.virtual_memory().available
    if free_bytes < need_bytes:
        raise TransportUnfitError(
            f"weights.transport is {transport}, which keeps the weights in the learner's process: {need}, and this "
            f"machine has {in_units(free_bytes)} of memory free; set weights.transport: disk"
        )
    return f"this machine has {in_units(free_bytes)} of memory free, and {need}"


def _check_shared(folder: Path, need_bytes: int, need: str, engines: EngineSites) -> str:
    if elsewhere := _elsewhere(engines):
        raise TransportUnfitError(f"the server at {elsewhere} is on another machine and cannot read shared memory")
    if not folder.is_dir():
        raise TransportUnfitError(f"there is no {folder} on this machine, and {need}")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise TransportUnfitError(f"{folder} is not writable for this user")
    free = os.statvfs(folder)
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < need_bytes:
        total_bytes = free.f_blocks * free.f_frsize
        raise TransportUnfitError(f"{folder} has {in_units(free_bytes)} free of {in_units(total_bytes)}, and {need}")
    return f"{folder} has {in_units(free_bytes)} free, and {need}"


def _check_disk(folder: Path, need_bytes: int, need: str) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(b"penstock")
        free = os.statvfs(folder)
    except OSError as error:
        raise TransportUnfitError(
            f"weights cannot be written to {folder} ({error.strerror}); set run.folder to a folder you can write to"
        ) from None
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < need_bytes:
        raise TransportUnfitError(
            f"the disk of {folder} has {in_units(free_bytes)} free, and {need}; free some, or set run.folder to a "
            "folder on a larger disk"
        )
    return f"the disk of {folder} has {in_units(free_bytes)} free, and {need}"


def _num_elements(path: Path) -> int:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_HEADER_BYTES)
        length = int.from_bytes(begin, "little")
        raw = file.read(length) if 0 < length < size_bytes else b""
    if begin == _LFS_POINTER[:_HEADER_BYTES]:
        raise ValueError(f"{path} is a pointer of Git LFS and no weights; fetch them with: git lfs pull")
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(entry, type=_Tensor) for entry in header.values()]
    except msgspec.MsgspecError:
        raise ValueError(f"{path} is no safetensors file, or it was cut short ({size_bytes} bytes)") from None
    described = _HEADER_BYTES + length + max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if described != size_bytes:
        raise ValueError(
            f"{path} was cut short or changed: its header describes {described} bytes, found {size_bytes}; copy or "
            "download it again"
        )
    count = 0
    for tensor in tensors:
        num = 1
        for length in tensor.shape:
            num *= length
        count += num
    return count


def _gibibytes(size_bytes: int) -> int:
    return -(-size_bytes // (1 << 30))
