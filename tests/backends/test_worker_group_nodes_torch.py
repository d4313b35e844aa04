"""Torch ranks on two nodes, both of them this machine: what they train is what ranks of one node train."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
from learner_cases import learner_plan, train_command
from worker_group_nodes import LocalNodes

from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.plan import ExportPlan
from penstock.backends.learners.spec import LearnerContext, open_ranks
from penstock.backends.learners.torch.spec import RANK
from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
from penstock.messages.commands import OpenLearner, SaveCheckpoint
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, LocalEvent

if TYPE_CHECKING:
    from penstock.messages.commands import LearnerCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAIT_S = 180.0


def trained(folder: Path, further: FurtherNodes | None) -> tuple[bytes, float]:
    """The weights after two batches, and the loss of the last one."""
    plan = learner_plan(
        folder.parent / "model",
        folder / "checkpoints",
        LearnerOptions(num_ranks=2, learning_rate=1e-3, device="cpu"),
        export=ExportPlan(transport="disk", run_id="nodes", folder=str(folder / "weights"), host="127.0.0.1"),
    )
    backend = open_ranks(LearnerContext(plan=plan, log_path=partial(_log, folder), further=further), RANK)
    events: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
    backend.start(events.put, events.put)

    def ask(command: LearnerCommand) -> LocalEvent:
        backend.execute(command)
        event = events.get(timeout=WAIT_S)
        if isinstance(event, BaseException):
            raise event
        return event

    try:
        assert isinstance(ask(OpenLearner()), LearnerOpened)
        ask(train_command(1))
        done = ask(train_command(2))
        assert isinstance(done, BatchTrained)
        saved = ask(SaveCheckpoint(2))
        assert isinstance(saved, CheckpointWritten)
    finally:
        backend.close(30.0)
    figures = {metric.name: metric.value for metric in done.metrics}
    return (Path(saved.path) / "model.safetensors").read_bytes(), figures["train/loss"]


def _log(folder: Path, who: str, number: int) -> Path:
    return folder / f"{who}-{number}.log"


def test_ranks_of_two_nodes_train_what_those_of_one_do_to_the_last_bit(tmp_path: Path) -> None:
    make_model("xs", tmp_path / "model", seed=0)
    here = trained(tmp_path / "one", None)
    apart = trained(tmp_path / "two", FurtherNodes(LocalNodes(), partial(_log, tmp_path / "two", "node")))
    assert "starts the ranks 1 to 1" in (tmp_path / "two" / "node-1.log").read_text()
    assert apart == here
