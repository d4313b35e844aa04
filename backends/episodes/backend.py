"""Any engine's backend, with episodes for generations: the actor asks for a sample and hears of one, and what it was
made of (turns of the model, tokens of others between them) stays here.

Invariants:

* Each ``Generate`` of the actor is answered by exactly one ``GenerationEnded``, and when it is, none of the episode's
  generations runs in the engine any more, or its end was ordered before anything that the actor can order afterwards.
* An episode runs at most one generation at a time. Its generations have the sample's key, and as attempt a number of
  this backend's own, which no two share.
* ``InterruptGenerations`` pauses every episode; nothing is given to the engine for a paused one. The same ``Generate``
  again, with what it was told as prefix, lets the episode go on from there, and whoever waits for a turn waits on.
* Between ``ApplyWeights`` and its answer no generation is given to the engine, as the actor gives it none.
* The actor is told each token of an episode once, in order.
* An episode that comes with a part that ends at its save point goes on from there, with the state that was saved then.

| waits for | who ends it |
|---|---|
| a turn | the engine, whose deadlines hold as for any generation |
| the next turn, or the end | the driver, which has a deadline for each episode |
| a paused episode for its ``Generate`` | the actor, after the swap; past ``MAX_PAUSE_S`` it is forgotten: settled |
| a turn that begins during a swap | the engine's ``WeightsSwapped``, which the WeightPublisher's deadlines see to |
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.engines.options import SamplingOptions
from penstock.backends.episodes.episode import (
    ABORTED,
    INTERRUPTED,
    MAX_PAUSE_S,
    Dialogue,
    EpisodePhase,
    ModelTurn,
    PlayedEpisode,
)
from penstock.backends.episodes.moves import CUT_OFF, EpisodeMoves, ending_of
from penstock.backends.episodes.moves import INTERRUPTED as TURN_INTERRUPTED
from penstock.backends.episodes.protocol import EpisodeOverError
from penstock.backends.episodes.turn_sampling import CAUSES
from penstock.backends.protocol import Leaver
from penstock.messages.base import Metric
from penstock.messages.commands import AbortGeneration, ApplyWeights, Generate, InterruptGenerations
from penstock.messages.engine_counts import added
from penstock.messages.local import GenerationAdvanced, GenerationEnded, WeightsSwapped
from penstock.messages.parts import cut
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    Part,
    PolicyError,
    Prompt,
    SavePoint,
    StopReason,
    Truncated,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.episodes.protocol import CallMade, EpisodeDriver, EpisodeOutcome, TurnRequest
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.messages.commands import EngineCommand
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import Outcome, SampleKey


class EpisodeBackend:
    """See the module."""

    def __init__(
        self,
        inner: Backend[EngineCommand],
        driver: EpisodeDriver,
        *,
        sampling: SamplingOptions | None = None,
        now_s: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._inner = inner
        self._driver = driver
        self._now_s = now_s
        self.sampling = sampling or SamplingOptions()
        """Of the run: what is drawn otherwise is not trained."""
        self._num_masked = dict.fromkeys(CAUSES, 0)
        self._num_untaken = 0
        self._episodes: dict[SampleKey, PlayedEpisode] = {}
        self._turns: dict[int, PlayedEpisode] = {}
        """Episodes by the attempt of their running generation."""
        self._attempts = itertools.count()
        self._moves = EpisodeMoves(now_s, now_ns)
        self._is_swapping = False
        self.lock = threading.RLock()
        """Re-entrant, as an engine may answer within ``execute``."""

    # --- Backend ----------------------------------------------------------------------------------------------

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._moves.start(emit)
        self._driver.start(fail)
        self._inner.start(self._hear, fail)

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        with self.lock:
            match command:
                case Generate():
                    self._on_generate(command)
                case AbortGeneration():
                    self._on_abort(command)
                case InterruptGenerations():
                    self._on_interrupt(command)
                case _:
                    self._is_swapping |= isinstance(command, ApplyWeights)
                    self._inner.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Those of the engine, those of the driver, and how long episodes have waited for tools."""
        with self.lock:
            moves = self._moves.gauges()
            masked = [Metric(f"episodes/masked_{cause}", float(count)) for cause, count in self._num_masked.items()]
            untaken = Metric("episodes/untaken_tokens", float(self._num_untaken))
        return (*self._inner.gauges(), *self._driver.gauges(), *moves, *masked, untaken)

    def leaves(self) -> None:
        """See :class:`penstock.backends.protocol.Leaver`."""
        if isinstance(self._inner, Leaver):
            self._inner.leaves()

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        deadline_s = time.monotonic() + timeout_s
        self._driver.close(timeout_s / 2)
        self._inner.close(max(0.0, deadline_s - time.monotonic()))

    # --- the actor's commands ---------------------------------------------------------------------------------

    def _on_generate(self, command: Generate) -> None:
        self._forget_left_behind()
        episode = self._episodes.get(command.key)
        if episode is not None and episode.issued.attempt == command.attempt:
            self._resume(episode, 0 if command.prefix is None else command.prefix.num_tokens)
            return
        if episode is not None:
            self._take_away(episode, ABORTED, "its sample was issued again")
        prefix = command.prefix
        point = None if prefix is None else prefix.save_point
        if prefix is not None and prefix.num_tokens and (point is None or point.num_tokens != prefix.num_tokens):
            # Its agent talked to an engine that is gone, and nobody can put it back to where that part ends.
            outcome = InfraError(detail="the session of this sample is gone with its engine")
            self._answer(command, outcome, prefix)
            return
        episode = self._episodes[command.key] = PlayedEpisode(self, command)
        if prefix is not None and point is not None:
            episode.restore(prefix, point.num_turns)
        self._moves.note(episode)
        self._driver.opened(episode)

    def _resume(self, episode: PlayedEpisode, num_kept: int) -> None:
        assert episode.phase is EpisodePhase.PAUSED, f"{episode.issued.key} was asked for twice"
        episode.phase = EpisodePhase.RUNNING
        if num_kept < episode.num_told:  # what was put before a turn that has begun in the pause it has not heard of
            reason = "its last tokens were made by weights that turned out wrong"
            self._take_away(episode, InfraError(detail=reason), reason)
            return
        if episode.outcome is not None:
            self._finish(episode, episode.outcome)
            return
        self._moves.note(episode)
        self._driver.resumed(episode)
        if episode.turn is not None:
            self._run_turn(episode, episode.turn)

    def _on_abort(self, command: AbortGeneration) -> None:
        episode = self._episodes.get(command.key)
        if episode is not None and episode.issued.attempt == command.attempt:
            self._take_away(episode, ABORTED, "its sample is not needed any more")

    def _take_away(self, episode: PlayedEpisode, outcome: Outcome, reason: str) -> None:
        if episode.outcome is None:
            self._driver.closed(episode, reason)
        self._set_outcome(episode, outcome)
        if episode.phase is EpisodePhase.PAUSED:
            self._forget(episode)

    def _on_interrupt(self, command: InterruptGenerations) -> None:
        for episode in self._episodes.values():
            if episode.phase is EpisodePhase.RUNNING and _runs(episode.turn):
                episode.phase = EpisodePhase.PAUSING
        self._inner.execute(command)
        for episode in list(self._episodes.values()):
            if episode.phase is EpisodePhase.RUNNING:
                self._pause(episode)

    def _pause(self, episode: PlayedEpisode) -> None:
        episode.phase, episode.paused_at_s = EpisodePhase.PAUSED, self._now_s()
        part = episode.all.whole()
        episode.num_told = part.num_tokens
        self._moves.over(episode, episode.turn, TURN_INTERRUPTED)
        self._answer(episode.issued, INTERRUPTED, part)

    def _forget_left_behind(self) -> None:
        """A paused episode whose sample was settled is never asked for again, and nobody says so."""
        limit_s = self._now_s() - MAX_PAUSE_S
        paused = [each for each in self._episodes.values() if each.phase is EpisodePhase.PAUSED]
        for episode in [each for each in paused if each.paused_at_s < limit_s]:
            self._take_away(episode, ABORTED, "its sample is not needed any more")

    # --- what the driver asks for -----------------------------------------------------------------------------

    def begin_turn(self, episode: PlayedEpisode, request: TurnRequest) -> None:
        """See :class:`~penstock.backends.episodes.protocol.Episode`."""
        with self.lock:
            if episode.outcome is not None or episode.phase is EpisodePhase.OVER:
                raise EpisodeOverError("the episode is over")
            assert episode.turn is None, "one turn at a time"
            self._put_before(episode, request)
            transcript = episode.conversations[request.conversation].transcript
            episode.num_turns += 1
            masked = episode.why_masked(request)
            episode.masked |= {masked} - {""}
            episode.turn = ModelTurn(request, transcript, episode.all.num_tokens, episode.num_turns, masked)
            self._moves.note(episode)
            if episode.phase is EpisodePhase.RUNNING:
                self._run_turn(episode, episode.turn)

    def take(self, episode: PlayedEpisode, choice: int, into: int) -> None:
        """See :class:`~penstock.backends.episodes.protocol.Episode`."""
        with self.lock:
            taken = episode.conversations.get(choice)
            if taken is None or not taken.is_choice or episode.outcome is not None:
                return
            taken.is_choice = False
            goes_on = episode.conversations.setdefault(into, Dialogue(episode.issued.prompt))
            if goes_on.transcript.goes_on_with(taken.transcript):
                goes_on.num_turns += taken.num_turns
                del episode.conversations[choice]

    def saved(self, episode: PlayedEpisode, state: bytes) -> None:
        """See :class:`~penstock.backends.episodes.protocol.Episode`."""
        with self.lock:
            is_whole = len(episode.conversations) == 1 and not episode.has_choices
            if episode.phase is not EpisodePhase.RUNNING or episode.turn is not None or not is_whole:
                return
            self._tell(episode)
            issued, num_tokens = episode.issued, episode.all.num_tokens
            chunk = Part(save_point=SavePoint(num_tokens, episode.num_turns, state))
            self._emit(GenerationAdvanced(key=issued.key, attempt=issued.attempt, from_token=num_tokens, chunk=chunk))

    def called(self, episode: PlayedEpisode, call: CallMade) -> None:
        """See :class:`~penstock.backends.episodes.protocol.Episode`."""
        with self.lock:
            self._moves.called(episode, call)

    def _put_before(self, episode: PlayedEpisode, request: TurnRequest) -> None:
        """What the model is to see before it answers."""
        conversation = episode.conversations.setdefault(request.conversation, Dialogue(episode.issued.prompt))
        if request.is_choice:
            conversation.is_choice = episode.has_choices = True
        transcript, is_first = conversation.transcript, not conversation.num_turns
        conversation.num_turns += 1
        if is_first:
            transcript.begin_with(request.tokens, request.media)
            if not episode.num_turns:
                episode.all.begin_with(request.tokens, request.media)
            return
        if transcript.num_tokens:
            episode.all.add_foreign(request.tokens, request.media)
        transcript.add_foreign(request.tokens, request.media)

    def end(self, episode: PlayedEpisode, outcome: EpisodeOutcome) -> None:
        """See :class:`~penstock.backends.episodes.protocol.Episode`."""
        with self.lock:
            if episode.outcome is None:
                self._set_outcome(episode, outcome)

    def _set_outcome(self, episode: PlayedEpisode, outcome: Outcome) -> None:
        """The episode ends with this as soon as its turn has, and while it is paused not before it is resumed."""
        if episode.phase is EpisodePhase.OVER:
            return
        episode.outcome = outcome
        turn = episode.turn
        if turn is not None and _runs(turn):
            episode.phase = EpisodePhase.ENDING
            self._inner.execute(AbortGeneration(episode.issued.key, turn.attempt))
        elif episode.phase is EpisodePhase.RUNNING:
            self._finish(episode, outcome)

    # --- turns ------------------------------------------------------------------------------------------------

    def _run_turn(self, episode: PlayedEpisode, turn: ModelTurn) -> None:
        if self._is_swapping:
            return
        issued, transcript, sampling = episode.issued, turn.transcript, turn.request.sampling
        if sampling is not None and sampling.is_constrained and transcript.num_tokens > turn.begin:
            # The engine would begin with the schema anew, behind what there is.
            self._give_up(episode, InfraError(detail="a turn that is held to a schema was interrupted by new weights"))
            return
        self._moves.asked(turn)
        turn.attempt = next(self._attempts)
        self._turns[turn.attempt] = episode
        before = transcript.context + transcript.slice(0, turn.begin).tokens
        made = transcript.slice(turn.begin)
        self._inner.execute(
            Generate(
                key=issued.key,
                attempt=turn.attempt,
                purpose=issued.purpose,
                prompt=Prompt(
                    row=issued.prompt.row,
                    epoch=issued.prompt.epoch,
                    tokens=before,
                    dataset=issued.prompt.dataset,
                    media=transcript.media,
                ),
                seed=episode.turn_seed(sampling),
                deadline_version=issued.deadline_version,
                prefix=msgspec.structs.replace(made, context_tokens=b"") if made.num_tokens else None,
                max_new_tokens=turn.request.max_new_tokens,
                sampling=sampling,
            )
        )

    def _hear(self, event: LocalEvent) -> None:
        """What the engine says, from any of its threads."""
        with self.lock:
            if not isinstance(event, GenerationAdvanced | GenerationEnded):
                self._emit(event)
                if isinstance(event, WeightsSwapped):
                    self._run_held_turns()
                return
            episode = self._turns.get(event.attempt)
            if episode is None or episode.turn is None:
                return
            if isinstance(event, GenerationAdvanced):
                self._take_tokens(episode, episode.turn, event.chunk)
                self._tell(episode)
                if episode.turn.cut_as is not None and episode.phase is not EpisodePhase.ENDING:
                    self._inner.execute(AbortGeneration(event.key, event.attempt))
            else:
                self._on_turn_ended(episode, episode.turn, event)

    def _run_held_turns(self) -> None:
        self._is_swapping = False
        for episode in list(self._episodes.values()):
            if episode.phase is EpisodePhase.RUNNING and episode.turn is not None and not _runs(episode.turn):
                self._run_turn(episode, episode.turn)

    def _take_tokens(self, episode: PlayedEpisode, turn: ModelTurn, new: Part) -> None:
        """Take over what the turn gained, up to where it is to end."""
        if turn.cut_as is not None:
            return
        transcript, limit = turn.transcript, turn.request.max_new_tokens
        num_before = transcript.num_tokens - turn.begin
        stop = None if turn.request.stops_at is None else turn.request.stops_at(new)
        if stop is not None and stop <= limit:
            turn.cut_as, new = Completed(stop=StopReason.STOP_STRING), cut(new, 0, stop - num_before)
        elif num_before + new.num_tokens > limit:
            turn.cut_as, new = Truncated(), cut(new, 0, limit - num_before)
        for growing in (transcript, episode.all):
            growing.add_model(new, is_trained=turn.is_trained)
        if turn.masked:
            self._num_masked[turn.masked] += new.num_tokens
        if new.num_tokens and episode.outcome is None:
            turn.request.listener.advanced(new)

    def _tell(self, episode: PlayedEpisode) -> None:
        """Tell the actor of the tokens that it does not know."""
        if episode.phase is EpisodePhase.RUNNING and episode.all.num_tokens > episode.num_told:
            chunk, begin = episode.all.slice(episode.num_told), episode.num_told
            episode.num_told = episode.all.num_tokens
            issued = episode.issued
            self._emit(GenerationAdvanced(key=issued.key, attempt=issued.attempt, from_token=begin, chunk=chunk))

    def _on_turn_ended(self, episode: PlayedEpisode, turn: ModelTurn, event: GenerationEnded) -> None:
        del self._turns[turn.attempt]
        turn.attempt = -1
        num_taken = turn.transcript.num_tokens - turn.begin
        if turn.cut_as is None:
            self._take_tokens(episode, turn, cut(event.part, num_taken))
        for growing in (turn.transcript, episode.all):
            growing.counts = added((growing.counts, event.part.counts))
        outcome = event.outcome if turn.cut_as is None else turn.cut_as
        if episode.outcome is not None:
            self._finish(episode, episode.outcome)
        elif isinstance(outcome, Cancelled):
            self._pause(episode)
        elif isinstance(outcome, InfraError | PolicyError):  # the engine makes no turn behind what the model has said
            self._give_up(episode, outcome)
        else:
            episode.turn = None
            self._tell(episode)
            self._moves.over(episode, turn, ending_of(outcome))
            turn.request.listener.ended(turn.transcript.slice(turn.begin), outcome)
            if episode.phase is EpisodePhase.PAUSING:
                self._pause(episode)

    def _give_up(self, episode: PlayedEpisode, outcome: InfraError | PolicyError) -> None:
        episode.outcome = outcome
        self._driver.closed(episode, outcome.detail)
        self._finish(episode, outcome)

    def _finish(self, episode: PlayedEpisode, outcome: Outcome) -> None:
        if (turn := episode.turn) is not None:  # cut off now, or in a pause: nobody has heard the end of it
            turn.transcript.mask_from(turn.begin)
            episode.all.mask_from(turn.begin_in_all)
        part, parts = episode.all.whole(), episode.parts()
        has_some = any(each.num_tokens > each.num_given_tokens for each in parts)
        if isinstance(outcome, Completed | Truncated) and not has_some:
            outcome = InfraError(detail=episode.nothing_to_train())
        self._num_untaken += episode.num_untaken
        self._forget(episode)
        self._answer(episode.issued, outcome, part, parts if len(parts) > 1 or episode.has_choices else ())

    def _forget(self, episode: PlayedEpisode) -> None:
        turn, episode.turn = episode.turn, None
        episode.phase = EpisodePhase.OVER
        self._moves.over(episode, turn, CUT_OFF)
        if self._episodes.get(episode.issued.key) is episode:
            del self._episodes[episode.issued.key]
        if turn is not None:
            begin = min(turn.begin, turn.transcript.num_tokens)
            turn.request.listener.ended(turn.transcript.slice(begin), ABORTED)

    def _answer(self, issued: Generate, outcome: Outcome, part: Part, parts: tuple[Part, ...] = ()) -> None:
        self._emit(GenerationEnded(key=issued.key, attempt=issued.attempt, outcome=outcome, part=part, parts=parts))


def _runs(turn: ModelTurn | None) -> bool:
    return turn is not None and turn.attempt >= 0
