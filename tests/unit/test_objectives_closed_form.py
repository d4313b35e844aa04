"""Objectives against small cases worked out by hand from the papers, and against plain loops on random input."""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from padded_objectives import discounted_returns, generalized_advantages, reinforce_plus_plus_advantages

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives import correction, policy_loss
from penstock.backends.learners.objectives.advantages import (
    group_normalized_advantages,
    leave_one_out_advantages,
    whitened,
)
from penstock.backends.learners.objectives.distillation import (
    sampled_reverse_kl,
    top_divergence,
)
from penstock.backends.learners.objectives.imitation import (
    best_of_group,
    supervised_loss,
)
from penstock.backends.learners.objectives.kl import kl_estimate
from penstock.backends.learners.objectives.logprobs import other_logprobs, token_entropy, token_logprobs
from penstock.backends.learners.objectives.mismatch import mis_metrics
from penstock.backends.learners.objectives.policy_loss import reduction_weights
from penstock.backends.learners.objectives.preference import pair_loss
from penstock.backends.learners.objectives.values import clipped_value_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from penstock.backends.learners.objective_names import Level, MisMode

gradcheck: Any = torch.autograd.gradcheck  # has no types
SEQUENCES = Segments(torch.tensor([0, 2, 0, 2, 0, 1]), 3)


def random(*shape: int, seed: int = 0, requires_grad: bool = False) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_(requires_grad)


# --- advantages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 6, 7])
@pytest.mark.parametrize("reward", [0.1, 0.7, -1.3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_no_advantage(reward: float, size: int) -> None:
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0] * size + [1, 1])
    for normalize_std in (True, False):
        assert not group_normalized_advantages(rewards, groups, normalize_std=normalize_std)[:size].any()
    assert not leave_one_out_advantages(rewards, groups)[:size].any()
    assert not whitened(rewards[:size]).any()


def test_dr_grpo_is_the_reward_less_the_mean_of_its_group() -> None:
    rewards, groups = torch.tensor([3.0, 1.0, 5.0, 2.0]), torch.tensor([7, 7, 4, 4])
    advantages = group_normalized_advantages(rewards, groups, normalize_std=False)
    assert advantages.tolist() == [1.0, -1.0, 1.5, -1.5]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    rewards, groups = torch.tensor([1.0, 9.0, 2.0, 6.0]), torch.tensor([5, 8, 5, 5])
    advantages = leave_one_out_advantages(rewards, groups)
    assert advantages.tolist() == pytest.approx([1 - 4, 0, 2 - 3.5, 6 - 1.5])


def test_the_reward_stands_at_the_last_trained_token_and_masked_ones_have_no_kl() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = reinforce_plus_plus_advantages(
        torch.tensor([2.0, 5.0, 3.0]), mask, kl=torch.ones(3, 4), kl_coef=0.5, discount=0.5
    )
    assert found.tolist() == [[0.25, 0.0, 1.5, 0.0], [0.0] * 4, [-0.5625, -0.125, 0.75, 2.5]]


def test_gae_with_a_trace_of_0_is_the_temporal_difference_and_of_1_the_return_less_the_value() -> None:
    rewards, values, mask = random(2, 5), random(2, 5, seed=1), torch.ones(2, 5, dtype=torch.float64)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1, dtype=torch.float64)], dim=1)
    short = generalized_advantages(rewards, values, mask, discount=0.9, trace=0.0)
    torch.testing.assert_close(short.advantages, rewards + 0.9 * following - values)
    long = generalized_advantages(rewards, values, mask, discount=0.9, trace=1.0)
    torch.testing.assert_close(long.returns, discounted_returns(rewards, discount=0.9))


def test_gae_steps_over_positions_that_are_not_trained() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    rewards, values = random(1, 5) * mask, random(1, 5, seed=1)
    kept = [0, 2, 3]
    whole = generalized_advantages(rewards, values, mask, discount=0.9, trace=0.7)
    alone = generalized_advantages(rewards[:, kept], values[:, kept], mask[:, kept], discount=0.9, trace=0.7)
    torch.testing.assert_close(whole.advantages[:, kept], alone.advantages)
    assert (whole.advantages[:, [1, 4]] == 0).all()
    assert (whole.returns[:, [1, 4]] == 0).all()


