"""The line between the launchers of a worker group: whole frames in order, and none that somebody else has made."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING

import pytest

from penstock.backends.learners.worker_group.interfaces import GLOO_VARIABLE, NCCL_VARIABLE, interface_of, meet_over
from penstock.backends.learners.worker_group.node_line import MAX_FIRST_BYTES, NONCE_BYTES, LineClosedError, NodeLine

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = b"s" * 32
WAIT_S = 20.0


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


def lines_over(sockets: tuple[socket.socket, socket.socket], secret: bytes = SECRET) -> tuple[NodeLine, NodeLine]:
    return NodeLine(sockets[0], SECRET, is_launcher=True), NodeLine(sockets[1], secret, is_launcher=False)


def carry(sender: NodeLine, receiver: NodeLine, num_frames: int) -> list[bytes]:
    """Both ends at work until so many frames have come."""
    found: list[bytes] = []
    end_s = time.monotonic() + WAIT_S
    while len(found) < num_frames:
        assert time.monotonic() < end_s, "waited in vain"
        writers = [line for line in (sender, receiver) if line.wants_to_write]
        readable, writable, _ = select.select([sender, receiver], writers, [], WAIT_S)
        for line in writable:
            line.write()
        if sender in readable:
            assert sender.read() == []
        if receiver in readable:
            found += [bytes(frame) for frame in receiver.read()]
    return found


def test_frames_of_every_size_arrive_whole_in_order_and_in_both_directions(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    launcher, node = lines_over(sockets)
    frames = [b"first", b"x", os.urandom(20 << 20), b"y" * 70_000, *(b"%d" % number for number in range(500))]
    for frame in frames:
        launcher.send(frame)
    assert carry(launcher, node, len(frames)) == frames
    for frame in frames:
        node.send(frame)
    assert carry(node, launcher, len(frames)) == frames
    assert not launcher.wants_to_write
    assert not node.wants_to_write


def test_sending_to_an_end_that_does_not_read_never_waits(sockets: tuple[socket.socket, socket.socket]) -> None:
    launcher, node = lines_over(sockets)
    launcher.send(b"hello")
    assert carry(launcher, node, 1) == [b"hello"]
    large = os.urandom(64 << 20)
    launcher.send(large)
    assert launcher.wants_to_write
    assert carry(launcher, node, 1) == [large]


def test_who_has_another_secret_is_refused_by_both(sockets: tuple[socket.socket, socket.socket]) -> None:
    launcher, node = lines_over(sockets, secret=b"t" * 32)
    launcher.send(b"order")
    node.send(b"word")
    with pytest.raises(LineClosedError, match="not made by the other end"):
        carry(launcher, node, 1)
    with pytest.raises(LineClosedError, match="not made by the other end"):
        carry(node, launcher, 1)


@pytest.mark.parametrize("what", ["changed", "repeated", "left out", "of the other direction"])
def test_nothing_that_is_done_to_frames_on_their_way_goes_unnoticed(what: str) -> None:
    """Somebody sits between the two ends and passes on what he likes."""

    def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        near, inner = pair(listener)
        outer, far = pair(listener)
    with near, inner, outer, far:
        launcher, node = lines_over((near, far))
        for line in (launcher, node):
            line.write()
        outer.sendall(_exactly(inner, NONCE_BYTES))
        inner.sendall(_exactly(outer, NONCE_BYTES))
        _read_when_there(node)
        _read_when_there(launcher)
        size = 8 + 32 + 5
        for said in (b"frame", b"again", b"third"):
            launcher.send(said)
        node.send(b"frame")
        first, second, third = (_exactly(inner, size) for _ in range(3))
        other = _exactly(outer, size)
        sent = {
            "changed": [first, second[:-1] + b"!"],
            "repeated": [first, first],
            "left out": [first, third],
            "of the other direction": [first, other],
        }[what]
        outer.sendall(sent[0])
        assert _read_when_there(node) == [b"frame"]
        outer.sendall(sent[1])
        with pytest.raises(LineClosedError, match="not made by the other end"):
            _read_when_there(node)


def test_a_stranger_cannot_have_memory_set_aside(sockets: tuple[socket.socket, socket.socket]) -> None:
    launcher = NodeLine(sockets[0], SECRET, is_launcher=True)
    sockets[1].sendall(bytes(NONCE_BYTES) + (1 << 40).to_bytes(8, "little") + bytes(32))
    with pytest.raises(LineClosedError, match=f"at most {MAX_FIRST_BYTES} are taken"):
        _read_when_there(launcher)


def test_what_came_before_the_end_is_heard(sockets: tuple[socket.socket, socket.socket]) -> None:
    launcher, node = lines_over(sockets)
    launcher.send(b"hello")
    assert carry(launcher, node, 1) == [b"hello"]
    node.send(b"last words")
    node.finish()
    assert carry(node, launcher, 1) == [b"last words"]
    with pytest.raises(LineClosedError, match="has closed the line"):
        _read_when_there(launcher)


def test_a_line_knows_when_it_last_heard_something(sockets: tuple[socket.socket, socket.socket]) -> None:
    launcher, node = lines_over(sockets)
    launcher.send(b"hello")
    assert carry(launcher, node, 1) == [b"hello"]
    before_s = node.heard_s
    assert node.read() == []
    assert node.heard_s == before_s
    launcher.send(b"more")
    assert carry(launcher, node, 1) == [b"more"]
    assert node.heard_s > before_s


def test_ranks_meet_over_the_network_that_their_nodes_address_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GLOO_VARIABLE, NCCL_VARIABLE):
        monkeypatch.setenv(name, "")  # so that what the environment had is put back
        monkeypatch.delenv(name)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == ""
    meet_over("203.0.113.9")
    assert GLOO_VARIABLE not in os.environ
    meet_over("127.0.0.1")
    assert os.environ[GLOO_VARIABLE] == "lo"
    assert NCCL_VARIABLE not in os.environ
    monkeypatch.setenv(GLOO_VARIABLE, "ib0")
    meet_over("127.0.0.1")
    assert os.environ[GLOO_VARIABLE] == "ib0"


def _exactly(connection: socket.socket, size: int) -> bytes:
    connection.settimeout(WAIT_S)
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        assert more
        found += more
    return found


def _read_when_there(line: NodeLine) -> list[bytes]:
    assert select.select([line], [], [], WAIT_S)[0]
    return [bytes(frame) for frame in line.read()]
