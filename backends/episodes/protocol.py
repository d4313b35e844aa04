"""What an episode's driver is to the backend, and the backend's turns to the driver.

A driver decides what happens in an episode: which tokens come before each turn of the model, and when it is over. The
backend makes turns out of generations, whatever the weights do meanwhile. All methods may be called from any thread and
return at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.protocol import Fail
    from penstock.messages.base import Metric
    from penstock.messages.commands import Generate
    from penstock.messages.samples import Completed, InfraError, Media, Outcome, Part, PolicyError, Truncated
    from penstock.messages.turn_sampling import TurnSampling

    EpisodeOutcome = Completed | Truncated | PolicyError | InfraError


class EpisodeOverError(Exception):
    """Nothing more can be asked of this episode; the message says why."""


class TurnListener(Protocol):
    """Whoever waits for one turn."""

    def advanced(self, new: Part) -> None:
        """Tokens of this turn since the last call."""
        ...

    def ended(self, turn: Part, outcome: Outcome) -> None:
        """The turn is over, with all its tokens; ``Cancelled`` says that the episode is over with it."""
        ...


class TurnRequest(NamedTuple):
    """One turn of the model."""

    tokens: bytes
    """int32 ids to put after what there is; for the first turn of a conversation its whole context."""
    max_new_tokens: int
    listener: TurnListener
    stops_at: Callable[[Part], int | None] | None = None
    """Is shown the turn's new tokens as they come, and says how many tokens the turn shall have once it knows: those
    after them are thrown away, and it ends as with a stop string."""
    conversation: int = 0
    """Which of the episode's conversations goes on, counted from 0. Each that the model said something in becomes one
    part of the sample."""
    is_trained: bool = True
    """Whether its tokens may be trained."""
    is_chat: bool = True
    """The model answers messages; otherwise it goes on with a text."""
    sampling: TurnSampling | None = None
    """How it is drawn, where that is not as the scenario says."""
    is_choice: bool = False
    """It begins a conversation of its own that is no part of the sample unless it is taken."""
    media: tuple[Media, ...] = ()
    """Images that stand in ``tokens``, counted from the first of them."""


class CallMade(NamedTuple):
    """A tool, an environment or another server was called, and has answered or not."""

    name: str
    call_id: str
    """Of the model's own call; empty where there is none."""
    begin_ns: int
    """Unix time, as ``end_ns``."""
    end_ns: int
    error: str
    """Class of the exception that it ended with; empty where it answered."""


class Episode(Protocol):
    """One sample that is being played."""

    issued: Generate

    @property
    def num_context_tokens(self) -> int:
        """Tokens of context and response so far."""
        ...

    @property
    def num_response_tokens(self) -> int:
        """Of the response so far: the model's and the others'."""
        ...

    @property
    def num_model_tokens(self) -> int:
        """Of these, the model's."""
        ...

    @property
    def is_paused(self) -> bool:
        """Its engine takes new weights; a turn that begins now waits for them."""
        ...

    def so_far(self, conversation: int = 0) -> bytes:
        """int32 ids of context and response; nothing for a conversation without a turn."""
        ...

    def media_of(self, conversation: int = 0) -> tuple[Media, ...]:
        """Images among those ids, counted from the first of them."""
        ...

    def num_turns_of(self, conversation: int) -> int:
        """How many have begun."""
        ...

    def begin_turn(self, request: TurnRequest) -> None:
        """Have the model go on. One turn at a time.

        Raises:
            EpisodeOverError: it was aborted meanwhile, or has ended.
        """
        ...

    def why_masked(self, request: TurnRequest) -> str:
        """Why the tokens of such a turn would not be trained although its conversation is; empty: they would."""
        ...

    def take(self, choice: int, into: int) -> None:
        """The conversation ``into`` goes on with this choice, where it still stands as it did when the choice was made;
        otherwise the choice becomes a part of its own. Ignored for what is no choice, or is taken."""
        ...

    def saved(self, state: bytes) -> None:
        """It can go on from here, after its last turn, with this state. Ignored while a turn runs, and where there are
        several conversations."""
        ...

    def called(self, call: CallMade) -> None:
        """It has called something beside the model. Ignored for one that is over."""
        ...

    def end(self, outcome: EpisodeOutcome) -> None:
        """It is over. A turn that runs is cut off and not trained. Ignored for one that is over already."""
        ...


class EpisodeDriver(Protocol):
    """Plays episodes."""

    def start(self, fail: Fail) -> None:
        """Called once, before the first episode."""
        ...

    def opened(self, episode: Episode) -> None:
        """A sample to be played."""
        ...

    def resumed(self, episode: Episode) -> None:
        """It was paused, and goes on."""
        ...

    def closed(self, episode: Episode, reason: str) -> None:
        """It was taken away: nobody needs it any more, or it goes on elsewhere."""
        ...

    def gauges(self) -> tuple[Metric, ...]:
        """As of a backend."""
        ...

    def close(self, timeout_s: float) -> None:
        """End everything within the time."""
        ...
