"""Weights pulled from the learner's weight service into this process's memory: for embedded engines.

| waits for | who ends it |
|---|---|
| the next answer of the service | the service, the end of its connection, or ``SILENCE_S`` after the answer before |
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.backends.processes.curve import KeyPair, show_keys
from penstock.backends.weights.changes import apply_changes
from penstock.backends.weights.fetched import MappedWeights, check_size, checked_digest
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.service_messages import (
    MAX_READ_BYTES,
    MAX_REPLY_BYTES,
    AnyRead,
    AnyReply,
    Changed,
    Piece,
    Read,
    ReadChanges,
    Refused,
    address_in,
    publish_of,
)
from penstock.backends.weights.tensor_file import parse_layout, tensor_views
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from penstock.backends.weights.service_messages import PublishId, ServiceAddress
    from penstock.messages.weights import WeightManifest

SILENCE_S: Final = 30.0
READ_BYTES: Final = 8 << 20
READS_UNDER_WAY: Final = 4
"""Enough that the service has the next one at hand, and few enough that its answers do not pile up."""

MAX_LINES: Final = 3
"""For one publish, one after the other."""

BROKEN: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Of a connection: whoever asked will not get an answer by it. A service listens before its first manifest is made,
so a connection that is refused is one to a service that has ended."""

_requests: Final = msgspec.msgpack.Encoder()
_replies: Final = msgspec.msgpack.Decoder(AnyReply)
assert READ_BYTES <= MAX_READ_BYTES


class LineBrokeError(WeightFetchError):
    """The connection ended while an answer was awaited."""


class Pulled(NamedTuple):
    """How the bytes of a publish have come."""

    size_bytes: int
    """That came over the line."""
    num_changed: int
    """Pieces that were made of those before and what has changed."""


def fetch_pushed(manifest: WeightManifest) -> MappedWeights:
    """Read the snapshot of the manifest into memory and check it.

    Raises:
        WeightFetchError: the service does not answer, has it no longer, or sent what the manifest does not describe.
    """
    data = torch.empty(manifest.size_bytes, dtype=torch.uint8).numpy().data
    pull(manifest, data)
    digest = checked_digest(described(manifest), data)
    return MappedWeights(tensor_views(parse_layout(data), data), digest)


def described(manifest: WeightManifest) -> WeightManifest:
    """The manifest for errors, which quote its location: with the address alone, as the key is no reading."""
    return msgspec.structs.replace(manifest, location=address_in(manifest).endpoint)


def pull(manifest: WeightManifest, data: memoryview[int], since: PublishId | None = None) -> Pulled:
    """Fill ``data`` with the bytes of the manifest; nothing of them is checked.

    A line that breaks is made anew, and what has come by then is not asked for again.

    Args:
        manifest: of the publish.
        data: of its size; with ``since`` it holds the bytes of that publish.
        since: only what has changed since is asked for.

    Raises:
        WeightFetchError: the service does not answer, has it no longer, or sent something else.
    """
    check_size(described(manifest), len(data))
    pulling = _Pulling(described(manifest), data, since)
    for left in reversed(range(MAX_LINES)):
        try:
            _pull_by_one_line(pulling, address_in(manifest))
            break
        except LineBrokeError:
            if not left:
                raise
    return Pulled(pulling.size_bytes, pulling.num_changed)


def _pull_by_one_line(pulling: _Pulling, address: ServiceAddress) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        line = open_line(context, address)
        pulling.go_on(line)
        line.socket.disable_monitor()
    finally:
        context.destroy(linger=0)


class Line(NamedTuple):
    """To one service."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    """Says when it breaks."""

    def ask(self, request_id: bytes, request: AnyRead) -> None:
        """Send a request. One that was refused has nobody to send to any more, and waiting for somebody would be for
        ever: it is not sent, and the monitor says why."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([request_id, _requests.encode(request)], zmq.NOBLOCK)

    def event(self) -> int:
        """What has happened to it: one of ``BROKEN``. To be asked when the monitor has something."""
        return int(parse_monitor_message(self.monitor.recv_multipart())["event"])


def open_line(context: zmq.Context[zmq.Socket[bytes]], address: ServiceAddress) -> Line:
    """A line to a service, which ends with the context."""
    line = context.socket(zmq.DEALER)
    configure(line, address)
    line.rcvhwm = READS_UNDER_WAY + 1  # whoever sends what nobody has asked for waits, and fills no memory here
    monitor = line.get_monitor_socket(BROKEN)
    line.connect(address.endpoint)
    return Line(line, monitor)


