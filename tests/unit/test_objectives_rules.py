"""The rules that the objectives keep for every input, and an objective put together against its formula."""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from itertools import pairwise
from random import Random  # noqa: TC003  # hypothesis reads the annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.learning_rate import learning_rate
from penstock.backends.learners.objectives.advantages import group_normalized_advantages
from penstock.backends.learners.objectives.correction import truncated_importance_weights
from penstock.backends.learners.objectives.logprobs import token_entropy, token_logprobs
from penstock.backends.learners.objectives.objective import finished, policy_objective
from penstock.backends.learners.objectives.policy_loss import clipped_policy_loss, reduction_weights
from penstock.backends.learners.objectives.protocol import ObjectiveTerms, PolicyTokens
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_advantages, token_estimates
from penstock.backends.learners.objectives.validity import objective_problem
from penstock.backends.learners.options import MisOptions, ObjectiveOptions

NEW = torch.tensor([-0.5, -1.5, -0.5, -1.5, -0.9])
ROLLOUT = torch.tensor([-1.0, -1.0, -1.4, -1.2, -0.9])
REFERENCE = torch.tensor([-0.7, -1.0, -0.5, -2.0, -0.8])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.5])
ENTROPY = torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7])
STALENESS = torch.tensor([0, 1, 2, 2, 4])
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15])


def terms_of(options: ObjectiveOptions, logprobs: torch.Tensor = NEW) -> ObjectiveTerms:
    tokens = PolicyTokens(
        logprobs=logprobs,
        entropy=ENTROPY,
        rollout_logprobs=ROLLOUT,
        reference_logprobs=REFERENCE if options.kl_coef else None,
        advantages=ADVANTAGES,
        weights=WEIGHTS,
        figure_weights=WEIGHTS,
        staleness=STALENESS,
        samples=Segments(torch.tensor([0, 0, 1, 1, 1]), 2),
    )
    return policy_objective(tokens, options)


def weighted(values: torch.Tensor) -> torch.Tensor:
    return (WEIGHTS * values).sum(dtype=torch.float64)


@given(
    st.lists(st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=1, max_size=6), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_advantages_depend_on_group_ids_and_not_on_order(
    groups: list[list[float]], random: Random, normalize_std: bool
) -> None:
    pairs = [(100 - group, reward) for group, rewards in enumerate(groups) for reward in rewards]
    order = list(range(len(pairs)))
    random.shuffle(order)
    ids = torch.tensor([pair[0] for pair in pairs])
    rewards = torch.tensor([pair[1] for pair in pairs], dtype=torch.float64)
    straight = group_normalized_advantages(rewards, ids, normalize_std=normalize_std)
    shuffled = group_normalized_advantages(rewards[order], ids[order], normalize_std=normalize_std)
    torch.testing.assert_close(shuffled, straight[order])
    for group in {pair[0] for pair in pairs}:
        members = rewards[ids == group]
        expected = members - members.mean()
        if normalize_std and len(members) > 1:
            expected = expected / (members.std() + 1e-6)
        torch.testing.assert_close(straight[ids == group], expected, atol=1e-6, rtol=1e-4)


def test_a_group_of_one_has_no_advantage() -> None:
    advantages = group_normalized_advantages(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, 8, 8]), normalize_std=True)
    assert advantages[0] == 0.0


def test_token_mean_is_the_mean_over_tokens() -> None:
    weights = reduction_weights("token_mean", torch.tensor([3.0, 0.0, 1.0]))
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert (weights[torch.tensor([0, 0, 0, 2])] * values).sum() == pytest.approx(4.0)


def test_sequence_mean_is_the_mean_of_means_and_counts_empty_samples() -> None:
    weights = reduction_weights("sequence_mean", torch.tensor([3.0, 0.0, 1.0]))
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])
    expected = (2.0 + 0.0 + 10.0) / 3
    assert (weights[torch.tensor([0, 0, 0, 2])] * values).sum() == pytest.approx(expected)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_reductions_of_nothing_are_finite(reduction: str) -> None:
    assert torch.isfinite(reduction_weights(reduction, torch.zeros(2))).all()  # type: ignore[arg-type]


