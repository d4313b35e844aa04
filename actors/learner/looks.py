"""What the Learner shows of itself: what its time is spent on, and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from penstock.actors.learner.phases import Phase
from penstock.messages.names import BUFFER
from penstock.messages.training import Activity
from penstock.messages.waits import OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.actors.learner.publishing import Publishing
    from penstock.actors.learner.saving import Saving
    from penstock.actors.learner.turns import Turns


def learner_activity(phase: Phase, *, version: int, is_awake: bool, is_held_up: bool) -> Activity:
    """What the learner's time is spent on; ``is_held_up``: see :meth:`.Saving.holds_up`."""
    match phase:
        case Phase.STARTING | Phase.OPENING:
            return Activity.STARTING
        case Phase.ASKING if version < 0:
            return Activity.STARTING
        case Phase.ASKING | Phase.WAKING | Phase.SLEEPING:
            return Activity.ASLEEP
        case Phase.IDLE if not is_awake:
            return Activity.ASLEEP
        case Phase.IDLE if is_held_up:
            return Activity.CHECKPOINTING
        case Phase.IDLE:
            return Activity.WAITING_FOR_SAMPLES
        case Phase.TRAINING:
            return Activity.WORKING
        case Phase.PUBLISHING:
            return Activity.PUBLISHING
        case _:
            assert_never(phase)


def learner_waits(
    phase: Phase, turns: Turns, saving: Saving, publishing: Publishing, *, version: int, is_held_up: bool
) -> list[Wait]:
    """The Buffer, engines on its devices, or its backend; ``is_held_up``: see :meth:`.Saving.holds_up`."""
    match phase:
        case Phase.ASKING:
            return turns.waits()
        case Phase.STARTING:
            found = [Wait("name of", "a checkpoint", BUFFER)]
        case Phase.IDLE if is_held_up:
            found = []  # it waits for the checkpoint, which follows
        case Phase.IDLE:
            found = [Wait("offer of", f"batch {version + 1}", BUFFER)]
        case Phase.TRAINING:
            found = [Wait("step on", f"batch {version + 1}", OWN_BACKEND)]
        case _:
            found = [Wait(f"{phase.value} of", f"version {version}", OWN_BACKEND)]
    if saving.writing is not None:
        found.append(Wait("checkpoint of", f"version {saving.writing}", OWN_BACKEND))
    if publishing.copied is not None:
        found.append(Wait("digest of", f"version {publishing.copied}", OWN_BACKEND))
    return found
