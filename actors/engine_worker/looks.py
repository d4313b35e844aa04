"""What an EngineWorker shows of itself: what its time is spent on, and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.actors.engine_worker.phases import HOLDING_NOTHING, Phase
from penstock.actors.waits import several
from penstock.messages.names import LEARNER, WEIGHT_PUBLISHER
from penstock.messages.training import Activity
from penstock.messages.waits import OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.actors.engine_worker.requests import RequestTable
    from penstock.actors.engine_worker.weights import Weights

_STARTING: Final = Phase.STARTING
_SPOILT: Final = Phase.SPOILT
_APPLYING: Final = Phase.APPLYING
_ASLEEP: Final = Phase.ASLEEP
_WAITING_FOR_DEMAND: Final = Activity.WAITING_FOR_DEMAND
"""See :data:`penstock.messages.base.LOSSY`."""


def engine_activity(
    phase: Phase, requests: RequestTable, weights: Weights, num_generating: int, *, is_our_turn: bool
) -> Activity:
    """What the engine's time is spent on; ``num_generating`` of its running requests wait for nothing else."""
    if phase is _STARTING:
        return Activity.STARTING
    if phase in HOLDING_NOTHING and not is_our_turn:
        return Activity.ASLEEP
    if phase is _SPOILT:
        return Activity.WAITING_FOR_WEIGHTS
    if num_generating:
        return Activity.WORKING
    if phase is _APPLYING:
        return Activity.APPLYING_WEIGHTS
    if requests.num_running:
        return Activity.WAITING_FOR_TOOLS
    if requests.num_waiting or weights.version < 0 or phase is _ASLEEP:
        return Activity.WAITING_FOR_WEIGHTS
    return _WAITING_FOR_DEMAND


def engine_waits(phase: Phase, requests: RequestTable, weights: Weights, *, is_our_turn: bool) -> list[Wait]:
    """The backend's answers, and the weights that waiting requests need."""
    waits: list[Wait] = []
    if phase is Phase.STARTING:
        waits.append(Wait("start of", "the engine", OWN_BACKEND))
    elif phase is Phase.SPOILT:
        waits.append(Wait("other weights than", "the wrong ones", WEIGHT_PUBLISHER))
    elif phase is Phase.SLEEPING:
        waits.append(Wait("sleep of", "the engine", OWN_BACKEND))
    elif phase in HOLDING_NOTHING and not is_our_turn:
        waits.append(Wait("turn on", "the device", LEARNER))
    elif phase is Phase.ASLEEP:
        waits.append(Wait("weights for", "the engine that sleeps", WEIGHT_PUBLISHER))
    for doing, manifest in (("fetched weights of", weights.fetching), ("swapped weights of", weights.applying)):
        if manifest is not None:
            waits.append(Wait(doing, f"version {manifest.version}", OWN_BACKEND))
    waits += several("tokens of", OWN_BACKEND, [(r.key, r.num_tokens) for r in requests.running()])
    lacking = sorted({r.issued.min_version for r in requests.waiting() if r.issued.min_version > weights.version})
    waits += several("weights of", WEIGHT_PUBLISHER, [(f"version {version}", 0) for version in lacking])
    return waits
