"""What the Learner's backend does, and what leads from one to the next, as data."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from penstock.messages.evaluation import PublishDemanded
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    TimerFired,
    WeightsCopied,
    WeightsPublished,
)
from penstock.messages.membership import EngineLost
from penstock.messages.training import BatchReady, CheckpointDemanded, CheckpointNamed, DeviceYielded
from penstock.messages.weights import PublishFailed

if TYPE_CHECKING:
    from penstock.actors.transitions import Transitions


class Phase(StrEnum):
    """What the backend does."""

    STARTING = "starting"
    """Nothing, until a checkpoint is named."""
    OPENING = "opening"
    IDLE = "idle"
    """Nothing; asleep where engines have the devices."""
    TRAINING = "training"
    PUBLISHING = "publishing"
    ASKING = "asking"
    """Something is to be done, and engines may have the devices still."""
    WAKING = "waking"
    SLEEPING = "sleeping"


NEEDING: Final = (BatchReady, PublishFailed, PublishDemanded, CheckpointDemanded, CheckpointWritten)
"""What a Learner that is asleep has to wake for."""

LEARNER: Final[Transitions] = {
    (Phase.STARTING, CheckpointNamed): (Phase.ASKING,),
    (Phase.ASKING, CheckpointNamed): (Phase.OPENING,),
    **{(Phase.ASKING, needed): (Phase.WAKING,) for needed in (*NEEDING, LearnerSlept)},
    (Phase.ASKING, DeviceYielded): (Phase.OPENING, Phase.WAKING),
    (Phase.ASKING, EngineLost): (Phase.OPENING, Phase.WAKING),
    (Phase.OPENING, LearnerOpened): (Phase.IDLE,),
    (Phase.IDLE, LearnerOpened): (Phase.PUBLISHING,),
    (Phase.IDLE, BatchReady): (Phase.TRAINING, Phase.ASKING),
    (Phase.IDLE, BatchTrained): (Phase.PUBLISHING,),
    (Phase.IDLE, WeightsPublished): (Phase.TRAINING, Phase.SLEEPING, Phase.PUBLISHING),
    (Phase.IDLE, WeightsCopied): (Phase.TRAINING, Phase.PUBLISHING),
    (Phase.IDLE, PublishDemanded): (Phase.PUBLISHING, Phase.ASKING),
    (Phase.IDLE, CheckpointDemanded): (Phase.ASKING,),
    (Phase.IDLE, CheckpointWritten): (Phase.TRAINING, Phase.ASKING),
    (Phase.IDLE, TimerFired): (Phase.SLEEPING,),
    (Phase.IDLE, PublishFailed): (Phase.PUBLISHING, Phase.ASKING),
    (Phase.IDLE, LearnerSlept): (Phase.ASKING,),
    (Phase.IDLE, LearnerWoken): (Phase.TRAINING, Phase.PUBLISHING),
    (Phase.TRAINING, BatchTrained): (Phase.IDLE,),
    (Phase.PUBLISHING, WeightsPublished): (Phase.IDLE,),
    (Phase.PUBLISHING, WeightsCopied): (Phase.IDLE,),
    (Phase.WAKING, LearnerWoken): (Phase.IDLE,),
    (Phase.SLEEPING, LearnerSlept): (Phase.IDLE,),
}
