"""The embedded engine killed in the middle of long generations, and the torch learner killed between checkpoints."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import pytest
from chaos_run import ChaosRun

from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.simulated.timers import ThreadTimers
from penstock.messages.commands import OpenLearner, SaveCheckpoint, Train
from penstock.messages.ledger import BatchLeased, CheckpointRecorded
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, LocalEvent
from penstock.messages.names import LEARNER
from penstock.runtime.hosts.processes.prepare import MODEL_FOLDER
from penstock.runtime.launch.runs import SCENARIO_NAME
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import open_backend
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.commands import LearnerCommand

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

FAULTS = (
    "kill:engine/0@0.25",
    "kill:learner@0.36",
    "kill:engine/1@0.45",
    "kill:learner@0.57",
    "kill:engine/0@0.65",
)
ANSWER_TIMEOUT_S = 120.0
WEIGHTS = "model.safetensors"
EventT = TypeVar("EventT", bound=LocalEvent)


class Replay:
    """A torch learner that nobody disturbs."""

    def __init__(self, plan: RunPlan) -> None:
        self.answers: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        backend = open_backend(LEARNER, plan, epoch=1, timers=ThreadTimers(self.answers.put), store=None)
        assert backend is not None
        self.backend = backend
        backend.start(self.answers.put, self.answers.put)

    def ask(self, command: LearnerCommand, answer: type[EventT]) -> EventT:
        self.backend.execute(command)
        event = self.answers.get(timeout=ANSWER_TIMEOUT_S)
        if isinstance(event, BaseException):
            raise event
        assert isinstance(event, answer)
        return event


def weights_of_an_undisturbed_training(run_folder: Path, folder: Path, num_steps: int) -> bytes:
    """Train the recorded batches from the recorded payloads, in one go."""
    scenario = load_scenario(run_folder / SCENARIO_NAME)
    plan = RunPlan(
        scenario=scenario,
        run_id="replay",
        run_folder=str(folder),
        model_folder=str(run_folder / MODEL_FOLDER),
        num_rows=1,
        transport="disk",
    )
    ledger = SqliteReader(run_folder / LEDGER_FILE)
    leases = {entry.version: entry for entry in ledger.entries() if isinstance(entry, BatchLeased)}
    assert sorted(leases) == list(range(1, num_steps + 1))
    learner = Replay(plan)
    learner.ask(OpenLearner(), LearnerOpened)
    for version, lease in sorted(leases.items()):
        groups = ledger.payloads(lease.group_ids)
        learner.ask(Train(version=version, groups=groups, min_token_version=0), BatchTrained)
    saved = learner.ask(SaveCheckpoint(version=num_steps), CheckpointWritten)
    learner.backend.close(10.0)
    ledger.close()
    return weights_in(run_folder=folder, path=saved.path)


def weights_in(*, run_folder: Path, path: str) -> bytes:
    return (run_folder / path / WEIGHTS).read_bytes()


def test_killed_engines_lose_little_and_a_killed_learner_comes_to_the_same_bits(tmp_path: Path) -> None:
    run = ChaosRun(tmp_path, "torch.yaml", FAULTS, seed=31)
    run.assert_clean()
    verdict = run.verdict
    assert verdict.restarts == {"engine/0": 2, "engine/1": 1, "learner": 2}

    assert verdict.tokens_saved > 0
    killed = [fault for fault in verdict.faults if "engine" in fault.fault]
    assert len(killed) == 3
    assert all(fault.back_after_s is not None for fault in killed), "a replacement made no token"
    # Its speed is told, not judged: with few cores, and others at work on them, a run ends before it is regained.
    print(f"from SIGKILL of an engine to full speed: {[fault.restored_after_s for fault in killed]} s")
    print(f"tokens saved from killed engines: {verdict.tokens_saved}")

    ledger = SqliteReader(run.run_folder / LEDGER_FILE)
    *_, last = [entry for entry in ledger.entries() if isinstance(entry, CheckpointRecorded)]
    ledger.close()
    assert last.version == verdict.num_steps
    replay = tmp_path / "replay"
    replay.mkdir()
    undisturbed = weights_of_an_undisturbed_training(run.run_folder, replay, verdict.num_steps)
    assert weights_in(run_folder=run.run_folder, path=last.path) == undisturbed
