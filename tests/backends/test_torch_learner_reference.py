"""A reference that is refreshed: when it moves, and what a checkpoint keeps of it."""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path

import torch
from learner_cases import RunningLearner, make_groups, open_learner, train_command
from safetensors.torch import load_file

from penstock.backends.learners.checkpoints.record import read_record
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.messages.commands import DeleteCheckpoints, OpenLearner, SaveCheckpoint, SleepLearner, WakeLearner
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, LearnerSlept, LearnerWoken

EVERY_2 = LearnerOptions(learning_rate=1e-2, objective=ObjectiveOptions(kl_coef=0.1, reference_every=2))


def begun(model_folder: Path, folder: Path, opened: list[RunningLearner], *, epoch: int = 1) -> RunningLearner:
    learner = open_learner(model_folder, folder, EVERY_2, epoch=epoch)
    opened.append(learner)
    return learner


def figures(learner: RunningLearner, version: int) -> dict[str, float]:
    step = (version * 0.37) % 1.0
    groups = make_groups(((step, 0.0, 1.0), (0.5, step / 2, 0.0)))
    trained = learner.ask(train_command(version, groups=groups), BatchTrained)
    return {metric.name: metric.value for metric in trained.metrics if not metric.name.startswith("perf/")}


def saved(learner: RunningLearner, version: int) -> Path:
    return Path(learner.ask(SaveCheckpoint(version=version), CheckpointWritten).path)


def test_the_kl_is_0_right_after_each_refresh_and_only_then(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = begun(model_folder, tmp_path / "checkpoints", opened)
    learner.ask(OpenLearner(), LearnerOpened)
    divergences = [figures(learner, version)["train/kl_loss"] for version in (1, 2, 3, 4, 5)]
    assert [divergence == 0.0 for divergence in divergences] == [True, False, True, False, True]
    assert min(divergences[1], divergences[3]) > 1e-7


def test_a_learner_goes_on_with_the_reference_that_its_checkpoint_had(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    straight = begun(model_folder, tmp_path / "straight", opened)
    straight.ask(OpenLearner(), LearnerOpened)
    expected = [figures(straight, version) for version in range(1, 7)]
    first = begun(model_folder, tmp_path / "checkpoints", opened)
    first.ask(OpenLearner(), LearnerOpened)
    for version in (1, 2, 3):
        figures(first, version)
    path = saved(first, 3)
    record = read_record(path, version=3)
    assert record.reference is not None
    assert (record.reference.folder, record.reference.version) == ("reference-0000002", 2)
    second = begun(model_folder, tmp_path / "checkpoints", opened, epoch=2)
    second.ask(OpenLearner(version=3, path=str(path)), LearnerOpened)
    assert [figures(second, version) for version in (4, 5, 6)] == expected[3:]
    assert read_record(saved(second, 6), version=6).reference is not None
    kept = load_file(tmp_path / "checkpoints" / "reference-0000006-e2" / "model.safetensors")
    model = load_file(tmp_path / "checkpoints" / "version-0000006-e2" / "model.safetensors")
    assert all(torch.equal(kept[name], model[name]) for name in model)


def test_a_reference_goes_when_no_checkpoint_has_it_any_more(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    folder = tmp_path / "checkpoints"
    learner = begun(model_folder, folder, opened)
    learner.ask(OpenLearner(), LearnerOpened)
    for version in range(1, 6):
        figures(learner, version)
        if version != 2:
            saved(learner, version)
    names = {entry.name for entry in folder.iterdir()}
    assert {"reference", "reference-0000002", "reference-0000004"} <= names
    learner.backend.execute(DeleteCheckpoints(below_version=3))
    figures(learner, 6)
    left = {entry.name for entry in folder.iterdir()}
    assert left == {
        "reference-0000002", "reference-0000004", "version-0000003", "version-0000004", "version-0000005",
    }  # fmt: skip
    read_record(folder / "version-0000003", version=3)


def test_a_refreshed_reference_outlives_a_sleep(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    awake, sleeping = (begun(model_folder, tmp_path / name, opened) for name in ("awake", "sleeping"))
    for learner in (awake, sleeping):
        learner.ask(OpenLearner(), LearnerOpened)
        for version in (1, 2, 3):
            figures(learner, version)
    sleeping.ask(SleepLearner(), LearnerSlept)
    saved(sleeping, 3)
    sleeping.ask(WakeLearner(), LearnerWoken)
    assert figures(sleeping, 4) == figures(awake, 4)
