"""Episodes on the virtual host: a simulated engine whose samples can go on elsewhere from save points only.

A real episode talks to tools or to an environment, so the tokens behind its last save point are of no use to an engine
that has not seen them made. Here every report of progress is a turn, and some turns are followed by a save point.

Invariants that it asserts:

* An attempt that is new to this engine goes on from a save point of its own, with the state that was saved there, or
  from nothing.
* An attempt that is paused here goes on with all that it had; when its last tokens were taken back it cannot, and ends
  as an ``infra_error``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.backends.draws import uniform
from penstock.messages.commands import Generate
from penstock.messages.local import EpisodeMoved, GenerationAdvanced, GenerationEnded
from penstock.messages.samples import Cancelled, InfraError, Part, SavePoint

if TYPE_CHECKING:
    from penstock.backends.protocol import Emit, Fail
    from penstock.backends.simulated.engine import SimulatedEngine
    from penstock.messages.base import Metric
    from penstock.messages.commands import EngineCommand
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import SampleKey
    from trials.faulty_engine import FaultyEngine


class _Session(msgspec.Struct):
    """One attempt, as long as it runs or is paused here."""

    attempt: int
    num_tokens: int
    num_turns: int
    is_paused: bool = False
    is_outside: bool = False
    """It waits for a tool."""


class EpisodicEngine:
    """The same engine, playing episodes."""

    def __init__(self, engine: SimulatedEngine | FaultyEngine, save_share: float) -> None:
        """``save_share``: of the turns after which the episode is saved."""
        self._engine = engine
        self._save_share = save_share
        self._sessions: dict[SampleKey, _Session] = {}
        self._num_outside = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._engine.start(self._tell, fail)

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        if not isinstance(command, Generate):
            self._engine.execute(command)
            return
        session, prefix = self._sessions.get(command.key), command.prefix
        num_tokens = 0 if prefix is None else prefix.num_tokens
        if session is None or session.attempt != command.attempt:
            num_turns = _num_turns_at(command.key, prefix)
            self._num_outside -= session is not None and session.is_outside
            self._sessions[command.key] = _Session(command.attempt, num_tokens, num_turns)
        elif num_tokens < session.num_tokens:
            del self._sessions[command.key]
            outcome = InfraError(detail="its last tokens were made by weights that turned out wrong")
            ended = GenerationEnded(key=command.key, attempt=command.attempt, outcome=outcome, part=prefix or Part())
            self._emit(ended)
            return
        else:
            assert session.is_paused, f"{command.key} is asked for twice"
            assert session.num_tokens == num_tokens, f"{command.key} goes on with more than there was"
            session.is_paused = False
        self._engine.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Those of the engine."""
        return self._engine.gauges()

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._engine.close(timeout_s)

    def _tell(self, event: LocalEvent) -> None:
        self._emit(event)
        if not isinstance(event, GenerationAdvanced | GenerationEnded):
            return
        session = self._sessions.get(event.key)
        if session is None or session.attempt != event.attempt:
            return
        if isinstance(event, GenerationEnded):
            session.num_tokens = event.part.num_tokens
            session.is_paused = event.outcome == Cancelled(cause="interrupted")
            self._move(event, session, is_outside=False)
            if not session.is_paused:
                del self._sessions[event.key]
            return
        session.num_tokens = event.from_token + event.chunk.num_tokens
        session.num_turns += 1
        self._move(event, session, is_outside=not session.is_outside)
        if uniform(event.key.group_id, event.key.index, session.num_turns) < self._save_share:
            point = SavePoint(session.num_tokens, session.num_turns, saved_state(event.key, session.num_tokens))
            chunk = Part(save_point=point)
            self._emit(
                GenerationAdvanced(key=event.key, attempt=event.attempt, from_token=session.num_tokens, chunk=chunk)
            )

    def _move(self, event: GenerationAdvanced | GenerationEnded, session: _Session, *, is_outside: bool) -> None:
        """Every second turn is a tool's."""
        if is_outside is not session.is_outside:
            session.is_outside = is_outside
            self._num_outside += 1 if is_outside else -1
            self._emit(EpisodeMoved(key=event.key, attempt=event.attempt, num_outside=self._num_outside))


def saved_state(key: SampleKey, num_tokens: int) -> bytes:
    """What the episode of a sample saves behind so many tokens."""
    return f"{key.group_id} {key.index} {num_tokens}".encode()


def _num_turns_at(key: SampleKey, prefix: Part | None) -> int:
    """Of an attempt that comes with this prefix."""
    if prefix is None or not prefix.num_tokens:
        return 0
    point = prefix.save_point
    assert point is not None, f"{key} goes on from token {prefix.num_tokens}, and was never saved"
    assert point.num_tokens == prefix.num_tokens, f"{key} goes on from {prefix.num_tokens}, saved at {point.num_tokens}"
    assert point.state == saved_state(key, point.num_tokens), f"{key} goes on with the state {point.state!r}"
    return point.num_turns
