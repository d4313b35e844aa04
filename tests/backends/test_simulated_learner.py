"""The simulated learner's checkpoints: nothing is kept, and yet only what was written can be opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.simulated.learner import SimulatedLearner
from penstock.messages.commands import DeleteCheckpoints, OpenLearner, SaveCheckpoint
from penstock.messages.local import CheckpointWritten, LearnerOpened, LocalEvent

if TYPE_CHECKING:
    from collections.abc import Callable


class AtOnce:
    """A clock on which everything is due now."""

    def now_s(self) -> float:
        return 0.0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        callback()


@pytest.fixture
def answers() -> list[LocalEvent]:
    return []


@pytest.fixture
def learner(answers: list[LocalEvent]) -> SimulatedLearner:
    opened = SimulatedLearner(SimulatedLearnerOptions(), seed=0, epoch=2, timers=AtOnce())
    opened.start(answers.append, lambda error: pytest.fail(str(error)))
    return opened


def test_it_opens_at_the_version_of_the_checkpoint(learner: SimulatedLearner, answers: list[LocalEvent]) -> None:
    learner.execute(OpenLearner())
    learner.execute(SaveCheckpoint(version=7))
    written = answers.pop()
    assert isinstance(written, CheckpointWritten)
    learner.execute(DeleteCheckpoints(below_version=7))
    learner.execute(OpenLearner(version=7, path=written.path))
    assert answers == [LearnerOpened(version=0), LearnerOpened(version=7)]


@pytest.mark.parametrize(("version", "path"), [(7, "simulated/checkpoint-6"), (7, ""), (0, "elsewhere")])
def test_a_checkpoint_that_it_did_not_write_is_refused(learner: SimulatedLearner, version: int, path: str) -> None:
    with pytest.raises(ValueError, match=f"for version {version}, found '{path}'"):
        learner.execute(OpenLearner(version=version, path=path))