def test_temperature_scales_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    target = torch.tensor([0])
    torch.testing.assert_close(token_logprobs(logits, target, temperature=0.5), token_logprobs(logits * 2, target))
    torch.testing.assert_close(token_entropy(logits, temperature=0.5), token_entropy(logits * 2))


def test_logprobs_of_bfloat16_logits_are_float32() -> None:
    assert token_logprobs(torch.zeros(1, 4, dtype=torch.bfloat16), torch.tensor([0])).dtype == torch.float32


def test_a_huge_ratio_stays_finite() -> None:
    result = clipped_policy_loss(
        torch.tensor([0.0]), torch.tensor([-1000.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2
    )
    assert torch.isfinite(result.loss).all()


def test_a_clipped_token_gives_no_gradient() -> None:
    logprobs = torch.tensor([-0.5, -0.95], requires_grad=True)
    result = clipped_policy_loss(
        logprobs, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]), clip_low=0.2, clip_high=0.28
    )
    torch.autograd.backward(result.loss.sum())
    assert logprobs.grad is not None
    assert logprobs.grad[0] == 0.0
    assert logprobs.grad[1] == pytest.approx(-math.exp(0.05))


def test_importance_weights_carry_no_gradient() -> None:
    old = torch.tensor([-1.0], requires_grad=True)
    assert not truncated_importance_weights(old, torch.tensor([-1.1]), upper=2.0).weight.requires_grad


def test_the_default_with_engine_logprobs_takes_the_ratio_to_them_and_needs_no_weight() -> None:
    terms = terms_of(ObjectiveOptions(old_logprobs="engine"))
    ratio = (NEW - ROLLOUT).exp()
    loss = torch.maximum(-ratio * ADVANTAGES, -ratio.clamp(0.8, 1.28) * ADVANTAGES)
    torch.testing.assert_close(terms.loss, weighted(loss))
    torch.testing.assert_close(terms.figures["train/ois"], weighted(ratio))
    torch.testing.assert_close(terms.figures["train/ppo_kl"], weighted(ROLLOUT - NEW))
    assert "train/tis" not in terms.figures


def test_the_default_with_recomputed_logprobs_is_on_policy_and_weighted_by_tis() -> None:
    logprobs = NEW.clone().requires_grad_()
    terms = terms_of(ObjectiveOptions(old_logprobs="recompute", tis_clip=1.3), logprobs)
    weight = (NEW - ROLLOUT).exp().clamp(max=1.3)
    torch.testing.assert_close(terms.loss.detach(), weighted(-ADVANTAGES * weight))
    torch.autograd.backward(terms.loss)
    torch.testing.assert_close(logprobs.grad, -WEIGHTS * ADVANTAGES * weight)
    torch.testing.assert_close(terms.figures["train/tis"], weighted((NEW - ROLLOUT).exp()))
    torch.testing.assert_close(terms.figures["train/tis_clipfrac"], weighted(((NEW - ROLLOUT).exp() > 1.3).float()))
    assert terms.figures["train/ppo_kl"] == 0.0


def test_the_default_without_tis_clip_leaves_the_weight_out() -> None:
    terms = terms_of(ObjectiveOptions(old_logprobs="recompute", tis_clip=None))
    torch.testing.assert_close(terms.loss, weighted(-ADVANTAGES))
    assert "train/tis" not in terms.figures


