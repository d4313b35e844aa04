"""A judge's questions to an embedded engine, as OpenAI's chat completions over HTTP.

Invariants:

* Everything but ``start`` and ``close`` runs on one event loop, on a thread of its own.
* The server's file is in the run's folder from when it listens until it closes; whoever asks names the key in it.
* A request is answered by its deadline. One that nobody waits for any more, as its connection is gone, is dropped.
* Whatever ends the thread is told through ``fail``.

| waits for | who ends it |
|---|---|
| the thread, for requests | ``close`` |
| a request for its answer | the engine; ``timeout_s``; the client, which goes away; ``close`` |
| ``close`` for the thread | its own deadline |
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

from aiohttp import web

from penstock.backends.data.row import BadColumnError
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.draws import mixed
from penstock.backends.engines.run_endpoints import remove_endpoint, write_endpoint
from penstock.backends.episodes.api import ChatChoice, ReplyMessage, Response, Usage
from penstock.backends.episodes.dialogue import encoded
from penstock.backends.episodes.http import answer_errors, json_response
from penstock.backends.episodes.judge_endpoint.backend import Asked
from penstock.backends.episodes.judge_endpoint.judge_sampling import Question
from penstock.backends.episodes.loop_thread import LoopThread
from penstock.backends.processes.http_server import RequestError, application, check_token, decoded, listen
from penstock.messages.arrays import pack_tokens, tokens_view
from penstock.messages.samples import Cancelled, Completed, InfraError, PolicyError, Truncated

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.row import Message
    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.episodes.api import FinishReason
    from penstock.backends.episodes.judge_endpoint.backend import JudgingEngine
    from penstock.backends.episodes.judge_endpoint.settings import JudgingSettings
    from penstock.backends.protocol import Fail
    from penstock.messages.samples import Outcome, Part

ROUTE: Final = "/v1/chat/completions"
MAX_OPEN: Final = 4096
"""Requests at a time; as many as one judge's ``max_concurrent`` can be."""
SHUTDOWN_S: Final = 1.0
"""For answers that are being written when the server closes."""
BETWEEN_MESSAGES: Final = "\n\n"
"""What stands between messages where there is no chat template."""
_SEED: Final = 0x1D6E


