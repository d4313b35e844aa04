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
import copy
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.episodes.agent_images import AgentImages
from penstock.backends.episodes.api import FIXED, FOLLOWED, ChatRequest, CompletionRequest
from penstock.backends.episodes.branches import Branches, one_after_the_other
from penstock.backends.episodes.dialogue import ChatDialogue, ConversationError, MalformedError, TextDialogue
from penstock.backends.episodes.protocol import EpisodeOverError, TurnRequest
from penstock.backends.episodes.stops import StopWatch
from penstock.backends.episodes.turn_sampling import follows_seed, requested
from penstock.backends.episodes.turns import TurnReply, TurnRun, Wording
from penstock.messages.arrays import pack_tokens, tokens_view
from penstock.messages.samples import Completed, InfraError, StopReason, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.episodes.branches import Start
    from penstock.backends.episodes.images import EpisodeImages
    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.protocol import Episode, EpisodeOutcome
    from penstock.backends.episodes.tool_calls import ToolFormat
    from penstock.messages.samples import Media
    from penstock.messages.turn_sampling import TurnSampling

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
"""Of each: the end of a streamed answer is compared with every beginning of it."""
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
    can: frozenset[str] = frozenset()
    """Capabilities of the engine."""
    images: Callable[[Sequence[Media]], EpisodeImages] | None = None
    """What takes the images of an episode whose prompt has these; None: the run shows none."""


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
        self.runs: list[TurnRun] = []
        """The answers to the last request, made one after the other."""
        self._on_over = on_over
        self.images = AgentImages(rules.images, episode.issued.prompt.media, rules.max_context)
        self._branches = Branches(episode, rules.options.max_parts)
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

    def finish(self, outcome: EpisodeOutcome, choice: int = 0) -> None:
        """Its agent has ended it; of several answers to the last request this one counts."""
        self._take_choice(choice)
        self._over("it was finished")
        self.episode.end(outcome)

    def _take_choice(self, choice: int) -> None:
        if len(self.runs) > 1:
            self._branches.take(self.runs[choice].conversation)

    def was_closed(self, reason: str) -> None:
        """The engine has."""
        self._over(reason)

    def natural_outcome(self, choice: int = 0) -> Completed | Truncated:
        """What becomes of it when its agent says nothing else, and this of the last answers counts."""
        reply = self.runs[choice].reply if self.runs else None
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
        self._take_choice(0)
        self._over(reason)
        self.episode.end(Truncated() if self.is_exhausted else InfraError(detail=f"session {reason}"))

    # --- requests ---------------------------------------------------------------------------------------------

    async def kept(self, request: ChatRequest) -> ChatRequest:
        """The request as :meth:`chat` takes it: its images are kept, and stand in it as references.

        Raises:
            GoneError: the session is over.
            MalformedError: one cannot be shown.
        """
        if self.over_because:
            raise GoneError(self.over_because)
        return msgspec.structs.replace(request, messages=await self.images.kept(request.messages))

    def chat(self, request: ChatRequest) -> list[TurnRun]:
        """The turns that answer a request, as many as it asks for.

        Raises:
            GoneError, LimitError, ConversationError, MalformedError: it cannot be answered.
        """
        tools, wishes = request.tools or [], self._wishes(request)
        fingerprint = msgspec.json.encode(["chat", request.messages, tools, request.n or 1, wishes])
        if known := self._known(fingerprint):
            return known
        if self.rules.template is None:
            raise MalformedError("the model's folder has no chat template; use /completions, or add the template")
        fresh = ChatDialogue(
            self.rules.template,
            self.rules.tokenizer,
            shows_images=self.images.are_shown,
            check_room=self._check_room,
        )

        def added(dialogue: ChatDialogue, _: list[int]) -> tuple[list[int], tuple[Media, ...]]:
            tokens = dialogue.tokens_for(request.messages, tools)
            return self.images.placed(tokens, dialogue.added(request.messages))

        start = self._branches.start(fresh, added)
        given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens

        def replied(reply: TurnReply) -> ChatDialogue:
            dialogue = copy.copy(start.dialogue)
            dialogue.asked(request.messages, tools)
            dialogue.replied(reply.message(), reply.end_token)
            return dialogue

        tool_format = self.rules.options.tool_format if tools and request.tool_choice != "none" else "none"
        return self._begin(fingerprint, start, request, given, wishes, replied, tool_format)

    def complete(self, request: CompletionRequest) -> list[TurnRun]:
        """As :meth:`chat`, for plain text."""
        wishes = self._wishes(request)
        fingerprint = msgspec.json.encode(["text", request.prompt, request.n or 1, wishes])
        if known := self._known(fingerprint):
            return known
        prompt = self.episode.issued.prompt
        if prompt.media:
            raise MalformedError(
                "prompt: that of this session has images, which /chat/completions shows and a text not"
            )
        fresh = TextDialogue(self.rules.tokenizer, prompt.text, tokens_view(prompt.tokens).tolist(), self._check_room)
        start = self._branches.start(fresh, lambda dialogue, so_far: (dialogue.tokens_for(request.prompt, so_far), ()))

        def replied(reply: TurnReply) -> TextDialogue:
            dialogue = copy.copy(start.dialogue)
            dialogue.replied(request.prompt, reply.text)
            return dialogue

        return self._begin(fingerprint, start, request, request.max_tokens, wishes, replied, "none")

    def _wishes(self, request: ChatRequest | CompletionRequest) -> TurnSampling | None:
        return requested(request, self.rules.can, follows=self.rules.options.follow_sampling)

    def _known(self, fingerprint: bytes) -> list[TurnRun]:
        """The turns that answer this request already; none where it is new.

        Raises:
            GoneError: the session is over.
            ConversationError: another request is being answered.
        """
        if self.over_because:
            raise GoneError(self.over_because)
        if self.runs and self.runs[0].fingerprint == fingerprint:
            return self.runs
        if any(not run.is_over for run in self.runs):
            raise ConversationError("the model is answering another request of this session; one at a time")
        return []

    def _begin(
        self,
        fingerprint: bytes,
        start: Start[ChatDialogue] | Start[TextDialogue],
        request: ChatRequest | CompletionRequest,
        max_tokens: int | None,
        wishes: TurnSampling | None,
        replied: Callable[[TurnReply], ChatDialogue | TextDialogue],
        tool_format: ToolFormat,
    ) -> list[TurnRun]:
        count = 1 if request.n is None else request.n
        limit, stop = self._limit(start.num_before, max_tokens, count), _stops(request)
        rules, conversation = self.rules, self._branches.begin(start)
        runs: list[TurnRun] = []

        def ended(run: TurnRun) -> None:
            following = runs[runs.index(run) + 1 :]
            if run.reply is None or self.over_because:
                for other in following:
                    other.give_up()
                return
            self._branches.answered(run.conversation, replied(run.reply), conversation if count > 1 else None)
            if following:
                self._ask(following[0], start, request, limit, wishes, is_choice=True)
            else:
                self._watch_agent()

        for number in range(count):
            prefix = f"{secrets.token_hex(4)}{self.num_turns + number:03x}"
            wording = Wording(rules.tokenizer, stop, tool_format, prefix)
            run = TurnRun(fingerprint, self.num_turns + number + 1, wording, start.num_before, ended)
            run.conversation = self._branches.new_number() if count > 1 else conversation
            runs.append(run)
        if not self._ask(runs[0], start, request, limit, wishes, is_choice=count > 1):
            raise GoneError("the episode is over")
        for timer in self._timers[1:]:  # while the model answers, its agent is not silent
            timer.cancel()
        self.num_turns += count
        self.runs = runs
        return runs

    def _ask(
        self,
        run: TurnRun,
        start: Start[ChatDialogue] | Start[TextDialogue],
        request: ChatRequest | CompletionRequest,
        limit: int,
        wishes: TurnSampling | None,
        *,
        is_choice: bool,
    ) -> bool:
        """Have the engine make a turn; False where the episode is over."""
        tokens, media = start.tokens, start.media
        if is_choice:
            tokens, media = one_after_the_other(start.before, start.seen, tokens, media)
        asked = TurnRequest(
            pack_tokens(tokens),
            limit,
            run,
            StopWatch(run.wording.stop, self.rules.tokenizer) if run.wording.stop else None,
            conversation=run.conversation,
            is_chat=isinstance(request, ChatRequest),
            sampling=wishes,
            is_choice=is_choice,
            media=media,
        )
        run.masked = self.episode.why_masked(asked)
        try:
            self.episode.begin_turn(asked)
        except EpisodeOverError:
            run.give_up()
            return False
        return True

    def _check_room(self, num_tokens: int) -> None:
        self._limit(num_tokens, None, 1)

    def _limit(self, num_before: int, max_tokens: int | None, count: int) -> int:
        """How many tokens each of the next turns may have."""
        rules = self.rules
        if count < 1:
            raise MalformedError(f"n: must be at least 1, found {count}")
        if self.num_turns + count > rules.options.max_turns:
            self.is_exhausted = self.num_turns >= rules.options.max_turns
            most = f"{rules.options.max_turns} turns are all that episode.max_turns allows"
            raise LimitError("turn_limit_reached", most if count == 1 else f"n: {most}, and {self.num_turns} are made")
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


def ignored_fields(request: ChatRequest | CompletionRequest, rules: Rules) -> list[str]:
    """Fields that ask for another sampling than the scenario's, and are not followed."""
    sampling = rules.sampling
    own = {
        **NEUTRAL,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }
    followed = set(FOLLOWED) if rules.options.follow_sampling else set[str]()
    if not follows_seed(request, rules.can):
        followed -= {"seed"}
    values = {name: getattr(request, name) for name in FIXED if name not in followed}
    return [name for name, value in values.items() if value not in (None, {}) and value != own.get(name)]


def _stops(request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stop) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_CHARS for text in stop):
        raise MalformedError(f"stop: expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return stop
