"""The commands of a learner, carried out by a worker group of Megatron ranks, against the torch learner."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import uuid
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
import trainer_plan as plan

from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.megatron.spec import RANK
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import WarmStartOptions
from penstock.backends.learners.plan import ExportPlan, LearnerPlan, pack_demonstrations
from penstock.backends.learners.spec import LearnerContext, open_ranks
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.reference import new_reference, refresh
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.torch.warm_start import warm_start
from penstock.backends.learners.training.canary import canary_under, choose_canary
from penstock.backends.weights.segments import segments_of, sweep
from penstock.backends.weights.transports import open_fetcher
from penstock.messages.arrays import floats_view
from penstock.messages.commands import (
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    SleepLearner,
    Train,
    WakeLearner,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    LocalEvent,
    WeightsCopied,
    WeightsPublished,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from penstock.backends.learners.options import LearnerOptions
    from penstock.messages.commands import LearnerCommand
    from penstock.messages.weights import WeightManifest

pytestmark = pytest.mark.megatron

EventT = TypeVar("EventT", bound=LocalEvent)
WAIT_S = 200.0
CPU = torch.device("cpu")
BATCHES = plan.make_batches(2)
DEMONSTRATIONS = [([3, 4, 5], [6, 7, 8, 9]), ([11, 12], [13, 14, 15]), ([21, 22, 23, 24], [25])]


def options_of(megatron: dict[str, Any]) -> LearnerOptions:
    """With a warm start, and a reference that becomes the policy after each batch."""
    return plan.learner_options(
        objective("grpo", kl_coef=0.2, reference_every=1),
        megatron,
        num_passes=2,
        num_ranks=2,
        device="cpu",
        warm_start=WarmStartOptions(path="given", num_steps=4, batch_size=2, warmup_steps=1),
    )


class RunningWorkers:
    """A learner that is told one command after the other."""

    def __init__(self, model: Path, folder: Path, megatron: dict[str, Any]) -> None:
        self._folder = folder
        self._run_id = f"mega{uuid.uuid4().hex[:12]}"
        self._events: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        learner = LearnerPlan(
            model_folder=str(model),
            checkpoints_folder=str(folder / "checkpoints"),
            options=options_of(megatron),
            temperature=plan.TEMPERATURE,
            dtype="float32",
            seed=plan.SEED,
            num_steps=plan.NUM_STEPS,
            epoch=1,
            export=ExportPlan(
                transport="shared_memory", run_id=self._run_id, folder=str(folder / "weights"), host="127.0.0.1"
            ),
            demonstrations=pack_demonstrations(DEMONSTRATIONS),
        )
        context = LearnerContext(plan=learner, log_path=lambda who, number: folder / f"{who}-{number}.log")
        self.backend = open_ranks(context, RANK)
        self.backend.start(self._events.put, self._events.put)

    def ask(self, command: LearnerCommand, answer: type[EventT]) -> EventT:
        self.backend.execute(command)
        event = self._events.get(timeout=WAIT_S)
        if isinstance(event, WeightsCopied):  # and engines are told later
            event = self._events.get(timeout=WAIT_S)
        if isinstance(event, BaseException):
            log = self._folder / "rank-0.log"
            raise AssertionError(log.read_text()[-4000:] if log.exists() else "no log") from event
        assert isinstance(event, answer)
        return event

    def train(self, version: int) -> dict[str, float]:
        trained = self.ask(Train(version=version, groups=BATCHES[version - 1], min_token_version=0), BatchTrained)
        return {metric.name: metric.value for metric in trained.metrics if not metric.name.startswith("perf/")}

    def publish(self, version: int) -> tuple[WeightManifest, dict[str, Any]]:
        manifest = self.ask(PublishWeights(version, version), WeightsPublished).manifest
        fetched = open_fetcher().fetch(manifest)
        weights = {name: tensor.numpy().copy() for name, tensor in fetched.tensors.items()}
        fetched.close()
        return manifest, weights

    def close(self) -> list[str]:
        """What is left of the published weights."""
        self.backend.close(WAIT_S)
        left = [str(segment.path) for segment in segments_of(self._run_id)]
        sweep(self._run_id)
        assert self._events.empty()
        return left


@contextmanager
def running(model: Path, folder: Path, megatron: dict[str, Any]) -> Generator[RunningWorkers]:
    folder.mkdir(exist_ok=True)
    workers = RunningWorkers(model, folder, megatron)
    try:
        yield workers
    finally:
        left = workers.close()
    assert left == [], "the first rank lets go of what it published when it finishes"


def test_two_ranks_do_what_the_torch_learner_does_and_go_on_from_a_checkpoint_in_another_layout(
    tmp_path: Path, tiny_family: Callable[[str], Path]
) -> None:
    model = tiny_family("qwen3 tied")
    with running(model, tmp_path / "first", {"tensor_parallel": 2}) as workers:
        assert workers.ask(OpenLearner(), LearnerOpened).version == 0
        figures = [workers.train(1)]
        saved = workers.ask(SaveCheckpoint(1), CheckpointWritten)
        published = [workers.publish(1)]
        workers.ask(SleepLearner(), LearnerSlept)
        workers.ask(WakeLearner(), LearnerWoken)
        figures.append(workers.train(2))
        published.append(workers.publish(2))
        workers.backend.execute(ReleaseWeights(2))
        gauges = {metric.name: metric.value for metric in workers.backend.gauges()}
    expected, weights, canaries = by_torch(model)
    for number in range(2):
        assert figures[number].keys() == expected[number].keys()
        for name, value in expected[number].items():
            assert figures[number][name] == pytest.approx(value, abs=1e-5, rel=1e-3, nan_ok=True), name
        manifest, found = published[number]
        assert found.keys() == weights[number].keys()
        for name, wanted in weights[number].items():
            np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-3, err_msg=name)
            assert np.abs(found[name] - wanted).mean() < 1e-6, name
        assert manifest.canary is not None
        assert manifest.canary.tokens == canaries[number][0]
        np.testing.assert_allclose(list(floats_view(manifest.canary.logprobs)), canaries[number][1], atol=1e-4)
    assert gauges["learner/warm_start_fraction"] == 1.0
    assert gauges["learner/trained_tokens"] == sum(each["train/num_tokens"] for each in expected)

    with running(model, tmp_path / "second", {"pipeline_parallel": 2, "virtual_pipeline": 2}) as workers:
        assert workers.ask(OpenLearner(path=saved.path, version=1), LearnerOpened).version == 1
        again = workers.train(2)
        manifest, found = workers.publish(2)
    for name, value in figures[1].items():
        assert again[name] == pytest.approx(value, abs=1e-5, rel=1e-3, nan_ok=True), name
    for name, wanted in published[1][1].items():
        assert np.abs(found[name] - wanted).mean() < 1e-6, name
    assert manifest.canary is not None
    assert published[1][0].canary is not None
    assert manifest.canary.tokens == published[1][0].canary.tokens


def by_torch(folder: Path) -> tuple[list[dict[str, float]], list[dict[str, Any]], list[tuple[bytes, list[float]]]]:
    """Figures, weights and canaries of each version."""
    options = options_of({})
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    sequences = [demonstration_sequence(*each, sample=index) for index, each in enumerate(DEMONSTRATIONS)]
    assert options.warm_start is not None
    warm_start(
        model,
        sequences,
        options,
        options.warm_start,
        seed=plan.SEED,
        report=lambda _fraction, _loss: None,
        check_stop=lambda: None,
    )
    reference = new_reference(model, options)
    assert reference is not None
    tokens = choose_canary(model)
    trainer = PolicyTrainer(
        model, options, temperature=plan.TEMPERATURE, num_steps=plan.NUM_STEPS, reference=reference,
        check_stop=lambda: None, seed=plan.SEED,
    )  # fmt: skip
    figures: list[dict[str, float]] = []
    weights: list[dict[str, Any]] = []
    canaries: list[tuple[bytes, list[float]]] = []
    for version, groups in enumerate(BATCHES, start=1):
        result = trainer.train(groups, version=version, min_token_version=0)
        refresh(reference, model)
        figures.append({m.name: m.value for m in result.metrics if not m.name.startswith("perf/")})
        weights.append({name: tensor.numpy().copy() for name, tensor in model.named_tensors().items()})
        canary = canary_under(model, tokens)
        canaries.append((canary.tokens, list(floats_view(canary.logprobs))))
    return figures, weights, canaries