def test_whitened_advantages_have_mean_0_and_standard_deviation_1_over_what_counts() -> None:
    values, mask = random(40) * 5 + 3, (random(40, seed=1) > 0).double()
    result = whitened(values, mask)[mask == 1]
    assert float(result.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(result.std()) == pytest.approx(1.0, abs=1e-6)
    assert whitened(torch.tensor([4.0])).tolist() == [0.0]
    with pytest.raises(ValueError, match="no token of the step is trained"):
        whitened(values, torch.zeros_like(values))


# --- KL -----------------------------------------------------------------------------------------------------------


def expectation_over_three_tokens(estimator: str, *, unbiased: bool) -> tuple[float, Tensor, float, Tensor]:
    """Value and gradient of the estimator in expectation over the behaviour policy; the exact reverse KL and its."""
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    behaviour = torch.tensor([0.9, 0.1, -0.3], dtype=torch.float64).log_softmax(0) if unbiased else new.detach()
    estimate = kl_estimate(estimator, new, base, behaviour_logprobs=behaviour if unbiased else None)  # type: ignore[arg-type]
    mean = (behaviour.exp() * estimate).sum()
    exact = (new.exp() * (new - base)).sum()
    (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(exact, logits)
    return float(mean.detach()), gradient, float(exact.detach()), wanted


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_var_kl"])
def test_k1_and_k3_are_unbiased_values(estimator: str) -> None:
    value, _, exact, _ = expectation_over_three_tokens(estimator, unbiased=False)
    assert value == pytest.approx(exact, abs=1e-12)


def test_k1_as_a_loss_has_no_gradient_and_k2_that_of_the_reverse_kl() -> None:
    _, k1, _, _ = expectation_over_three_tokens("k1", unbiased=False)
    torch.testing.assert_close(k1, torch.zeros_like(k1))
    _, k2, _, exact = expectation_over_three_tokens("k2", unbiased=False)
    torch.testing.assert_close(k2, exact)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_kl_has_value_and_gradient_of_the_reverse_kl_off_policy(estimator: str) -> None:
    value, gradient, exact, wanted = expectation_over_three_tokens(estimator, unbiased=True)
    assert value == pytest.approx(exact, abs=1e-12)
    torch.testing.assert_close(gradient, wanted)


# --- policy losses ------------------------------------------------------------------------------------------------


def test_gspo_weighs_each_token_of_a_sequence_by_the_geometric_mean_of_the_ratios() -> None:
    new, old = random(6), random(6, seed=1)
    ratio = (policy_loss.sequence_logprobs(new, old, SEQUENCES) - old).exp()
    for tokens in ([0, 2, 4], [1, 3], [5]):
        geometric = math.prod(math.exp(float(new[t] - old[t])) for t in tokens) ** (1 / len(tokens))
        assert ratio[tokens].tolist() == pytest.approx([geometric] * len(tokens))


def test_gspo_credits_each_token_with_its_own_advantage() -> None:
    new, old = random(6, requires_grad=True), random(6, seed=1)
    advantages = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5, 0.0], dtype=torch.float64)
    at_level = policy_loss.sequence_logprobs(new, old, SEQUENCES)
    result = policy_loss.clipped_policy_loss(at_level, old, advantages, clip_low=1.0, clip_high=99.0)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    torch.testing.assert_close(gradient, -advantages * (at_level - old).exp().detach())


