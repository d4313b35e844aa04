"""A learner that trains on while what it has published is looked at: what engines are told, when, of which weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from learner_cases import HeldWeights, RunningLearner, learner_plan, train_command

from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.backend import open_torch_learner
from penstock.backends.weights.protocol import BackgroundExporter, WeightExportError
from penstock.messages.commands import OpenLearner, PublishWeights, ReleaseWeights
from penstock.messages.local import BatchTrained, LearnerOpened, WeightsCopied, WeightsPublished

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.weights import Canary, WeightManifest

WAIT_S = 60.0


class LateExport:
    """Its digest is there when the test says so."""

    def __init__(self, manifest: WeightManifest, goes_on: threading.Event, error: WeightExportError | None) -> None:
        self._manifest = manifest
        self._goes_on = goes_on
        self._error = error
        self.size_bytes = 17

    def manifest(self) -> WeightManifest:
        assert self._goes_on.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        return self._manifest


class LateWeights(HeldWeights):
    """Looks at what it holds on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = [threading.Event() for _ in range(3)]
        self.error: WeightExportError | None = None

    def begin(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> LateExport:
        manifest = self.export(tensors, version=version, publish=publish, canary=canary)
        return LateExport(manifest, self.goes_on[publish], self.error)

    def close(self) -> None:
        assert all(goes_on.is_set() for goes_on in self.goes_on[: len(self.published)]), "an export is under way"
        super().close()


@pytest.fixture
def weights() -> LateWeights:
    return LateWeights()


@pytest.fixture
def learner(model_folder: Path, tmp_path: Path, weights: LateWeights) -> Iterator[RunningLearner]:
    plan: Any = learner_plan(model_folder, tmp_path / "checkpoints", LearnerOptions(learning_rate=1e-2))
    assert isinstance(weights, BackgroundExporter)
    running = RunningLearner(open_torch_learner(plan, weights), weights)
    running.ask(OpenLearner(), LearnerOpened)
    yield running
    for goes_on in weights.goes_on:
        goes_on.set()
    running.close()


def test_it_trains_on_and_engines_are_told_of_what_it_was(learner: RunningLearner, weights: LateWeights) -> None:
    copied = learner.ask(PublishWeights(version=0, publish=0), WeightsCopied)
    assert (copied.version, copied.size_bytes) == (0, 17)
    assert learner.ask(train_command(1), BatchTrained).version == 1
    learner.backend.execute(ReleaseWeights(below_version=0))
    weights.goes_on[0].set()
    assert learner.next(WeightsPublished).manifest.version == 0
    learner.ask(PublishWeights(version=1, publish=1), WeightsCopied)
    weights.goes_on[1].set()
    learner.next(WeightsPublished)
    before, after = weights.published
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert weights.released == [0]


def test_the_next_export_waits_for_the_one_that_is_looked_at(learner: RunningLearner, weights: LateWeights) -> None:
    learner.ask(PublishWeights(version=0, publish=0), WeightsCopied)
    learner.ask(train_command(1), BatchTrained)
    learner.backend.execute(PublishWeights(version=1, publish=1))
    weights.goes_on[0].set()
    assert learner.next(WeightsPublished).manifest.version == 0
    assert learner.next(WeightsCopied).version == 1
    weights.goes_on[1].set()
    assert learner.next(WeightsPublished).manifest.version == 1


def test_a_copy_that_cannot_be_read_ends_the_learner(learner: RunningLearner, weights: LateWeights) -> None:
    weights.error = WeightExportError("cannot be read back")
    learner.ask(PublishWeights(version=0, publish=0), WeightsCopied)
    weights.goes_on[0].set()
    assert learner.error() is weights.error
