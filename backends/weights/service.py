"""The learner's weight service: what engines ask about the snapshots, and the broadcasts and payloads they order.

Invariants:

* One thread owns the socket. Requests are answered in it, except those to process groups, whose threads hand in their
  answers. Nothing that an engine does can hold up the learner's own thread: that only takes snapshots.
* Only who has the key of a manifest of this service gets past the handshake, and what is said is encrypted (CURVE).
  The keys are made per incarnation.
* Every request is answered, by ``Refused`` with the story where it cannot be met. A client that has gone is forgotten.

| waits for | who ends it |
|---|---|
| the thread, for requests and answers of groups | any of them, or ``close`` |
| ``close``, for the thread | the thread; at the latest its timeout |
"""

# torch.cuda.nccl has no types: pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec
import torch
import zmq
from torch.cuda import nccl as torch_nccl

from penstock.backends.processes.curve import ZapHandler, bind_at, make_keys
from penstock.backends.weights.changes_kept import ChangesKept
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
    Refused,
    ServiceAddress,
)
from penstock.backends.weights.tensor_file import DTYPES
from penstock.backends.weights.update_group import UpdateGroup

if TYPE_CHECKING:
    from penstock.backends.processes.curve import KeyPair
    from penstock.backends.weights.service_messages import AnyReply
    from penstock.backends.weights.snapshots import SnapshotShelf
    from penstock.backends.weights.update_group import Answer

HANDSHAKE_MS: Final = 5000
CLOSE_TIMEOUT_S: Final = 5.0
GROUP_END_S: Final = 1.0

_requests: Final = msgspec.msgpack.Decoder(AnyRequest)
_replies: Final = msgspec.msgpack.Encoder()

_Socket = zmq.Socket[bytes]


class _Outgoing(NamedTuple):
    """An answer on its way to the thread with the sockets."""

    client: bytes
    request_id: bytes
    reply: AnyReply
    data: tuple[memoryview[int] | bytes, ...] = ()


class WeightService:
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
        self._outbox: deque[_Outgoing] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._is_closing = threading.Event()
        self._failure: BaseException | None = None
        keys = make_keys()
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._zap = ZapHandler(self._context, admitted=keys.public)
        self._router = self._context.socket(zmq.ROUTER)
        self.address = self._open(keys)
        self._thread = threading.Thread(target=self._run, name="weights-service", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the service, if something did.

        Raises:
            WeightExportError: engines cannot take weights any more.
        """
        if self._failure is not None:
            raise WeightExportError(f"the weight service ended: {self._failure}") from self._failure

    def close(self) -> None:
        """End the thread, the groups and the sockets."""
        self._is_closing.set()
        self._ring()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._ringer.close()

    def _open(self, keys: KeyPair) -> ServiceAddress:
        self._router.linger = 0
        self._router.handshake_ivl = HANDSHAKE_MS
        self._router.maxmsgsize = MAX_REQUEST_BYTES
        server_key = self._zap.guard(self._router)
        try:
            endpoint = bind_at(self._router, self._host)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise WeightExportError(f"the weight service cannot listen at {self._host}: {error}") from error
        return ServiceAddress(
            endpoint=endpoint,
            server_key=server_key.decode(),
            client_public=keys.public.decode(),
            client_secret=keys.secret.decode(),
        )

    def _close_sockets(self) -> None:
        self._router.close(0)
        self._zap.close()
        self._context.term()

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # The learner hears of it at its next publish; without this word every engine would run into its deadline
            # and nobody would know why.
            self._failure = error
            raise
        finally:
            for group in self._groups.values():
                group.close()
            for group in self._groups.values():
                group.join(GROUP_END_S)
            self._bell.close()
            self._close_sockets()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._bell):
            poller.register(source, zmq.POLLIN)
        while not self._is_closing.is_set():
            ready = dict(poller.poll())
            if self._bell.fileno() in ready or self._bell in ready:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
            while self._outbox:
                self._send(self._outbox.popleft())
            if self._router in ready:
                self._take(self._router.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        client, request_id, body = frames
        try:
            self._carry_out(_requests.decode(body), client, request_id)
        except msgspec.MsgspecError as error:
            self._send(_Outgoing(client, request_id, Refused(story=f"a request that nobody knows: {error}")))
        except WeightFetchError as error:
            self._send(_Outgoing(client, request_id, Refused(story=str(error))))

    def _carry_out(self, request: AnyRequest, client: bytes, request_id: bytes) -> None:
        def send(reply: AnyReply, *data: memoryview[int] | bytes) -> None:
            self._send(_Outgoing(client, request_id, reply, data))

        def answer(reply: AnyReply) -> None:
            self._outbox.append(_Outgoing(client, request_id, reply))
            self._ring()

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

    def _send(self, outgoing: _Outgoing) -> None:
        frames = [outgoing.client, outgoing.request_id, _replies.encode(outgoing.reply), *outgoing.data]
        # ROUTER drops what is for a client that has gone. Large frames are lent to ZeroMQ, which keeps them alive.
        self._router.send_multipart(frames, copy=not outgoing.data)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it rings already; closed: nobody listens any more
            self._ringer.send(b"\0")


def own_libraries() -> Libraries:
    """What a peer of this process has to fit to."""
    nccl = ""
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        version = cast("tuple[int, ...]", torch_nccl.version())  # type: ignore[no-untyped-call]
        nccl = ".".join(str(part) for part in version)
    return Libraries(torch=str(torch.__version__), nccl=nccl)
