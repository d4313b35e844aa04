"""Training in float16: the loss is scaled so that gradients do not vanish, steps whose gradients overflow are left out
and counted on every rank alike, and the scale is part of a checkpoint."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pytest
import torch
from learner_cases import demonstrations, make_groups
from rank_cases import CPU, Ranks

from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.batch.sequences import demonstration_sequences, read_groups
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions, WarmStartOptions
from penstock.backends.learners.torch.model import CheckpointError, PackedModel
from penstock.backends.learners.torch.parallel import parallelize, transformer_blocks, whole
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.torch.warm_start import warm_start
from penstock.backends.learners.training.alarms import LOSS_SCALE, OVERFLOWS
from penstock.backends.learners.training.loss_scale import GROWTH_STEPS, INITIAL, KEY, LARGEST, LossScale
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.messages.errors import DivergedError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainBatch
    from penstock.backends.learners.training.batch_trainer import StepResult
    from penstock.backends.learners.worker_group.workers import WorkerGroup

pytestmark = pytest.mark.long_run
NUM_RANKS = 2

NORM = "train/grad_norm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights float16 holds exactly, so that rounding them is no difference."""
    path = tmp_path_factory.mktemp("xs")
    make_model("xs", path, seed=0)
    model = PackedModel.load(path, dtype="float16", device=CPU)
    model.model.float()  # type: ignore[no-untyped-call]
    model.save(path)
    return path


def open_trainer(
    folder: Path, dtype: str = "float16", workers: WorkerGroup = SOLO, options: LearnerOptions | None = None
) -> tuple[PackedModel, PolicyTrainer]:
    options = options or LearnerOptions(learning_rate=1e-2)
    model = PackedModel.load(folder, dtype=dtype, device=CPU)
    parallelize(model, workers, options)
    return model, PolicyTrainer(
        model, options, temperature=1.0, num_steps=10, reference=None, check_stop=lambda: None, workers=workers
    )


def set_scale(trainer: PolicyTrainer, value: float) -> None:
    trainer.restore({**trainer.state(), KEY: torch.tensor([value, 0.0], dtype=torch.float64)})


def step(trainer: PolicyTrainer, version: int) -> tuple[dict[str, float], StepResult]:
    result = trainer.train(make_groups(), version=version, min_token_version=0)
    return {metric.name: metric.value for metric in result.metrics}, result


def batch() -> TrainBatch:
    return read_groups(make_groups(), min_token_version=0)


