"""Whole copies of what was published, kept in the learner's process for engines to take.

Invariants:

* A snapshot is one run of bytes, laid out as the tensor file: a bucket is a slice of it and nothing is gathered.
* Nothing changes a snapshot once it is made. Whoever uses one keeps it alive, so a release takes nothing from an
  update that is under way.
* The newest snapshot outlives every release.

Where it lies: in ordinary memory for a learner on the CPU. On CUDA in device memory, where it can be broadcast and
handed over as it is, if that leaves ``DEVICE_RESERVE`` of the device free; in pinned host memory otherwise.
"""

# torch.cuda is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.weights.digest import StreamDigest, digest_of_pieces, piece_digests_of
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.stream import placed_tensors, planned

if TYPE_CHECKING:
    from penstock.backends.weights.service_messages import PublishId
    from penstock.backends.weights.stream import AnyWeights
    from penstock.backends.weights.tensor_file import Layout, Placed

DEVICE_RESERVE: Final = 0.1
"""Share of a device's memory that a snapshot leaves free for the learner's activations."""
HASH_BYTES: Final = 64 << 20
CPU: Final = torch.device("cpu")


class Snapshot:
    """The bytes of one publish."""

    def __init__(self, publish: PublishId, layout: Layout, data: torch.Tensor, source: torch.device) -> None:
        self.publish = publish
        self.layout = layout
        self.data = data
        """uint8 ``[size_bytes]``"""
        self.source = source
        """Where the learner's own tensors lie."""
        self.piece_digests = _piece_digests(data)
        """See :mod:`~penstock.backends.weights.digest`."""
        self.digest = digest_of_pieces(self.piece_digests)
        self.not_finite = next((placed.name for placed in layout.placed if not _is_finite(self.view(placed))), "")
        """The first tensor with a value that is not finite; empty when there is none."""

    @property
    def device(self) -> torch.device:
        return self.data.device

    def view(self, placed: Placed) -> torch.Tensor:
        """One tensor, in place."""
        return _view(self.data, placed)

    def slice(self, start: int, size_bytes: int) -> torch.Tensor:
        """These bytes, in place.

        Raises:
            WeightFetchError: they are not all in the file.
        """
        if start < 0 or size_bytes < 1 or start + size_bytes > self.layout.size_bytes:
            raise WeightFetchError(
                f"bytes {start} to {start + size_bytes} were asked for, and version {self.publish.version} has "
                f"{self.layout.size_bytes}"
            )
        return self.data[start : start + size_bytes]


def take_snapshot(tensors: AnyWeights, publish: PublishId) -> Snapshot:
    """Copy all of these; they may change as soon as this returns.

    Raises:
        WeightExportError: there is no memory for it, or a dtype has no form in the file.
    """
    layout = planned(tensors)
    data, source = torch.empty(0, dtype=torch.uint8), CPU
    for placed, tensor in placed_tensors(tensors, layout):
        if not len(data):
            data, source = _begun(layout, tensor.device, publish), tensor.device
        if placed.size_bytes:
            _view(data, placed).copy_(tensor.detach(), non_blocking=True)
    if source.type == "cuda":
        torch.cuda.synchronize(source)
    return Snapshot(publish, layout, data, source)


def _begun(layout: Layout, source: torch.device, publish: PublishId) -> torch.Tensor:
    """Room for everything, with the header."""
    try:
        data = _room_for(layout.size_bytes, source)
    except RuntimeError as error:  # torch's word for no memory, on the host too
        raise WeightExportError(
            f"version {publish.version} needs {layout.size_bytes:,} bytes in the learner's process for the transport, "
            f"and there is no room: {error}"
        ) from error
    data[: len(layout.header)].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
    return data


class SnapshotShelf:
    """The snapshots of one learner incarnation. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[PublishId, Snapshot] = {}

    def add(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._kept.pop(snapshot.publish, None)
            self._kept[snapshot.publish] = snapshot

    def find(self, publish: PublishId) -> Snapshot:
        """The snapshot of a publish.

        Raises:
            WeightFetchError: it was released, or was never made here.
        """
        with self._lock:
            snapshot = self._kept.get(publish)
        if snapshot is None:
            raise WeightFetchError(
                f"version {publish.version}, publish {publish.publish} of learner incarnation {publish.learner_epoch} "
                "is not held here: it was released, or exported by another incarnation, whose weights ended with it"
            )
        return snapshot

    def source(self) -> torch.device:
        """The learner's device; the CPU before the first publish."""
        with self._lock:
            newest = next(reversed(self._kept.values()), None)
        return torch.device("cpu") if newest is None else newest.source

    def release(self, below_version: int) -> None:
        """Let go of what was exported for versions below this one; the newest stays."""
        with self._lock:
            newest = next(reversed(self._kept), None)
            for publish in list(self._kept):
                if publish.version < below_version and publish != newest:
                    del self._kept[publish]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)


def _room_for(size_bytes: int, source: torch.device) -> torch.Tensor:
    if source.type != "cuda":
        return torch.empty(size_bytes, dtype=torch.uint8)
    free_bytes, total_bytes = torch.cuda.mem_get_info(source)
    if free_bytes - size_bytes >= DEVICE_RESERVE * total_bytes:
        return torch.empty(size_bytes, dtype=torch.uint8, device=source)
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def _view(data: torch.Tensor, placed: Placed) -> torch.Tensor:
    return data[placed.start : placed.start + placed.size_bytes].view(placed.dtype).view(placed.shape)


def _is_finite(tensor: torch.Tensor) -> bool:
    # Of floats of one byte torch cannot tell; they are what quantising made, and saturate.
    return tensor.element_size() == 1 or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _piece_digests(data: torch.Tensor) -> bytes:
    if data.device.type == "cpu":
        return piece_digests_of(data.numpy().data)
    digest = StreamDigest()
    for start in range(0, data.numel(), HASH_BYTES):
        digest.update(data[start : start + HASH_BYTES].cpu().numpy().data)
    return digest.piece_digests()
