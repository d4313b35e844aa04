"""The client of the OpenEnv protocol, against a real server that behaves as told."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Literal

import pytest
from aiohttp import WSMsgType, web

from penstock.backends.episodes.environments import OpenEnvServer
from penstock.backends.episodes.interfaces import EpisodeInfraError, Task, ToolError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from penstock.backends.episodes.interfaces import JsonObject, Observation

Transport = Literal["websocket", "http"]
TASK = Task(prompt="p", messages=[], label="7", group_id=1, index=0, attempt=0, seed=(1 << 40) + 5)


class Counting:
    """Counts up to three; each episode by itself."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.requests: list[tuple[str, JsonObject]] = []
        self.connections: set[object] = set()
        self.misbehave: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = []
        """What the next requests get instead."""
        self.refuses: list[dict[str, object]] = []
        """What the next messages of a WebSocket get instead; ``{}``: the connection is closed."""
        self.num_sockets = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/reset", self.http)
        app.router.add_post("/step", self.http)
        app.router.add_get("/state", self.state)
        app.router.add_get("/ws", self.socket)
        return app

    async def http(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        body = json.loads(await request.read())
        kind = request.path.strip("/")
        self.requests.append((kind, body))
        if self.misbehave:
            return await self.misbehave.pop(0)(request)
        return web.json_response(self.played(kind, body, body["episode_id"]))

    async def state(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"episode_id": "?", "step_count": sum(self.counts.values())})

    def played(self, kind: str, body: JsonObject, episode: str) -> JsonObject:
        if kind == "reset":
            self.counts[episode] = 0
            return {"observation": {"text": "count"}, "reward": None, "done": False}
        self.counts[episode] += 1
        count = self.counts[episode]
        action = body.get("action", body)
        assert isinstance(action, dict)
        return {"observation": {"text": f"{count} {action['message']}"}, "reward": 0.5, "done": count == 3}

    async def socket(self, request: web.Request) -> web.StreamResponse:
        if self.misbehave:
            return await self.misbehave.pop(0)(request)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_sockets += 1
        episode = f"socket {self.num_sockets}"
        async for message in socket:
            assert message.type is WSMsgType.TEXT
            asked = json.loads(message.data)
            self.requests.append((asked["type"], asked.get("data", {})))
            if self.refuses:
                if not (said := self.refuses.pop(0)):
                    break
                await socket.send_json(said)
            elif asked["type"] == "state":
                await socket.send_json({"type": "state", "data": {"step_count": self.counts[episode]}})
            else:
                data = self.played(asked["type"], asked["data"], episode)
                await socket.send_json({"type": "observation", "data": data})
        self.counts.pop(episode, None)
        return socket


async def _serving(counting: Counting) -> AsyncGenerator[str]:
    runner = web.AppRunner(counting.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def against(
    counting: Counting,
    transport: Transport,
    scene: Callable[[OpenEnvServer], Awaitable[None]],
    *,
    max_connections: int = 0,
) -> None:
    async def everything() -> None:
        async for url in _serving(counting):
            server = OpenEnvServer(url, transport=transport, max_connections=max_connections)
            try:
                await scene(server)
            finally:
                await server.close()

    asyncio.run(asyncio.wait_for(everything(), 120))


def texts(observation: Observation) -> list[object]:
    return [message["content"] for message in observation.messages]


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_an_episode_is_played_to_its_end(transport: Transport) -> None:
    counting = Counting()

    async def scene(server: OpenEnvServer) -> None:
        environment = server.environment(observation_key="text", reset_options=lambda task: {"label": task.label})
        first = await environment.reset(TASK)
        assert texts(first) == ["count"]
        assert (first.reward, first.is_over) == (None, False)
        for number in (1, 2, 3):
            shown = await environment.step("go")
            assert texts(shown) == [f"{number} go"]
            assert (shown.reward, shown.is_over) == (0.5, number == 3)
        assert (await environment.state())["step_count"] == 3
        await environment.close()

    against(counting, transport, scene)
    kind, body = counting.requests[0]
    assert (kind, body["seed"], body["label"]) == ("reset", 5, "7")


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_episodes_side_by_side_do_not_meet_and_share_connections(transport: Transport) -> None:
    counting = Counting()

    async def one(server: OpenEnvServer, name: str) -> None:
        environment = server.environment(observation_key="text")
        await environment.reset(TASK)
        for number in (1, 2, 3):
            assert texts(await environment.step(name)) == [f"{number} {name}"]
        await environment.close()

    async def scene(server: OpenEnvServer) -> None:
        for _ in range(3):
            await asyncio.gather(*(one(server, f"e{i}") for i in range(4)))

    against(counting, transport, scene, max_connections=4)
    if transport == "http":
        assert len(counting.connections) <= 4
    else:
        assert counting.num_sockets == 12


async def unavailable(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="later")


async def failing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="a bug")


