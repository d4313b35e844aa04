"""What an HTTP server of a run does with whoever comes: nothing hangs, nothing grows, nothing leaves a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.backends.episodes.http import answer_errors, json_response, key_check
from penstock.backends.processes.http_server import Bounds, application, decoded, listen
from penstock.messages.json_depth import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


WAIT_S = 60.0
TOKEN = "secret"
BOUNDS = Bounds(idle_s=1.0, body_s=1.0, max_body_bytes=100_000, max_connections=20)
NUM_FUZZED = 150


class Body(msgspec.Struct):
    text: str = ""
    anything: object = None


class Server:
    """A server on a thread of its own, and what its handlers have read."""

    def __init__(self, host: str, bounds: Bounds) -> None:
        self.read: list[Body] = []
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        port: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(host, bounds, port)))
        self._thread.start()
        self.port = port.result(WAIT_S)

    async def _serve(self, host: str, bounds: Bounds, port: Future[int]) -> None:
        app = application(host=host, errors=answer_errors, check_key=key_check(TOKEN), bounds=bounds)
        app.add_routes([web.post("/say", self._say)])
        listener = await listen(app, host, 0, bounds=bounds)
        port.set_result(listener.port)
        await self._closing.wait()
        await listener.close()

    async def _say(self, request: web.Request) -> web.Response:
        body = decoded(await request.read(), Body)
        self.read.append(body)
        return json_response(body)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(WAIT_S)
        self._loop.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def ask(self, raw: bytes) -> bytes:
        """Everything that comes back until the server closes the connection."""
        with self.connect() as line:
            line.sendall(raw)
            return rest_of(line)


def rest_of(line: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := line.recv(65536):
            found += data
    return found


def request(
    body: bytes = b'{"text":"hi"}', *headers: bytes, host: bytes = b"127.0.0.1", key: bytes = b"secret"
) -> bytes:
    lines = [b"POST /say HTTP/1.1", b"Host: " + host, b"Authorization: Bearer " + key, *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def status_of(answer: bytes) -> int:
    found = re.match(rb"HTTP/\d\.\d (\d{3}) ", answer)
    assert found is not None, answer
    return int(found.group(1))


@pytest.fixture(scope="module")
def open_server() -> Iterator[Callable[..., Server]]:
    opened: list[Server] = []

    def open_one(host: str = "127.0.0.1", bounds: Bounds = BOUNDS) -> Server:
        opened.append(Server(host, bounds))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def server(open_server: Callable[..., Server]) -> Server:
    return open_server()


@pytest.mark.parametrize(
    "begun",
    [b"", b"POST", b"POST /say HTTP/1.1\r\nHost: 127.0.0.1\r\n", request()[:-5]],
    ids=["no", "bit", "head", "body"],
)
def test_a_request_that_is_never_finished_is_closed(server: Server, begun: bytes) -> None:
    with server.connect() as line:
        line.sendall(begun)
        answer = rest_of(line)  # which returns when the server has closed
    assert not answer or status_of(answer) in (400, 408)


def test_a_client_that_drips_a_head_is_closed_all_the_same(server: Server) -> None:
    began_s = time.monotonic()
    with server.connect() as line, pytest.raises(OSError, match=r"reset|Broken pipe"):  # noqa: PT012 - one after another
        line.settimeout(0.1)
        while time.monotonic() < began_s + WAIT_S:
            line.sendall(b"X")
            with contextlib.suppress(TimeoutError):
                if not line.recv(1):
                    raise ConnectionResetError("reset: closed by the server")


def test_an_idle_connection_is_closed_and_a_busy_one_goes_on(server: Server) -> None:
    with server.connect() as line:
        for _ in range(3):
            line.sendall(request())
            answer = b""
            while b"hi" not in answer:
                answer += line.recv(65536)
            assert status_of(answer) == 200
        assert rest_of(line) == b""


def test_a_connection_too_many_is_refused_and_the_next_one_gets_in_when_one_has_gone(
    open_server: Callable[..., Server],
) -> None:
    server = open_server(bounds=Bounds(idle_s=WAIT_S, max_connections=3))
    lines = [server.connect() for _ in range(3)]
    for line in lines:
        line.sendall(request())
        assert status_of(line.recv(65536)) == 200
    assert server.ask(request()) == b""
    lines.pop().close()
    deadline_s = time.monotonic() + WAIT_S
    while not (answer := server.ask(request(b"{}", b"Connection: close"))):
        assert time.monotonic() < deadline_s
    assert status_of(answer) == 200
    for line in lines:
        line.close()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (request(b"x" * 100_001), 413),
        (request(b"{}", b"X-Large: " + b"x" * 20_000), 400),
        (request(b"{}", *(b"X-%d: x" % i for i in range(200))), 400),
        (request(b"[" * 50_000), 400),
        (request(b'{"anything":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}"), 400),
        (request(b'{"anything":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"), 400),
        (request(b'{"text":"\xff"}'), 400),
        (request(b'{"text":"\\ud800"}'), 400),
        (request(b"{}", b"X-Name: \xff\xfe"), 400),
        (request(b"{}", key=b"\xff\xfe"), 401),
        (request(b"{}", key=b""), 401),
        (request(b"{}", host=b"penstock.example"), 403),
        (request(b"{}", host=b"169.254.169.254"), 403),
        (request(b"{}", host=b""), 400),
        (request(b"{}", host=b"127.0.0.1@evil.example"), 400),
        (request(b"{}", b"Origin: https://evil.example"), 403),
        (request(b"{}", b"Origin: null"), 403),
        (request(b"{}", b"Origin: http://[", b"X: y"), 403),
        (request(b"{}", b"Transfer-Encoding: chunked"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50) + b"\r\n\r\n", 400),
    ],
)
def test_what_is_out_of_bounds_is_refused_without_a_traceback(
    server: Server, caplog: pytest.LogCaptureFixture, raw: bytes, status: int
) -> None:
    num_read = len(server.read)
    answer = server.ask(raw)
    assert status_of(answer) == status
    assert b"Traceback" not in answer
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert len(server.read) == num_read


@pytest.mark.parametrize(
    "raw",
    [
        request(b"x" * 1000)[:-500],
        request(b"no gzip" * 9, b"Content-Encoding: gzip"),
        request(b"no gzip" * 9, b"Content-Encoding: gzip", key=b"other"),
        request(b"ZZ\r\n", b"Transfer-Encoding: chunked").replace(b"Content-Length: 4\r\n", b""),
    ],
    ids=["goes away", "no gzip", "no gzip and no key", "no chunk"],
)
def test_a_client_that_breaks_off_within_its_body_leaves_no_traceback(
    open_server: Callable[..., Server], caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    server = open_server(bounds=Bounds(idle_s=WAIT_S, body_s=WAIT_S))
    with server.connect() as line:
        line.sendall(raw)
        if not raw.endswith(b"x"):
            assert status_of(line.recv(65536)) in (400, 401)
    assert status_of(server.ask(request(b"{}", b"Connection: close"))) == 200  # by then it has seen that the other left
    assert [record.exc_text for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("has_left", [True, False])
def test_a_client_that_leaves_within_its_answer_is_let_go_and_nobody_else(*, has_left: bool) -> None:
    transport = Mock(is_closing=Mock(return_value=has_left))
    asked = make_mocked_request("GET", "/", transport=transport)

    async def answer(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    async def answered() -> int:
        return (await let_go(asked, answer)).status

    let_go, *_ = application(host="127.0.0.1", errors=answer_errors, check_key=answer_errors).middlewares
    if has_left:
        assert asyncio.run(answered()) == 499
    else:
        with pytest.raises(ConnectionResetError):  # of another connection: to an engine, say
            asyncio.run(answered())


@pytest.mark.parametrize("host", [b"127.0.0.1", b"localhost:8470", b"LOCALHOST", b"[::1]:9", b"127.9.9.9:1"])
def test_the_machines_own_names_are_served(server: Server, host: bytes) -> None:
    own = b"Origin: http://" + host
    assert status_of(server.ask(request(b'{"text":"a [[[ \\" ]"}', own, host=host))) == 200


def test_beyond_this_machine_any_name_is_served_to_who_has_the_key(open_server: Callable[..., Server]) -> None:
    server = open_server("0.0.0.0")
    assert status_of(server.ask(request(host=b"node7.cluster:8470"))) == 200
    assert status_of(server.ask(request(host=b"node7.cluster:8470", key=b"other"))) == 401


def test_the_body_of_who_has_no_key_is_not_waited_for(open_server: Callable[..., Server]) -> None:
    server = open_server(bounds=Bounds(idle_s=WAIT_S, body_s=10 * WAIT_S))
    with server.connect() as line:
        line.sendall(request(b"x" * 1000, key=b"other")[:-900])
        assert status_of(line.recv(65536)) == 401


def mutated(rng_bytes: list[tuple[int, int]], raw: bytes) -> bytes:
    changed = bytearray(raw)
    for place, value in rng_bytes:
        changed[place % len(changed)] = value
    return bytes(changed)


CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=12)
JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=4))


def check_any_request(
    server: Server, caplog: pytest.LogCaptureFixture, changes: list[tuple[int, int]], body: object
) -> None:
    caplog.clear()
    raw = request(msgspec.json.encode({"text": "hi", "anything": body}), b"X-Some: header", b"Connection: close")
    answer = server.ask(mutated(changes, raw) + b"\r\n\r\n")
    assert not answer or status_of(answer) < 500, answer
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


FUZZ = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=NUM_FUZZED, **FUZZ)  # type: ignore[arg-type]
@given(changes=CHANGES, body=JSON)
def test_no_request_makes_a_server_fail(
    open_server: Callable[..., Server], caplog: pytest.LogCaptureFixture, changes: list[tuple[int, int]], body: object
) -> None:
    check_any_request(fuzzed(open_server), caplog, changes, body)


_FUZZED: list[Server] = []


def fuzzed(open_server: Callable[..., Server]) -> Server:
    """One that gives half a request up at once."""
    if not _FUZZED:
        _FUZZED.append(open_server(bounds=Bounds(idle_s=0.05, body_s=0.05)))
    return _FUZZED[0]
