"""What stands between a function that plays an episode and the engine: requests for turns, and their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from penstock.backends.episodes.api import ChatMessage
from penstock.backends.episodes.interfaces import JsonObject
from penstock.backends.episodes.options import EpisodeOptions
from penstock.messages.samples import Media
from penstock.messages.turn_sampling import TurnSampling

if TYPE_CHECKING:
    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.backends.episodes.protocol import CallMade


EndedBy = Literal["end_token", "stop_string", "length"]


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """Of images in an episode."""

    folder: str
    """Where they are kept."""
    max_bytes: int
    max_pixels: int
    """Of one."""
    max_kept_bytes: int | None = None
    """That may lie in the folder before another is refused; None: as many as come."""


class PlayRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the scenario says of every episode."""

    options: EpisodeOptions
    max_context: int
    max_response_tokens: int
    uses_chat: bool = False
    """Prompts are rendered with the chat template."""
    can: tuple[str, ...] = ()
    """Capabilities of the engine."""
    images: ImageRules | None = None
    """None: the run has none."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A turn as it comes from the engine."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    ended_by: EndedBy
    masked: str = ""


class Saved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an episode stood after a complete turn, so that it can go on from there in another process."""

    state: JsonObject
    """The function's own."""
    num_turns: int
    num_tokens: int
    """Of the conversation, its context included."""
    num_response_tokens: int
    messages: list[ChatMessage] = []
    """Of the last request; none where the conversation is no chat."""
    tools: list[JsonObject] = []
    reply: ChatMessage | None = None
    end_token: int | None = None


class TurnAsked(msgspec.Struct, frozen=True, array_like=True):
    """A turn of the model that a function waits for."""

    conversation: int
    base: int
    """What stands before the tokens of a conversation's first turn: another conversation, or one of the two below."""
    tokens: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...]
    is_trained: bool
    is_chat: bool = True
    sampling: TurnSampling | None = None
    is_choice: bool = False
    media: tuple[Media, ...] = ()
    """Images that stand in ``tokens``, counted from the first of them."""


NOTHING: Final = -1
PROMPT: Final = -2


class ModelLink(Protocol):
    """Who brings the function's requests to the engine."""

    async def turn(self, asked: TurnAsked) -> Answer:
        """The model's next turn."""
        ...

    def take(self, choice: int, into: int) -> None:
        """This choice is what the conversation goes on with."""
        ...

    def save(self, saved: bytes) -> None:
        """The episode can go on from here elsewhere."""
        ...

    def called(self, call: CallMade) -> None:
        """The function has called something beside the model."""
        ...


class Words(Protocol):
    """The model's tokenizer and its template."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def template(self) -> ChatTemplate:
        """Raises ``MalformedError`` where the model has none."""
        ...
