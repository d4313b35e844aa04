"""Any engine's backend, whose process passes the weights that land in it on to other engines.

Invariants:

* The engine is told of nothing and works as it would alone. What its actor hears besides is where the weights are
  served, with the word that it is up, and what other engines did not give, with the word of each fetch.
* Where nothing can be served the engine comes up all the same, and says so.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import are_modelled, capabilities_of
from penstock.backends.protocol import Capability
from penstock.backends.weights.protocol import WeightTransportError
from penstock.backends.weights.spec import NETWORK
from penstock.messages.base import Metric
from penstock.messages.local import EngineOpened, WeightsStagedLocally

if TYPE_CHECKING:
    from penstock.backends.engines.options import EnginesOptions
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.messages.commands import EngineCommand
    from penstock.messages.local import LocalEvent
    from penstock.messages.weights import WeightDetour


def pass_on(engines: EnginesOptions, *, transport: str, fan_out: str) -> bool:
    """Whether the engines of a run pass weights on to each other: where they come over the network, and several take
    them, now or later.

    Args:
        engines: of the run.
        transport: of the weights; ``auto`` is none.
        fan_out: ``weights.fan_out``.
    """
    takers = [group for group in engine_groups(engines) if Capability.HOLDS_WEIGHTS in capabilities_of(group)]
    most = engines.max or sum(group.count for group in takers)
    return transport == NETWORK and fan_out == "tree" and bool(takers) and most > 1 and not are_modelled(engines)


class PassesOn(Protocol):
    """What lands in a process, and serves it; :class:`~penstock.backends.weights.network.Landing`."""

    def pass_on(self, engine: str, host: str) -> str:
        """Serve from here on; the location. Raises WeightTransportError."""
        ...

    def detours_of(self, publish: int) -> tuple[WeightDetour, ...]:
        """What other engines did not give of this publish; told once."""
        ...

    @property
    def passed_on_bytes(self) -> int:
        """To other engines so far."""
        ...

    def stop(self) -> None:
        """Serve no more."""
        ...


class PassingOn:
    """See the module."""

    def __init__(self, inner: Backend[EngineCommand], landing: PassesOn, *, engine: str, host: str) -> None:
        """
        Args:
            inner: the engine.
            landing: where its weights land.
            engine: name of its actor.
            host: this machine's address as other engines see it.
        """
        self._inner, self._landing = inner, landing
        self._engine, self._host = engine, host

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._inner.start(partial(self._hear, emit), fail)

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._inner.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """See :class:`penstock.backends.protocol.Backend`."""
        passed_on = Metric("engine/weights_passed_on_bytes", self._landing.passed_on_bytes)
        return (*self._inner.gauges(), passed_on)

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        try:
            self._inner.close(timeout_s)
        finally:
            self._landing.stop()

    def _hear(self, emit: Emit, event: LocalEvent) -> None:
        match event:
            case EngineOpened():
                emit(self._opened(event))
            case WeightsStagedLocally():
                emit(msgspec.structs.replace(event, detours=self._landing.detours_of(event.publish)))
            case _:
                emit(event)

    def _opened(self, event: EngineOpened) -> EngineOpened:
        try:
            location = self._landing.pass_on(self._engine, self._host)
        except WeightTransportError as error:
            notice = f"it passes no weights on to other engines: {error}"
            return msgspec.structs.replace(event, notices=(*event.notices, notice))
        return msgspec.structs.replace(event, passes_on_at=location)
