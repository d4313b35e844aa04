"""A reward model as a backend: it listens for conversations and answers with scores.

Invariants:

* Whoever asks has read the address and the key in the run's folder; the file is there from when the model can be asked
  until it closes.
* A sample that cannot be scored is refused with the reason, which touches no other; whatever else goes wrong ends the
  process with the story, and its successor is asked again.
* What a conversation says never becomes a control token of the model.

| waits for | who ends it |
|---|---|
| the model to be loaded | the scorer; of a server, ``start_timeout_s`` |
| a score | the scorer; of a server, ``timeout_s``; the client, which goes away |
"""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from aiohttp import web

from penstock.backends.data.chat import ChatTemplate
from penstock.backends.data.row import BadColumnError
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.engines.run_endpoints import remove_endpoint, write_endpoint
from penstock.backends.engines.served.base.loop import LoopBackend
from penstock.backends.processes.http_server import RequestError, application, check_token, decoded, listen
from penstock.messages.base import Metric
from penstock.messages.commands import OpenEngine
from penstock.messages.local import EngineOpened, ScoringMoved

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp.typedefs import Handler

    from penstock.backends.data.row import Message
    from penstock.backends.engines.spec import RewardModelContext
    from penstock.backends.processes.http_server import Listener

ROUTE: Final = "/score"


class UnscorableTextError(Exception):
    """The model cannot take this text; the message says why."""


class TokenScorer(Protocol):
    """What computes scores; used on the backend's loop."""

    async def open(self) -> None:
        """Load the model."""
        ...

    async def watch(self) -> None:
        """Ends at once, or with an error when what it has opened can score no more."""
        ...

    async def score(self, ids: list[int]) -> float:
        """The model's output for these tokens. Raises UnscorableTextError; any other error ends the backend."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Give everything back."""
        ...


class Conversation(msgspec.Struct, frozen=True):
    """What is asked about: chat messages before the response, or the text of the prompt."""

    messages: list[dict[str, Any]] | None
    prompt: str
    response: str


class ConversationTokens:
    """The tokens of a conversation as the reward model reads it."""

    def __init__(self, folder: Path, *, chat_template: bool, max_context: int | None) -> None:
        self._tokenizer = TextTokenizer(folder)
        self._template = ChatTemplate(folder) if chat_template else None
        self._max_context = max_context

    def of(self, asked: Conversation) -> list[int]:
        """
        Raises:
            UnscorableTextError: the template or the tokenizer refuses it, or it is too long.
        """
        inert = self._tokenizer.inert
        if self._template is None:
            text = inert(asked.prompt) + inert(asked.response)
        else:
            given: list[Message] = asked.messages or [{"role": "user", "content": asked.prompt}]
            messages: list[Message] = [
                {**each, "content": inert(content)} if isinstance(content := each.get("content"), str) else each
                for each in given
            ]
            messages.append({"role": "assistant", "content": inert(asked.response)})
            try:
                text = self._template.render_messages(messages, begins_answer=False)
            except BadColumnError as error:
                raise UnscorableTextError(error.message) from None
        (ids,) = self._tokenizer.encode([text], special=self._template is None)
        if isinstance(ids, str):
            raise UnscorableTextError(f"the reward model's tokenizer refuses it: {ids}")
        if not ids:
            raise UnscorableTextError("it becomes no token at all")
        if self._max_context is not None and len(ids) > self._max_context:
            raise UnscorableTextError(
                f"it has {len(ids)} tokens for the reward model, which takes {self._max_context} "
                "(reward_model.max_context)"
            )
        return ids


class RewardModelBackend(LoopBackend[OpenEngine]):
    """One reward model behind :class:`penstock.backends.protocol.Backend`."""

    def __init__(self, context: RewardModelContext, scorer: TokenScorer, max_context: int | None) -> None:
        super().__init__("reward-model")
        self._context, self._scorer, self._max_context = context, scorer, max_context
        self._key = secrets.token_urlsafe(24)
        self._url = ""
        self._listener: Listener | None = None
        self._num_open = self._num_scored = self._num_refused = 0

    def gauges(self) -> tuple[Metric, ...]:
        """Samples that are being scored; since the start, those that were scored and those that could not be."""
        return (
            Metric("reward_model/running", self._num_open),
            Metric("reward_model/scored", self._num_scored),
            Metric("reward_model/refused", self._num_refused),
        )

    def _take(self, command: OpenEngine) -> None:
        self._spawn(self._open(), "open")

    async def _open(self) -> None:
        context, host = self._context, self._context.host
        template = context.options.chat_template
        self._tokens = ConversationTokens(context.model_folder, chat_template=template, max_context=self._max_context)
        await self._scorer.open()
        self._spawn(self._scorer.watch(), "watch")
        app = application(host=host, errors=_answer_errors, check_key=self._check_key)
        app.add_routes([web.post(ROUTE, self._score)])
        self._listener = await listen(app, host, 0, handler_cancellation=True)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{self._listener.port}"
        write_endpoint(context.run_folder, context.name, self._url, self._key)
        self._emit(EngineOpened(num_slots=context.options.slots))

    async def _shut(self, timeout_s: float) -> None:
        if self._listener is not None:
            remove_endpoint(self._context.run_folder, self._context.name, self._url)
            await self._listener.close()
        await self._scorer.close(timeout_s)

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not check_token(request.headers, self._key):
            raise RequestError(421, "other", "the key is not that of this reward model; its file was that of another")
        return await handler(request)

    async def _score(self, request: web.Request) -> web.StreamResponse:
        asked = decoded(await request.read(), Conversation)
        self._move(1)
        try:
            score = await self._scorer.score(self._tokens.of(asked))
            if not math.isfinite(score):
                raise UnscorableTextError(f"the reward model says {score}")
        except UnscorableTextError as error:
            self._num_refused += 1
            raise RequestError(400, "unscorable", str(error)) from None
        except BaseException as error:
            if isinstance(error, Exception):
                self._fail(error)
            raise
        finally:
            self._move(-1)
        self._num_scored += 1
        return web.json_response(score)

    def _move(self, change: int) -> None:
        self._num_open += change
        self._emit(ScoringMoved(num_open=self._num_open))


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return web.Response(status=error.status, text=error.message)
