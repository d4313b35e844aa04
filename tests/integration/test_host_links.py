"""The sockets of the Ray + ZMQ host, in one process."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from penstock.backends.processes.curve import PIECE_BYTES, KeyPair, make_keys
from penstock.messages.names import SCORER
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.links import LineState, Links
from penstock.runtime.hosts.processes.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_S = 60.0


class Pair:
    """An inbox under the name of the Scorer, and a peer that talks to it."""

    def __init__(self, keys: KeyPair | None) -> None:
        self.keys = keys
        self.inbox = Links(client_keys=keys)
        self.peer = Links(client_keys=keys)
        self.peer.connect(self.address)

    @property
    def address(self) -> Address:
        return Address(SCORER, 1, self.inbox.endpoint, self.inbox.server_key)

    def close(self) -> None:
        self.peer.close(linger_ms=0)
        self.inbox.close(linger_ms=0)


@pytest.fixture(params=[True, False], ids=["curve", "plain"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(make_keys() if request.param else None)
    yield made
    made.close()


@pytest.fixture
def curve() -> Iterator[Pair]:
    made = Pair(make_keys())
    yield made
    made.close()


def until(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.002)


def frames_of(links: Links, num_frames: int) -> list[bytes]:
    found: list[bytes] = []

    def look() -> bool:
        found.extend(frame for _, frame in links.receive(64))
        return len(found) >= num_frames

    until(look)
    return found


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    sent = [bytes([i % 256]) * (i * 997 % 5000) for i in range(300)] + [b"x" * 3_000_000]
    for frame in sent:
        assert pair.peer.send(SCORER, frame)
    assert frames_of(pair.inbox, len(sent)) == sent


@pytest.mark.parametrize("num_bytes", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 60_000_000])
def test_a_frame_larger_than_a_piece_arrives_in_one(pair: Pair, num_bytes: int) -> None:
    frame = (bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]
    sent = [b"before", frame, b"", b"behind"]
    for each in sent:
        assert pair.peer.send(SCORER, each)
    assert frames_of(pair.inbox, len(sent)) == sent
    assert not any(change.state is LineState.DOWN for change in pair.peer.changes())


@pytest.mark.parametrize("shape", ["before the greeting", "a command of a handshake", "a message"])
def test_whoever_announces_more_than_a_piece_is_cut_off_before_it_is_read(pair: Pair, shape: str) -> None:
    """Without keys too: an inbox that takes what is announced would take gigabytes of memory for anybody."""
    host, _, port = pair.inbox.endpoint.removeprefix("tcp://").rpartition(":")
    mechanism = b"NULL" if pair.keys is None else b"CURVE"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    size = (1 << 30).to_bytes(8, "big")
    opening = {
        "before the greeting": b"\xff" + size + b"\x01" + b"\0" * 100,
        "a command of a handshake": greeting + b"\x06" + size,
        "a message": greeting + b"\x02" + size,
    }[shape]
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
        stranger.sendall(opening)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stranger.sendall(bytes(256 << 20))  # more than any buffer between the two ends takes
    pair.peer.send(SCORER, b"still there")
    assert frames_of(pair.inbox, 1) == [b"still there"]


def test_sending_to_nobody_is_refused_at_once(pair: Pair) -> None:
    assert not pair.peer.send("filter", b"x")


def test_a_reply_comes_back_on_the_connection_of_the_frame(pair: Pair) -> None:
    pair.peer.send(SCORER, b"beat")
    found: list[tuple[bytes, bytes]] = []

    def has_arrived() -> bool:
        found.extend(pair.inbox.receive(1))
        return bool(found)

    until(has_arrived)
    pair.inbox.reply(found[0][0], b"dismissed")
    replies: list[bytes] = []

    def look() -> bool:
        reply = pair.peer.receive_reply(SCORER)
        if reply is not None:
            replies.append(reply)
        return bool(replies)

    until(look)
    assert replies == [b"dismissed"]


def test_a_reply_to_a_connection_that_is_gone_is_dropped(pair: Pair) -> None:
    pair.inbox.reply(b"nobody", b"dismissed")
    pair.peer.send(SCORER, b"the line is as it was")
    assert frames_of(pair.inbox, 1) == [b"the line is as it was"]
    assert pair.peer.receive_reply(SCORER) is None


def test_a_peer_at_a_new_endpoint_gets_what_is_sent_from_then_on(pair: Pair) -> None:
    successor = Links(client_keys=pair.keys)
    pair.peer.connect(Address(SCORER, 2, successor.endpoint, successor.server_key))
    pair.peer.send(SCORER, b"for the successor")
    assert frames_of(successor, 1) == [b"for the successor"]
    assert pair.inbox.receive(1) == []
    successor.close(linger_ms=0)


def test_the_same_endpoint_under_a_new_epoch_keeps_its_line(pair: Pair) -> None:
    before = pair.peer.socket_of(SCORER)
    pair.peer.connect(Address(SCORER, 2, pair.inbox.endpoint, pair.inbox.server_key))
    assert pair.peer.socket_of(SCORER) is before
    known = pair.peer.address_of(SCORER)
    assert known is not None
    assert known.epoch == 2


def test_the_end_of_an_inbox_is_told_and_wakes_the_poller() -> None:
    keys = make_keys()
    inbox, watcher = Links(client_keys=keys), Links(client_keys=keys, wakes_on_changes=True)
    watcher.connect(Address(SCORER, 1, inbox.endpoint, inbox.server_key))
    states: list[LineState] = []

    def look() -> bool:
        watcher.poller.poll(100)
        states.extend(change.state for change in watcher.changes())
        return bool(states)

    until(look)
    assert states == [LineState.UP]
    states.clear()
    inbox.close(linger_ms=0)
    until(look)
    assert LineState.DOWN in states
    watcher.disconnect(SCORER)
    assert watcher.poller.poll(0) == []  # the closed line is not polled any more
    watcher.close(linger_ms=0)


def raw_client(context: zmq.Context[zmq.Socket[bytes]], address: Address, keys: KeyPair | None) -> zmq.Socket[bytes]:
    client = context.socket(zmq.DEALER)
    client.linger = 0
    if keys is not None:
        client.curve_publickey, client.curve_secretkey = keys.public, keys.secret
        client.curve_serverkey = address.server_key
    return client


@pytest.mark.parametrize("kind", ["no key at all", "a key of its own", "the key of the run, but a wrong server key"])
def test_a_client_without_the_keys_gets_in_nowhere(curve: Pair, kind: str) -> None:
    address, keys = curve.address, curve.keys
    if kind == "no key at all":
        keys = None
    elif kind == "a key of its own":
        keys = make_keys()
    else:
        address = Address(SCORER, 1, address.endpoint, make_keys().public)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = raw_client(context, address, keys)
    client.handshake_ivl = 200
    client.connect(address.endpoint)
    client.send(b"let me in")

    def is_refused() -> bool:
        assert curve.inbox.receive(1) == []
        curve.inbox.changes()
        return curve.inbox.num_refused > 0

    until(is_refused)
    curve.peer.send(SCORER, b"still there")  # who has the key is not disturbed by who has not
    assert frames_of(curve.inbox, 1) == [b"still there"]
    client.close(0)
    context.term()


def test_handshakes_go_on_after_many_bad_ones_at_the_door(curve: Pair) -> None:
    """The thread that decides about handshakes survives whatever the decision is."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    strangers = [raw_client(context, curve.address, make_keys()) for _ in range(50)]
    for stranger in strangers:
        stranger.connect(curve.address.endpoint)

    def are_refused() -> bool:
        curve.inbox.changes()
        return curve.inbox.num_refused >= len(strangers)

    until(are_refused)
    friend = Links(client_keys=curve.keys)
    friend.connect(curve.address)
    friend.send(SCORER, b"friend")
    assert frames_of(curve.inbox, 1) == [b"friend"]
    friend.close(linger_ms=0)
    for stranger in strangers:
        stranger.close(0)
    context.term()


def test_everything_that_threads_put_is_taken_once_and_in_the_order_of_each_thread() -> None:
    wakeup: Wakeup[tuple[int, int]] = Wakeup()
    num_threads, num_items = 4, 5000

    def put(thread: int) -> None:
        for i in range(num_items):
            wakeup.put((thread, i))

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(num_threads)]
    poller = zmq.Poller()
    poller.register(wakeup.fileno(), zmq.POLLIN)
    for thread in threads:
        thread.start()
    taken: list[tuple[int, int]] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(taken) < num_threads * num_items:
        assert time.monotonic() < deadline_s, "a wake-up was missed"
        poller.poll(1000)  # nothing but the descriptor says that there is something
        taken.extend(wakeup.take())
    for thread in threads:
        thread.join()
    for name in range(num_threads):
        assert [i for thread, i in taken if thread == name] == list(range(num_items))
    wakeup.close()
    wakeup.put((0, 0))  # nobody listens, nobody minds
