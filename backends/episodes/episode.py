"""One episode as its engine's backend keeps it: its conversations, its turn, how far it is told."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from penstock.backends.draws import mixed
from penstock.backends.episodes.transcript import Transcript
from penstock.backends.episodes.turn_sampling import why_masked
from penstock.messages.arrays import TOKEN_BYTES
from penstock.messages.samples import Cancelled, Part, Purpose

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.episodes.protocol import CallMade, EpisodeOutcome, TurnRequest
    from penstock.messages.commands import Generate
    from penstock.messages.samples import Media, Outcome, Prompt
    from penstock.messages.turn_sampling import TurnSampling

MAX_PAUSE_S: Final = 3600.0
INTERRUPTED: Final = Cancelled(cause="interrupted")
ABORTED: Final = Cancelled(cause="aborted")
TURN_SEED: Final = 0x7E57


class EpisodePhase(Enum):
    RUNNING = "running"
    """The actor waits for its end."""
    PAUSING = "pausing"
    """An interrupt was ordered, and its turn has not ended yet."""
    PAUSED = "paused"
    """The actor was told that it is interrupted."""
    ENDING = "ending"
    """Its outcome is known, and its turn has not ended yet."""
    OVER = "over"


class ModelTurn:
    """One turn of the model: one generation, or several where it was interrupted."""

    def __init__(
        self, request: TurnRequest, transcript: Transcript, begin_in_all: int, number: int, masked: str = ""
    ) -> None:
        self.request = request
        self.masked = masked
        """Why its tokens are not trained although its conversation is; empty: they are."""
        self.number = number
        """Of the episode's turns, counted from 1."""
        self.transcript = transcript
        """Of its conversation."""
        self.begin = transcript.num_tokens
        """Where it begins there."""
        self.begin_in_all = begin_in_all
        """Where it begins in the response."""
        self.attempt = -1
        """Of its generation; −1 while none runs."""
        self.began_ns = 0
        """When the model began with it, or went on after a pause: Unix time; 0 while it does not."""
        self.stretch_from = 0
        """Where its transcript ended then."""
        self.cut_as: Outcome | None = None
        """It has all the tokens that it shall have, and so ends: what the engine still makes of it is thrown away."""

    @property
    def is_trained(self) -> bool:
        return self.request.is_trained and not self.masked


class Dialogue:
    """One sequence of tokens that the model goes on from."""

    def __init__(self, prompt: Prompt) -> None:
        self.transcript = Transcript(prompt)
        self.num_turns = 0
        self.is_choice = False
        """It is no part of the sample, unless it is taken."""


