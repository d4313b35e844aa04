"""The line between the launchers of a worker group: whole words in order, and none that somebody else has made."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from penstock.backends.learners.worker_group import node_line
from penstock.backends.learners.worker_group.interfaces import GLOO_VARIABLE, NCCL_VARIABLE, interface_of, meet_over
from penstock.backends.learners.worker_group.node_line import (
    Invitation,
    LineClosedError,
    LinesToNodes,
    NodeLine,
    line_to_launcher,
)
from penstock.backends.processes.curve import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 20.0
GREETING_BYTES = 64
NUM_HANDSHAKE_FRAMES = 2
"""Of CURVE, in each direction."""


@pytest.fixture
def lines() -> Iterator[LinesToNodes]:
    """The launcher's."""
    made = LinesToNodes("127.0.0.1", WAIT_S)
    yield made
    made.close()


def node_end(invitation: Invitation, *, timeout_s: float = WAIT_S, wait_s: float = WAIT_S) -> NodeLine:
    return line_to_launcher(invitation, timeout_s, wait_s=wait_s)


def pair(lines: LinesToNodes) -> tuple[NodeLine, NodeLine]:
    """Both ends of a line: the launcher's, which has heard a first word, and the node's."""
    launcher, invitation = lines.open()
    node = node_end(invitation)
    node.send(b"came")
    assert words(launcher, 1) == [b"came"]
    return launcher, node


def words(line: NodeLine, num_words: int) -> list[bytes]:
    """So many words that come."""
    found: list[bytes] = []
    end_s = time.monotonic() + WAIT_S
    while len(found) < num_words:
        assert time.monotonic() < end_s, "waited in vain"
        line.socket.poll(100)
        found += line.receive()
    return found


def words_until_the_end(line: NodeLine) -> list[bytes]:
    """All words that come until the line is down."""
    found: list[bytes] = []
    end_s = time.monotonic() + WAIT_S
    with contextlib.suppress(LineClosedError):
        while line.is_up or line.socket.poll(0):
            assert time.monotonic() < end_s, "the line is still up"
            line.socket.poll(100)
            for word in line.receive():
                found.append(word)  # noqa: PERF402  # those before a gap count
    return found


def test_words_of_every_size_arrive_whole_in_order_and_in_both_directions(lines: LinesToNodes) -> None:
    launcher, node = pair(lines)
    said = [b"first", b"", b"x", os.urandom(20 << 20), b"y" * PIECE_BYTES, *(b"%d" % number for number in range(500))]
    for sender, receiver in ((launcher, node), (node, launcher)):
        for word in said:
            sender.send(word)
        assert words(receiver, len(said)) == said
    assert launcher.peer_host == "127.0.0.1"


def test_sending_to_an_end_that_does_not_read_never_waits(lines: LinesToNodes) -> None:
    launcher, node = pair(lines)
    large = [os.urandom(16 << 20) for _ in range(8)]
    for word in large:
        launcher.send(word)
    assert words(node, len(large)) == large


@pytest.mark.parametrize("what", ["the server's key", "the node's keys"])
def test_who_has_another_key_is_refused(what: str, lines: LinesToNodes) -> None:
    launcher, invitation = lines.open()
    others = LinesToNodes("127.0.0.1", WAIT_S)
    strange_server, *strange_keys = others.open()[1].secret.split()
    others.close()
    server_key, *keys = invitation.secret.split()
    secret = (strange_server, *keys) if what == "the server's key" else (server_key, *strange_keys)
    with pytest.raises(LineClosedError, match="has not taken"):
        node_end(Invitation(invitation.endpoint, " ".join(secret)), wait_s=1.0)
    assert not launcher.is_up
    node = node_end(invitation)  # who has the keys is not disturbed by who has not
    node.send(b"came")
    assert words(launcher, 1) == [b"came"]


def test_a_line_has_one_other_end(lines: LinesToNodes) -> None:
    launcher, invitation = lines.open()
    first, second = node_end(invitation), node_end(invitation)
    second.send(b"I as well")
    first.send(b"came")
    assert words(launcher, 1) == [b"came"]
    launcher.send(b"welcome")
    assert words(first, 1) == [b"welcome"]
    assert not launcher.socket.poll(0)
    assert not second.socket.poll(0)