async def unprocessable(request: web.Request) -> web.StreamResponse:
    return web.Response(status=422, text="no such field")


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


async def no_number(request: web.Request) -> web.StreamResponse:
    return web.json_response({"observation": {}, "reward": "high", "done": False})


async def endless_number(request: web.Request) -> web.StreamResponse:
    return web.Response(text='{"observation": {"text": ""}, "reward": 1e999, "done": false}')


async def huge(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"x" * (9 << 20))


async def cut_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hanging(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


def test_a_step_that_the_server_has_not_begun_is_sent_again() -> None:
    counting = Counting()

    async def scene(server: OpenEnvServer) -> None:
        environment = server.environment(observation_key="text")
        await environment.reset(TASK)
        counting.misbehave = [unavailable, unavailable]
        assert texts(await environment.step("a")) == ["1 a"]

    against(counting, "http", scene)
    assert [kind for kind, _ in counting.requests] == ["reset", "step", "step", "step"]


async def redirecting(request: web.Request) -> web.StreamResponse:
    """To itself, where it would be answered."""
    raise web.HTTPTemporaryRedirect(str(request.url))


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (failing, "500: a bug"), (unprocessable, "422: no such field"), (garbage, "none of this protocol"),
        (no_number, r"reward"), (endless_number, "reward|finite"), (huge, "more than"), (cut_off, "broke off"),
        (hanging, "not answered within"), (redirecting, "was answered 307"),
    ],
)  # fmt: skip
def test_a_step_that_may_have_been_played_is_never_sent_again(
    response: Callable[[web.Request], Awaitable[web.StreamResponse]], says: str
) -> None:
    counting = Counting()

    async def scene(server: OpenEnvServer) -> None:
        timeout_s = 1.0 if response is hanging else 60.0
        environment = server.environment(observation_key="text", step_timeout_s=timeout_s)
        await environment.reset(TASK)
        counting.misbehave = [response]
        with pytest.raises(EpisodeInfraError, match=says):
            await environment.step("a")

    against(counting, "http", scene)
    assert len(counting.requests) == 2


def test_a_reset_is_sent_again_whatever_happened() -> None:
    counting = Counting()
    counting.misbehave = [failing, cut_off, unavailable]

    async def scene(server: OpenEnvServer) -> None:
        assert texts(await server.environment(observation_key="text").reset(TASK)) == ["count"]

    against(counting, "http", scene)
    assert len(counting.requests) == 4


def test_a_reset_gives_up_at_its_deadline_and_a_malformed_one_at_once() -> None:
    counting = Counting()
    counting.misbehave = [failing] * 99

    async def scene(server: OpenEnvServer) -> None:
        with pytest.raises(EpisodeInfraError, match="500"):
            await server.environment(reset_timeout_s=10.0).reset(TASK)
        num_before = len(counting.requests)
        counting.misbehave = [unprocessable]
        with pytest.raises(EpisodeInfraError, match="422"):
            await server.environment().reset(TASK)
        assert len(counting.requests) == num_before + 1

    against(counting, "http", scene)


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_a_server_that_is_not_there_is_infrastructure(transport: Transport) -> None:
    async def scene() -> None:
        server = OpenEnvServer("http://127.0.0.1:1", transport=transport)
        with pytest.raises(EpisodeInfraError, match=r"127\.0\.0\.1"):
            await server.environment(reset_timeout_s=0.3).reset(TASK)
        await server.close()

    asyncio.run(scene())


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_another_kind_of_server_is_recognised(transport: Transport) -> None:
    counting = Counting()

    async def scene(server: OpenEnvServer) -> None:
        with pytest.raises(EpisodeInfraError, match="OpenEnv server"):
            await (
                OpenEnvServer(server.url + "/elsewhere", transport=transport)
                .environment(reset_timeout_s=0.3)
                .reset(TASK)
            )

    against(counting, transport, scene)