class JudgeServer:
    """See the module; a :class:`~penstock.backends.episodes.judge_endpoint.backend.QuestionServer`."""

    def __init__(self, settings: JudgingSettings) -> None:
        self._settings = settings
        self._key = f"penstock-{secrets.token_urlsafe(24)}"
        self._thread = LoopThread("judge-server", self._run)
        self._open: set[asyncio.Future[tuple[Outcome, Part]]] = set()
        self._datasets: dict[SamplingOptions, int] = {
            sampling: settings.first_dataset + place for place, sampling in enumerate(settings.samplings)
        }

    def start(self, engine: JudgingEngine, fail: Fail) -> None:
        """See :class:`~penstock.backends.episodes.judge_endpoint.backend.QuestionServer`."""
        self._engine = engine
        self._fail = fail
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """See :class:`~penstock.backends.episodes.judge_endpoint.backend.QuestionServer`."""
        self._thread.close(timeout_s)

    # --- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._thread.runner() as runner:
                runner.run(self._serve())
        except BaseException as error:  # the contract of Backend: the process ends with this story
            self._fail(error)

    async def _serve(self) -> None:
        settings, folder = self._settings, Path(self._settings.run_folder)
        self._tokenizer = TextTokenizer(Path(settings.model_folder))
        self._template = self._open_template()
        app = application(host=settings.host, errors=answer_errors, check_key=self._check_key)
        app.add_routes([web.post(ROUTE, self._chat)])
        listener = await listen(app, settings.host, 0, shutdown_s=SHUTDOWN_S, handler_cancellation=True)
        try:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            url = f"http://{host}:{listener.port}"
            write_endpoint(folder, settings.engine, url, self._key)
            await self._thread.closing.wait()
            remove_endpoint(folder, settings.engine, url)
            for waiting in self._open:
                if not waiting.done():
                    waiting.set_exception(RequestError(503, "closing", "this engine ends; ask another"))
        finally:
            await listener.close()

    def _open_template(self) -> ChatTemplate | None:
        data = self._settings.data
        if not data.chat_template:
            return None
        from penstock.backends.data.chat import ChatTemplate  # here, as it brings transformers

        return ChatTemplate(Path(self._settings.model_folder), data.template_arguments)

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not check_token(request.headers, self._key):
            raise RequestError(421, "other_engine", "the key is not that of this engine; its file was that of another")
        return await handler(request)

    # --- requests ---------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        question = decoded(body, Question)
        dataset = self._datasets.get(question.sampling(self._settings.max_context))
        if dataset is None:
            raise RequestError(400, "not_served", "no judge of this run draws its answers like that")
        prompt = self._prompt(question)
        if len(self._open) >= MAX_OPEN:
            raise RequestError(429, "too_many", f"{MAX_OPEN} requests are open; ask later")
        # The same question of the same sample has the same answer, whichever engine of the same weights gives it.
        name = hashlib.blake2b(request.headers.get("Idempotency-Key", "").encode() + b"\0" + body, digest_size=8)
        own_seed = mixed(self._settings.seed, _SEED, int.from_bytes(name.digest())) >> 1
        seed = own_seed if question.seed is None else question.seed
        outcome, part = await self._answer(Asked(pack_tokens(prompt), seed, dataset, question.max_tokens))
        return json_response(self._reply(question, len(prompt), outcome, part, name.hexdigest()))

    def _prompt(self, question: Question) -> list[int]:
        messages: list[Message] = [
            {"role": each.role, "content": self._tokenizer.inert(each.content)} for each in question.messages
        ]
        if self._template is None:
            text = BETWEEN_MESSAGES.join(str(message["content"]) for message in messages)
        else:
            try:
                text = self._template.render_messages(messages)
            except BadColumnError as error:
                raise RequestError(400, "invalid_request", str(error)) from None
        ids = encoded(self._tokenizer, text, special=self._template is None)
        if not 1 <= len(ids) < self._settings.max_context:
            raise RequestError(
                400,
                "context_length_exceeded",
                f"the question has {len(ids)} tokens, and model.max_context is {self._settings.max_context}, which has "
                "to hold the answer as well",
            )
        return ids

    async def _answer(self, asked: Asked) -> tuple[Outcome, Part]:
        waiting: asyncio.Future[tuple[Outcome, Part]] = self._thread.loop.create_future()

        def take(outcome: Outcome, part: Part) -> None:
            if not waiting.done():
                waiting.set_result((outcome, part))

        self._open.add(waiting)
        number = self._engine.ask(asked, lambda outcome, part: self._thread.soon(take, outcome, part))
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await waiting
        except TimeoutError:
            raise RequestError(504, "timeout", f"no answer within {self._settings.timeout_s:g} s") from None
        finally:
            self._open.discard(waiting)
            self._engine.drop(number)

    def _reply(self, question: Question, num_prompt: int, outcome: Outcome, part: Part, name: str) -> Response:
        finish: FinishReason
        match outcome:
            case Completed():
                finish = "stop"
            case Truncated():
                finish = "length"
            case InfraError() | PolicyError():
                raise RequestError(400, "not_served", outcome.detail)
            case Cancelled():
                raise RequestError(503, "stopped", f"the engine stopped it: {outcome.cause}")
            case _:
                assert_never(outcome)
        text = self._tokenizer.decode(tokens_view(part.tokens).tolist())
        if question.stop is not None:
            text = text.partition(question.stop)[0]
        return Response(
            id=f"chatcmpl-{name}",
            object="chat.completion",
            created=int(time.time()),
            model=question.model,
            choices=[ChatChoice(ReplyMessage(text), finish)],
            usage=Usage(num_prompt, part.num_tokens, num_prompt + part.num_tokens),
        )
