"""What a function that plays an episode hears of the model, and how it says that the episode has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.backends.episodes.interfaces import EpisodeInfraError, JsonObject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.episodes.playing import EndedBy


FinishReason = Literal["stop", "tool_calls", "length"]


class EpisodeLimitError(Exception):
    """The scenario allows no further turn: ``episode.max_turns``, ``episode.max_parts``, or no room is left in
    ``model.max_context``. Who does not catch it has an episode that counts as truncated."""


class ToolTimeoutError(EpisodeInfraError):
    """What was awaited took longer than its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an episode ends. A function that returns a number, a ``dict`` as reward functions do, or nothing says the
    same with fewer words."""

    reward: float | None = None
    """None: the scenario's ``reward.function`` gives it."""
    components: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named figures that are reported beside the reward."""
    outcome: Literal["completed", "truncated", "policy_error"] | None = None
    """None: ``truncated`` where a limit cut the last turn off, else ``completed``."""
    detail: str = ""
    """A sentence for an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The model wants a tool called."""

    id: str
    name: str
    arguments: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model answered."""

    text: str
    """Without special tokens, stop strings, and calls."""
    calls: tuple[Call, ...] = ()
    """Those that are well-formed, as ``episode.tool_format`` says; anything else stays in the text."""
    finish_reason: FinishReason
    """As the protocol of OpenAI calls it. ``length``: cut off by a limit of tokens."""
    ended_by: EndedBy
    """``end_token``: the model's own; ``stop_string``: one of ``stop``, or a token of ``sampling.stop_token_ids``."""
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    """Which weights made the tokens: (version, number of tokens), in order."""
    message: JsonObject
    """As the next request of the conversation has to repeat it."""
    end_token: int | None = None
    """Token that the model ended the turn with."""
    masked: str = ""
    """Why its tokens are not trained: ``other_sampling`` or ``constrained``; empty where they are, or none of the
    conversation's is."""