def test_a_websocket_is_opened_where_the_server_was_named_and_nowhere_else() -> None:
    counting = Counting()
    counting.misbehave = [redirecting]

    async def scene(server: OpenEnvServer) -> None:
        with pytest.raises(EpisodeInfraError, match="was answered 307 instead of a WebSocket"):
            await server.environment().reset(TASK)

    against(counting, "websocket", scene)
    assert (counting.misbehave, counting.num_sockets) == ([], 0)


def test_a_malformed_action_is_the_models_only_where_that_is_said() -> None:
    counting = Counting()

    async def scene(server: OpenEnvServer) -> None:
        environment = server.environment(observation_key="text", refused="tool_error")
        await environment.reset(TASK)
        counting.misbehave = [unprocessable]
        with pytest.raises(ToolError, match="no such field"):
            await environment.step("a")
        assert texts(await environment.step("b")) == ["1 b"]

    against(counting, "http", scene)


def test_a_full_server_is_asked_again_and_a_lost_connection_ends_the_episode() -> None:
    counting = Counting()
    full: JsonObject = {"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}
    counting.refuses = [full, full]

    async def scene(server: OpenEnvServer) -> None:
        environment = server.environment(observation_key="text")
        assert texts(await environment.reset(TASK)) == ["count"]
        assert counting.num_sockets == 3
        counting.refuses = [{"type": "error", "data": {"message": "oh", "code": "EXECUTION_ERROR"}}]
        with pytest.raises(EpisodeInfraError, match="EXECUTION_ERROR: oh"):
            await environment.step("a")
        counting.refuses = [{}]
        with pytest.raises(EpisodeInfraError, match="closed the connection"):
            await environment.step("a")
        with pytest.raises(EpisodeInfraError, match="connection is gone"):
            await environment.step("a")
        counting.refuses = [{"type": "state", "data": {}}] * 9999
        with pytest.raises(EpisodeInfraError, match="'observation'"):
            await server.environment(reset_timeout_s=10.0).reset(TASK)

    against(counting, "websocket", scene)


def test_what_the_model_is_shown_and_what_it_does_can_be_made_by_functions() -> None:
    counting = Counting()

    def action(text: str) -> JsonObject:
        if not text.isdigit():
            raise ToolError("a number, please")
        return {"message": int(text)}

    async def scene(server: OpenEnvServer) -> None:
        environment = server.environment(action_of=action, messages_of=lambda seen: [{"role": "tool", "content": seen}])
        assert texts(await environment.reset(TASK)) == [{"text": "count"}]
        with pytest.raises(ToolError, match="number"):
            await environment.step("x")
        assert texts(await environment.step("4")) == [{"text": "1 4"}]
        whole = server.environment()
        assert texts(await whole.reset(TASK)) == ['{"text":"count"}']
        with pytest.raises(EpisodeInfraError, match="under 'texts'; the environment's observation has text"):
            await server.environment(observation_key="texts").reset(TASK)

    against(counting, "http", scene)
    assert [kind for kind, _ in counting.requests].count("step") == 1


@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_what_goes_into_the_ledger_names_the_address_without_its_password(transport: Transport) -> None:
    async def scene() -> str:
        server = OpenEnvServer("http://user:hunter2@127.0.0.1:1", transport=transport)
        try:
            with pytest.raises(EpisodeInfraError) as failed:
                await server.environment(reset_timeout_s=1.0).reset(TASK)
        finally:
            await server.close()
        return str(failed.value)

    said = asyncio.run(scene())
    assert "http://***@127.0.0.1:1" in said
    assert "hunter2" not in said


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="http://"):
        OpenEnvServer("127.0.0.1:8000")