class Between:
    """Sits between a node and its launcher, and hands on what the launcher says as it likes."""

    def __init__(self, invitation: Invitation) -> None:
        self.invitation = invitation
        self.of_node: list[bytes] = []
        """Frames after the handshake."""
        self.change: Callable[[int, bytes], list[bytes]] = lambda _, frame: [frame]
        """From the number of a frame after the handshake, and the frame, to what the node gets in its place."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        threading.Thread(target=self._run, daemon=True).start()

    def node(self, *, timeout_s: float = WAIT_S) -> NodeLine:
        port = self._listener.getsockname()[1]
        return node_end(Invitation(f"tcp://127.0.0.1:{port}", self.invitation.secret), timeout_s=timeout_s)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _run(self) -> None:
        outer = self._listener.accept()[0]
        inner = socket.create_connection(("127.0.0.1", int(self.invitation.endpoint.rpartition(":")[2])))
        self._sockets += [outer, inner]

        def keep(_: int, frame: bytes) -> list[bytes]:
            self.of_node.append(frame)
            return [frame]

        threading.Thread(target=_carry, args=(outer, inner, keep), daemon=True).start()
        _carry(inner, outer, lambda number, frame: self.change(number, frame))


def _carry(source: socket.socket, target: socket.socket, change: Callable[[int, bytes], list[bytes]]) -> None:
    """Greeting and handshake as they are, then frame by frame."""
    with contextlib.suppress(OSError, EOFError), source.makefile("rb", 0) as reader:

        def exactly(size: int) -> bytes:
            found = b""
            while len(found) < size:
                if not (more := reader.read(size - len(found))):
                    raise EOFError
                found += more
            return found

        for _ in range(GREETING_BYTES):  # each waits for a part of the other's
            target.sendall(exactly(1))
        number = -NUM_HANDSHAKE_FRAMES
        while True:
            flags = exactly(1)
            size = exactly(8 if flags[0] & 2 else 1)
            frame = flags + size + exactly(int.from_bytes(size, "big"))
            for changed in change(number, frame) if number >= 0 else [frame]:
                target.sendall(changed)
            number += 1
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def between(lines: LinesToNodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NodeLine, Between, NodeLine]]:
    """The launcher's end, whoever is between, and the node's end, whose first word has come; no beats."""
    monkeypatch.setattr(node_line, "BEAT_MS", 3_600_000)
    launcher, invitation = lines.open()
    middle = Between(invitation)
    node = middle.node()
    node.send(b"frame")
    assert words(launcher, 1) == [b"frame"]
    yield launcher, middle, node
    middle.close()


@pytest.mark.parametrize("what", ["changed", "repeated", "left out", "of the other direction"])
def test_nothing_that_is_done_to_words_on_their_way_goes_unnoticed(
    what: str, between: tuple[NodeLine, Between, NodeLine]
) -> None:
    launcher, middle, node = between
    first: list[bytes] = []

    def change(number: int, frame: bytes) -> list[bytes]:
        """A word is two frames: its number and itself. The second word is meddled with."""
        if number < 2:
            first.append(frame)
        if number not in {2, 3}:
            return [frame]
        return {
            "changed": [frame[:-1] + bytes([frame[-1] ^ 1])] if number == 3 else [frame],
            "repeated": [first[number - 2]],
            "left out": [],
            "of the other direction": [middle.of_node[number - 2]],
        }[what]

    middle.change = change
    for said in (b"frame", b"again", b"third"):
        launcher.send(said)
    assert words_until_the_end(node) == [b"frame"]


def test_whoever_is_between_reads_nothing(between: tuple[NodeLine, Between, NodeLine]) -> None:
    _, middle, node = between
    node.send(b"can you read this?")
    node.send(b"end")
    words(between[0], 2)
    assert len(middle.of_node) == 6
    assert b"can you" not in b"".join(middle.of_node)


def test_a_line_that_is_slow_is_not_silent(lines: LinesToNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_line, "BEAT_MS", 100)
    launcher, invitation = lines.open()
    middle, pause = Between(invitation), threading.Event()

    def slowly(_: int, frame: bytes) -> list[bytes]:
        if len(frame) > PIECE_BYTES:
            pause.wait(0.3)  # so slow is the network
        return [frame]

    middle.change = slowly
    node = middle.node(timeout_s=1.0)
    node.send(b"came")
    assert words(launcher, 1) == [b"came"]
    launcher.send(large := os.urandom(8 * PIECE_BYTES))
    assert words(node, 1) == [large]
    assert node.is_up
    middle.close()


def test_a_line_that_is_silent_for_the_limit_is_down_though_nobody_has_closed_it(
    lines: LinesToNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_line, "BEAT_MS", 100)
    _, invitation = lines.open()
    middle, end = Between(invitation), threading.Event()

    def hold(_: int, frame: bytes) -> list[bytes]:
        end.wait(WAIT_S)
        return [frame]

    middle.change = hold  # from the first beat on
    node = middle.node(timeout_s=0.5)
    assert words_until_the_end(node) == []
    end.set()
    middle.close()


def test_a_stranger_cannot_have_memory_set_aside(lines: LinesToNodes) -> None:
    _, invitation = lines.open()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    size_bytes = 64 * PIECE_BYTES
    with socket.create_connection(("127.0.0.1", int(invitation.endpoint.rpartition(":")[2])), WAIT_S) as stranger:
        stranger.sendall(greeting + b"\x06" + size_bytes.to_bytes(8, "big"))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stranger.sendall(bytes(size_bytes))  # more than any buffer between the two ends takes


def test_what_came_before_the_end_is_heard_and_nothing_can_be_said_after_it(lines: LinesToNodes) -> None:
    launcher, node = pair(lines)
    node.send(b"last words")
    node.socket.close(linger=int(WAIT_S * 1000))
    assert words_until_the_end(launcher) == [b"last words"]
    with pytest.raises(LineClosedError, match="has closed, or was silent for 20 s"):
        launcher.send(b"too late")


def test_a_node_sees_that_its_launcher_has_gone() -> None:
    _, node = pair(lines := LinesToNodes("127.0.0.1", WAIT_S))
    lines.close()
    assert words_until_the_end(node) == []


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