def configure(line: zmq.Socket[bytes], address: ServiceAddress) -> None:
    """Give a socket the keys of a service, and a bound on what whoever poses as it may make this process buffer."""
    line.linger = 0
    line.maxmsgsize = MAX_REPLY_BYTES
    own = KeyPair(address.client_public.encode(), address.client_secret.encode())
    show_keys(line, own, address.server_key.encode())
    line.ipv6 = "[" in address.endpoint


def story_of_the_break(event: int) -> str:
    """What an event of ``BROKEN`` means to whoever waits for an answer."""
    if event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the learner's weight service refused the key of this manifest; it is of another learner incarnation"
    return "the connection to the learner's weight service broke; the learner has ended, or this is not its service"


def put_answer(place: memoryview[int], reply: AnyReply, frame: bytes, *, takes_changes: bool) -> None:
    """Make the bytes that were asked for of an answer.

    Args:
        place: where they belong; with ``takes_changes`` it holds those of the publish before.
        reply: the answer.
        frame: what came behind it.
        takes_changes: what has changed was asked for.

    Raises:
        ValueError: it is no answer to that.
    """
    match reply:
        case Piece() if len(frame) == len(place):
            place[:] = frame
        case Changed() if takes_changes:
            apply_changes(place, frame, reply.num_words)
        case _:
            raise ValueError("something else came than was asked for")


class _Pulling:
    """The pieces of one publish that are still missing."""

    def __init__(self, manifest: WeightManifest, data: memoryview[int], since: PublishId | None) -> None:
        self.size_bytes = 0
        self.num_changed = 0
        self._manifest = manifest
        self._data = data
        self._since = since
        self._missing = dict.fromkeys(range(0, len(data), READ_BYTES))

    def go_on(self, line: Line) -> None:
        """Until nothing is missing."""
        waiting = 0
        for start in list(self._missing):
            line.ask(start.to_bytes(8, "little"), self._request(start))
            waiting += 1
            if waiting == READS_UNDER_WAY:
                self._take(line)
                waiting -= 1
        for _ in range(waiting):
            self._take(line)

    def _request(self, start: int) -> Read | ReadChanges:
        publish, size_bytes = publish_of(self._manifest), self._size_at(start)
        if self._since is None:
            return Read(publish=publish, start=start, size_bytes=size_bytes)
        return ReadChanges(publish=publish, since=self._since, start=start, size_bytes=size_bytes)

    def _size_at(self, start: int) -> int:
        return min(READ_BYTES, len(self._data) - start)

    def _take(self, line: Line) -> None:
        """One answer; the id of a request is where its bytes belong."""
        frames = _receive(line, self._manifest)
        try:
            reply = _replies.decode(frames[1])
        except (IndexError, *UNREADABLE) as error:
            raise WeightFetchError(f"{self._manifest.location}: an answer that nobody knows: {error}") from None
        if isinstance(reply, Refused):
            raise WeightFetchError(f"{self._manifest.location}: {reply.story}")
        start = int.from_bytes(frames[0], "little")
        if start not in self._missing or len(frames) != 3:
            raise WeightFetchError(f"{self._manifest.location}: bytes {start} on came, which nobody has asked for")
        place = self._data[start : start + self._size_at(start)]
        try:
            put_answer(place, reply, frames[2], takes_changes=self._since is not None)
        except ValueError as error:
            raise WeightFetchError(f"{self._manifest.location}: bytes {start} on: {error}") from None
        self.num_changed += isinstance(reply, Changed)
        self.size_bytes += len(frames[2])
        del self._missing[start]


def _receive(line: Line, manifest: WeightManifest) -> list[bytes]:
    poller = zmq.Poller()
    poller.register(line.socket, zmq.POLLIN)
    poller.register(line.monitor, zmq.POLLIN)
    ready = dict(poller.poll(int(SILENCE_S * 1000)))
    if line.socket in ready:
        return line.socket.recv_multipart()
    if line.monitor in ready:
        event = line.event()
        kind = LineBrokeError if event == zmq.EVENT_DISCONNECTED else WeightFetchError
        raise kind(f"{manifest.location}: {story_of_the_break(event)}")
    raise WeightFetchError(f"{manifest.location}: the learner's weight service has not answered for {SILENCE_S:g} s")
