"""A thread with one socket that answers engines about weights, behind a key.

Invariants:

* One thread owns the socket. Requests are answered in it, or later by what others hand in.
* Only who has the key of this service gets past the handshake, and what is said is encrypted (CURVE). The keys are
  made per service.
* Every request is answered, by ``Refused`` with the story where it cannot be met. A client that has gone is forgotten.

| waits for | who ends it |
|---|---|
| the thread, for requests and what is handed in | any of them, or ``close`` |
| ``close``, for the thread | the thread; at the latest its timeout |
"""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import msgspec
import zmq

from penstock.backends.processes.curve import ZapHandler, bind_at, make_keys
from penstock.backends.weights.protocol import WeightFetchError, WeightTransportError
from penstock.backends.weights.service_messages import Refused, ServiceAddress
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from penstock.backends.processes.curve import KeyPair
    from penstock.backends.weights.service_messages import AnyReply

HANDSHAKE_MS: Final = 5000
CLOSE_TIMEOUT_S: Final = 5.0

RequestT = TypeVar("RequestT")
Socket = zmq.Socket[bytes]
_replies: Final = msgspec.msgpack.Encoder()


class ServiceOpenError(WeightTransportError):
    """A service cannot listen where it should."""


class Client(NamedTuple):
    """Who is to be answered, and what request of it."""

    routing_id: bytes
    request_id: bytes


class _Outgoing(NamedTuple):
    """An answer on its way to the thread with the socket."""

    client: Client
    reply: AnyReply


class KeyedService(ABC, Generic[RequestT]):
    """Serves from ``_start`` on until ``close``."""

    def __init__(
        self, host: str, requests: msgspec.msgpack.Decoder[RequestT], *, name: str, max_request_bytes: int
    ) -> None:
        """
        Args:
            host: this machine's address as the engines see it; it listens there and nowhere else.
            requests: what is understood.
            name: of the thread.
            max_request_bytes: of one frame, also from whoever has not shown the key yet; the connection of a peer that
                announces more is cut.

        Raises:
            ServiceOpenError: it cannot listen there.
        """
        self._requests = requests
        self._outbox: deque[_Outgoing] = deque()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._is_closing = threading.Event()
        self.failure: BaseException | None = None
        """What ended the thread, if something did."""
        keys = make_keys()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._zap = ZapHandler(self._context, admitted=keys.public)
        self._router = self._context.socket(zmq.ROUTER)
        self.address = self._open(host, keys, max_request_bytes)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self) -> None:
        """End the thread and the socket."""
        self._is_closing.set()
        self._ring()
        self._thread.join(CLOSE_TIMEOUT_S)
        self._ringer.close()

    def _start(self) -> None:
        self._thread.start()

    def _open(self, host: str, keys: KeyPair, max_request_bytes: int) -> ServiceAddress:
        self._router.linger = 0
        self._router.handshake_ivl = HANDSHAKE_MS
        self._router.maxmsgsize = max_request_bytes
        server_key = self._zap.guard(self._router)
        try:
            endpoint = bind_at(self._router, host)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ServiceOpenError(f"the weight service cannot listen at {host}: {error}") from error
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
            # Whoever asks for it hears of it; without this word every engine would run into its deadline and nobody
            # would know why.
            self.failure = error
            raise
        finally:
            self._ended()
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
                self._rung()
            while self._outbox:
                outgoing = self._outbox.popleft()
                self._send(outgoing.client, outgoing.reply)
            if self._router in ready:
                self._take(self._router.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        client = Client(frames[0], frames[1])
        try:
            self._carry_out(self._requests.decode(frames[2]), client)
        except UNREADABLE as error:
            self._send(client, Refused(story=f"a request that nobody knows: {error}"))
        except WeightFetchError as error:
            self._send(client, Refused(story=str(error)))

    @abstractmethod
    def _carry_out(self, request: RequestT, client: Client) -> None:
        """Answer, now or later. May raise WeightFetchError, whose text is the answer then."""

    def _rung(self) -> None:
        """Somebody has rung; on the thread."""

    def _ended(self) -> None:
        """The thread ends."""

    def _send(self, client: Client, reply: AnyReply, *data: memoryview[int] | bytes) -> None:
        """On the thread only."""
        # ROUTER drops what is for a client that has gone. Large frames are lent to ZeroMQ, which keeps them alive.
        self._router.send_multipart([*client, _replies.encode(reply), *data], copy=not data)

    # --- from any thread --------------------------------------------------------------------------------------

    def _hand_in(self, client: Client, reply: AnyReply) -> None:
        self._outbox.append(_Outgoing(client, reply))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it rings already; closed: nobody listens any more
            self._ringer.send(b"\0")
