"""The HTTP side of a gateway: requests in, sessions asked, responses out."""

from __future__ import annotations

import logging
import math
import re
import time
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from penstock.backends.data.pushed.forms import MAX_METADATA_BYTES
from penstock.backends.episodes.api import (
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    ErrorReply,
    GatewayStatus,
    ModelCard,
    ModelList,
    SessionAsked,
    SessionEnded,
    SessionFinish,
    SessionLine,
    SessionTaken,
)
from penstock.backends.episodes.http import answer_errors, json_response, key_check
from penstock.backends.episodes.messages_api import MessageReplies, MessagesRequest, as_chat
from penstock.backends.episodes.replies import EpisodeEndedError, Replies, event_of
from penstock.backends.episodes.sessions import ignored_fields
from penstock.backends.processes.http_server import BOUNDS, RequestError, application, decoded
from penstock.messages.base import Metric
from penstock.messages.samples import (
    MAX_COMPONENTS,
    MAX_REWARD,
    Completed,
    InfraError,
    PolicyError,
    Reward,
    StopReason,
    Truncated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.episodes.protocol import EpisodeOutcome
    from penstock.backends.episodes.sessions import Rules, Session
    from penstock.backends.episodes.table import SessionTable
    from penstock.backends.episodes.turns import TurnRun
    from penstock.backends.processes.http_server import Bounds


MAX_WAIT_S: Final = 600.0
STREAM_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
MAX_DETAIL_CHARS: Final = 4096
COMPONENT_NAME: Final = re.compile(r"[\w.][\w .@/:+-]{0,63}")
_LOG: Final = logging.getLogger(__name__)


class GatewayServer:
    """The routes of one engine's gateway."""

    def __init__(
        self,
        table: SessionTable,
        rules: Rules,
        *,
        engine: str,
        token: str,
        metadata_keys: Sequence[str],
        write_line: Callable[[SessionLine], None],
    ) -> None:
        self._table = table
        self._rules = rules
        self._engine = engine
        self._token = token
        self._metadata_keys = tuple(metadata_keys)
        self._write_line = write_line
        self.num_finished = 0
        self.num_abandoned = 0

    def app(self, host: str, bounds: Bounds = BOUNDS) -> web.Application:
        """What is served at this address."""
        app = application(host=host, errors=answer_errors, check_key=key_check(self._token), bounds=bounds)
        app.add_routes(
            [
                web.post("/sessions", self._take),
                web.get("/sessions/open", self._wait_for_open),
                web.get("/status", self._status),
                web.post("/sessions/{name}/finish", self._finish),
                web.post("/sessions/{name}/v1/chat/completions", self._chat),
                web.post("/sessions/{name}/v1/completions", self._complete),
                web.post("/sessions/{name}/v1/messages", self._messages),
                web.get("/sessions/{name}/v1/models", self._models),
                web.get("/v1/models", self._models),
            ]
        )
        return app

    # --- sessions ---------------------------------------------------------------------------------------------

    async def _take(self, request: web.Request) -> web.Response:
        asked = decoded(await request.read() or b"{}", SessionAsked)
        await self._table.has_open(min(max(asked.wait_s, 0.0), MAX_WAIT_S))
        session = self._table.take()
        if session is None:
            return web.Response(status=204)
        return json_response(await self._taken(session, str(request.url.origin())))

    async def _wait_for_open(self, request: web.Request) -> web.Response:
        """For the front door: when there is one, without taking it."""
        try:
            wait_s = float(request.query.get("wait_s", "0"))
            if math.isnan(wait_s):
                raise ValueError
        except ValueError:
            raise RequestError(400, "invalid_request", "wait_s: expected a number of seconds") from None
        await self._table.has_open(min(max(wait_s, 0.0), MAX_WAIT_S))
        return json_response(self._figures())

    async def _taken(self, session: Session, origin: str) -> SessionTaken:
        prompt, options = session.episode.issued.prompt, self._rules.options
        row = msgspec.json.decode(prompt.metadata, type=dict[str, msgspec.Raw]) if prompt.metadata else {}
        messages = prompt.messages or msgspec.json.encode([{"role": "user", "content": prompt.text}])
        return SessionTaken(
            id=session.name,
            base_url=f"{origin}/sessions/{session.name}/v1",
            model=self._rules.model,
            sample=str(session.episode.issued.key),
            attempt=session.episode.issued.attempt,
            prompt=prompt.text,
            messages=msgspec.Raw(await session.images.of_task(messages)),
            metadata=msgspec.Raw(msgspec.json.encode({k: row[k] for k in self._metadata_keys if k in row})),
            timeout_s=options.timeout_s,
            idle_timeout_s=options.idle_timeout_s,
            max_turns=options.max_turns,
        )

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._session(request)
        said = decoded(await request.read() or b"{}", SessionFinish)
        if said.choice >= max(1, len(session.runs)):
            raise RequestError(400, "invalid_request", f"choice: the last request has {len(session.runs)} answers")
        outcome = outcome_of(said, session)
        episode = session.episode
        num_tokens, num_model_tokens = episode.num_response_tokens, episode.num_model_tokens
        if not num_model_tokens and not isinstance(outcome, InfraError):
            raise RequestError(
                409,
                "no_answer",
                "the model has answered nothing in this session that can be trained; ask it first, and let it be drawn "
                "as block sampling: of the scenario says, or finish with outcome infra_error",
            )
        session.finish(outcome, said.choice)
        self.note_end(session, outcome, said)
        return json_response(
            SessionEnded(
                id=session.name,
                sample=str(episode.issued.key),
                outcome=_name(outcome),
                num_turns=session.num_turns,
                num_tokens=num_tokens,
                num_model_tokens=num_model_tokens,
            )
        )

    def note_end(self, session: Session, outcome: EpisodeOutcome, said: SessionFinish | None = None) -> None:
        """Count it, and write its line."""
        self.num_finished += not session.is_abandoned
        self.num_abandoned += session.is_abandoned
        issued = session.episode.issued
        self._write_line(
            SessionLine(
                id=session.name,
                sample=str(issued.key),
                attempt=issued.attempt,
                ended_at=time.time(),
                outcome=_name(outcome),
                detail=getattr(outcome, "detail", ""),
                num_turns=session.num_turns,
                num_tokens=session.episode.num_response_tokens,
                metadata={} if said is None else said.metadata,
            )
        )

    def _session(self, request: web.Request) -> Session:
        name = request.match_info["name"]
        try:
            return self._table.by_name(name)
        except KeyError:
            raise RequestError(
                404, "no_such_session", f"there is no session '{name}'; POST /sessions gives one"
            ) from None

    async def _status(self, request: web.Request) -> web.Response:
        return json_response(self._figures())

    def _figures(self) -> GatewayStatus:
        table = self._table
        return GatewayStatus(
            self._engine, self._rules.model, table.num_open, table.num_taken, self.num_finished, self.num_abandoned
        )

    async def _models(self, request: web.Request) -> web.Response:
        return json_response(ModelList([ModelCard(self._rules.model)]))

    # --- answers of the model ---------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = decoded(await request.read(), ChatRequest)
        _check_served(asked)
        session = self._session(request)
        asked = await session.kept(asked)
        return await self._answer(request, asked, session, session.chat(asked))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = decoded(await request.read(), CompletionRequest)
        _check_served(asked)
        session = self._session(request)
        return await self._answer(request, asked, session, session.complete(asked))

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        """As :meth:`_chat`, in Anthropic's protocol."""
        asked = as_chat(decoded(await request.read(), MessagesRequest))
        session = self._session(request)
        asked = await session.kept(asked)
        return await self._answer(request, asked, session, session.chat(asked), MessageReplies)

    async def _answer(
        self,
        request: web.Request,
        asked: ChatRequest | CompletionRequest,
        session: Session,
        runs: list[TurnRun],
        kind: type[Replies | MessageReplies] = Replies,
    ) -> web.StreamResponse:
        ignored = ignored_fields(asked, self._rules)
        if ignored and session.num_turns == 1:
            _LOG.warning("session %s asks for another %s; the scenario's holds", session.name, ", ".join(ignored))
        replies = kind(asked, runs, session=session.name, model=self._rules.model, ignored=ignored)
        if not asked.stream:
            try:
                return json_response(await replies.whole())
            except EpisodeEndedError:
                raise _gone(session) from None
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        try:
            async for event in replies.events():
                await response.write(event)
        except EpisodeEndedError:
            body = ErrorReply(ErrorBody(_gone(session).message, "invalid_request_error", "session_gone"))
            await response.write(event_of(body, replies.error_event))
        except ConnectionError:
            pass  # the turn goes on; the same request again gets its answer
        return response


def outcome_of(said: SessionFinish, session: Session) -> EpisodeOutcome:
    """What an agent's word makes of its session.

    Raises:
        RequestError: it contradicts itself.
    """
    _check_said(said)
    reward = None
    if said.reward is not None:
        reward = Reward(value=said.reward, components=tuple(Metric(n, v) for n, v in said.components.items()))
    elif said.components:
        raise RequestError(
            400, "invalid_request", "components: they stand beside a reward; give one, or leave them out"
        )
    match said.outcome:
        case "infra_error":
            if reward is not None:
                raise RequestError(400, "invalid_request", "reward: an infra_error is nobody's doing and earns none")
            return InfraError(detail=said.detail or "the agent reported an error of its own")
        case "policy_error":
            return PolicyError(detail=said.detail or "the agent found the model at fault", reward=reward)
        case "truncated":
            return Truncated(reward=reward)
        case "completed":
            return Completed(stop=StopReason.EPISODE, reward=reward)
        case None:
            return msgspec.structs.replace(session.natural_outcome(said.choice), reward=reward)


def _check_said(said: SessionFinish) -> None:
    """An agent is no part of the run, and what it says is summed up, shown and written down."""
    problem = ""
    if too_large := [value for value in (said.reward or 0.0, *said.components.values()) if abs(value) > MAX_REWARD]:
        problem = f"reward, components: expected -{MAX_REWARD:g} to {MAX_REWARD:g}, found {too_large[0]:g}"
    elif len(said.components) > MAX_COMPONENTS:
        problem = f"components: {len(said.components)} of them, and at most {MAX_COMPONENTS} are taken"
    elif bad := [name for name in said.components if not COMPONENT_NAME.fullmatch(name)]:
        problem = f"components: {bad[0][:80]!r} is no name: 1 to 64 letters, digits, spaces and . _ - / : @ +"
    elif len(said.detail) > MAX_DETAIL_CHARS:
        problem = f"detail: {len(said.detail)} characters, and at most {MAX_DETAIL_CHARS} are taken"
    elif (size_bytes := len(msgspec.json.encode(said.metadata))) > MAX_METADATA_BYTES:
        problem = f"metadata: {size_bytes} bytes, and at most {MAX_METADATA_BYTES} are taken"
    if problem:
        raise RequestError(400, "invalid_request", problem)


def _check_served(asked: ChatRequest | CompletionRequest) -> None:
    problem = ""
    if asked.n not in (None, 1) and asked.stream:
        problem = "n, stream: several answers are made one after the other; ask for them without stream"
    elif isinstance(asked, CompletionRequest):
        if asked.echo or asked.suffix:
            problem = "echo, suffix: they are not served; leave them out"
    elif (wanted := asked.response_format) is not None and wanted.type not in ("text", "json_object", "json_schema"):
        problem = f"response_format: text, json_object and json_schema are served; found {wanted.type}"
    elif asked.tool_choice not in (None, "auto", "none"):
        problem = f"tool_choice: auto and none are served, as the policy decides; found {asked.tool_choice}"
    elif asked.top_logprobs:
        problem = "top_logprobs: only the log-prob of the token that was drawn is served; set it to 0"
    if problem:
        raise RequestError(400, "not_served", problem)


def _gone(session: Session) -> RequestError:
    return RequestError(410, "session_gone", f"session {session.name} is over: {session.over_because or 'it ended'}")


def _name(outcome: EpisodeOutcome) -> str:
    return str(outcome.__struct_config__.tag)