def test_dppo_bounds_the_weight_of_a_rare_token_that_became_likelier() -> None:
    old = torch.tensor([-12.0, -12.0, -1.0], dtype=torch.float64)
    new = torch.tensor([-2.0, -9.5, -0.9], dtype=torch.float64, requires_grad=True)
    result = policy_loss.divergence_masked_loss(
        new,
        old,
        torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64),
        divergence=policy_loss.binary_total_variation(new.detach(), old),
        threshold_low=0.2,
        threshold_high=0.2,
        max_ratio=20.0,
    )
    ratio = [20.0, math.exp(2.5), math.exp(0.1)]  # e^10 = 22,026 without the bound
    assert result.loss.tolist() == pytest.approx([ratio[0], -ratio[1], -ratio[2]])
    assert result.clipped.tolist() == [1.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    assert gradient.tolist() == pytest.approx([ratio[0], -ratio[1], -ratio[2]])


def test_cispo_gives_every_token_a_gradient_of_its_bounded_ratio() -> None:
    new = torch.tensor([0.0, 2.0, -3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    result = policy_loss.cispo_loss(new, torch.zeros_like(new), advantages, clip_low=0.5, clip_high=1.0)
    torch.autograd.backward(result.loss.sum())
    torch.testing.assert_close(new.grad, torch.tensor([-1.0, 2.0 * 2.0, -0.5 * 0.5], dtype=torch.float64))


def test_dppo_masks_only_what_moves_further_out_of_the_region() -> None:
    old, new = torch.tensor([0.1, 0.1, 0.5, 0.5, 0.1]).log(), torch.tensor([0.4, 0.4, 0.2, 0.2, 0.2]).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    divergence = policy_loss.binary_total_variation(new, old)
    torch.testing.assert_close(divergence, torch.tensor([0.3, 0.3, 0.3, 0.3, 0.1]))
    result = policy_loss.divergence_masked_loss(
        new, old, advantages, divergence=divergence, threshold_low=0.2, threshold_high=0.2
    )
    torch.testing.assert_close(result.loss, torch.tensor([0.0, 4.0, -0.4, 0.0, -2.0]))
    assert result.clipped.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_the_binary_kl_is_that_of_two_coins() -> None:
    new, old = torch.tensor([0.25]).log(), torch.tensor([0.5]).log()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(policy_loss.binary_kl(new, old)) == pytest.approx(expected, abs=1e-6)
    assert torch.isfinite(policy_loss.binary_kl(torch.tensor([0.0, -200.0]), torch.tensor([-200.0, 0.0]))).all()


# --- corrections --------------------------------------------------------------------------------------------------


def test_the_interpolated_policy_is_the_current_one_when_fresh_and_the_engines_at_one_version() -> None:
    new, rollout = torch.full((4,), -1.0), torch.full((4,), -3.0)
    proximal = correction.interpolated_logprobs(new, rollout, torch.tensor([0, 1, 2, 4]))
    assert proximal.tolist() == pytest.approx([-1.0, -3.0, -2.0, -1.5])


def test_tis_has_a_lower_bound_too() -> None:
    weights = correction.truncated_importance_weights(torch.zeros(2), torch.tensor([2.0, -2.0]), upper=3.0, lower=0.5)
    assert weights.weight.tolist() == [0.5, 3.0]
    assert weights.truncated.tolist() == [1.0, 1.0]


DIFFERENCE = torch.tensor([0.4, -0.3, 0.5, 1.2, -0.2, -1.0])  # old − rollout; sequences {0, 2, 4}, {5}, {1, 3}


@pytest.mark.parametrize(
    ("level", "logs"),
    [
        ("token", [0.4, -0.3, 0.5, 1.2, -0.2, -1.0]),
        ("sequence", [0.7, 0.9, 0.7, 0.9, 0.7, -1.0]),
        ("geometric", [0.7 / 3, 0.45, 0.7 / 3, 0.45, 0.7 / 3, -1.0]),
    ],
)
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_mis_bounds_the_weight_of_its_level(level: Level, logs: list[float], mode: MisMode) -> None:
    result = correction.masked_importance_weights(
        DIFFERENCE, torch.zeros(6), SEQUENCES, level=level, mode=mode, upper=1.6, lower=0.9
    )
    expected: list[float] = []
    for ratio in map(math.exp, logs):
        match mode:
            case "truncate":
                expected.append(min(ratio, 1.6))
            case "clip":
                expected.append(min(max(ratio, 0.9), 1.6))
            case "mask":
                expected.append(ratio if 0.9 <= ratio <= 1.6 else 0.0)
    assert result.weight.tolist() == pytest.approx(expected, abs=1e-6)


def test_mis_bounds_below_by_the_inverse_where_nothing_is_said() -> None:
    result = correction.masked_importance_weights(
        DIFFERENCE, torch.zeros(6), SEQUENCES, level="token", mode="clip", upper=2.0
    )
    assert float(result.weight[5]) == 0.5


def test_mis_rejects_at_a_level_of_its_own_and_vetoes_whole_sequences() -> None:
    def weights(**how: Any) -> list[float]:  # noqa: ANN401 - handed on
        result = correction.masked_importance_weights(
            DIFFERENCE, torch.zeros(6), SEQUENCES, level="token", mode="truncate", upper=9.0, **how
        )
        return (result.weight == 0).double().tolist()

    assert weights() == [0.0] * 6
    assert weights(reject_level="sequence", reject_upper=2.2, reject_lower=0.1) == [0, 1, 0, 1, 0, 0]
    assert weights(reject_level="token", reject_upper=9.0, reject_lower=0.75) == [0, 1, 0, 0, 0, 1]
    assert weights(veto=0.75) == [0, 1, 0, 1, 0, 1]


def test_mis_weights_of_sequences_are_normalized_over_sequences() -> None:
    sequences = Segments(torch.tensor([0, *[1] * 9]), 3)  # and one without tokens
    difference = torch.tensor([math.log(2.0), *[math.log(0.5) / 9] * 9], dtype=torch.float64)
    result = correction.masked_importance_weights(
        difference, torch.zeros(10), sequences, level="sequence", mode="truncate", upper=9.0, normalize=True
    )
    assert result.weight.tolist() == pytest.approx([1.6, *[0.4] * 9])


def test_mis_weights_can_be_normalized_to_mean_1() -> None:
    result = correction.masked_importance_weights(
        DIFFERENCE, torch.zeros(6), SEQUENCES, level="token", mode="truncate", upper=9.0, normalize=True
    )
    assert float(result.weight.mean()) == pytest.approx(1.0)
    torch.testing.assert_close(result.weight / result.weight[0], DIFFERENCE.exp() / DIFFERENCE[0].exp())


def test_mis_metrics_are_those_of_their_definitions() -> None:
    old, rollout = random(6), random(6, seed=1)
    found = mis_metrics(old, rollout, SEQUENCES)
    for tokens in ([0, 2, 4], [1, 3], [5]):
        d = old[tokens] - rollout[tokens]
        expected = {
            "mis_kl": -d,
            "mis_k3_kl": d.exp() - d - 1,
            "mis_training_log_ppl": -old[tokens].mean(),
            "mis_rollout_ppl": (-rollout[tokens].mean()).exp(),
            "mis_log_ppl_diff": rollout[tokens].mean() - old[tokens].mean(),
            "mis_ppl_ratio": (-d.mean()).exp(),
            "mis_chi2_token": (2 * d).exp().mean() - 1,
            "mis_chi2_seq": (2 * d.sum()).exp() - 1,
        }
        for name, value in expected.items():
            torch.testing.assert_close(found[f"train/{name}"][tokens], value.expand(len(tokens)))


def test_opsm_keeps_good_samples_however_far_they_are() -> None:
    kept = correction.off_policy_sequence_mask(
        torch.full((6,), -3.0), torch.full((6,), -1.0), torch.tensor([1.0, -1.0] * 3), SEQUENCES, delta=0.1
    )
    assert kept.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


# --- other losses -------------------------------------------------------------------------------------------------


def test_dpo_is_log_2_at_the_reference_and_smoothing_mixes_the_two_orders() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    assert float(pair_loss(zero, zero, zero, zero, beta=0.1).loss) == pytest.approx(math.log(2))
    plain = pair_loss(3 * one, one, one, zero, beta=0.5)
    assert float(plain.margin) == pytest.approx(0.5)
    assert float(plain.loss) == pytest.approx(math.log(1 + math.exp(-0.5)))
    smooth = pair_loss(3 * one, one, one, zero, beta=0.5, label_smoothing=0.2)
    assert float(smooth.loss) == pytest.approx(0.8 * math.log(1 + math.exp(-0.5)) + 0.2 * math.log(1 + math.exp(0.5)))


def test_rejection_sampling_keeps_the_best_of_each_group_that_are_good_enough() -> None:
    rewards, groups = torch.tensor([1.0, 0.5, 1.0, 0.2, 0.1, 0.9]), torch.tensor([3, 3, 3, 5, 5, 4])
    assert best_of_group(rewards, groups, threshold=0.5).tolist() == [True, False, True, False, False, True]


def test_the_mean_over_samples_of_the_difference_is_the_reverse_kl() -> None:
    """Enumerated instead of drawn: each token weighs as often as the student takes it."""
    student, teacher = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.3, 0.1])
    sampled = sampled_reverse_kl(student.log().requires_grad_(), teacher.log())
    assert not sampled.requires_grad
    expected = 0.2 * math.log(0.2 / 0.6) + 0.5 * math.log(0.5 / 0.1)
    assert float((student * sampled).sum()) == pytest.approx(expected)
    assert float((student * sampled).sum()) == pytest.approx(
        float(top_divergence(student.log()[None], teacher.log()[None], beta=1.0)), abs=1e-6
    )


def test_the_policy_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """``−E[A · ∇log π]`` with ``A = −(log π − log π_T)`` over all tokens is ``∇ KL(π ‖ π_T)``, as ``E[∇log π] = 0``."""
    logits, teacher = random(5, seed=1, requires_grad=True), torch.log_softmax(random(5, seed=2), -1)
    student = torch.log_softmax(logits, -1)
    advantages = -sampled_reverse_kl(student, teacher)
    (by_policy,) = torch.autograd.grad(
        -(student.exp().detach() * advantages * student).sum(), logits, retain_graph=True
    )
    (by_kl,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits)
    assert torch.allclose(by_policy, by_kl, atol=1e-12)


def test_over_all_tokens_the_divergence_is_that_of_two_distributions() -> None:
    student, teacher = torch.tensor([[0.2, 0.3, 0.5]]).log(), torch.tensor([[0.6, 0.3, 0.1]]).log()

    def kl(p: Tensor, q: Tensor) -> float:
        return float((p.exp() * (p - q)).sum())

    mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
    assert float(top_divergence(student, teacher, beta=0.0)) == pytest.approx(kl(teacher, student), abs=1e-6)
    assert float(top_divergence(student, teacher, beta=1.0)) == pytest.approx(kl(student, teacher), abs=1e-6)
    expected = 0.3 * kl(teacher, mixture) + 0.7 * kl(student, mixture)
    assert float(top_divergence(student, teacher, beta=0.3)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_likeliest_tokens_and_all_others_together_are_two_distributions(beta: float) -> None:
    """Summed up here token by token; what the student does not know, and what a teacher has not named, is one of the
    others."""
    p, q = [0.5, 0.2, 0.1, 0.2], [0.3, 0.3, 0.25, 0.15]  # teacher and student over four tokens
    named = [0, 1]
    teacher = torch.tensor([[math.log(p[i]) for i in named]], dtype=torch.float64)
    student = torch.tensor([[math.log(q[i]) for i in named]], dtype=torch.float64)
    ps, qs = [p[0], p[1], p[2] + p[3]], [q[0], q[1], q[2] + q[3]]

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    ms = [beta * x + (1 - beta) * y for x, y in zip(ps, qs, strict=True)]
    inner = beta * kl(ps, ms) + (1 - beta) * kl(qs, ms)
    wanted = {0.0: kl(ps, qs), 1.0: kl(qs, ps)}.get(beta, inner)
    assert float(top_divergence(student, teacher, beta=beta)) == pytest.approx(wanted, abs=1e-12)
    nothing = torch.full((1, 1), -math.inf, dtype=torch.float64)
    known = torch.full((1, 1), math.log(0.2), dtype=torch.float64)
    for more in ((nothing, known), (known, nothing)):
        further = (torch.cat([each, one], dim=1) for each, one in zip((student, teacher), more, strict=True))
        assert float(top_divergence(*further, beta=beta)) == pytest.approx(wanted, abs=1e-12)
    everything = [torch.tensor([x], dtype=torch.float64).log() for x in (q, p)]
    assert float(top_divergence(*everything, beta=beta)) > wanted


def test_a_constant_denominator_sums_each_sample_over_the_constant() -> None:
    weights = reduction_weights("constant", torch.tensor([3.0, 0.0, 1.0]), constant_tokens=8)
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert float((weights[torch.tensor([0, 0, 0, 2])] * values).sum()) == pytest.approx((6.0 + 10.0) / 8 / 3)
    with pytest.raises(ValueError, match="constant_tokens"):
        reduction_weights("constant", torch.tensor([3.0]))


# --- gradients ----------------------------------------------------------------------------------------------------

BASE = random(6, seed=2)
ADVANTAGES = random(6, seed=3)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "ppo": lambda lp: policy_loss.clipped_policy_loss(lp, BASE, ADVANTAGES, clip_low=0.2, clip_high=0.3).loss,
    "dual clip": lambda lp: (
        policy_loss.clipped_policy_loss(lp, BASE, ADVANTAGES, clip_low=0.2, clip_high=0.3, dual_clip=1.5).loss
    ),
    "gspo": lambda lp: SEQUENCES.means(
        policy_loss.clipped_policy_loss(
            policy_loss.sequence_logprobs(lp, BASE, SEQUENCES),
            BASE,
            SEQUENCES.spread(SEQUENCES.means(ADVANTAGES)),
            clip_low=0.5,
            clip_high=0.5,
        ).loss
    ),
    "dppo": lambda lp: (
        policy_loss.divergence_masked_loss(
            lp, BASE, ADVANTAGES, divergence=ADVANTAGES.abs(), threshold_low=0.5, threshold_high=0.5
        ).loss
    ),
    "k1": lambda lp: kl_estimate("k1", lp, BASE),
    "k2": lambda lp: kl_estimate("k2", lp, BASE),
    "k3": lambda lp: kl_estimate("k3", lp, BASE),
    "low_var_kl": lambda lp: kl_estimate("low_var_kl", lp, BASE),
    "unbiased k3": lambda lp: kl_estimate("k3", lp, BASE, behaviour_logprobs=ADVANTAGES),
    "value": lambda lp: clipped_value_loss(lp, BASE, ADVANTAGES, value_clip=0.2).loss,
    "sft": supervised_loss,
    "dpo": lambda lp: pair_loss(lp[:3], lp[3:], BASE[:3], BASE[3:], beta=0.7, label_smoothing=0.1).loss,
}


def test_k3_is_finite_however_far_the_policies_are() -> None:
    far = torch.tensor([-300.0, 300.0, 0.0], requires_grad=True)
    for estimator in ("k3", "low_var_kl"):
        value = kl_estimate(estimator, far, torch.zeros(3))
        assert bool(value.isfinite().all())
        (gradient,) = torch.autograd.grad(value.sum(), far)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    assert gradcheck(LOSSES[name], (random(6, seed=4, requires_grad=True),))


def test_the_gradient_of_cispo_is_the_bounded_ratio_times_the_advantage() -> None:
    logprobs = random(6, seed=4, requires_grad=True)
    result = policy_loss.cispo_loss(logprobs, BASE, ADVANTAGES, clip_low=0.9, clip_high=2.0)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -(logprobs.detach() - BASE).exp().clamp(0.1, 3.0) * ADVANTAGES)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradients_through_logits_are_those_of_finite_differences(beta: float) -> None:
    logits, teacher, targets = random(4, 5, requires_grad=True), random(4, 5, seed=1), torch.tensor([0, 3, 2, 4])
    assert gradcheck(partial(token_logprobs, targets=targets, temperature=0.7), (logits,))
    assert gradcheck(partial(token_entropy, temperature=0.7), (logits,))
    likeliest = teacher.log_softmax(-1).topk(3, dim=-1)

    def divergence(logits: Tensor) -> Tensor:
        own = logits.gather(1, targets[:, None])[:, 0]
        lp = token_logprobs(logits, targets, temperature=0.7)
        top = other_logprobs(lp, logits.gather(1, likeliest.indices), own, temperature=0.7)
        return top_divergence(top, likeliest.values, beta=beta)

    assert gradcheck(divergence, (logits,))
    plain = torch.log_softmax(logits / 0.7, -1).gather(1, likeliest.indices)
    torch.testing.assert_close(divergence(logits), top_divergence(plain, likeliest.values, beta=beta))
