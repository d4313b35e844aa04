"""Sessions of outside agents: each is the episode of one issued sample. Everything here belongs to one event loop.

Invariants:

* A session is open (no agent has it), taken, or over. Each has a deadline at every moment, except while its engine is
  answering, when the session's own is the deadline.
* A session that nobody ends properly fails (``infra_error``), so that its sample is tried again; it never earns a
  reward of 0. One whose conversation a limit has ended counts as truncated instead.
* An agent that asks the same again gets the same answer: clients repeat a request when a connection breaks.

| waits for | who ends it |
|---|---|
| an open session for an agent | ``POST /sessions``; ``take_timeout_s`` |
| a taken session for its next request | its agent; ``idle_timeout_s``, ``timeout_s`` |
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.episodes.api import FIXED, ChatRequest, CompletionRequest
from penstock.backends.episodes.dialogue import ChatDialogue, ConversationError, MalformedError, TextDialogue
from penstock.backends.episodes.protocol import EpisodeOverError, TurnRequest
from penstock.backends.episodes.stops import StopWatch
from penstock.backends.episodes.turns import TurnRun, Wording
from penstock.messages.arrays import pack_tokens, tokens_view
from penstock.messages.samples import Completed, InfraError, StopReason, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.episodes.api import SamplingFields
    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.protocol import Episode, EpisodeOutcome

MAX_STOPS: Final = 16
NEUTRAL: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


class GoneError(Exception):
    """The session is over. (HTTP 410)"""


class LimitError(Exception):
    """The conversation has reached a limit of the scenario. (HTTP 400)"""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


class Rules(NamedTuple):
    """What holds for every session of a gateway."""

    options: EpisodeOptions
    sampling: SamplingOptions
    max_context: int
    model: str
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    """None: the model has none, and chat is refused."""


class Session:
    """One sample and the agent that plays it."""

    def __init__(self, name: str, episode: Episode, rules: Rules, on_over: Callable[[Session], None]) -> None:
        self.name = name
        self.episode = episode
        self.rules = rules
        self.is_taken = False
        self.is_abandoned = False
        self.over_because = ""
        """Why nothing more can be asked; empty while something can."""
        self.num_turns = 0
        self.is_exhausted = False
        """A limit of the scenario allows no further turn."""
        self.run: TurnRun | None = None
        """The last turn; it may be running."""
        self._on_over = on_over
        self._chat: ChatDialogue | None = None
        self._text: TextDialogue | None = None
        self._loop = asyncio.get_running_loop()
        options = rules.options
        self._timers = [self._deadline(options.take_timeout_s, "no agent took it", "take_timeout_s")]

    # --- its life ---------------------------------------------------------------------------------------------

    def take(self) -> None:
        """An agent has it from now on."""
        self.is_taken = True
        self._stop_timers()
        self._timers = [self._deadline(self.rules.options.timeout_s, "it was not finished", "timeout_s")]
        self._watch_agent()

    def finish(self, outcome: EpisodeOutcome) -> None:
        """Its agent has ended it."""
        self._over("it was finished")
        self.episode.end(outcome)

    def was_closed(self, reason: str) -> None:
        """The engine has."""
        self._over(reason)

    def natural_outcome(self) -> Completed | Truncated:
        """What becomes of it when its agent says nothing else."""
        reply = None if self.run is None else self.run.reply
        if self.is_exhausted or (reply is not None and reply.finish_reason == "length"):
            return Truncated()
        return Completed(stop=StopReason.EPISODE)

    def _over(self, reason: str) -> None:
        self.over_because = self.over_because or reason
        self._stop_timers()
        self._on_over(self)

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _watch_agent(self) -> None:
        """Its agent has until then to ask for something."""
        for timer in self._timers[1:]:
            timer.cancel()
        idle = self._deadline(self.rules.options.idle_timeout_s, "its agent was silent", "idle_timeout_s")
        self._timers = [*self._timers[:1], idle]

    def _deadline(self, limit_s: float, what: str, key: str) -> asyncio.TimerHandle:
        reason = f"abandoned: {what} for {limit_s:g} s (episode.{key})"
        return self._loop.call_later(limit_s, self._expire, reason)

    def _expire(self, reason: str) -> None:
        self.is_abandoned = True
        self._over(reason)
        self.episode.end(Truncated() if self.is_exhausted else InfraError(detail=f"session {reason}"))

    # --- requests ---------------------------------------------------------------------------------------------

    def chat(self, request: ChatRequest) -> TurnRun:
        """The turn that answers a request.

        Raises:
            GoneError, LimitError, ConversationError, MalformedError: it cannot be answered.
        """
        tools = request.tools or []
        known = self._known(msgspec.json.encode(["chat", request.messages, tools]))
        if isinstance(known, TurnRun):
            return known
        if self.rules.template is None:
            raise MalformedError("the model's folder has no chat template; use /completions, or add the template")
        if self._text is not None:
            raise ConversationError("this session was begun with /completions; go on with that")
        dialogue = self._chat or ChatDialogue(self.rules.template, self.rules.tokenizer)
        tokens = dialogue.tokens_for(request.messages, tools)
        allows_calls = bool(tools) and request.tool_choice != "none"
        given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens

        def replied(run: TurnRun) -> None:
            assert run.reply is not None
            dialogue.replied(run.reply.message(), run.reply.end_token)

        run = self._begin(known, tokens, request, given, replied, allows_calls=allows_calls)
        self._chat = dialogue
        dialogue.asked(request.messages, tools)
        return run

    def complete(self, request: CompletionRequest) -> TurnRun:
        """As :meth:`chat`, for plain text."""
        known = self._known(msgspec.json.encode(["text", request.prompt]))
        if isinstance(known, TurnRun):
            return known
        if self._chat is not None:
            raise ConversationError("this session was begun with /chat/completions; go on with that")
        prompt = self.episode.issued.prompt
        dialogue = self._text or TextDialogue(self.rules.tokenizer, prompt.text, tokens_view(prompt.tokens).tolist())
        tokens = dialogue.tokens_for(request.prompt, tokens_view(self.episode.so_far()).tolist())

        def replied(run: TurnRun) -> None:
            assert run.reply is not None
            dialogue.replied(request.prompt, run.reply.text)

        run = self._begin(known, tokens, request, request.max_tokens, replied, allows_calls=False)
        self._text = dialogue
        return run

    def _known(self, fingerprint: bytes) -> TurnRun | bytes:
        """The turn that answers this request already, or the request's fingerprint.

        Raises:
            GoneError: the session is over.
            ConversationError: another request is being answered.
        """
        if self.over_because:
            raise GoneError(self.over_because)
        run = self.run
        if run is not None and run.fingerprint == fingerprint:
            return run
        if run is not None and not run.is_over:
            raise ConversationError("the model is answering another request of this session; one at a time")
        return fingerprint

    def _begin(
        self,
        fingerprint: bytes,
        tokens: Sequence[int],
        request: SamplingFields,
        max_tokens: int | None,
        on_reply: Callable[[TurnRun], None],
        *,
        allows_calls: bool,
    ) -> TurnRun:
        rules = self.rules
        num_before = len(tokens) + (self.episode.num_context_tokens if self.num_turns else 0)
        limit = self._limit(num_before, max_tokens)
        stop = _stops(request)
        wording = Wording(
            rules.tokenizer,
            stop,
            rules.options.tool_format if allows_calls else "none",
            f"{secrets.token_hex(4)}{self.num_turns:03x}",
        )

        def ended(run: TurnRun) -> None:
            if run.reply is not None:
                on_reply(run)
                if not self.over_because:
                    self._watch_agent()

        run = TurnRun(fingerprint, self.num_turns + 1, wording, num_before, ended)
        watch = StopWatch(stop, rules.tokenizer) if stop else None
        try:
            request_of_model = TurnRequest(
                pack_tokens(tokens), limit, run, watch, is_chat=isinstance(request, ChatRequest)
            )
            self.episode.begin_turn(request_of_model)
        except EpisodeOverError as error:
            raise GoneError(str(error)) from None
        for timer in self._timers[1:]:  # while the model answers, its agent is not silent
            timer.cancel()
        self.num_turns += 1
        self.run = run
        return run

    def _limit(self, num_before: int, max_tokens: int | None) -> int:
        """How many tokens the next turn may have."""
        rules = self.rules
        if self.num_turns >= rules.options.max_turns:
            self.is_exhausted = True
            raise LimitError("turn_limit_reached", f"{self.num_turns} turns are all that episode.max_turns allows")
        if not num_before:
            raise MalformedError("the prompt becomes no token at all")
        room = rules.max_context - num_before
        if room < 1:
            self.is_exhausted = self.num_turns > 0
            raise LimitError(
                "context_length_exceeded",
                f"{num_before} tokens leave no room for an answer in model.max_context of {rules.max_context}",
            )
        if max_tokens is not None and max_tokens < 1:
            raise MalformedError(f"max_tokens: must be at least 1, found {max_tokens}")
        return min(room, rules.sampling.max_response_tokens, room if max_tokens is None else max_tokens)


def ignored_fields(request: ChatRequest | CompletionRequest, sampling: SamplingOptions) -> list[str]:
    """Fields that ask for another sampling than the scenario's."""
    own = {
        **NEUTRAL,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }
    values = {name: getattr(request, name) for name in FIXED}
    return [name for name, value in values.items() if value not in (None, {}) and value != own.get(name)]


def _stops(request: SamplingFields) -> tuple[str, ...]:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MAX_STOPS or not all(stop):
        raise MalformedError(f"stop: expected at most {MAX_STOPS} strings, none of them empty")
    return stop