def test_an_objective_adds_kl_and_takes_entropy_away() -> None:
    plain = terms_of(ObjectiveOptions())
    terms = terms_of(ObjectiveOptions(kl_coef=0.3, entropy_coef=0.1))
    difference = NEW - REFERENCE
    kl = (-difference).exp() - 1 + difference
    torch.testing.assert_close(terms.loss, plain.loss + 0.3 * weighted(kl) - 0.1 * weighted(ENTROPY))
    torch.testing.assert_close(terms.figures["train/kl_loss"], weighted(kl))
    torch.testing.assert_close(terms.figures["train/entropy_loss"], weighted(ENTROPY))
    torch.testing.assert_close(terms.figures["train/pg_loss"], plain.loss)
    assert "train/kl_loss" not in plain.figures


def test_the_mismatch_with_the_engine_is_always_reported() -> None:
    for old in ("engine", "recompute"):
        figures = terms_of(ObjectiveOptions(old_logprobs=old)).figures
        torch.testing.assert_close(figures["train/train_rollout_logprob_abs_diff"], weighted((NEW - ROLLOUT).abs()))


def test_decoupled_ppo_takes_the_trust_region_around_a_policy_between_the_two() -> None:
    terms = terms_of(ObjectiveOptions(old_logprobs="interpolate", tis_clip=1.2))
    share = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.25])
    proximal = share * ROLLOUT + (1 - share) * NEW
    ratio = (NEW - proximal).exp()
    clipped = torch.maximum(-ratio * ADVANTAGES, -ratio.clamp(0.8, 1.28) * ADVANTAGES)
    torch.testing.assert_close(terms.loss, weighted(clipped * (proximal - ROLLOUT).exp().clamp(max=1.2)))


def test_icepop_drops_tokens_that_learner_and_engine_see_too_differently() -> None:
    terms = terms_of(ObjectiveOptions(old_logprobs="recompute", correction="icepop", icepop_low=0.8, icepop_high=1.3))
    ratio = (NEW - ROLLOUT).exp()
    kept = (ratio >= 0.8) & (ratio <= 1.3)
    torch.testing.assert_close(terms.loss, weighted(-ADVANTAGES * ratio * kept))
    torch.testing.assert_close(terms.figures["train/tis_clipfrac"], weighted((~kept).float()))


def test_mis_rejects_sequences_and_keeps_the_denominator() -> None:
    mis = MisOptions(level="sequence", mode="clip", upper=3.0, reject_level="geometric", reject_upper=1.3)
    terms = terms_of(ObjectiveOptions(old_logprobs="recompute", correction="mis", mis=mis))
    # Sequence 0 sums to 0 nats; sequence 1 to 0.6, which is a geometric mean of e^0.2.
    torch.testing.assert_close(terms.loss, weighted(-ADVANTAGES * torch.tensor([1.0, 1.0] + [math.exp(0.6)] * 3)))
    narrow = MisOptions(level="sequence", mode="clip", upper=3.0, reject_level="geometric", reject_upper=1.2)
    terms = terms_of(ObjectiveOptions(old_logprobs="recompute", correction="mis", mis=narrow))
    torch.testing.assert_close(terms.loss, weighted(-ADVANTAGES * torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])))
    assert float(terms.figures["train/mis_rs_mask_fraction_high"]) == pytest.approx(0.7)


def test_opsm_takes_bad_tokens_of_left_sequences_out() -> None:
    terms = terms_of(ObjectiveOptions(opsm_delta=0.1), NEW - 0.5)
    assert float(terms.figures["train/opsm_clipfrac"]) == pytest.approx(0.3 + 0.25)
    plain = terms_of(ObjectiveOptions(), NEW - 0.5)
    assert terms.loss != plain.loss


@pytest.mark.parametrize("old_logprobs", ["engine", "recompute", "interpolate"])
def test_opsm_measures_from_what_the_engine_reported(old_logprobs: str) -> None:
    """In the only step of a batch a recomputed policy has not moved from itself, but it may be far from the engine."""
    options = objective("dapo", old_logprobs=old_logprobs, opsm_delta=0.1)
    assert float(terms_of(options, NEW - 0.5).figures["train/opsm_clipfrac"]) == pytest.approx(0.3 + 0.25)
    assert float(terms_of(options, NEW + 0.5).figures["train/opsm_clipfrac"]) == 0.0


