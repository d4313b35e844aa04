"""Environments behind a server that speaks the OpenEnv protocol.

```python
from penstock.backends.episodes.environments import OpenEnvServer

server = OpenEnvServer("http://127.0.0.1:8000")

def environment():  # episode.environment: this_file.py:environment
    return server.environment(observation_key="text", action_key="message")
```

Invariants:

* One environment plays one episode. Over HTTP it names its episode in every request (``episode_id``); over a WebSocket
  (the default) the connection is the episode.
* What is sent again is what the server cannot have acted on, and a ``reset`` in any case. A step that may have been
  played is never played twice: its sample ends as ``infra_error``.
* A reward is a finite number, or there is none.

| waits for | who ends it |
|---|---|
| ``reset`` | the server; ``reset_timeout_s``, all that are tried again included |
| ``step`` | the server; ``step_timeout_s``, likewise |
"""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import aiohttp
import msgspec

from penstock.backends.episodes.environments.links import (
    HttpLink,
    Link,
    LinkError,
    Outcome,
    SocketLink,
    refuse_redirected_socket,
)
from penstock.backends.episodes.interfaces import EpisodeInfraError, JsonObject, Observation, Task, ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.backends.episodes.environments.links import Kind

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
_SEED_BITS: Final = 31
"""Of the seed that a server is given: many take no larger ones."""

ReplyT = TypeVar("ReplyT")


class OpenEnvServer:
    """One server and the connections to it. Make one for a process; it opens them when the first episode begins."""

    def __init__(
        self,
        url: str,
        *,
        transport: Literal["websocket", "http"] = "websocket",
        headers: Mapping[str, str] | None = None,
        max_connections: int = 0,
        connect_timeout_s: float = 10.0,
    ) -> None:
        """
        Args:
            url: ``http://host:port``, and a path if the server has one.
            transport: ``http`` for servers that keep an environment between requests, one or by ``episode_id``;
                those of openenv-core make a new one for each request, and only a WebSocket is an episode there.
            headers: sent with every request.
            max_connections: at a time; 0: as many as there are episodes.
            connect_timeout_s: for one connection.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: expected http://… or https://…, got {url!r}")
        self.url = url.rstrip("/")
        self._transport = transport
        self._headers = dict(headers or {})
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def environment(
        self,
        *,
        action_key: str = "message",
        action_of: Callable[[str], JsonObject] | None = None,
        observation_key: str | None = None,
        messages_of: Callable[[JsonObject], Sequence[JsonObject]] | None = None,
        reset_options: Callable[[Task], JsonObject] | None = None,
        refused: Literal["infra_error", "tool_error"] = "infra_error",
        reset_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
    ) -> OpenEnvironment:
        """One environment, for one episode.

        Args:
            action_key: where the text of the model stands in an action.
            action_of: makes the action of it instead; may raise ``ToolError`` for what the model does wrong.
            observation_key: the text of an observation that the model is shown; the whole of it, as JSON, if not given.
            messages_of: makes the chat messages of it instead.
            reset_options: of the task, to be sent with ``reset`` beside ``seed`` and ``episode_id``.
            refused: whose fault a malformed action is. ``tool_error``: the model reads what the server says; only right
                where ``action_of`` leaves the form to the model.
            reset_timeout_s: for ``reset``.
            step_timeout_s: for one step.
        """
        return OpenEnvironment(
            self._link(),
            action_of=action_of or (lambda text: {action_key: text}),
            messages_of=messages_of or (lambda observation: [_message(observation, observation_key)]),
            reset_options=reset_options or (lambda task: {}),
            refused=refused,
            reset_timeout_s=reset_timeout_s,
            step_timeout_s=step_timeout_s,
        )

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _link(self) -> Link:
        kind = HttpLink if self._transport == "http" else SocketLink
        return kind(self._opened, self.url)

    def _opened(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                # Deadlines are the requests'; aiohttp would end a long step after five minutes.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
                middlewares=(refuse_redirected_socket,),
            )
        return self._session


class OpenEnvironment:
    """See the module; made by :meth:`OpenEnvServer.environment`."""

    def __init__(
        self,
        link: Link,
        *,
        action_of: Callable[[str], JsonObject],
        messages_of: Callable[[JsonObject], Sequence[JsonObject]],
        reset_options: Callable[[Task], JsonObject],
        refused: Literal["infra_error", "tool_error"],
        reset_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self._link = link
        self._action_of = action_of
        self._messages_of = messages_of
        self._reset_options = reset_options
        self._is_refusal_the_models = refused == "tool_error"
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_timeout_s
        self._episode_id = ""
        self._num_steps = 0

    async def reset(self, task: Task) -> Observation:
        """See :class:`~penstock.backends.episodes.interfaces.Environment`."""
        self._episode_id, self._num_steps = uuid.uuid4().hex, 0
        seed = task.seed % (1 << _SEED_BITS)
        body = {**self._reset_options(task), "seed": seed, "episode_id": self._episode_id}
        return self._shown(await self._asked("reset", body, Outcome, self._reset_timeout_s, is_repeatable=True))

    async def step(self, action: str) -> Observation:
        """See :class:`~penstock.backends.episodes.interfaces.Environment`."""
        self._num_steps += 1
        body: JsonObject = {
            "action": self._action_of(action),
            "timeout_s": self._step_timeout_s,
            "episode_id": self._episode_id,
            "request_id": f"{self._episode_id}-{self._num_steps}",
        }
        return self._shown(await self._asked("step", body, Outcome, self._step_timeout_s, is_repeatable=False))

    async def state(self) -> JsonObject:
        """What the server says of this episode."""
        return await self._asked("state", {}, JsonObject, self._step_timeout_s, is_repeatable=True)

    async def close(self) -> None:
        """See :class:`~penstock.backends.episodes.interfaces.Environment`."""
        await self._link.close()

    async def _asked(
        self, kind: Kind, body: JsonObject, reply: type[ReplyT], timeout_s: float, *, is_repeatable: bool
    ) -> ReplyT:
        loop = asyncio.get_running_loop()
        deadline_s, pause_s = loop.time() + timeout_s, FIRST_PAUSE_S
        while True:
            try:
                return await self._link.ask(kind, body, reply, max(0.0, deadline_s - loop.time()))
            except LinkError as error:
                if error.is_refused and kind == "step" and self._is_refusal_the_models:
                    raise ToolError(str(error)) from None
                may_repeat = error.is_done_never or (is_repeatable and not error.is_refused)
                if not may_repeat or loop.time() + pause_s >= deadline_s:
                    raise EpisodeInfraError(str(error)) from None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _shown(self, outcome: Outcome) -> Observation:
        reward = None if outcome.reward is None else float(outcome.reward)
        if reward is not None and not math.isfinite(reward):
            raise EpisodeInfraError(f"the environment gave a reward of {reward}; expected a finite number")
        messages = self._messages_of(outcome.observation)
        return Observation(messages=messages, reward=reward, is_over=outcome.done)


def _message(observation: JsonObject, key: str | None) -> JsonObject:
    if key is None:
        return {"role": "user", "content": msgspec.json.encode(observation).decode()}
    text = observation.get(key)
    if not isinstance(text, str):
        has = ", ".join(sorted(observation)) or "nothing"
        raise EpisodeInfraError(
            f"observation_key: expected a text under {key!r}; the environment's observation has {has}"
        )
    return {"role": "user", "content": text}
