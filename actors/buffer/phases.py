"""How a run goes, as data: its phases, and what leads from one to the next."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from penstock.messages.flow import FailuresTold, GroupAdmitted, GroupRejected
from penstock.messages.local import BatchFetched, SamplesArchived, Started
from penstock.messages.operator import PolicyChanged
from penstock.messages.training import CheckpointSaved, LearnerReady, StepFinished, StopAsked

if TYPE_CHECKING:
    from penstock.actors.transitions import Transitions


class Phase(StrEnum):
    """How far the run has come."""

    FILLING = "filling"
    """No Learner has loaded yet."""
    RUNNING = "running"
    ENDING = "ending"
    """Nothing is left to be done but to save, to archive, and to end the last evaluation."""
    STOPPING = "stopping"
    """The same, on demand."""
    ENDED = "ended"
    STOPPED = "stopped"


RUN: Final[Transitions] = {
    (Phase.FILLING, Started): (Phase.ENDING,),  # it had come to its end before, or the scenario wants less than then
    (Phase.FILLING, LearnerReady): (Phase.RUNNING, Phase.STOPPED),
    (Phase.FILLING, StepFinished): (Phase.ENDING, Phase.STOPPED),
    (Phase.FILLING, GroupAdmitted): (Phase.STOPPED,),
    (Phase.FILLING, GroupRejected): (Phase.ENDING,),
    (Phase.FILLING, FailuresTold): (Phase.STOPPED,),
    (Phase.FILLING, StopAsked): (Phase.STOPPED,),
    (Phase.RUNNING, LearnerReady): (Phase.ENDING, Phase.STOPPED),
    (Phase.RUNNING, StepFinished): (Phase.ENDING, Phase.STOPPED),
    (Phase.RUNNING, GroupAdmitted): (Phase.ENDING, Phase.STOPPED),
    (Phase.RUNNING, GroupRejected): (Phase.ENDING, Phase.STOPPED),
    (Phase.RUNNING, PolicyChanged): (Phase.ENDING,),
    (Phase.RUNNING, FailuresTold): (Phase.STOPPED,),
    (Phase.RUNNING, BatchFetched): (Phase.STOPPED,),
    (Phase.RUNNING, StopAsked): (Phase.STOPPING, Phase.STOPPED),
    (Phase.ENDING, Started): (Phase.ENDED,),
    (Phase.ENDING, LearnerReady): (Phase.ENDED,),
    (Phase.ENDING, CheckpointSaved): (Phase.ENDED,),
    (Phase.ENDING, SamplesArchived): (Phase.ENDED,),
    (Phase.ENDING, GroupAdmitted): (Phase.ENDED, Phase.STOPPED),
    (Phase.ENDING, GroupRejected): (Phase.ENDED,),
    (Phase.ENDING, PolicyChanged): (Phase.ENDED,),
    (Phase.ENDING, StopAsked): (Phase.STOPPING,),
    (Phase.STOPPING, StopAsked): (Phase.STOPPED,),
    (Phase.STOPPING, CheckpointSaved): (Phase.STOPPED,),
    (Phase.STOPPING, SamplesArchived): (Phase.STOPPED,),
    (Phase.STOPPING, LearnerReady): (Phase.STOPPED,),
}
"""What ends in ``stopped`` has failed, but on ``StopAsked`` and from ``stopping``."""