def test_the_effective_sample_size_adds_up_over_micro_batches() -> None:
    ratio = (NEW - ROLLOUT).exp()
    figures = terms_of(ObjectiveOptions()).figures
    twice = {name: 2 * float(value) for name, value in figures.items()}
    expected = float(ratio.sum() ** 2 / (5 * ratio.square().sum()))
    assert finished({name: float(value) for name, value in figures.items()})["train/ess_ratio"] == pytest.approx(
        expected
    )
    assert finished(twice)["train/ess_ratio"] == pytest.approx(expected)
    assert finished(twice)["train/log_ratio_abs"] == pytest.approx(float((NEW - ROLLOUT).abs().mean()))
    assert finished(twice)["train/heavy_weight"] == 0.0
    assert not [name for name in finished(twice) if name.startswith("sums/")]


def test_a_token_that_became_ten_times_likelier_is_heavy() -> None:
    ratio = torch.tensor([1.0, 9.9, 1.0, 70.0, 1.0])
    terms = terms_of(ObjectiveOptions(), ROLLOUT + ratio.log())
    figures = finished({name: float(value) for name, value in terms.figures.items()})
    assert figures["train/heavy_weight"] == pytest.approx(70 / 82.9)
    assert figures["train/log_ratio_abs"] == pytest.approx(float(ratio.log().sum() / 5))


REWARDED = RewardedSamples(
    rewards=torch.tensor([1.0, 0.0, 4.0, 2.0], dtype=torch.float64),
    group_ids=torch.tensor([9, 9, 2, 2]),
    samples=Segments(torch.tensor([3, 0, 0, 1, 2, 3, 0]), 4),
    positions=torch.tensor([4, 0, 3, 1, 0, 0, 1]),
)
KL = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])


def test_advantages_of_a_response_are_those_of_its_sample() -> None:
    advantages = token_advantages(REWARDED, objective("dr_grpo"))
    assert advantages.tolist() == [-1.0, 0.5, 0.5, -0.5, 1.0, -1.0, 0.5]
    assert advantages.dtype == torch.float32


def test_rloo_takes_the_kl_of_the_whole_response_off_its_reward() -> None:
    options = objective("rloo", kl_coef=0.5, kl_in="reward")
    total = [1.0 - 0.5 * 1.2, 0.0 - 0.5 * 0.4, 4.0 - 0.5 * 0.5, 2.0 - 0.5 * 0.7]
    per_sample = [total[0] - total[1], total[1] - total[0], total[2] - total[3], total[3] - total[2]]
    expected = [per_sample[sample] for sample in (3, 0, 0, 1, 2, 3, 0)]
    assert token_advantages(REWARDED, options, kl=KL).tolist() == pytest.approx(expected)


def test_reinforce_plus_plus_discounts_by_trained_tokens_and_rewards_the_last_of_them() -> None:
    options = objective("reinforce_plus_plus", kl_coef=0.5, discount=0.9, whiten=False)
    advantages = token_advantages(REWARDED, options, kl=KL)
    last = 1.0 - 0.15
    expected = [2.0 - 0.05, -0.1 + 0.9 * (-0.35 + 0.9 * last), last, -0.2, 4.0 - 0.25]
    expected += [-0.3 + 0.9 * (2.0 - 0.05), -0.35 + 0.9 * last]
    assert advantages.tolist() == pytest.approx(expected)


def test_reinforce_plus_plus_without_discount_and_kl_gives_each_token_the_reward() -> None:
    options = objective("reinforce_plus_plus", whiten=False)
    quick = token_advantages(REWARDED, options)
    table = token_advantages(REWARDED, options, kl=torch.zeros(7))
    assert quick.tolist() == table.tolist() == [2.0, 1.0, 1.0, 0.0, 4.0, 2.0, 1.0]


