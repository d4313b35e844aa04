"""One address in front of the gateways of two engines."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx2 as httpx
import msgspec
import openai
import pytest
from gateway_bench import ASKED, TOOLS, WAIT_S, BenchFactory, GatewayBench, hold_conversation

from penstock.backends.episodes.api import SessionTaken
from penstock.backends.episodes.registry import write_push_address
from penstock.backends.processes.http_server import listen
from penstock.runtime.gateway.door import SESSION_HEADER, FrontDoor

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path


pytestmark = pytest.mark.long_run


class Door:
    """What an agent sees."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S)

    def take(self) -> SessionTaken:
        reply = self.http.post("/sessions", json={"wait_s": WAIT_S})
        assert reply.status_code == 200, reply.text
        return msgspec.json.decode(reply.content, type=SessionTaken)

    def client(self, base_url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=base_url, api_key=self.key, max_retries=0, timeout=WAIT_S)


@contextmanager
def open_door(run_folder: Path, key: str) -> Generator[Door]:
    """A front door on a thread of its own."""
    loop, url = asyncio.new_event_loop(), Future[str]()
    closing = asyncio.Event()

    async def serve() -> None:
        listener = await listen(FrontDoor(run_folder, key).app("127.0.0.1"), "127.0.0.1", 0)
        url.set_result(f"http://127.0.0.1:{listener.port}")
        await closing.wait()
        await listener.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    door = Door(url.result(WAIT_S), key)
    yield door
    door.http.close()
    loop.call_soon_threadsafe(closing.set)
    thread.join(WAIT_S)
    loop.close()


@pytest.fixture
def factory(gateway_model: Path, tmp_path: Path) -> Iterator[BenchFactory]:
    factory = BenchFactory(gateway_model, tmp_path)
    yield factory
    for bench in factory.benches:
        bench.close()


@pytest.fixture
def engines(factory: BenchFactory, tmp_path: Path) -> list[GatewayBench]:
    return [factory(f"engine/{index}", tmp_path) for index in range(2)]


@pytest.fixture
def door(engines: list[GatewayBench], tmp_path: Path) -> Iterator[Door]:
    with open_door(tmp_path, engines[0].key) as opened:
        yield opened


def test_sessions_come_from_every_engine_and_stay_with_theirs(engines: list[GatewayBench], door: Door) -> None:
    for index in range(2):
        engines[0].issue(index)
    engines[1].issue(2)
    taken = [door.take() for _ in range(3)]
    assert sorted(session.sample for session in taken) == ["7/0", "7/1", "7/2"]
    for session in taken:
        assert session.base_url.startswith(door.url)
        hold_conversation(door.client(session.base_url))
        assert door.http.post(f"/sessions/{session.id}/finish", json={"reward": 1}).status_code == 200
    assert [len(engine.engine.ends) for engine in engines] == [4, 2]


def test_the_engine_with_the_most_open_sessions_comes_first(engines: list[GatewayBench], door: Door) -> None:
    engines[0].issue(0)
    for index in range(1, 4):
        engines[1].issue(index)
    assert door.take().sample == "7/1"


def test_an_agent_that_waits_gets_the_first_session_of_any_engine(engines: list[GatewayBench], door: Door) -> None:
    assert door.http.post("/sessions", json={"wait_s": 0}).status_code == 204
    got: list[SessionTaken] = []
    agent = threading.Thread(target=lambda: got.append(door.take()))
    agent.start()
    engines[1].issue(5)
    agent.join(WAIT_S)
    assert [session.sample for session in got] == ["7/5"]


def test_streams_pass_through_in_pieces(engines: list[GatewayBench], door: Door) -> None:
    engines[0].issue()
    client = door.client(door.take().base_url)
    chunks = list(client.chat.completions.create(model="t", messages=ASKED, stream=True, max_tokens=12))
    assert len(chunks) > 2
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


def test_a_session_can_be_named_by_header_or_user(engines: list[GatewayBench], door: Door) -> None:
    engines[1].issue()
    session = door.take()
    plain = door.client(f"{door.url}/v1")
    first = plain.chat.completions.create(model="t", messages=ASKED, tools=TOOLS, user=session.id)
    again = plain.chat.completions.create(
        model="t", messages=ASKED, tools=TOOLS, extra_headers={SESSION_HEADER: session.id}
    )
    assert again.choices == first.choices
    with pytest.raises(openai.BadRequestError, match="which session"):
        plain.chat.completions.create(model="t", messages=ASKED)
    assert [card.id for card in plain.models.list()] == [engines[1].model.name]


def test_status_adds_up_the_engines_and_names_the_silent(engines: list[GatewayBench], door: Door) -> None:
    engines[0].issue(0)
    engines[1].issue(1)
    door.take()
    status = json.loads(door.http.get("/status").content)
    assert (status["num_open"], status["num_taken"], status["silent"]) == (1, 1, [])
    assert [engine["engine"] for engine in status["engines"]] == ["engine/0", "engine/1"]


def test_what_is_not_there_is_said_to_be_not_there(engines: list[GatewayBench], door: Door) -> None:
    asked = {"messages": ASKED}
    assert door.http.post("/sessions/9-dead-beef/v1/chat/completions", json=asked).status_code == 404
    assert door.http.post("/sessions/nonsense/finish", json={}).status_code == 404
    assert door.http.post("/sessions/1-dead-beef/finish", json={}).status_code == 410
    assert httpx.get(f"{door.url}/status", timeout=WAIT_S).status_code == 401


ANSWERS = {"closed": b"", "half a head": b"HTTP/1.1 200 O", "no head": b"\0\1\2\3\r\n\r\n", "reset": None}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_one_that_dies_while_it_is_asked_may_be_asked_again(tmp_path: Path, answer: bytes | None) -> None:
    """Clients ask again after 502; anything else ends them."""
    with socket.create_server(("127.0.0.1", 0)) as dying, open_door(tmp_path, "key") as door:
        thread = threading.Thread(target=die_while_asked, args=(dying, answer))
        thread.start()
        write_push_address(tmp_path, f"http://127.0.0.1:{dying.getsockname()[1]}")
        reply = door.http.post("/trajectories", json={})
        thread.join(WAIT_S)
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "engine_unreachable"


def die_while_asked(dying: socket.socket, answer: bytes | None) -> None:
    connection, _ = dying.accept()
    with connection:
        connection.recv(1 << 16)
        if answer is None:  # the kernel says "reset by peer", as for a process that was killed with requests unread
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.sendall(answer)


def test_packed_bodies_arrive_as_what_they_are(tmp_path: Path) -> None:
    """A request is unpacked at the door, and an answer where it is read."""
    packed = gzip.compress(b'{"a":"b"}')
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n".encode()
    heard = bytearray()

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            while not heard.endswith(b'{"asked":1}'):
                heard.extend(connection.recv(1 << 16))
            connection.sendall(head + packed)

    with socket.create_server(("127.0.0.1", 0)) as server, open_door(tmp_path, "key") as door:
        server.settimeout(WAIT_S)
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        write_push_address(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
        asked = gzip.compress(b'{"asked":1}')
        reply = door.http.post("/trajectories", content=asked, headers={"Content-Encoding": "gzip"})
        thread.join(WAIT_S)
    assert reply.json() == {"a": "b"}
    assert b"content-encoding" not in bytes(heard).lower()
