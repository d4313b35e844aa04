"""How an engine comes to its weights, and a request to its end, as data."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Final

from penstock.messages.flow import SampleIssued, SampleRevoked, SamplesSettled
from penstock.messages.local import EngineOpened, EngineSlept, GenerationEnded, WeightsSwapped
from penstock.messages.membership import EngineLeaving
from penstock.messages.training import DeviceTurned
from penstock.messages.weights import WeightsCommitted

if TYPE_CHECKING:
    from penstock.actors.transitions import Transitions


class Phase(StrEnum):
    """State of the engine."""

    CLOSED = "closed"
    """It shares devices with the learner, and has had no turn yet."""
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """What runs may come to its end; then the weights that are committed are applied."""
    INTERRUPTING = "interrupting"
    """What runs is broken off for them, and goes on under them."""
    APPLYING = "applying"
    SPOILT = "spoilt"
    """What was loaded is wrong; other weights are awaited."""
    SLEEPING = "sleeping"
    """It gives its memory up, in a turn of the learner."""
    ASLEEP = "asleep"


BUSY: Final = (Phase.STARTING, Phase.APPLYING, Phase.SLEEPING)
"""The backend does something that cannot be broken off."""
HOLDING_NOTHING: Final = (Phase.CLOSED, Phase.SLEEPING, Phase.ASLEEP)
"""No device memory, or not for long."""


class RequestState(Enum):
    """How far a sample has come at one engine."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    """It was passed on."""
    FAILED = "failed"
    """PromptSource decides what next."""
    HANDED_BACK = "handed_back"
    """The engine leaves; it goes on at another."""


EMPTYING: Final = (GenerationEnded, SampleRevoked, SamplesSettled, SampleIssued)
"""What may leave nothing running, or nothing but what is evaluated."""

ENGINE: Final[Transitions] = {
    (Phase.CLOSED, DeviceTurned): (Phase.STARTING,),
    (Phase.STARTING, EngineOpened): (Phase.SERVING,),
    (Phase.SERVING, EngineOpened): (Phase.SLEEPING,),  # the learner took its turn meanwhile
    (Phase.SERVING, WeightsCommitted): (Phase.DRAINING, Phase.INTERRUPTING, Phase.APPLYING),
    (Phase.SERVING, WeightsSwapped): (Phase.SLEEPING, Phase.DRAINING, Phase.INTERRUPTING, Phase.APPLYING),
    (Phase.SERVING, DeviceTurned): (Phase.SLEEPING, Phase.INTERRUPTING),
    (Phase.SERVING, EngineLeaving): (Phase.INTERRUPTING,),
    (Phase.DRAINING, EngineLeaving): (Phase.INTERRUPTING,),
    **{(Phase.SERVING, emptied): (Phase.SLEEPING, Phase.INTERRUPTING) for emptied in EMPTYING},
    (Phase.DRAINING, WeightsCommitted): (Phase.INTERRUPTING, Phase.APPLYING),
    (Phase.DRAINING, WeightsSwapped): (Phase.INTERRUPTING,),
    (Phase.DRAINING, DeviceTurned): (Phase.INTERRUPTING, Phase.SLEEPING),
    **{(Phase.DRAINING, emptied): (Phase.APPLYING, Phase.SLEEPING, Phase.INTERRUPTING) for emptied in EMPTYING},
    (Phase.INTERRUPTING, WeightsCommitted): (Phase.APPLYING,),
    (Phase.INTERRUPTING, DeviceTurned): (Phase.SLEEPING,),
    **{(Phase.INTERRUPTING, emptied): (Phase.APPLYING, Phase.SLEEPING) for emptied in EMPTYING},
    (Phase.APPLYING, WeightsSwapped): (Phase.SERVING, Phase.SPOILT),
    (Phase.SPOILT, WeightsSwapped): (Phase.SLEEPING, Phase.APPLYING),
    (Phase.SPOILT, WeightsCommitted): (Phase.APPLYING,),
    (Phase.SPOILT, DeviceTurned): (Phase.SLEEPING,),
    **{(Phase.SPOILT, emptied): (Phase.APPLYING, Phase.SLEEPING) for emptied in EMPTYING},
    (Phase.SLEEPING, EngineSlept): (Phase.ASLEEP,),
    (Phase.ASLEEP, WeightsCommitted): (Phase.APPLYING,),
    (Phase.ASLEEP, DeviceTurned): (Phase.APPLYING,),
}

REQUEST: Final[Transitions] = {
    (None, SampleIssued): (RequestState.WAITING,),
    (RequestState.WAITING, SampleIssued): (RequestState.RUNNING, RequestState.HANDED_BACK, None),
    (RequestState.WAITING, GenerationEnded): (RequestState.RUNNING, RequestState.HANDED_BACK),
    (RequestState.WAITING, WeightsSwapped): (RequestState.RUNNING,),
    (RequestState.WAITING, SampleRevoked): (RequestState.RUNNING, RequestState.FAILED),
    (RequestState.WAITING, SamplesSettled): (RequestState.RUNNING, None),
    (RequestState.RUNNING, GenerationEnded): (RequestState.WAITING, RequestState.ENDED, RequestState.FAILED),
    (RequestState.WAITING, EngineLeaving): (RequestState.HANDED_BACK,),
    (RequestState.WAITING, DeviceTurned): (RequestState.HANDED_BACK,),
    (RequestState.RUNNING, SampleRevoked): (RequestState.FAILED,),
    (RequestState.RUNNING, SampleIssued): (None,),
    (RequestState.RUNNING, SamplesSettled): (None,),
}
