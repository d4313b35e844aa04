"""What stands before an inbox: passes everything on, or does to it what a fault says. No Ray; real sockets."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from penstock.backends.processes.curve import make_keys
from penstock.messages.names import FILTER, SCORER
from penstock.messages.training import StopAsked
from penstock.messages.wire import Header, InboxDecoder, WireError, encode_pack
from penstock.runtime.chaos.faults import ChaosKind
from penstock.runtime.chaos.switchboard import Switchboard
from penstock.runtime.hosts.processes.boot import Boot
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.rerouting import SOCKET_VARIABLE, announced_address

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from penstock.messages.base import Event

DEADLINE_S = 60.0
NUM_FRAMES = 200


def frame_of(number: int) -> bytes:
    """A frame of the Filter for the Scorer; an event of any kind will do."""
    return encode_pack([(Header(FILTER, 1, number, number, 0), StopAsked(reason=str(number)))])


class Line:
    """The Filter's line to the Scorer by way of a switchboard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys = make_keys()
        self.board = Switchboard(seed=1, pid_of=lambda name: os.getpid() if name == FILTER else None)
        self.inbox = Links(client_keys=self.keys)
        self.peer = Links(client_keys=self.keys)
        self.decoder: InboxDecoder[Event] = InboxDecoder(StopAsked)
        self.frames: list[bytes] = []
        monkeypatch.setenv(SOCKET_VARIABLE, str(self.board.path))

    def open(self) -> None:
        self.address = announced_address(boot(self), Address(SCORER, 1, self.inbox.endpoint, self.inbox.server_key))
        self.peer.connect(self.address)
        self.send(0)
        self.until(lambda: self.numbers() == [0])
        self.frames.clear()

    def send(self, number: int) -> None:
        self.peer.send(SCORER, frame_of(number))

    def numbers(self) -> list[int]:
        """Of the frames that have arrived and can be read, in their order."""
        self.frames += [frame for _, frame in self.inbox.receive(1000)]
        found: list[int] = []
        for frame in self.frames:
            try:
                events, _ = self.decoder.decode(frame)
            except WireError:
                continue
            found += [
                int(event.reason) for _, event in events if isinstance(event, StopAsked) and event.reason.isdigit()
            ]
        return found

    def until(self, what: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline_s, "waited in vain"
            time.sleep(0.005)


def boot(line: Line) -> Boot:
    return Boot(
        run_id="run",
        run_folder="/nowhere",
        started_unix_s=0.0,
        name=SCORER,
        epoch=1,
        names=(SCORER, FILTER),
        supervisor=Address("supervisor", 1, "tcp://127.0.0.1:1", b""),
        client_keys=line.keys,
        host=None,
        heartbeat_s=1.0,
        resend_after_s=1.0,
        validate=False,
        trace_salt=b"",
        trace_fraction=0.0,
        otlp_endpoint=None,
        wiring="",
        plan=b"",
    )


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Generator[Line]:
    made = Line(monkeypatch)
    with made.board:
        made.open()
        yield made
    made.peer.close(linger_ms=0)
    made.inbox.close(linger_ms=0)


def test_without_the_variable_a_process_announces_its_own_inbox(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE)
    own = Address(SCORER, 1, line.inbox.endpoint, line.inbox.server_key)
    assert announced_address(boot(line), own) is own


def test_a_controller_that_is_gone_is_an_error_and_no_way_around_it(
    line: Line, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, f"{tmp_path}/s")
    with pytest.raises((RuntimeError, FileNotFoundError)):
        announced_address(boot(line), line.address)


def test_only_this_user_can_reach_the_controller(line: Line) -> None:
    assert line.board.path.parent.stat().st_mode & 0o077 == 0


def test_what_no_fault_concerns_passes_whole_and_in_order(line: Line) -> None:
    for number in range(1, NUM_FRAMES):
        line.send(number)
    line.until(lambda: len(line.numbers()) >= NUM_FRAMES - 1)
    assert line.frames == [frame_of(number) for number in range(1, NUM_FRAMES)]


def test_a_fault_of_another_link_changes_nothing(line: Line) -> None:
    line.board.begin(ChaosKind.DROP, SCORER, FILTER, 1.0)
    line.send(1)
    line.until(lambda: line.numbers() == [1])


@pytest.mark.parametrize("kind", [ChaosKind.DROP, ChaosKind.DUPLICATE, ChaosKind.REORDER, ChaosKind.GARBAGE])
def test_a_share_of_the_frames_is(kind: ChaosKind, line: Line) -> None:
    line.board.table.begin(kind, FILTER, SCORER, 0.5)
    for number in range(1, NUM_FRAMES):
        line.send(number)
    line.until(lambda: line.board.table.num_hit.get(kind, 0) > NUM_FRAMES // 4)
    line.board.end(kind, FILTER, SCORER, 0.5)
    line.send(NUM_FRAMES)
    line.until(lambda: NUM_FRAMES in line.numbers())
    if kind is not ChaosKind.DROP:  # what was held back may come after the last one
        line.until(lambda: set(line.numbers()) >= set(range(1, NUM_FRAMES + 1)))
    numbers = line.numbers()
    match kind:
        case ChaosKind.DROP:
            assert NUM_FRAMES // 4 < len(numbers) < NUM_FRAMES * 3 // 4
        case ChaosKind.DUPLICATE:
            assert len(numbers) > NUM_FRAMES * 5 // 4
            assert set(numbers) == set(range(1, NUM_FRAMES + 1))
        case ChaosKind.REORDER:
            assert numbers != sorted(numbers)
            assert sorted(numbers) == list(range(1, NUM_FRAMES + 1))
        case _:
            assert set(range(1, NUM_FRAMES + 1)) <= set(numbers)
            assert len(line.frames) > NUM_FRAMES * 5 // 4


def test_a_truncated_frame_cannot_be_read_or_lacks_events(line: Line) -> None:
    line.board.table.begin(ChaosKind.TRUNCATE, FILTER, SCORER, 1.0)
    for number in range(1, 50):
        line.send(number)
    line.until(lambda: line.board.table.num_hit.get(ChaosKind.TRUNCATE, 0) >= 49)
    line.board.end(ChaosKind.TRUNCATE, FILTER, SCORER, 1.0)
    line.send(50)
    line.until(lambda: 50 in line.numbers())
    assert line.numbers() == [50]
    assert len(line.frames) == 50


def test_a_cut_link_carries_nothing_until_it_is_restored_and_heals_then(line: Line) -> None:
    line.board.begin(ChaosKind.CUT, FILTER, SCORER, 0.0)
    line.until(lambda: line.board.table.num_hit.get(ChaosKind.CUT, 0) >= 3)  # cut, and refused again and again
    line.send(1)
    line.until(lambda: line.board.table.num_hit.get(ChaosKind.CUT, 0) >= 5)
    assert line.numbers() == []
    line.board.begin(ChaosKind.RESTORE, FILTER, SCORER, 0.0)
    line.send(2)
    line.until(lambda: 2 in line.numbers())


@pytest.mark.parametrize("kind", [ChaosKind.TRUNCATE, ChaosKind.GARBAGE])
def test_a_connection_with_damaged_bytes_breaks_and_heals_and_no_byte_of_it_gets_through(
    kind: ChaosKind, line: Line
) -> None:
    line.board.begin(kind, FILTER, SCORER, 0.0)  # at the bytes alone: no share of the frames
    line.send(1)
    line.until(lambda: line.board.table.num_hit.get(kind, 0) == 1)
    sent = 1

    def arrives() -> bool:
        nonlocal sent
        sent += 1
        line.send(sent)
        return bool(line.numbers())

    line.until(arrives)
    assert set(line.frames) <= {frame_of(number) for number in range(1, sent + 1)}


def test_a_delayed_frame_comes_later_and_in_order(line: Line) -> None:
    line.board.begin(ChaosKind.DELAY, FILTER, SCORER, 0.2)
    for number in range(1, 10):
        line.send(number)
    line.until(lambda: line.board.table.num_hit.get(ChaosKind.DELAY, 0) == 9)
    line.until(lambda: len(line.numbers()) == 9)
    assert line.numbers() == list(range(1, 10))
