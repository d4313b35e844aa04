"""What the actor is told of an episode's turns and calls, and how long episodes were outside the engine.

Invariants:

* ``num_outside`` is how many episodes run and wait for their function: its tools, its environment, its agent. An
  episode that is paused, or whose turn the model makes or is about to make, is not among them.
* A turn is told in stretches, none of which contains a pause. What was told is over; nothing is told twice.
* Called under the lock of the backend, before the actor hears that the episode has ended or is interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.episodes.episode import EpisodePhase
from penstock.messages.arrays import TOKEN_BYTES
from penstock.messages.base import Metric
from penstock.messages.local import EpisodeMoved, ToolCalled, TurnTaken
from penstock.messages.samples import Completed, StopReason, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.episodes.episode import ModelTurn, PlayedEpisode
    from penstock.backends.episodes.protocol import CallMade
    from penstock.backends.protocol import Emit
    from penstock.messages.samples import Outcome

INTERRUPTED: Final = "interrupted"
CUT_OFF: Final = "cut_off"


class EpisodeMoves:
    """See the module."""

    def __init__(self, now_s: Callable[[], float], now_ns: Callable[[], int]) -> None:
        self.num_outside = 0
        self._now_s = now_s
        self._now_ns = now_ns
        self._outside_s = 0.0
        """Summed over episodes, up to ``_since_s``."""
        self._since_s = now_s()

    def start(self, emit: Emit) -> None:
        """From now on the actor hears."""
        self._emit = emit

    def gauges(self) -> tuple[Metric, ...]:
        """How many are outside, and the time that all were, summed over them."""
        self._add_up()
        return (
            Metric("episodes/waiting_for_tools", float(self.num_outside)),
            Metric("episodes/tool_wait_s", self._outside_s),
        )

    def asked(self, turn: ModelTurn) -> None:
        """The engine makes the turn from now on, or goes on with it."""
        turn.began_ns, turn.stretch_from = self._now_ns(), turn.transcript.num_tokens

    def over(self, episode: PlayedEpisode, turn: ModelTurn | None, ending: str) -> None:
        """The turn, or this stretch of it, is over, and the episode is where its phase says."""
        if turn is None or not turn.began_ns:
            self.note(episode)
            return
        made = turn.transcript.slice(turn.stretch_from)
        step = TurnTaken(
            number=turn.number,
            conversation=turn.request.conversation,
            begin_ns=turn.began_ns,
            end_ns=max(turn.began_ns, self._now_ns()),
            num_context_tokens=len(turn.transcript.context) // TOKEN_BYTES + turn.stretch_from,
            spans=made.spans,
            ending=ending,
            is_chat=turn.request.is_chat,
            is_trained=turn.is_trained,
            masked=turn.masked,
        )
        turn.began_ns = 0
        self.note(episode, step)

    def called(self, episode: PlayedEpisode, call: CallMade) -> None:
        """Its function has called a tool, and has its answer."""
        if episode.phase is not EpisodePhase.OVER:
            step = ToolCalled(
                after_turn=episode.num_turns,
                name=call.name,
                call_id=call.call_id,
                begin_ns=call.begin_ns,
                end_ns=max(call.begin_ns, call.end_ns),
                error=call.error,
            )
            self.note(episode, step)

    def note(self, episode: PlayedEpisode, step: TurnTaken | ToolCalled | None = None) -> None:
        """Tell the actor of this step, and if the episode has gone outside or come back."""
        is_outside = episode.phase is EpisodePhase.RUNNING and episode.turn is None
        if is_outside is not episode.is_outside:
            self._add_up()
            self.num_outside += 1 if is_outside else -1
            episode.is_outside = is_outside
        elif step is None:
            return
        issued, num_outside = episode.issued, self.num_outside
        self._emit(EpisodeMoved(key=issued.key, attempt=issued.attempt, num_outside=num_outside, step=step))

    def _add_up(self) -> None:
        now_s = self._now_s()
        self._outside_s += self.num_outside * (now_s - self._since_s)
        self._since_s = now_s


def ending_of(outcome: Outcome) -> str:
    """How a turn ended that ended by itself."""
    if isinstance(outcome, Truncated):
        return "length"
    return "end_token" if isinstance(outcome, Completed) and outcome.stop is StopReason.END_TOKEN else "stop_string"