def weights_of(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [whole(weight).clone() for weight in trainer.trained_weights()]


def gradient_of(trainer: PolicyTrainer) -> torch.Tensor:
    trainer.accumulate(batch(), version=0)
    return torch.cat([weight.grad.reshape(-1) for weight in trainer.trained_weights() if weight.grad is not None])


# --- the scale ----------------------------------------------------------------------------------------------------


def test_a_scale_is_halved_by_an_overflow_and_doubled_after_many_steps_without() -> None:
    scale = LossScale(torch.float16)
    scale.follow(has_overflown=True, name="step 1")
    for _ in range(GROWTH_STEPS - 1):
        scale.follow(has_overflown=False, name="step")
    assert scale.value == INITIAL / 2
    kept = LossScale(torch.float16)
    kept.restore(scale.state())
    for one in (scale, kept):
        one.follow(has_overflown=False, name="step")
        assert one.value == INITIAL
    for _ in range(20 * GROWTH_STEPS):
        scale.follow(has_overflown=False, name="step")
    assert scale.value == LARGEST
    while scale.value > 1:
        scale.follow(has_overflown=True, name="step 7")
    with pytest.raises(DivergedError, match=r"step 7: the gradient is not finite .* with a loss scale of 1"):
        scale.follow(has_overflown=True, name="step 7")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_of_numbers_have_none(dtype: torch.dtype) -> None:
    scale, loss = LossScale(dtype), torch.ones(())
    assert scale.scaled(loss) is loss
    assert scale.state() == {}


# --- gradients ----------------------------------------------------------------------------------------------------


def test_small_gradients_are_those_of_float32_and_vanish_without_a_scale(folder: Path) -> None:
    options = LearnerOptions(objective=objective("dr_grpo", constant_tokens=1_000_000))
    expected = gradient_of(open_trainer(folder, "float32", options=options)[1])
    _, trainer = open_trainer(folder, options=options)
    found = gradient_of(trainer)
    assert 0 < float(expected.norm()) < 1e-4
    assert float((found - expected).norm() / expected.norm()) < 5e-3
    trainer.forget_gradients()
    set_scale(trainer, 1.0)
    assert float((gradient_of(trainer) - expected).norm() / expected.norm()) > 0.1


def test_a_step_whose_gradients_overflow_changes_nothing_and_is_counted_and_told(folder: Path) -> None:
    _, trainer = open_trainer(folder)
    set_scale(trainer, LARGEST)
    first, scale, version, notices = weights_of(trainer), LARGEST, 0, list[str]()
    while True:
        version += 1
        before = trainer.state()
        figures, result = step(trainer, version)
        notices += result.notices
        assert figures[LOSS_SCALE] == scale
        if not figures[OVERFLOWS]:
            break
        scale /= 2
        assert NORM not in figures
        assert all(map(torch.equal, weights_of(trainer), first))
        assert not any(key.startswith("exp_avg") for key in before)
        assert trainer.state()[KEY].tolist() == [scale, 0]
    assert version > 2, "there was more than one overflow"
    assert len([text for text in notices if "gradients did not fit into float16 at a loss scale of 1.67" in text]) == 1
    assert np.isfinite(figures[NORM])
    assert not all(map(torch.equal, weights_of(trainer), first))


def test_updates_of_a_batch_are_counted_together(folder: Path) -> None:
    _, trainer = open_trainer(folder, options=LearnerOptions(learning_rate=1e-2, num_updates=2, num_passes=2))
    set_scale(trainer, LARGEST)
    figures, _ = step(trainer, 1)
    assert figures[OVERFLOWS] == figures["train/num_updates"] > 1
    assert figures[LOSS_SCALE] == LARGEST / 2 ** (figures[OVERFLOWS] - 1)


def test_a_model_that_leaves_the_range_is_refused(folder: Path, tmp_path: Path) -> None:
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    with torch.no_grad():
        for block in transformer_blocks(model.model):
            for parameter in block.parameters():
                parameter.mul_(100.0)
    model.save(tmp_path)
    PackedModel.load(tmp_path, dtype="bfloat16", device=CPU)
    with pytest.raises(CheckpointError, match=r"larger than float16 holds .* set model\.dtype: bfloat16"):
        PackedModel.load(tmp_path, dtype="float16", device=CPU)


def test_a_warm_start_in_float16_learns(folder: Path) -> None:
    model = PackedModel.load(folder, dtype="float16", device=CPU)
    losses: list[float] = []
    warm_start(
        model,
        demonstration_sequences(demonstrations(), model.check_length),
        LearnerOptions(),
        WarmStartOptions(path="x", num_steps=30, batch_size=3, warmup_steps=2),
        seed=0,
        report=lambda _fraction, loss: losses.append(loss),
        check_stop=lambda: None,
    )
    assert losses[-1] < 0.5 * losses[0]


# --- ranks --------------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """What a rank found: of each step whether it was left out, its scale, and all weights after it."""

    overflows: list[float]
    scales: list[float]
    weights: list[NDArray[np.float32]]


def trained(workers: WorkerGroup, folder: Path, parallel: str, bad_rank: int | None) -> Ended:
    """Three steps; on one rank the gradient overflows in the second, between two blocks."""
    how: Literal["fsdp", "ddp"] = "ddp" if parallel == "ddp" else "fsdp"
    options = LearnerOptions(learning_rate=1e-2, parallel=how, max_tokens_per_micro_batch=16)
    model, trainer = open_trainer(folder, workers=workers, options=options)
    is_bad = False

    def burst(_block: object, _inputs: object, output: torch.Tensor) -> None:
        if is_bad and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2.0**30)  # type: ignore[no-untyped-call]

    transformer_blocks(model.model)[0].register_forward_hook(burst)
    ended = Ended([], [], [])
    for version in (1, 2, 3):
        is_bad = version == 2 and bad_rank == workers.rank
        figures, _ = step(trainer, version)
        ended.overflows.append(figures[OVERFLOWS])
        ended.scales.append(figures[LOSS_SCALE])
        ended.weights.append(torch.cat([weight.reshape(-1) for weight in weights_of(trainer)]).numpy())
    return ended


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_what_overflows_on_one_rank_is_left_out_on_all(parallel: str, folder: Path, ranks: Ranks) -> None:
    found = ranks.run(2, trained, folder, parallel, 1)
    for rank in found:
        assert rank.overflows == [0, 1, 0]
        assert rank.scales == [INITIAL, INITIAL, INITIAL / 2]
        assert np.array_equal(rank.weights[0], rank.weights[1])
        assert not np.array_equal(rank.weights[1], rank.weights[2])
        assert np.array_equal(rank.weights[2], found[0].weights[2])
    (alone,) = ranks.run(1, trained, folder, parallel, 0)
    assert alone.overflows == [0, 1, 0]
    moved = alone.weights[2] - alone.weights[0]
    assert np.linalg.norm(found[0].weights[2] - alone.weights[2]) < 0.05 * np.linalg.norm(moved)
