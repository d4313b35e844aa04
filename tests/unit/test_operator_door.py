"""The door of a run's operator: real sockets, a Buffer that is played, and no clock but the arguments."""

from __future__ import annotations

import socket
import stat
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq

from penstock.messages.operator import GrantsPaused, OperatorAnswered, SaveAsked
from penstock.runtime.hosts.processes.operator_door import (
    MAX_BYTES,
    MAX_OPEN,
    REPEAT_S,
    REQUEST_S,
    SOCKET_NAME,
    CommandAnswer,
    OperatorDoor,
    OperatorRequest,
    socket_address,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from penstock.messages.operator import OperatorEvent

TIMEOUT_S = 10.0
PAUSE = GrantsPaused(is_paused=True)


class House:
    """A run with its door."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.door = OperatorDoor(folder, zmq.Poller())
        self.told: list[OperatorEvent] = []
        self.ending = ""

    def turn(self, now_s: float) -> None:
        self.door.turn(now_s, self.told.append, ending=self.ending)

    def visitor(self) -> socket.socket:
        visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        visitor.settimeout(TIMEOUT_S)
        with socket_address(self.folder) as address:
            visitor.connect(address)
        return visitor

    def ask(self, event: OperatorEvent = PAUSE, timeout_s: float = 20.0) -> socket.socket:
        visitor = self.visitor()
        visitor.send(msgspec.msgpack.encode(OperatorRequest(event, timeout_s)))
        return visitor


@pytest.fixture
def house(tmp_path: Path) -> Generator[House]:
    deep = tmp_path / ("deep" * 20) / ("folder" * 20)  # a socket's address has 107 bytes at most
    deep.mkdir(parents=True)
    house = House(deep)
    yield house
    house.door.close()
    assert not (deep / SOCKET_NAME).exists()


def heard(visitor: socket.socket) -> CommandAnswer:
    return msgspec.msgpack.decode(visitor.recv(MAX_BYTES), type=CommandAnswer)


def test_what_is_asked_is_told_until_the_buffer_answers_and_the_answer_is_its_own(house: House) -> None:
    visitor = house.ask()
    house.turn(0.0)
    house.turn(0.1)
    house.turn(0.1 + REPEAT_S / 2)
    assert house.told == [GrantsPaused(is_paused=True, request=1)]
    house.turn(0.2 + REPEAT_S)
    assert len(house.told) == 2, "it may have been lost with the Buffer"
    house.door.answered(OperatorAnswered(request=7, accepted=True, text="of somebody else"))
    house.door.answered(OperatorAnswered(request=1, accepted=False, text="no"))
    assert heard(visitor) == CommandAnswer(accepted=False, text="no")
    house.turn(9.0)
    assert len(house.told) == 2


def test_the_next_request_waits_for_the_one_before_but_not_for_its_checkpoint(house: House) -> None:
    first, second = house.ask(), house.ask(SaveAsked())
    third = house.ask()
    house.turn(0.0)
    house.turn(0.1)
    assert [event.request for event in house.told] == [1]
    house.door.answered(OperatorAnswered(request=1, accepted=True, text="yes"))
    house.turn(0.2)
    house.door.answered(OperatorAnswered(request=2, accepted=True, text="asked for", is_final=False))
    house.turn(0.3)
    assert [event.request for event in house.told] == [1, 2, 3]
    assert heard(first).text == "yes"
    house.door.answered(OperatorAnswered(request=3, accepted=True, text="again"))
    house.door.answered(OperatorAnswered(request=2, accepted=True, text="saved"))
    assert (heard(second).text, heard(third).text) == ("saved", "again")


def test_every_wait_has_an_end(house: House) -> None:
    silent, late, saving = house.visitor(), house.ask(timeout_s=3.0), house.ask(SaveAsked(), timeout_s=4.0)
    house.turn(0.0)
    house.turn(0.1)
    house.turn(3.1)
    assert not heard(late).accepted
    house.turn(3.2)
    house.door.answered(OperatorAnswered(request=2, accepted=True, text="asked for", is_final=False))
    house.turn(4.2)
    assert heard(saving) == CommandAnswer(accepted=True, text="asked for; it is not done yet")
    house.turn(REQUEST_S + 0.1)
    assert silent.recv(MAX_BYTES) == b""


def test_a_promised_checkpoint_is_asked_for_when_nobody_waits_for_it_any_more(house: House) -> None:
    saving = house.ask(SaveAsked(), timeout_s=4.0)
    house.turn(0.0)
    house.turn(0.1)
    house.door.answered(OperatorAnswered(request=1, accepted=True, text="asked for", is_final=False))
    house.turn(4.2)
    assert heard(saving).accepted
    house.told.clear()
    house.turn(4.3 + REPEAT_S)
    assert house.told == [SaveAsked(request=1)], "another Buffer may be there"
    later = house.ask()
    house.turn(5.4)
    house.turn(5.4)
    assert house.told[-1] == GrantsPaused(is_paused=True, request=2), "it holds nobody up"
    house.door.answered(OperatorAnswered(request=2, accepted=True, text="yes"))
    assert heard(later).text == "yes"
    house.door.answered(OperatorAnswered(request=1, accepted=True, text="saved"))
    house.told.clear()
    house.turn(99.0)
    assert house.told == []


def test_a_run_that_ends_says_so(house: House) -> None:
    before = house.ask()
    house.turn(0.0)
    house.turn(0.1)
    house.ending = "stopped by SIGINT"
    after = house.ask()
    house.turn(0.2)
    house.turn(0.3)
    assert "the run is ending: stopped by SIGINT" in heard(before).text
    assert not heard(after).accepted


@pytest.mark.parametrize(
    "data",
    [
        b"no msgpack",
        b"\x00" * (MAX_BYTES + 1),
        msgspec.msgpack.encode({"event": {"type": "StopAsked", "reason": ""}, "timeout_s": 1.0}),
        msgspec.msgpack.encode({"event": {"type": "SaveAsked"}, "timeout_s": float("nan")}),
        msgspec.msgpack.encode({"event": {"type": "SaveAsked"}, "timeout_s": -1.0}),
        msgspec.msgpack.encode({"event": {"type": "SaveAsked"}, "timeout_s": 1.0, "more": 1}),
        msgspec.msgpack.encode({"event": {"type": "PolicyChanged", "policy": "?"}, "timeout_s": 1.0}).replace(
            b"?", b"\xff"
        ),
        b"\x81\xa4more" + b"\x91" * 4000,
    ],
    ids=[
        "rubbish",
        "too long",
        "what the supervisor says",
        "not a time",
        "a time before",
        "more",
        "no UTF-8",
        "too deep",
    ],
)
def test_what_cannot_be_read_is_refused_and_harms_nobody(house: House, data: bytes) -> None:
    visitor = house.visitor()
    visitor.send(data)
    house.turn(0.0)
    house.turn(0.1)
    assert "cannot be read" in heard(visitor).text
    other = house.ask()
    house.turn(0.2)
    house.turn(0.3)
    assert house.told
    house.door.answered(OperatorAnswered(request=1, accepted=True, text="yes"))
    assert heard(other).accepted


def test_whoever_hangs_up_is_forgotten_and_no_more_than_some_are_let_in(house: House) -> None:
    house.ask().close()
    house.visitor().close()
    house.turn(0.0)
    house.turn(0.1)
    house.door.answered(OperatorAnswered(request=1, accepted=True, text="nobody hears it"))
    visitors: list[socket.socket] = []
    for _ in range(MAX_OPEN + 2):
        visitors.append(house.visitor())
        house.turn(0.2)
    assert visitors[-1].recv(MAX_BYTES) == b""
    for visitor in visitors:
        visitor.close()


def test_only_the_run_s_user_may_open_it(house: House) -> None:
    assert stat.S_IMODE((house.folder / SOCKET_NAME).stat().st_mode) == 0o600


def test_another_user_is_sent_away(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_never_own(_: socket.socket) -> bool:
        return False

    monkeypatch.setattr("penstock.runtime.hosts.processes.operator_door._is_own", is_never_own)
    visitor = house.visitor()
    house.turn(0.0)
    assert visitor.recv(MAX_BYTES) == b""


def test_a_socket_that_a_killed_driver_has_left_is_replaced(tmp_path: Path) -> None:
    poller = zmq.Poller()
    OperatorDoor(tmp_path, poller)  # never closed
    second = House(tmp_path)
    visitor = second.ask()
    second.turn(0.0)
    second.turn(0.1)
    assert second.told
    visitor.close()
    second.door.close()
