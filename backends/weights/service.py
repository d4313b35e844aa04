"""The learner's weight service: what engines ask about the snapshots, and the broadcasts and payloads they order.

Invariants:

* Requests are answered in the thread of the service, except those to process groups, whose threads hand in their
  answers. Nothing that an engine does can hold up the learner's own thread: that only takes snapshots.
* Only who has the key of a manifest of this incarnation is answered (:mod:`~penstock.backends.weights.keyed_service`).
"""

# torch.cuda.nccl has no types: pyright: reportUnknownMemberType=false

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec
import torch
from torch.cuda import nccl as torch_nccl

from penstock.backends.weights.changes_kept import ChangesKept
from penstock.backends.weights.keyed_service import KeyedService, ServiceOpenError
from penstock.backends.weights.payloads import pack_bucket
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.service_messages import (
    MAX_READ_BYTES,
    MAX_REQUEST_BYTES,
    AnyRequest,
    Broadcast,
    Changed,
    Describe,
    Described,
    Join,
    Leave,
    Left,
    Libraries,
    Pack,
    Packed,
    Piece,
    Read,
    ReadChanges,
    ReadDigests,
    Refused,
)
from penstock.backends.weights.tensor_file import DTYPES
from penstock.backends.weights.update_group import UpdateGroup

if TYPE_CHECKING:
    from penstock.backends.weights.keyed_service import Client
    from penstock.backends.weights.snapshots import SnapshotShelf
    from penstock.backends.weights.update_group import Answer

GROUP_END_S: Final = 1.0

_requests: Final = msgspec.msgpack.Decoder(AnyRequest)


class WeightService(KeyedService[AnyRequest]):
    """Serves from here on until ``close``."""

    def __init__(self, shelf: SnapshotShelf, host: str) -> None:
        """``host`` is this machine's address as the engines see it; the service listens there and nowhere else.

        Raises:
            WeightExportError: it cannot listen there.
        """
        self._shelf = shelf
        self._host = host
        self._groups: dict[str, UpdateGroup] = {}
        self._changes = ChangesKept(shelf)
        try:
            super().__init__(host, _requests, name="weights-service", max_request_bytes=MAX_REQUEST_BYTES)
        except ServiceOpenError as error:
            raise WeightExportError(str(error)) from error
        self._start()

    def check(self) -> None:
        """Raise what ended the service, if something did.

        Raises:
            WeightExportError: engines cannot take weights any more.
        """
        if self.failure is not None:
            raise WeightExportError(f"the weight service ended: {self.failure}") from self.failure

    def _ended(self) -> None:
        for group in self._groups.values():
            group.close()
        for group in self._groups.values():
            group.join(GROUP_END_S)

    def _carry_out(self, request: AnyRequest, client: Client) -> None:
        send, answer = partial(self._send, client), partial(self._hand_in, client)

        match request:
            case Describe():
                snapshot = self._shelf.find(request.publish)
                send(
                    Described(
                        header=snapshot.layout.header,
                        digest=snapshot.digest,
                        libraries=own_libraries(),
                        device=snapshot.device.type,
                        not_finite=snapshot.not_finite,
                    )
                )
            case ReadDigests():
                send(Piece(), self._shelf.find(request.publish).piece_digests)
            case Read():
                send(Piece(), self._slice(request).cpu().numpy().data)
            case ReadChanges():
                piece = self._slice(request)
                changes = self._changes.of(request, piece)
                if changes is None:
                    send(Piece(), piece.cpu().numpy().data)
                else:
                    send(Changed(num_words=changes.num_words), changes.data)
            case Pack():
                send(Packed(), *self._pack(request))
            case Join():
                self._join(request, answer)
            case Broadcast():
                self._broadcast(request, answer)
            case Leave():
                group = self._groups.pop(request.group, None)
                if group is not None:
                    group.close()
                send(Left())

    def _slice(self, request: Read | ReadChanges) -> torch.Tensor:
        if request.size_bytes > MAX_READ_BYTES:
            raise WeightFetchError(f"at most {MAX_READ_BYTES} bytes at once, {request.size_bytes} were asked for")
        return self._shelf.find(request.publish).slice(request.start, request.size_bytes)

    def _pack(self, request: Pack) -> list[bytes]:
        size_bytes = sum(tensor.size_bytes for tensor in request.tensors)
        data = self._shelf.find(request.publish).slice(request.start, size_bytes)
        unknown = [tensor.dtype for tensor in request.tensors if tensor.dtype not in DTYPES]
        if unknown:
            raise WeightFetchError(f"unknown dtype {unknown[0]!r}")
        if not request.by_handle:
            return [pack_bucket(data, request.tensors, by_handle=False)] * request.num_ranks
        if data.device.type != "cuda":
            raise WeightFetchError(
                "the learner's snapshot does not lie on a GPU (it trains on the CPU, or the device had no room), so "
                "there is no handle of it; send it by value"
            )
        return [pack_bucket(data, request.tensors, by_handle=True) for _ in range(request.num_ranks)]

    def _join(self, request: Join, answer: Answer) -> None:
        for name, group in list(self._groups.items()):
            if group.engine == request.engine or group.has_ended:
                group.close()
                del self._groups[name]
        self._groups[request.group] = UpdateGroup(request, self._host, self._shelf.source(), answer)

    def _broadcast(self, request: Broadcast, answer: Answer) -> None:
        group = self._groups.get(request.group)
        if group is None or group.has_ended:
            story = "" if group is None else f": {group.story}"
            raise WeightFetchError(f"there is no process group {request.group}, or it has ended{story}")
        snapshot = self._shelf.find(request.publish)
        snapshot.slice(request.start, request.size_bytes)  # refused here, it does not break the group
        group.broadcast(snapshot, request, answer)
        if group.has_ended:  # in between, and perhaps without having seen this request
            answer(Refused(story=f"the process group {request.group} has ended: {group.story}"))


def own_libraries() -> Libraries:
    """What a peer of this process has to fit to."""
    nccl = ""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version = cast("tuple[int, ...]", torch_nccl.version())  # type: ignore[no-untyped-call]
        nccl = ".".join(str(part) for part in version)
    return Libraries(torch=str(torch.__version__), nccl=nccl)
