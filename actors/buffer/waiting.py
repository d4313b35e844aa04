"""What the Buffer waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.buffer.phases import Phase
from penstock.actors.buffer.table import Status
from penstock.actors.waits import several
from penstock.messages.names import FILTER, LEARNER, WEIGHT_PUBLISHER
from penstock.messages.samples import group_name
from penstock.messages.waits import OPERATOR, OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.actors.buffer.books import Books
    from penstock.actors.buffer.learner_side import LearnerSide


def buffer_waits(books: Books, learner: LearnerSide, phase: Phase, *, is_archived: bool) -> list[Wait]:
    """For the Learner, for a first version, and for groups while the Learner has nothing to train."""
    if phase in (Phase.ENDED, Phase.STOPPED):
        return []
    waits: list[Wait] = []
    if books.announced is None:
        waits.append(Wait("announcement of", "version 0", WEIGHT_PUBLISHER))
    stand = learner.stand
    if stand is None:
        waits.append(Wait("loading of", f"version {max(0, books.checkpoint_version)}", LEARNER))
    elif stand < books.version or books.open_lease is not None:
        waits.append(Wait("receipt of", f"batch {stand + 1}", LEARNER))
    elif phase is Phase.RUNNING:
        if books.is_paused:
            waits.append(Wait("the end of", "the pause of new grants", OPERATOR))
        granted = [g.group_id for g in books.table.outstanding() if g.status is Status.GRANTED]
        waits += several("group", FILTER, [(group_id, books.table.num_ready) for group_id in granted])
    evaluations = books.evaluations
    if evaluations.holds_training or (phase is Phase.ENDING and evaluations.is_busy):
        if evaluations.open is None:
            waits.append(Wait("announcement of", f"version {evaluations.due}", WEIGHT_PUBLISHER))
        waits += several("group", FILTER, [(group_name(g), evaluations.num_ended) for g in evaluations.waiting()])
    if phase in (Phase.ENDING, Phase.STOPPING):
        if not books.goal.is_saved(books):
            waits.append(Wait("checkpoint of", f"version {books.version}", LEARNER))
        elif not is_archived:
            waits.append(Wait("archive of", f"version {books.checkpoint_version}", OWN_BACKEND))
    return waits
