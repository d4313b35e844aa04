"""One request of an agent while the model answers it, and what it answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.episodes.api import ChatMessage, FunctionCall, ToolCall, Usage
from penstock.backends.episodes.stops import before_stop, settled_text
from penstock.backends.episodes.tool_calls import ParsedText, opening_of, parse_tool_calls
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.samples import Cancelled, Completed, InfraError, StopReason, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.backends.episodes.api import FinishReason
    from penstock.backends.episodes.tool_calls import ToolFormat
    from penstock.messages.samples import Outcome, Part

CALL_ID_CHARACTERS: Final = 9
"""Some templates allow no other length."""


class Wording(NamedTuple):
    """How the tokens of a turn become text."""

    tokenizer: TextTokenizer
    stop: tuple[str, ...]
    """Strings that end the turn and are not part of its text."""
    tool_format: ToolFormat
    """``none`` where the request allows no calls."""
    call_prefix: str
    """Makes the ids of calls unique within the session."""

    def text(self, ids: list[int]) -> str:
        """What the agent sees of these tokens, calls included."""
        return before_stop(self.tokenizer.decode(ids), self.stop)

    def settled(self, ids: list[int]) -> str:
        """What can be streamed of a turn that goes on."""
        opening = opening_of(self.tool_format)
        if opening is None and self.tool_format != "none":
            return ""  # it may become one call as a whole
        return settled_text(self.tokenizer.decode(ids), [*self.stop, *([opening] if opening else [])])

    def parsed(self, ids: list[int]) -> ParsedText:
        """Text and calls of a turn that is over."""
        return parse_tool_calls(self.text(ids), self.tool_format)


class TurnReply(NamedTuple):
    """What the model answered."""

    part: Part
    text: str
    """Beside the calls."""
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage
    versions: tuple[tuple[int, int], ...]
    end_token: int | None
    """Token that the model ended the turn with."""

    @property
    def ids(self) -> list[int]:
        return tokens_view(self.part.tokens).tolist()

    @property
    def logprobs(self) -> list[float]:
        return list(floats_view(self.part.logprobs))

    @property
    def content(self) -> str | None:
        """As a message has it."""
        return (self.text.strip() or None) if self.calls else self.text

    def message(self) -> ChatMessage:
        """As the next request has to repeat it."""
        return ChatMessage("assistant", self.content, list(self.calls) or None)


class TurnRun:
    """A turn that runs; the backend's listener for it. All but ``advanced`` and ``ended`` belongs to the event loop."""

    def __init__(
        self,
        fingerprint: bytes,
        number: int,
        wording: Wording,
        num_prompt_tokens: int,
        on_end: Callable[[TurnRun], None],
    ) -> None:
        self.conversation = 0
        self.masked = ""
        """Why its tokens are not trained; empty: they are."""
        self.fingerprint = fingerprint
        """Of the request: the same request again gets the same answer."""
        self.number = number
        self.wording = wording
        self.reply: TurnReply | None = None
        self.is_over = False
        """With a reply, or without one where the episode ended."""
        self.ids: list[int] = []
        self._num_prompt_tokens = num_prompt_tokens
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def advanced(self, new: Part) -> None:
        """See :class:`~penstock.backends.episodes.protocol.TurnListener`."""
        self._loop.call_soon_threadsafe(self._take, new)

    def ended(self, turn: Part, outcome: Outcome) -> None:
        """See :class:`~penstock.backends.episodes.protocol.TurnListener`."""
        self._loop.call_soon_threadsafe(self._end, turn, outcome)

    def give_up(self) -> None:
        """It never begins, as the episode is over."""
        self.is_over = True
        self._notify()

    @property
    def num_prompt_tokens(self) -> int:
        """That the model sees before the turn."""
        return self._num_prompt_tokens

    async def changed(self) -> None:
        """Wait until there are more tokens, or it is over; the session's deadline sees to that."""
        await self._changed.wait()

    async def over(self) -> TurnReply | None:
        """Wait for the end; None where the episode ended instead."""
        while not self.is_over:
            await self.changed()
        return self.reply

    def _take(self, new: Part) -> None:
        self.ids += tokens_view(new.tokens).tolist()
        self._notify()

    def _end(self, turn: Part, outcome: Outcome) -> None:
        if not isinstance(outcome, Cancelled | InfraError):
            self.reply = self._reply(turn, outcome)
            self.ids = self.reply.ids
        self.is_over = True
        self._on_end(self)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _reply(self, turn: Part, outcome: Outcome) -> TurnReply:
        ids = tokens_view(turn.tokens).tolist()
        parsed = self.wording.parsed(ids)
        calls = tuple(
            ToolCall(f"{self.wording.call_prefix}{number:02x}"[-CALL_ID_CHARACTERS:], FunctionCall(*call))
            for number, call in enumerate(parsed.calls)
        )
        has_end_token = isinstance(outcome, Completed) and outcome.stop is StopReason.END_TOKEN
        reason: FinishReason = "length" if isinstance(outcome, Truncated) else "tool_calls" if calls else "stop"
        return TurnReply(
            part=turn,
            text=parsed.content,
            calls=calls,
            finish_reason=reason,
            usage=Usage(self._num_prompt_tokens, len(ids), self._num_prompt_tokens + len(ids)),
            versions=tuple((span.version, span.num_tokens) for span in turn.spans),
            end_token=ids[-1] if has_end_token and ids else None,
        )