def test_whitening_counts_every_trained_token_once() -> None:
    plain = token_advantages(REWARDED, objective("reinforce_plus_plus_baseline", whiten=False, kl_coef=0.1), kl=KL)
    white = token_advantages(REWARDED, objective("reinforce_plus_plus_baseline", kl_coef=0.1), kl=KL)
    torch.testing.assert_close(white, (plain - plain.mean()) / plain.std())


VALUES = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7])


def test_gae_steps_over_what_is_not_trained_and_ends_with_the_reward_and_no_value_after_it() -> None:
    """Sample 0 is trained at 0, 1 and 3, sample 3 at 0 and 4."""
    options = objective("ppo", discount=0.9, gae_lambda=0.5, kl_coef=0.5)
    found = token_estimates(REWARDED, options, kl=KL, values=VALUES)
    last = 1.0 - 0.15 - 0.2
    middle = (-0.35 + 0.9 * 0.2 - 0.7) + 0.45 * last
    first = (-0.1 + 0.9 * 0.7 - 0.1) + 0.45 * middle
    end = 2.0 - 0.05 - 0.5
    begin = (-0.3 + 0.9 * 0.5 - 0.6) + 0.45 * end
    expected = [end, first, last, 0.0 - 0.2 - 0.3, 4.0 - 0.25 - 0.4, begin, middle]
    assert found.advantages.tolist() == pytest.approx(expected)
    assert found.returns is not None
    torch.testing.assert_close(found.returns, found.advantages + VALUES)


def test_without_discount_gae_is_the_reward_less_the_value_and_its_returns_the_reward() -> None:
    found = token_estimates(REWARDED, objective("ppo"), values=VALUES)
    rewards = torch.tensor([2.0, 1.0, 1.0, 0.0, 4.0, 2.0, 1.0])
    torch.testing.assert_close(found.advantages, rewards - VALUES)
    torch.testing.assert_close(found.returns, rewards)


def test_whitening_leaves_the_returns_of_a_critic_as_they_are() -> None:
    plain, white = (token_estimates(REWARDED, objective("ppo", whiten=w), values=VALUES) for w in (False, True))
    torch.testing.assert_close(white.advantages, (plain.advantages - plain.advantages.mean()) / plain.advantages.std())
    assert white.returns is not None
    assert plain.returns is not None
    assert torch.equal(white.returns, plain.returns)


def test_gae_without_a_critic_is_told() -> None:
    with pytest.raises(ValueError, match="needs the values of a critic"):
        token_estimates(REWARDED, objective("ppo"))


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("linear", 0.1), ("cosine", 0.1)])
def test_the_learning_rate_warms_up_peaks_and_ends(schedule: str, last: float) -> None:
    rates = [
        learning_rate(step, peak=1.0, warmup_steps=4, num_steps=20, schedule=schedule)  # type: ignore[arg-type]
        for step in range(25)
    ]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[19] == pytest.approx(last)
    assert rates[19:] == [rates[19]] * 6
    assert all(a >= b for a, b in pairwise(rates[4:]))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_ends_where_it_is_told_to(schedule: str) -> None:
    rates = [
        learning_rate(step, peak=2.0, warmup_steps=2, num_steps=12, schedule=schedule, final_fraction=0.25)  # type: ignore[arg-type]
        for step in range(14)
    ]
    assert max(rates) == rates[2] == 2.0
    assert rates[11:] == pytest.approx([0.5] * 3)


def test_a_reference_that_nothing_pulls_to_is_not_refreshed() -> None:
    problem = objective_problem(objective("dapo", reference_every=4))
    assert problem is not None
    assert problem[0] == "reference_every"
    assert objective_problem(objective("dapo", reference_every=4, kl_coef=0.1)) is None


def test_a_run_that_is_all_warm_up_has_a_rate_for_each_step() -> None:
    assert learning_rate(2, peak=1.0, warmup_steps=3, num_steps=3, schedule="linear") == pytest.approx(0.75)
