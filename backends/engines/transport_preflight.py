"""Whether weights of this size can be carried to these engines, asked before anything starts.

What fits where:

* ``shared_memory`` needs ``/dev/shm`` and engines on the learner's machine.
* ``disk`` fits every engine that sees the run's folder.
* ``distributed`` and ``tensor`` need memory in the learner's process for the snapshots. Embedded engines beside SGLang
  servers pull the bytes. ``tensor`` needs every server on the loopback of the learner's machine.
* ``none`` is what a run gets whose engines hold no weights, whatever it asks for.
* ``auto`` takes ``shared_memory`` or ``disk``, and ``disk`` on a Ray cluster that is there already, as nobody knows on
  which of its nodes an engine will be. It never takes a transport that pushes: what a learner pushed ends with it, so
  an engine that starts while there is no learner would have nothing to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import some_can
from penstock.backends.protocol import Capability
from penstock.backends.weights.segments import SHARED_FOLDER
from penstock.backends.weights.spec import AUTO, DISK, NONE, SHARED_MEMORY, TRANSPORTS, TransportSite
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.checkpoint.options import ModelDtype
    from penstock.backends.engines.options import EnginesOptions
    from penstock.backends.weights.service_messages import Libraries

NUM_COPIES: Final = 3
"""Kept at once: the newest, the one before (engines may still read it), and the one being written."""

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEADER_BYTES: Final = 8
_LFS_POINTER: Final = b"version https://git-lfs"


class TransportChoice(NamedTuple):
    """The transport to use, and why it."""

    transport: str
    reason: str


class EngineSites(NamedTuple):
    """The engines that weights are carried to."""

    hold_weights: bool = True
    """Whether any of them holds any."""
    addresses: tuple[str, ...] = ()
    """Addresses of servers that run already."""
    are_placed_by_ray: bool = False
    """On a cluster that is there already, so on whichever of its nodes."""


EMBEDDED: Final = EngineSites()


def sites_of(options: EnginesOptions, ray_address: str | None = None) -> EngineSites:
    """The engines of a scenario, and the ``runtime.ray_address`` of the run."""
    addresses = tuple(address for group in engine_groups(options) for address in group.addresses)
    return EngineSites(some_can(options, Capability.HOLDS_WEIGHTS), addresses, ray_address is not None)


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_transport(
    wanted: str,
    *,
    size_bytes: int,
    folder: Path,
    num_copies: int = NUM_COPIES,
    shared_folder: Path = SHARED_FOLDER,
    engines: EngineSites = EMBEDDED,
) -> TransportChoice:
    """Decide how weights of ``size_bytes`` travel; ``folder`` is where ``disk`` would write.

    ``auto`` takes shared memory where there is room for ``num_copies`` and no engine on another machine, and disk
    otherwise; ``reason`` says which and why, and is worth a line in the log.

    Raises:
        UserFault: the wanted transport, or with ``auto`` either, cannot work.
    """
    if not engines.hold_weights:
        return TransportChoice(NONE, "no engine of the run holds weights")
    site = TransportSite(
        size_bytes=size_bytes,
        num_copies=num_copies,
        folder=folder,
        addresses=engines.addresses,
        is_asked=wanted != AUTO,
        may_be_elsewhere=engines.are_placed_by_ray,
        shared_folder=shared_folder,
    )
    if site.is_asked:
        return TransportChoice(wanted, TRANSPORTS.spec(wanted).check(site))
    try:
        return TransportChoice(SHARED_MEMORY, TRANSPORTS.spec(SHARED_MEMORY).check(site))
    except UserFault as no_shared_memory:
        try:
            return TransportChoice(DISK, f"{no_shared_memory}; {TRANSPORTS.spec(DISK).check(site)}")
        except UserFault as no_disk:
            raise UserFault(f"weights can go neither way: {no_shared_memory}; and {no_disk}") from None


def check_libraries(ours: Libraries, theirs: Libraries | None, backend: Literal["gloo", "nccl"]) -> str:
    """Whether learner and server can be in one process group; what is worth a line in the log, or nothing.

    NCCL wants one version on all ranks. That two versions of torch find each other is seen for gloo of the same version
    only; where they differ the first update shows it, within its deadline.

    Raises:
        UserFault: their versions of NCCL differ.
    """
    if theirs is None:
        return "the server's versions of torch and NCCL are not known; the first update will show whether they fit"
    if backend == "nccl" and ours.nccl != theirs.nccl:
        raise UserFault(
            f"weights.transport is distributed, and NCCL wants one version on all ranks: the learner has "
            f"{ours.nccl or 'none'}, the server {theirs.nccl or 'none'}. Build the server's environment with the "
            "learner's version, or set weights.transport: disk"
        )
    if ours.torch.partition("+")[0] != theirs.torch.partition("+")[0]:
        return f"torch is {ours.torch} in the learner and {theirs.torch} in the server; the first update will show"
    return ""


def model_size_bytes(folder: Path, dtype: ModelDtype) -> int:
    """Size of a checkpoint's weights once they are held as ``dtype``; reads only the headers of its files.

    Raises:
        UserFault: the folder has no safetensors files, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserFault(
            f"{folder} has no *.safetensors file. If it has pytorch_model.bin, load it with transformers and call "
            "save_pretrained to write it anew"
        )
    return sum(_num_elements(path) for path in files) * _ITEM_BYTES[dtype]


def _num_elements(path: Path) -> int:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_HEADER_BYTES)
        length = int.from_bytes(begin, "little")
        raw = file.read(length) if 0 < length < size_bytes else b""
    if begin == _LFS_POINTER[:_HEADER_BYTES]:
        raise UserFault(f"{path} is a pointer of Git LFS and no weights; fetch them with: git lfs pull")
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(entry, type=_Tensor) for entry in header.values()]
    except UNREADABLE:
        raise UserFault(f"{path} is no safetensors file, or it was cut short ({size_bytes} bytes)") from None
    described = _HEADER_BYTES + length + max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if described != size_bytes:
        raise UserFault(
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
