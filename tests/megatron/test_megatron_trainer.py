"""Batches of reinforcement learning under every layout, against the torch learner."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import trainer_plan as plan

from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.megatron.speed import shape_of
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.recording_options import DumpOptions
from penstock.backends.learners.step_dumps import read_step
from penstock.backends.learners.torch import speed
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.reference import new_reference
from penstock.backends.learners.torch.trainer import PolicyTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ranks import Ranks

    from penstock.backends.learners.options import LearnerOptions
    from penstock.messages.samples import Group

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")
NUM_BATCHES = 2
Weights = dict[str, Any]


@pytest.mark.parametrize("layout", plan.LAYOUTS)
def test_batches_end_where_the_torch_learner_ends(
    layout: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys = plan.LAYOUTS[layout]
    options = plan.learner_options(megatron=keys, num_updates=2)
    check_against_torch(tiny_family(family), options, ranks(num_ranks), num_ranks, plan.make_batches(NUM_BATCHES))


PIPELINE, VIRTUAL = plan.PP2, plan.VIRTUAL | {"expert_parallel": 1}
IN_CI = ("grpo, KL to a reference", "MIS by sequence", "dpo")
"""Objectives that four ranks have there: with a reference, with tokens that are coupled, with samples that are. The
others have stages there, and the layouts above have replicas; both at once come at night."""


@pytest.mark.parametrize(
    ("name", "keys"),
    [pytest.param(name, PIPELINE, id=f"pipeline-{name}") for name in plan.OBJECTIVES]
    + [
        pytest.param(name, VIRTUAL, id=f"virtual-{name}", marks=[] if name in IN_CI else [pytest.mark.slow])
        for name in plan.OBJECTIVES
    ],
)
def test_every_objective_is_that_of_the_torch_learner(
    name: str, keys: dict[str, Any], ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    objective, others = plan.OBJECTIVES[name]
    options = plan.learner_options(objective, keys, **others)
    num_ranks = 4 if "virtual_pipeline" in keys else 2  # with replicas that have unequally much to do
    check_against_torch(tiny_family("qwen3"), options, ranks(num_ranks), num_ranks, plan.make_batches(2))


@pytest.mark.parametrize("keys", [plan.TP2, {"context_parallel": 2}], ids=["tensor 2", "context 2"])
def test_likeliest_tokens_are_found_in_a_divided_vocabulary_and_a_divided_sequence(
    keys: dict[str, Any], ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    options = plan.learner_options(objective("gkd", distill_beta=0.0), keys)
    check_against_torch(tiny_family("qwen3"), options, ranks(2), 2, plan.make_batches(2, with_imitated=True))


@pytest.mark.parametrize("keys", [plan.TP2, {"context_parallel": 2}], ids=["tensor 2", "context 2"])
def test_tokens_that_were_kept_are_found_in_a_divided_vocabulary_and_a_divided_sequence(
    keys: dict[str, Any], ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    """With a reference, and with tokens beside them that were drawn from the whole vocabulary."""
    options = plan.learner_options(objective("grpo", old_logprobs="recompute", kl_coef=0.1, entropy_coef=0.01), keys)
    batches = plan.with_kept(plan.make_batches(2))
    check_against_torch(tiny_family("qwen3"), options, ranks(2), 2, batches)


def test_imitated_samples_are_trained_beside_the_others(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    """One replica may have only the one kind, and the other only the other."""
    options = plan.learner_options(num_updates=2)
    check_against_torch(
        tiny_family("qwen3"), options, ranks(2), 2, plan.make_batches(2, with_imitated=True)
    )  # fmt: skip


@pytest.mark.parametrize("layout", plan.LAYOUTS)
def test_loss_and_gradient_are_those_of_the_torch_learner(
    layout: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys = plan.LAYOUTS[layout]
    folder, (groups,) = tiny_family(family), plan.make_batches(1)
    options = plan.learner_options(megatron=keys | {"distributed_optimizer": False, "overlap_param_gather": False})
    answers = ranks(num_ranks).run(
        "trainer_cases:gradient", str(folder), encoded(options), num_ranks, encoded(groups)
    )  # fmt: skip
    figures, expected = gradient_by_torch(folder, options, groups)
    assert all(found == answers[0][0] for found, _ in answers), "the same bits on every rank"
    for name, value in figures.items():
        assert answers[0][0][name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    found: Weights = answers[0][1]
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-5, err_msg=name)
    assert norm(expected) > 1, "there is something to see"


@pytest.mark.parametrize(
    "layout",
    ["data 2", "context 2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tensor 2", "pipeline 2, tied"))],
)
def test_a_dump_has_what_the_torch_learner_writes_and_changes_no_bit(
    layout: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    family, num_ranks, keys = plan.LAYOUTS[layout]
    folder, batches = tiny_family(family), plan.make_batches(1)
    chosen = objective("gspo" if layout == "data 2" else "grpo", old_logprobs="recompute", kl_coef=0.1)
    options = plan.learner_options(chosen, keys, num_updates=2)
    dumped = msgspec.structs.replace(options, dump=DumpOptions())
    torch_trainer(loaded(folder), dumped, tmp_path / "torch").train(batches[0], version=1, min_token_version=0)
    ends: list[Weights] = []
    for given, run in ((options, ""), (dumped, str(tmp_path / layout))):
        answers = ranks(num_ranks).run(
            "trainer_cases:trained", str(folder), encoded(given), num_ranks, encoded(batches), run
        )  # fmt: skip
        ends.append(answers[0][1])
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])
    expected, found = read_step(tmp_path / "torch", 1), read_step(tmp_path / layout, 1)
    assert [row.key for row in found] == [row.key for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens.tolist(), ours.mask.tolist()) == (theirs.tokens.tolist(), theirs.mask.tolist())
        for name, values in theirs.figures.items():
            assert (np.isfinite(values[theirs.mask]) != (name == "num_kept")).all(), name  # no cut-off was recorded
            np.testing.assert_allclose(ours.figures[name], values, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("keys", [{}, plan.OVERLAPS, {"distributed_optimizer": False}, plan.TP2, plan.PP2])
def test_a_step_whose_gradient_is_no_number_changes_nothing(
    keys: dict[str, Any], ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    answers = ranks(2).run("trainer_cases:after_a_bad_step", str(tiny_family("qwen3")), keys, 2)
    for story, is_unchanged, goes_on in answers:
        assert "the weights were not changed" in story
        assert is_unchanged
        assert goes_on


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3 tied", "qwen3_moe mixed", "llama"])
def test_a_model_costs_what_the_torch_learner_counts(family: str, tiny_family: Callable[[str], Path]) -> None:
    folder = tiny_family(family)
    ours, theirs = shape_of(read_architecture(folder)), speed.shape_of(loaded(folder).model)
    assert theirs is not None
    assert ours == theirs


def check_against_torch(
    folder: Path, options: LearnerOptions, ranks: Ranks, num_ranks: int, batches: list[tuple[Group, ...]]
) -> Weights:
    """Figures of every batch, on every rank, and weights after the last.

    A first step of AdamW makes steps of full size of gradients that are hardly more than rounding. So figures of later
    batches may differ by as much as those of the torch learner do when it adds up in another order, which depends on
    the processor, three times over.
    """
    answers = ranks.run("trainer_cases:trained", str(folder), encoded(options), num_ranks, encoded(batches))
    figures, weights = by_torch(folder, without_layout(options), encoded(batches))
    smaller = msgspec.structs.replace(options, max_tokens_per_micro_batch=options.max_tokens_per_micro_batch // 2)
    otherwise, _ = by_torch(folder, without_layout(smaller), encoded(batches))
    for number, wanted in enumerate(figures):
        found: list[dict[str, float]] = [of_rank[number] for of_rank, _ in answers]
        own = [{name: value for name, value in each.items() if not name.startswith("perf/")} for each in found]
        assert all(each == pytest.approx(own[0], abs=0, rel=0, nan_ok=True) for each in own), "the same bits"
        assert found[0].keys() == wanted.keys()
        for name, value in wanted.items():
            if not name.startswith("perf/"):
                rounding = abs(value - otherwise[number][name]) if number and math.isfinite(value) else 0.0
                expected = pytest.approx(value, abs=max(1e-5, 3 * rounding), rel=1e-4 if number else 1e-5, nan_ok=True)
                assert found[0][name] == expected, f"{name}, batch {number + 1}"
    after: Weights = answers[0][1]
    assert after.keys() == weights.keys()
    before = {name: tensor.numpy() for name, tensor in loaded(folder).named_tensors().items()}
    moved = norm({name: weights[name] - before[name] for name in weights})
    # Adam makes a step of full size from a gradient that is zero but for rounding; such weights are few.
    assert norm({name: after[name] - weights[name] for name in weights}) < 2e-3 * moved
    return after


@pytest.mark.parametrize("layout", ["tensor 2", "pipeline 2, tied", "expert 2"])
def test_weights_that_are_frozen_keep_their_bits_and_the_others_are_trained_as_by_torch(
    layout: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys = plan.LAYOUTS[layout]
    frozen = ("embed_tokens", r"layers\.0\.self_attn", "mlp.*down_proj")
    options = plan.learner_options(megatron=keys, freeze=frozen)
    before = {name: tensor.numpy() for name, tensor in loaded(tiny_family(family)).named_tensors().items()}
    kept = {name for name in before if any(re.search(pattern, name) for pattern in frozen)}
    after = check_against_torch(tiny_family(family), options, ranks(num_ranks), num_ranks, plan.make_batches(2))
    assert {name for name in before if np.array_equal(before[name], after[name])} == kept


def test_a_stage_that_has_nothing_to_train_is_refused(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    wrong = plan.learner_options(megatron=PIPELINE, train_only=(r"layers\.0\.",))
    with pytest.raises(AssertionError, match="every weight of the pipeline stage of rank 1 is frozen"):
        ranks(2).run("trainer_cases:trained", str(tiny_family("qwen3")), encoded(wrong), 2, encoded([]))


@pytest.mark.parametrize(
    ("name", "place"), [("grpo", "forward"), ("grpo", "backward"), ("gspo", "backward"), ("ppo", "forward")]
)
def test_a_rank_that_runs_out_of_memory_has_all_of_them_go_on_with_smaller_micro_batches(
    name: str, place: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, batches = str(tiny_family("qwen3")), encoded(plan.make_batches(2))
    keys: dict[str, Any] = {"critic": "shared"} if name == "ppo" else {}
    options = plan.learner_options(objective(name, **keys), num_updates=2)
    limit = plan.Limit(30, (1,), place, str(tmp_path))
    answers = ranks(2).run("trainer_cases:short_of_memory", folder, encoded(options), 2, batches, limit)
    assert [(size, story) for _, _, size, story in answers] == [(plan.MAX_TOKENS // 2, "")] * 2
    smaller = encoded(msgspec.structs.replace(options, max_tokens_per_micro_batch=plan.MAX_TOKENS // 2))
    figures, weights = ranks(2).run("trainer_cases:trained", folder, smaller, 2, batches)[0]
    for found, wanted in zip(answers[0][0], figures, strict=True):
        of_step = {key: value for key, value in wanted.items() if not key.startswith("perf/")}
        assert {key: found[key] for key in of_step} == pytest.approx(of_step, rel=1e-6, abs=1e-7, nan_ok=True)
    assert norm({key: answers[0][1][key] - weights[key] for key in weights}) < 5e-5


def test_where_others_wait_in_a_layer_the_next_learner_has_smaller_micro_batches(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    """Both ranks run out, as here none would be ended while it waits for the other."""
    keys, num_ranks = plan.TP2, 2
    options, batches = plan.learner_options(megatron=keys), encoded(plan.make_batches(1))
    limit = plan.Limit(15, (0, 1), "forward", str(tmp_path))  # of a sequence that two divide
    for others, size, reason in (
        ({}, 24, "out of memory with micro-batches of at most 48 tokens. .* goes on from its last checkpoint with 24"),
        ({}, 24, "^$"),
        ({"max_tokens_per_micro_batch": 40}, 20, "at most 40 tokens"),
    ):
        asked = encoded(msgspec.structs.replace(options, **others))
        given = (str(tiny_family("qwen3")), asked, num_ranks, batches, limit)
        for _, _, found, story in ranks(num_ranks).run("trainer_cases:short_of_memory", *given):
            assert found == size
            assert re.search(reason, story)


def without_layout(options: LearnerOptions) -> bytes:
    """What the torch learner reads of these, for the cache."""
    return encoded(msgspec.structs.replace(options, megatron=type(options.megatron)()))


@cache
def by_torch(folder: Path, options: bytes, batches: bytes) -> tuple[list[dict[str, float]], Weights]:
    """Figures of every batch, and weights after the last."""
    from penstock.backends.learners.options import LearnerOptions
    from penstock.messages.samples import Group

    model = loaded(folder)
    trainer = torch_trainer(model, msgspec.msgpack.decode(options, type=LearnerOptions))
    figures: list[dict[str, float]] = []
    for number, groups in enumerate(msgspec.msgpack.decode(batches, type=list[tuple[Group, ...]]), start=1):
        result = trainer.train(groups, version=number, min_token_version=0)
        figures.append({metric.name: metric.value for metric in result.metrics})
    return figures, {name: tensor.numpy() for name, tensor in model.named_tensors().items()}


def gradient_by_torch(
    folder: Path, options: LearnerOptions, groups: tuple[Group, ...]
) -> tuple[dict[str, float], Weights]:
    """Figures of a batch as one step, and its gradient by the names of a checkpoint."""
    model = loaded(folder)
    figures = torch_trainer(model, options).accumulate(read_groups(groups, min_token_version=0), version=1)
    found: dict[str, Any] = {name: parameter.grad for name, parameter in model.model.named_parameters()}
    return figures, {name: tensor.numpy() for name, tensor in model.checkpoint_names.rename(found).items()}


def loaded(folder: Path) -> PackedModel:
    return PackedModel.load(folder, dtype="float32", device=CPU)


def torch_trainer(model: PackedModel, options: LearnerOptions, run_folder: Path | None = None) -> PolicyTrainer:
    model.freeze(options)
    return PolicyTrainer(
        model, options, temperature=plan.TEMPERATURE, num_steps=plan.NUM_STEPS,
        reference=new_reference(model, options), check_stop=lambda: None, seed=plan.SEED,
        run_folder=run_folder,
    )  # fmt: skip


def encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def norm(tensors: Mapping[str, Any]) -> float:
    return math.sqrt(sum(float(np.square(tensor, dtype=np.float64).sum()) for tensor in tensors.values()))
