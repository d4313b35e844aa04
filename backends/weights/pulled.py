"""Weights pulled from the learner's weight service into this process's memory: for embedded engines.

| waits for | who ends it |
|---|---|
| the next answer of the service | the service, the end of its connection, or ``SILENCE_S`` after the answer before |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.backends.processes.curve import KeyPair, show_keys
from penstock.backends.weights.fetched import MappedWeights, check_size, checked_digest
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.service_messages import (
    MAX_READ_BYTES,
    MAX_REPLY_BYTES,
    AnyReply,
    Piece,
    Read,
    Refused,
    address_in,
    publish_of,
)
from penstock.backends.weights.tensor_file import parse_layout, tensor_views

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.backends.weights.service_messages import ServiceAddress
    from penstock.messages.weights import WeightManifest

SILENCE_S: Final = 30.0
READ_BYTES: Final = 8 << 20
READS_UNDER_WAY: Final = 4
"""Enough that the service has the next one at hand, and few enough that its answers do not pile up."""

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


def fetch_pushed(manifest: WeightManifest) -> MappedWeights:
    """Read the snapshot of the manifest into memory and check it.

    Raises:
        WeightFetchError: the service does not answer, has it no longer, or sent what the manifest does not describe.
    """
    address = address_in(manifest)
    named = msgspec.structs.replace(manifest, location=address.endpoint)  # errors quote it, and the key is no reading
    buffer = torch.empty(manifest.size_bytes, dtype=torch.uint8)
    data = buffer.numpy().data
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        line = context.socket(zmq.DEALER)
        configure(line, address)
        monitor = line.get_monitor_socket(BROKEN)
        line.connect(address.endpoint)
        _pull(_Line(line, monitor), named, data)
        line.disable_monitor()
    finally:
        context.destroy(linger=0)
    check_size(named, len(data))
    digest = checked_digest(named, data)
    return MappedWeights(tensor_views(parse_layout(data), data), digest)


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


class _Line(NamedTuple):
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]


def _pull(line: _Line, manifest: WeightManifest, data: memoryview[int]) -> None:
    waiting = 0
    for _ in _send_reads(line, manifest, len(data)):
        waiting += 1
        if waiting == READS_UNDER_WAY:
            _take(line, manifest, data)
            waiting -= 1
    for _ in range(waiting):
        _take(line, manifest, data)


def _send_reads(line: _Line, manifest: WeightManifest, size_bytes: int) -> Generator[int]:
    for start in range(0, size_bytes, READ_BYTES):
        read = Read(publish=publish_of(manifest), start=start, size_bytes=min(READ_BYTES, size_bytes - start))
        line.socket.send_multipart([start.to_bytes(8, "little"), _requests.encode(read)])
        yield start


def _take(line: _Line, manifest: WeightManifest, data: memoryview[int]) -> None:
    """One answer; the id of a request is where its bytes belong."""
    frames = _receive(line, manifest)
    try:
        reply = _replies.decode(frames[1])
    except (IndexError, msgspec.MsgspecError) as error:
        raise WeightFetchError(f"{manifest.location}: an answer that nobody knows: {error}") from None
    if isinstance(reply, Refused):
        raise WeightFetchError(f"{manifest.location}: {reply.story}")
    start = int.from_bytes(frames[0], "little")
    expected_bytes = min(READ_BYTES, len(data) - start)
    if not isinstance(reply, Piece) or len(frames) != 3 or len(frames[2]) != expected_bytes:
        raise WeightFetchError(f"{manifest.location}: asked for bytes {start} on, got something else")
    data[start : start + expected_bytes] = frames[2]


def _receive(line: _Line, manifest: WeightManifest) -> list[bytes]:
    poller = zmq.Poller()
    poller.register(line.socket, zmq.POLLIN)
    poller.register(line.monitor, zmq.POLLIN)
    ready = dict(poller.poll(int(SILENCE_S * 1000)))
    if line.socket in ready:
        return line.socket.recv_multipart()
    if line.monitor in ready:
        event = parse_monitor_message(line.monitor.recv_multipart())["event"]
        raise WeightFetchError(f"{manifest.location}: {story_of_the_break(int(event))}")
    raise WeightFetchError(f"{manifest.location}: the learner's weight service has not answered for {SILENCE_S:g} s")
