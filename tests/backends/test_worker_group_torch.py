"""A worker group of torch ranks publishes from the first rank's process, by every transport, what it has trained."""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import uuid
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch
from learner_cases import learner_plan, train_command
from safetensors.torch import load_file

from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.plan import ExportPlan
from penstock.backends.learners.spec import LearnerContext, open_ranks
from penstock.backends.learners.torch.spec import RANK
from penstock.backends.weights.segments import segments_of, sweep
from penstock.backends.weights.transports import open_fetcher
from penstock.messages.commands import (
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    SleepLearner,
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
    from typing import Literal

    from penstock.messages.commands import LearnerCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EventT = TypeVar("EventT", bound=LocalEvent)
WAIT_S = 120.0


@pytest.mark.parametrize("transport", ["shared_memory", "disk", "distributed", "tensor"])
def test_what_two_ranks_have_trained_is_published_and_saved(
    transport: Literal["shared_memory", "disk", "distributed", "tensor"], tmp_path: Path
) -> None:
    run_id = f"worker-group-{uuid.uuid4().hex[:12]}"
    make_model("xs", tmp_path / "model", seed=0)
    plan = learner_plan(
        tmp_path / "model",
        tmp_path / "checkpoints",
        LearnerOptions(num_ranks=2, learning_rate=1e-3, device="cpu"),
        export=ExportPlan(transport=transport, run_id=run_id, folder=str(tmp_path / "weights"), host="127.0.0.1"),
    )
    context = LearnerContext(plan=plan, log_path=lambda who, number: tmp_path / f"{who}-{number}.log")
    backend = open_ranks(context, RANK)
    events: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
    backend.start(events.put, events.put)

    def ask(command: LearnerCommand, answer: type[EventT]) -> EventT:
        backend.execute(command)
        event = events.get(timeout=WAIT_S)
        if isinstance(event, WeightsCopied):  # and engines are told later
            event = events.get(timeout=WAIT_S)
        if isinstance(event, BaseException):
            raise event
        assert isinstance(event, answer)
        return event

    try:
        ask(OpenLearner(), LearnerOpened)
        ask(train_command(1), BatchTrained)
        manifest = ask(PublishWeights(1, 0), WeightsPublished).manifest
        saved = ask(SaveCheckpoint(1), CheckpointWritten)
        assert manifest.transport == transport
        fetched = open_fetcher().fetch(manifest)
        on_disk = load_file(Path(saved.path) / "model.safetensors")
        assert on_disk
        assert all(torch.equal(fetched.tensors[name], tensor) for name, tensor in on_disk.items())
        fetched.close()
        ask(SleepLearner(), LearnerSlept)
        ask(WakeLearner(), LearnerWoken)
        ask(train_command(2), BatchTrained)
        ask(PublishWeights(2, 1), WeightsPublished)
        backend.execute(ReleaseWeights(2))
    finally:
        backend.close(WAIT_S)
        left = list(segments_of(run_id))
        sweep(run_id)
    assert left == [], "the first rank lets go of what it published when it finishes"
    assert events.empty()