class EpisodeKeeper(Protocol):
    """What an episode needs of the backend that keeps it."""

    sampling: SamplingOptions
    """Of the run."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """That its state belongs to."""
        ...

    def begin_turn(self, episode: PlayedEpisode, request: TurnRequest) -> None:
        """See :class:`~penstock.backends.episodes.protocol.Episode`, as for the others."""
        ...

    def take(self, episode: PlayedEpisode, choice: int, into: int) -> None: ...

    def saved(self, episode: PlayedEpisode, state: bytes) -> None: ...

    def called(self, episode: PlayedEpisode, call: CallMade) -> None: ...

    def end(self, episode: PlayedEpisode, outcome: EpisodeOutcome) -> None: ...


class PlayedEpisode:
    """See :class:`~penstock.backends.episodes.protocol.Episode`. All its state belongs to the backend's lock."""

    def __init__(self, backend: EpisodeKeeper, issued: Generate) -> None:
        self.backend = backend
        self.issued = issued
        self.all = Transcript(issued.prompt)
        """Everything that was said, in the order in which it was: what the actor hears of."""
        self.conversations: dict[int, Dialogue] = {}
        self.phase = EpisodePhase.RUNNING
        self.turn: ModelTurn | None = None
        self.num_turns = 0
        self.has_choices = False
        """So not all that was said is part of the sample."""
        self.masked: set[str] = set()
        """Why turns of it are not trained."""
        self.num_told = 0
        """Tokens that the actor knows of."""
        self.outcome: Outcome | None = None
        """Once it is known."""
        self.paused_at_s = 0.0
        self.is_outside = False
        """It waits for its function, and asks nothing of the engine."""

    @property
    def num_context_tokens(self) -> int:
        return len(self.so_far()) // TOKEN_BYTES

    @property
    def num_response_tokens(self) -> int:
        return self.all.num_tokens

    @property
    def num_model_tokens(self) -> int:
        return self.all.num_model_tokens

    @property
    def is_paused(self) -> bool:
        return self.phase in (EpisodePhase.PAUSED, EpisodePhase.PAUSING)

    def so_far(self, conversation: int = 0) -> bytes:
        with self.backend.lock:
            known = self.conversations.get(conversation)
            return known.transcript.so_far() if known else self.issued.prompt.tokens if not conversation else b""

    def media_of(self, conversation: int = 0) -> tuple[Media, ...]:
        with self.backend.lock:
            known = self.conversations.get(conversation)
            return known.transcript.media if known else self.issued.prompt.media if not conversation else ()

    def num_turns_of(self, conversation: int) -> int:
        with self.backend.lock:
            known = self.conversations.get(conversation)
            return known.num_turns if known else 0

    def parts(self) -> tuple[Part, ...]:
        """One for each conversation in which the model said something; of choices, those that were taken."""
        kept = [number for number in sorted(self.conversations) if not self.conversations[number].is_choice]
        found = [self.conversations[number].transcript.whole() for number in kept]
        return tuple(part for part in found if part.num_tokens)

    def begin_turn(self, request: TurnRequest) -> None:
        self.backend.begin_turn(self, request)

    @property
    def num_untaken(self) -> int:
        """Tokens of choices that were not taken."""
        return sum(each.transcript.num_tokens for each in self.conversations.values() if each.is_choice)

    def turn_seed(self, sampling: TurnSampling | None) -> int:
        """Of the turn that has begun. The numbers of the sample's own stream would come again in every turn."""
        if sampling is not None and sampling.seed is not None:
            return sampling.seed
        seed = self.issued.seed
        return mixed(seed, TURN_SEED, self.num_turns) >> 1 if self.num_turns > 1 else seed

    def nothing_to_train(self) -> str:
        """That there is nothing, and why."""
        detail = "the episode ended without one token of the model that may be trained"
        if self.masked:
            causes = ", ".join(sorted(self.masked))
            return f"{detail}: its turns were drawn otherwise than block sampling: says ({causes})"
        if not self.num_turns:
            return f"{detail}: it has asked the model for nothing (await play.say(…) or play.generate(…))"
        return f"{detail}; none of its choices was taken" if self.has_choices else detail

    def why_masked(self, request: TurnRequest) -> str:
        is_trained = request.is_trained and self.issued.purpose is not Purpose.EVALUATE
        return why_masked(request.sampling, self.backend.sampling) if is_trained else ""

    def take(self, choice: int, into: int) -> None:
        self.backend.take(self, choice, into)

    def saved(self, state: bytes) -> None:
        self.backend.saved(self, state)

    def called(self, call: CallMade) -> None:
        self.backend.called(self, call)

    def end(self, outcome: EpisodeOutcome) -> None:
        self.backend.end(self, outcome)

    def restore(self, prefix: Part, num_turns: int) -> None:
        """Go on after this part, in the only conversation."""
        prompt = self.issued.prompt
        conversation = self.conversations[0] = Dialogue(prompt)
        context = prefix.context_tokens or prompt.tokens
        num_context = len(context) // TOKEN_BYTES
        seen = tuple(each for each in prefix.media_after(prompt) if each.at < num_context)
        for transcript in (conversation.transcript, self.all):
            transcript.begin_with(context, seen)
            transcript.add_known(prefix)
        conversation.num_turns = self.num_turns = num_turns
        self.num_told = prefix.num_tokens
