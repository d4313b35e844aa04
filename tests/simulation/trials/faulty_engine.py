"""An engine some of whose fetches and swaps go wrong, and some of whose requests stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.draws import uniform
from penstock.messages.commands import ApplyWeights, FetchWeights, Generate

if TYPE_CHECKING:
    from penstock.backends.protocol import Emit, Fail
    from penstock.backends.simulated.engine import SimulatedEngine
    from penstock.messages.base import Metric
    from penstock.messages.commands import EngineCommand

_FETCHES, _SWAPS, _HANGS = range(3)
"""Streams of random numbers of one engine incarnation."""

Where = tuple[int, int, int]
"""Seed of the trial, index of the engine, its epoch."""


class FaultyEngine:
    """The same engine, which each time that it is asked may do it wrong."""

    def __init__(self, engine: SimulatedEngine, where: Where, *, bad_weights_rate: float, hang_rate: float) -> None:
        """
        Args:
            engine: that does the work.
            where: what the draws depend on.
            bad_weights_rate: share of fetches, and of swaps, that bring other weights than they should.
            hang_rate: share of attempts that stand still after their first report.
        """
        self._engine, self._where = engine, where
        self._bad_weights_rate, self._hang_rate = bad_weights_rate, hang_rate
        self._num_fetches = self._num_swaps = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._engine.start(emit, fail)

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        match command:
            case FetchWeights():
                self._num_fetches += 1
                self._engine.corrupt_fetches = self._is_bad(_FETCHES, self._num_fetches)
            case ApplyWeights():
                self._num_swaps += 1
                self._engine.corrupt_swaps = self._is_bad(_SWAPS, self._num_swaps)
            case Generate(key=key):
                hangs = uniform(*self._where, _HANGS, key.group_id, key.index, command.attempt) < self._hang_rate
                self._engine.num_hangs = int(hangs)
            case _:
                pass
        self._engine.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Those of the engine."""
        return self._engine.gauges()

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._engine.close(timeout_s)

    def _is_bad(self, stream: int, number: int) -> int:
        return int(uniform(*self._where, stream, number) < self._bad_weights_rate)
