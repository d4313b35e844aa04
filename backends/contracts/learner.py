"""What the Learner relies on of every learner's backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.backends.contracts.hearing import Driven
from penstock.messages.base import Metric
from penstock.messages.commands import OpenLearner, PublishWeights, ReleaseWeights, SaveCheckpoint, Train
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, WeightsPublished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.learners.spec import LearnerContext, LearnerSpec


@dataclass(frozen=True, kw_only=True)
class LearnerSubject:
    """The learner that is meant, and what it can be given."""

    spec: LearnerSpec
    context: LearnerContext
    train: Callable[[int], Train]
    """A batch for this version, of tokens that are all trained."""
    timeout_s: float = 120.0
    """How long any answer may take."""

    def open(self, epoch: int = 1) -> Driven:
        """An incarnation of it, started."""
        context = replace(self.context, plan=msgspec.structs.replace(self.context.plan, epoch=epoch))
        return Driven(self.spec.open(context), self.timeout_s)


class LearnerContract:
    """Derive from it, and override ``subject``."""

    @pytest.fixture
    def subject(self) -> LearnerSubject:
        """The learner that is meant."""
        raise NotImplementedError("override the fixture 'subject' with the learner that is meant")

    @pytest.fixture
    def learner(self, subject: LearnerSubject) -> Iterator[Driven]:
        """It, open at version 0."""
        driven = subject.open()
        assert driven.ask(OpenLearner(), LearnerOpened).version == 0
        yield driven
        driven.close()

    def test_each_batch_makes_the_next_version(self, subject: LearnerSubject, learner: Driven) -> None:
        for version in (1, 2, 3):
            command = subject.train(version)
            trained = learner.ask(command, BatchTrained)
            num_tokens = sum(part.num_tokens for g in command.groups for s in g.samples for part in s.parts)
            assert (trained.version, trained.num_trained_tokens, trained.num_masked_tokens) == (version, num_tokens, 0)
            assert all(isinstance(metric, Metric) for metric in (*trained.metrics, *learner.backend.gauges()))

    def test_it_publishes_the_version_that_it_has(self, subject: LearnerSubject, learner: Driven) -> None:
        first = learner.ask(PublishWeights(version=0, publish=0), WeightsPublished).manifest
        learner.ask(subject.train(1), BatchTrained)
        second = learner.ask(PublishWeights(version=1, publish=1), WeightsPublished).manifest
        for version, manifest in enumerate((first, second)):
            assert (manifest.version, manifest.publish) == (version, version)
            assert manifest.digest
        learner.tell(ReleaseWeights(below_version=1))
        learner.ask(subject.train(2), BatchTrained)

    def test_it_goes_on_from_a_checkpoint(self, subject: LearnerSubject, learner: Driven) -> None:
        learner.ask(subject.train(1), BatchTrained)
        saved = learner.ask(SaveCheckpoint(version=1), CheckpointWritten)
        assert saved.version == 1
        assert learner.ask(SaveCheckpoint(version=1), CheckpointWritten).path == saved.path
        later = subject.open(2)
        assert later.ask(OpenLearner(version=1, path=saved.path), LearnerOpened).version == 1
        assert later.ask(subject.train(2), BatchTrained).version == 2
        later.close()

    def test_a_batch_for_another_version_is_refused(self, subject: LearnerSubject) -> None:
        if subject.spec.is_modelled:
            pytest.skip("it trains nothing")
        driven = subject.open()
        driven.ask(OpenLearner(), LearnerOpened)
        driven.tell(subject.train(5))
        assert str(driven.failure())
        driven.close()
