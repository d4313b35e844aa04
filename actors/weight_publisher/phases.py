"""How one engine comes to new weights, as the WeightPublisher sees it, as data."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from penstock.messages.local import TimerFired
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.weights import EngineReady, WeightsApplied, WeightsExported, WeightsFetched

if TYPE_CHECKING:
    from penstock.actors.transitions import Transitions


class Phase(StrEnum):
    """What the publisher waits for from one engine."""

    STARTING = "starting"
    IDLE = "idle"
    """Nothing: it serves what it is to serve."""
    STAGING = "staging"
    """It fetches."""
    STAGED = "staged"
    """It has fetched; another goes first, which is the canary."""
    COMMITTING = "committing"
    """It drains or interrupts what runs, and swaps."""
    QUARANTINED = "quarantined"
    """It is given up; the supervisor replaces it."""


LOST: Final = (EngineLost, EngineJoined, EngineLeaving)
"""Another incarnation may join before the loss of this one is heard of. One that is to leave takes part in nothing."""
ABSENT: Final = (*LOST, EngineReady)
"""Nor does one whose lent device is taken back, which is said as ``EngineReady`` without slots."""

ENGINE: Final[Transitions] = {
    (None, EngineJoined): (Phase.STARTING,),
    (None, EngineReady): (Phase.STARTING,),  # a lent device is taken back
    (Phase.STARTING, TimerFired): (Phase.QUARANTINED,),
    (Phase.IDLE, WeightsExported): (Phase.STAGING,),
    (Phase.IDLE, TimerFired): (Phase.STAGING,),  # the one that it was to wait for is given up
    (Phase.IDLE, WeightsFetched): (Phase.STAGING, Phase.QUARANTINED),
    (Phase.IDLE, WeightsApplied): (Phase.STAGING, Phase.QUARANTINED),
    (Phase.STAGING, WeightsFetched): (Phase.STAGED, Phase.IDLE),
    # Quarantined: it has taken, wrong again, a publish that was given back meanwhile.
    (Phase.STAGING, WeightsApplied): (Phase.IDLE, Phase.QUARANTINED),
    (Phase.STAGING, TimerFired): (Phase.QUARANTINED,),
    (Phase.STAGED, WeightsFetched): (Phase.COMMITTING, Phase.IDLE),
    (Phase.STAGED, WeightsApplied): (Phase.COMMITTING, Phase.IDLE, Phase.QUARANTINED),
    (Phase.STAGED, TimerFired): (Phase.COMMITTING, Phase.IDLE),
    (Phase.COMMITTING, WeightsFetched): (Phase.IDLE,),
    (Phase.COMMITTING, WeightsApplied): (Phase.IDLE, Phase.QUARANTINED),
    (Phase.COMMITTING, TimerFired): (Phase.QUARANTINED,),
    **{(phase, gone): (None,) for phase in Phase for gone in LOST},
    **{(phase, EngineReady): (None,) for phase in Phase if phase is not Phase.QUARANTINED},
    (Phase.STARTING, EngineReady): (Phase.IDLE, None),
    **{(Phase.STAGED, gone): (Phase.COMMITTING, Phase.IDLE, None) for gone in ABSENT},  # the canary, or this one
    **{(Phase.IDLE, gone): (Phase.STAGING, None) for gone in ABSENT},  # the one that it was to wait for, or this one
}
