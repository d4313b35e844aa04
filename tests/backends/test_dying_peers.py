"""Peers that are killed, stopped or replaced at any instant: whoever asks them gets the answer that is documented."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest
from aiohttp import web
from dying_peer import DEATHS, Death, DyingPeer, dying_peer

from penstock.backends.engines.served.base.http import (
    BadReply,
    CallError,
    CutOff,
    ServerError,
    ServerHttp,
    TimedOut,
    error_of,
)
from penstock.backends.episodes.api import GatewayStatus
from penstock.backends.episodes.environments import links
from penstock.backends.episodes.environments.links import HttpLink, LinkError, SocketLink
from penstock.backends.episodes.registry import GatewayAddress, write_address
from penstock.backends.processes.http_server import listen
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.service_client import Endpoint, ServiceClient
from penstock.backends.rewards.service_options import ServiceOptions
from penstock.runtime.gateway import door

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

LIMIT_S = 0.5
"""What the asked may take; those that are silent are given up then."""
WAIT_S = 30.0
KEY = "key"
WITHIN = tuple(death for death in DEATHS if death.startswith(("half-body", "half-chunk", "silent-within")))
"""The head of the answer is whole."""

deaths = pytest.mark.parametrize("death", DEATHS)


def kind_of(death: Death) -> type[CallError]:
    if death.startswith("silent"):
        return TimedOut
    return BadReply if death in ("no-head", "no-chunk") else CutOff


# --- those who ask ----------------------------------------------------------------------------------------------


@deaths
def test_a_call_to_a_server_ends_as_what_happened(death: Death) -> None:
    async def ask() -> None:
        async with dying_peer(death) as peer:
            http = ServerHttp(peer.url)
            try:
                with pytest.raises(kind_of(death)):
                    await http.call("POST", "/generate", b"{}", timeout_s=LIMIT_S)
            finally:
                await http.close()
            assert peer.num_asked == 1

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


async def read_stream(http: ServerHttp) -> None:
    async with http.stream("/generate", b"{}", timeout_s=LIMIT_S) as events, asyncio.timeout(LIMIT_S):
        while await events.next() is not None:
            pass


@deaths
def test_a_stream_ends_as_an_error_of_its_own_kind(death: Death) -> None:
    async def ask() -> None:
        async with dying_peer(death) as peer:
            http = ServerHttp(peer.url)
            try:
                with pytest.raises((CallError, TimeoutError)):
                    await read_stream(http)
            finally:
                await http.close()

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


@pytest.mark.parametrize("body", [b'{"message":"\xff"}', b'{"more":' + b"[" * 100_000], ids=["no UTF-8", "too deep"])
def test_words_that_nobody_can_read_are_quoted(body: bytes) -> None:
    error = error_of(500, body, "POST /generate")
    assert isinstance(error, ServerError)
    assert "was answered 500" in str(error)


@deaths
@pytest.mark.parametrize("kind", ["http", "socket"])
def test_a_request_to_an_environment_may_have_been_carried_out(death: Death, kind: str) -> None:
    async def ask() -> None:
        async with dying_peer(death) as peer, aiohttp.ClientSession() as session:
            link = (HttpLink if kind == "http" else SocketLink)(lambda: session, peer.url)
            with pytest.raises(LinkError) as raised:
                await link.ask("reset", {}, dict, LIMIT_S)
            assert not raised.value.is_done_never
            assert not raised.value.is_refused

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


@deaths
def test_a_reward_says_why_there_is_none(death: Death) -> None:
    options = ServiceOptions(timeout_s=LIMIT_S, num_retries=1, backoff_s=0.01, max_backoff_s=0.01, repeats=False)

    async def ask() -> None:
        async with dying_peer(death) as peer:
            client = ServiceClient(options, lambda: [Endpoint(peer.url)], what="reward.remote")
            with pytest.raises(NoRewardError, match=r"no answer within|the connection broke"):
                await client.ask({}, request_id="group/0")
            assert peer.num_asked == 1, "it may have worked on it"

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


# --- an environment's socket ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [10, 32 << 20], ids=["unanswered", "unread"])
def test_a_socket_whose_server_has_stopped_is_left_in_time(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CLOSE_TIMEOUT_S", LIMIT_S)

    async def ask() -> None:
        has_stopped, may_end = asyncio.Event(), asyncio.Event()

        async def stop(request: web.Request) -> web.StreamResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            assert request.transport is not None
            request.transport.pause_reading()  # pyright: ignore
            has_stopped.set()
            await may_end.wait()
            return socket

        app = web.Application()
        app.router.add_get("/ws", stop)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with aiohttp.ClientSession() as session:
                link = SocketLink(lambda: session, f"http://127.0.0.1:{runner.addresses[0][1]}")
                async with asyncio.timeout(5.0):  # aiohttp itself takes ten seconds, or waits for its heartbeat
                    with pytest.raises(LinkError, match="was not answered within"):
                        await link.ask("reset", {"text": "x" * size_bytes}, dict, LIMIT_S)
                assert has_stopped.is_set()
        finally:
            may_end.set()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


# --- the gateways' front door -----------------------------------------------------------------------------------


@asynccontextmanager
async def asked_door(folder: Path, *peers: DyingPeer) -> AsyncGenerator[aiohttp.ClientSession]:
    """A client of the front door before gateways at these addresses."""
    for index, peer in enumerate(peers):
        write_address(folder, GatewayAddress(f"engine/{index}", 1, peer.url))
    listener = await listen(door.FrontDoor(folder, KEY).app("127.0.0.1"), "127.0.0.1", 0)
    headers = {"Authorization": f"Bearer {KEY}"}
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.port}", headers=headers) as client:
            yield client
    finally:
        await listener.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "CONNECT_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(door, "LOOK_AGAIN_S", LIMIT_S)


def figures(num_open: int) -> bytes:
    return msgspec.json.encode(GatewayStatus("engine/0", "model", num_open, 0, 0, 0))


@deaths
def test_an_engine_that_dies_when_a_session_is_taken_leaves_the_agent_none(death: Death, tmp_path: Path) -> None:
    async def ask() -> None:
        async with dying_peer(death) as peer, asked_door(tmp_path, peer) as client:
            peer.answers["/sessions/open"] = figures(num_open=1)
            async with client.post("/sessions", json={"wait_s": 0.0}) as reply:
                assert reply.status == 204
            assert peer.num_asked == 2, "for its figures, and for a session"

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


@pytest.mark.parametrize(
    "death", [death for death in DEATHS if death != "no-gzip"]
)  # engines pack nothing, doors unpack nothing
def test_models_and_status_are_those_of_the_engines_that_answer(death: Death, tmp_path: Path) -> None:
    async def ask() -> None:
        async with (
            dying_peer(death) as dying,
            dying_peer("close") as living,
            asked_door(tmp_path, dying, living) as client,
        ):
            living.answers |= {"/v1/models": b'{"data":[]}', "/sessions/open": figures(num_open=3)}
            async with client.get("/v1/models") as reply:
                assert (reply.status, await reply.json()) == (200, {"data": []})
            assert dying.num_asked >= 1  # aiohttp asks by GET again where it was cut off before an answer
            async with client.get("/status") as reply:
                found = await reply.json()
            assert (found["num_open"], found["silent"]) == (3, ["engine/0"])

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


@pytest.mark.parametrize("answer", [b'{"engine":"\xff"}', b'{"more":' + b"[" * 100_000], ids=["no UTF-8", "too deep"])
def test_whoever_has_an_engine_s_port_meanwhile_is_no_engine(answer: bytes, tmp_path: Path) -> None:
    async def ask() -> None:
        async with dying_peer("close") as peer, asked_door(tmp_path, peer) as client:
            peer.answers["/sessions/open"] = answer
            async with client.get("/status") as reply:
                assert (await reply.json())["silent"] == ["engine/0"]
            peer.answers |= {"/sessions/open": figures(num_open=1), "/sessions": answer}
            async with client.post("/sessions", json={"wait_s": 0.0}) as reply:
                assert reply.status == 204

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


@pytest.mark.parametrize("death", WITHIN)
def test_an_answer_that_breaks_off_breaks_off_for_the_agent_too(
    death: Death, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "FORWARD_TIMEOUT_S", LIMIT_S)

    async def ask() -> None:
        async with (
            dying_peer(death) as peer,
            asked_door(tmp_path, peer) as client,
            client.post("/sessions/0-a/v1/chat/completions", json={}) as reply,
        ):
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientError):
                await reply.read()

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))
