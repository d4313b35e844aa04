"""Distillation through the trainer: what is reported, and what a batch without a teacher's word is worth. That loss and
gradient are those of the formula is in ``test_torch_learner_objectives.py``."""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.advantages import whitened
from penstock.backends.learners.objectives.asked import advantages_need_policy
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_estimates
from penstock.backends.learners.objectives.validity import objective_problem
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens
from penstock.messages.errors import UserFault
from penstock.messages.samples import Completed, Group, Loss, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

TOKENS = ([10, 11, 12, 1], [13, 14, 1])
TEACHER = ([-0.5, -2.0, -0.25, -1.0], [-3.0, -0.125, -0.75])
ROLLOUT = ([-1.0, -1.5, -2.0, -0.5], [-0.5, -1.25, -0.25])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("student")
    make_model("xs", folder, 0)
    return PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))


def group(*, taught: bool = True, masks: tuple[bytes, bytes] = (b"", b""), loss: Loss = Loss.OBJECTIVE) -> Group:
    samples = tuple(
        Sample(
            key=SampleKey(0, index),
            parts=(
                Part(
                    tokens=pack_tokens(tokens),
                    logprobs=pack_floats(ROLLOUT[index]),
                    spans=(VersionSpan(0, len(tokens)),),
                    loss_mask=masks[index],
                    teacher_logprobs=pack_floats(TEACHER[index]) if taught else b"",
                ),
            ),
            outcome=Completed(reward=Reward(value=float(index))),
            loss=loss,
        )
        for index, tokens in enumerate(TOKENS)
    )
    return Group(group_id=0, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([5, 6])), samples=samples)


def figures_of(model: PackedModel, groups: tuple[Group, ...], **keys: Any) -> dict[str, float]:  # noqa: ANN401 - options
    trainer = PolicyTrainer(
        model,
        LearnerOptions(objective=objective("distill", **keys)),
        temperature=1.0,
        num_steps=4,
        reference=None,
        check_stop=lambda: None,
    )
    figures = trainer.accumulate(read_groups(groups, min_token_version=0), version=0)
    model.model.zero_grad()
    return figures


def differences() -> list[float]:
    pairs = zip((v for s in ROLLOUT for v in s), (v for s in TEACHER for v in s), strict=True)
    return [old - taught for old, taught in pairs]


def test_the_reverse_kl_is_reported_as_a_mean_over_trained_tokens(model: PackedModel) -> None:
    every = differences()
    figures = figures_of(model, (group(),))
    assert figures["train/opd_reverse_kl"] == pytest.approx(sum(every) / 7)
    assert figures["rollout/advantages"] == pytest.approx(-sum(every) / 7)
    masked = figures_of(model, (group(masks=(bytes([1, 0, 0, 1]), b"")),))
    left = [every[0], *every[3:]]
    assert masked["train/opd_reverse_kl"] == pytest.approx(sum(left) / 5)


def test_with_another_proximal_policy_the_distance_is_that_of_it(model: PackedModel) -> None:
    figures = figures_of(model, (group(),), old_logprobs="recompute")
    taught = sum(v for s in TEACHER for v in s) / 7
    assert figures["train/opd_reverse_kl"] == pytest.approx(figures["rollout/log_probs"] - taught, abs=1e-6)


@pytest.mark.parametrize(("old", "is_asked"), [("engine", False), ("recompute", True), ("interpolate", True)])
def test_the_policy_is_asked_before_the_first_step_only_where_the_engine_does_not_say(old: str, is_asked: bool) -> None:
    assert advantages_need_policy(objective("distill", old_logprobs=old)) is is_asked
    assert not advantages_need_policy(objective("dapo", old_logprobs=old))


def test_a_batch_without_a_teachers_word_is_refused(model: PackedModel) -> None:
    with pytest.raises(UserFault, match="came without the log-probs of a teacher"):
        figures_of(model, (group(taught=False),))
    with pytest.raises(UserFault, match="came without the log-probs of a teacher"):
        figures_of(model, (group(), group(taught=False)))


def test_samples_that_are_imitated_need_no_teacher(model: PackedModel) -> None:
    demonstrated = msgspec.structs.replace(group(taught=False, loss=Loss.SUPERVISED), group_id=1)
    figures = figures_of(model, (group(), demonstrated))
    assert figures["train/opd_reverse_kl"] == pytest.approx(sum(differences()) / 7)
    assert math.isfinite(figures["train/loss"])
    assert "train/opd_reverse_kl" not in figures_of(model, (demonstrated,))


def test_sequences_have_what_the_teacher_said_of_their_trained_tokens() -> None:
    batch = read_groups([group(masks=(bytes([0, 1, 1, 0]), b""))], min_token_version=0)
    found = [s.teacher_logprobs for s in batch.sequences]
    assert [None if f is None else f.tolist() for f in found] == [[-2.0, -0.25], TEACHER[1]]
    assert [s.teacher_logprobs for s in read_groups([group(taught=False)], min_token_version=0).sequences] == [None] * 2
    assert list(floats_view(group().samples[0].parts[0].teacher_logprobs)) == TEACHER[0]


# --- advantages ---------------------------------------------------------------------------------------------------

GIVEN = RewardedSamples(
    rewards=torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64),
    group_ids=torch.tensor([0, 0, 1]),
    samples=Segments(torch.tensor([0, 0, 1, 2]), 3),
    positions=torch.tensor([0, 1, 0, 0]),
)
APART = torch.tensor([0.5, -0.25, 2.0, 1.0])


def test_distillation_alone_leaves_rewards_out() -> None:
    found = token_estimates(GIVEN, objective("distill", opd_kl_coef=0.5), reverse_kl=APART)
    assert found.advantages.tolist() == [-0.25, 0.125, -1.0, -0.5]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_every_estimator_takes_the_distance_off_before_it_whitens(name: str) -> None:
    options = objective(name, opd_kl_coef=0.5, whiten=False)
    alone = token_estimates(GIVEN, options).advantages
    found = token_estimates(GIVEN, options, reverse_kl=APART).advantages
    torch.testing.assert_close(found, alone - 0.5 * APART)
    white = token_estimates(GIVEN, msgspec.structs.replace(options, whiten=True), reverse_kl=APART).advantages
    torch.testing.assert_close(white, whitened(found.double()).float())


def test_a_critic_predicts_rewards_and_not_the_distance_to_a_teacher() -> None:
    values = torch.tensor([0.5, 0.25, 0.0, 1.0])
    options = objective("ppo", opd_kl_coef=0.5)
    plain = token_estimates(GIVEN, options, values=values)
    found = token_estimates(GIVEN, options, values=values, reverse_kl=APART)
    assert found.returns is not None
    assert plain.returns is not None
    assert torch.equal(found.returns, plain.returns)
    torch.testing.assert_close(found.advantages, plain.advantages - 0.5 * APART)


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("distill", {"opd_kl_coef": 0.0}, "opd_kl_coef"),
        ("distill", {"kl_in": "reward", "kl_coef": 0.1}, "kl_in"),
        ("sft", {"opd_kl_coef": 1.0}, "opd_kl_coef"),
    ],
)
def test_what_makes_no_sense_with_a_teacher_is_told(name: str, keys: dict[str, Any], key: str) -> None:
    problem = objective_problem(objective(name, **keys))
    assert problem is not None
    assert problem[0] == key
