"""The simulated learner: nothing of its checkpoints is kept, and yet only what was written can be opened; a step takes
as long as its batch is packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from learner_cases import make_groups, train_command

from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.backends.simulated.learner import SimulatedLearner
from penstock.messages.commands import DeleteCheckpoints, OpenLearner, SaveCheckpoint
from penstock.messages.local import CheckpointWritten, LearnerOpened, LocalEvent

if TYPE_CHECKING:
    from collections.abc import Callable


class AtOnce:
    """A clock on which everything is due now."""

    def __init__(self) -> None:
        self.delays_s: list[float] = []

    def now_s(self) -> float:
        return 0.0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.delays_s.append(delay_s)
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


@pytest.mark.parametrize(
    ("num_ranks", "num_rounds", "imbalance"),
    [(1, 2, 1.0), (2, 1, 1.0), (3, 1, 1.5)],  # of three ranks one has two of the four sequences
)
def test_a_step_takes_its_rounds_of_micro_batches_and_the_largest_share(
    num_ranks: int, num_rounds: int, imbalance: float
) -> None:
    clock = AtOnce()
    options = SimulatedLearnerOptions(
        step_s=1.0, token_s=0.1, micro_batch_s=10.0, num_ranks=num_ranks, jitter_sigma=0.0
    )
    learner = SimulatedLearner(options, seed=0, epoch=0, timers=clock, max_tokens_per_micro_batch=8)
    learner.start(lambda _: None, lambda error: pytest.fail(str(error)))
    learner.execute(train_command(groups=make_groups([[1.0]] * 4)))  # each is 2 + 3 tokens, of which 4 are read
    assert clock.delays_s == [pytest.approx(1.0 + 10.0 * num_rounds + 0.1 * imbalance * 12)]
