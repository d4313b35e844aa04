"""Imitation, weighted likelihood and pairs, as the trainer calls them: against formulas written out here."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from penstock.backends.learners.batch.sequences import TrainSequence, demonstration_sequence
from penstock.backends.learners.batch.updates import Update
from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.objective import finished, policy_objective
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.preference import preference_pairs
from penstock.backends.learners.objectives.protocol import Judged, PolicyTokens
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_advantages
from penstock.backends.learners.training.mismatched import mismatched, reference_point
from penstock.backends.learners.training.step import Scores

SAMPLE_OF = torch.tensor([0, 0, 1, 2, 2, 2, 3])
"""Of seven tokens."""


def draw(seed: int, *shape: int) -> torch.Tensor:
    return -torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens_with(logprobs: torch.Tensor, **fields: Any) -> PolicyTokens:  # noqa: ANN401 - any field of it
    number = len(SAMPLE_OF)
    return PolicyTokens(
        logprobs=logprobs,
        entropy=draw(9, number),
        rollout_logprobs=draw(1, number),
        reference_logprobs=None,
        advantages=draw(2, number) + 0.5,
        weights=torch.full((number,), 1.0 / number, dtype=torch.float64),
        figure_weights=torch.full((number,), 1.0 / number, dtype=torch.float64),
        staleness=torch.zeros(number, dtype=torch.int64),
        samples=Segments(SAMPLE_OF, 4),
    )._replace(**fields)


def loss_and_gradient(name: str, tokens: PolicyTokens, **keys: object) -> tuple[float, torch.Tensor]:
    options = objective(name, **keys)
    loss = open_objective(options)(tokens, options).loss
    (gradient,) = torch.autograd.grad(loss, [tokens.logprobs])
    return float(loss.detach()), gradient


# --- pairs --------------------------------------------------------------------------------------------------------


def test_pairs_are_made_within_groups_by_their_id_whatever_the_order() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.2, 0.9, 0.3])
    groups = torch.tensor([7, 3, 7, 3, 3, 9])
    trained = torch.ones(6, dtype=torch.bool)
    best_worst = preference_pairs(rewards, groups, trained, pairing="best_worst")
    assert sorted(map(tuple, best_worst.tolist())) == [(1, 3), (2, 0)]
    every = preference_pairs(rewards, groups, trained, pairing="all")
    assert sorted(map(tuple, every.tolist())) == [(1, 3), (1, 4), (2, 0), (4, 3)]


def test_equal_rewards_and_samples_without_trained_tokens_make_no_pair() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    trained = torch.tensor([True, True, True, False])
    for pairing in ("best_worst", "all"):
        assert preference_pairs(rewards, groups, trained, pairing=pairing).shape == (0, 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_the_plain_formula_over_sums_of_whole_responses(smoothing: float) -> None:
    logprobs, reference = draw(3, 7).requires_grad_(), draw(4, 7)
    pairs = torch.tensor([[0, 1], [3, 2]])
    tokens = tokens_with(logprobs, reference_logprobs=reference, pairs=pairs, knows_rollout=False)
    found, gradient = loss_and_gradient("dpo", tokens, dpo_beta=0.3, dpo_label_smoothing=smoothing)
    gain = (logprobs - reference) * 0.3
    margins = torch.stack([gain[0] + gain[1] - gain[2], gain[6] - gain[3] - gain[4] - gain[5]])
    plain = (-(1 - smoothing) * functional.logsigmoid(margins) - smoothing * functional.logsigmoid(-margins)).mean()
    (wanted,) = torch.autograd.grad(plain, [logprobs])
    assert found == pytest.approx(float(plain.detach()), abs=1e-12)
    assert torch.allclose(gradient, wanted, atol=1e-12)


def test_ipo_is_the_squared_distance_of_the_gap_from_half_of_one_over_tau() -> None:
    logprobs, reference = draw(3, 7).requires_grad_(), draw(4, 7)
    tokens = tokens_with(logprobs, reference_logprobs=reference, pairs=torch.tensor([[0, 1], [3, 2]]))
    found, gradient = loss_and_gradient("ipo", tokens, dpo_beta=0.3)
    d = logprobs - reference
    gaps = torch.stack([d[0] + d[1] - d[2], d[6] - d[3] - d[4] - d[5]])
    plain = ((gaps[0] - 1 / 0.6) ** 2 + (gaps[1] - 1 / 0.6) ** 2) / 2
    (wanted,) = torch.autograd.grad(plain, [logprobs])
    assert found == pytest.approx(float(plain.detach()), abs=1e-12)
    assert torch.allclose(gradient, wanted, atol=1e-12)


@pytest.mark.parametrize("name", ["ln_dpo", "ipo"])
def test_with_normalised_lengths_a_pair_is_compared_by_means_over_tokens(name: str) -> None:
    logprobs, reference = draw(3, 7).requires_grad_(), draw(4, 7)
    tokens = tokens_with(logprobs, reference_logprobs=reference, pairs=torch.tensor([[0, 1], [3, 2]]))
    found, gradient = loss_and_gradient(name, tokens, dpo_beta=2.0, dpo_normalize_length=True)
    d = logprobs - reference
    gaps = torch.stack([(d[0] + d[1]) / 2 - d[2], d[6] - (d[3] + d[4] + d[5]) / 3])
    plain = (torch.log(1 + torch.exp(-2.0 * gaps)) if name == "ln_dpo" else (gaps - 0.25) ** 2).mean()
    (wanted,) = torch.autograd.grad(plain, [logprobs])
    assert found == pytest.approx(float(plain.detach()), abs=1e-12)
    assert torch.allclose(gradient, wanted, atol=1e-12)


def test_a_step_without_any_pair_has_no_loss_and_no_gradient() -> None:
    nothing = torch.empty((0, 2), dtype=torch.int64)
    tokens = tokens_with(draw(3, 7).requires_grad_(), reference_logprobs=draw(4, 7), pairs=nothing)
    loss, gradient = loss_and_gradient("dpo", tokens)
    assert loss == 0.0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("name", "keys"), [("dpo", {"dpo_label_smoothing": 0.1}), ("ipo", {"dpo_normalize_length": True}), ("kto", {})]
)
def test_the_gradient_is_that_of_finite_differences(name: str, keys: dict[str, Any]) -> None:
    reference, pairs = draw(4, 7), torch.tensor([[0, 1], [3, 2], [0, 2]])
    options = objective(name, **keys)
    judged = Judged(torch.tensor([True, False, True, False]), torch.tensor(0.2, dtype=torch.float64))
    tokens = tokens_with(draw(3, 7), reference_logprobs=reference, pairs=pairs, judged=judged)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return open_objective(options)(tokens._replace(logprobs=logprobs), options).loss

    gradcheck: Any = torch.autograd.gradcheck  # has no types
    assert gradcheck(loss, (draw(3, 7).requires_grad_(),))


# --- each response alone ------------------------------------------------------------------------------------------


def test_kto_is_the_plain_formula_over_responses_that_have_a_trained_token() -> None:
    logprobs, reference = draw(3, 7).requires_grad_(), draw(4, 7)
    judged = Judged(torch.tensor([True, False, False, True, True]), torch.tensor(0.4, dtype=torch.float64))
    samples = Segments(SAMPLE_OF, 5)  # of the fifth nothing is trained
    tokens = tokens_with(logprobs, reference_logprobs=reference, judged=judged, samples=samples, knows_rollout=False)
    keys: dict[str, Any] = {"dpo_beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    found, gradient = loss_and_gradient("kto", tokens, **keys)
    d = logprobs - reference
    ratios = [d[0] + d[1], d[2], d[3] + d[4] + d[5], d[6]]
    values = [
        1.5 / (1 + torch.exp(-0.3 * (ratios[0] - 0.4))),
        0.7 / (1 + torch.exp(-0.3 * (0.4 - ratios[1]))),
        0.7 / (1 + torch.exp(-0.3 * (0.4 - ratios[2]))),
        1.5 / (1 + torch.exp(-0.3 * (ratios[3] - 0.4))),
    ]
    plain = ((1.5 - values[0]) + (0.7 - values[1]) + (0.7 - values[2]) + (1.5 - values[3])) / 4
    (wanted,) = torch.autograd.grad(plain, [logprobs])
    assert found == pytest.approx(float(plain.detach()), abs=1e-12)
    assert torch.allclose(gradient, wanted, atol=1e-12)
    options = objective("kto", **keys)
    terms = open_objective(options)(tokens, options)
    figures = finished({key: float(value) for key, value in terms.figures.items()})
    assert figures["train/kto_kl"] == pytest.approx(0.4)
    assert figures["train/desirable_ratio"] == 0.5
    assert figures["train/kto_desirable_reward"] == pytest.approx(0.15 * float((ratios[0] + ratios[3]).detach()))


def sequence(sample: int, prompt: list[int], response: list[int], first: int) -> TrainSequence:
    made = demonstration_sequence(prompt, response, sample=sample)
    return made._replace(prompt=prompt[0], first=first, positions=np.arange(len(response)))


def test_the_reference_point_puts_each_response_behind_another_prompt_and_never_behind_its_own() -> None:
    update = Update(
        (
            sequence(0, [1, 2], [10, 11, 12], 0),
            sequence(1, [1, 2], [20], 3),
            sequence(2, [3], [30, 31, 32, 33], 4),
            sequence(3, [4, 5, 6], [40], 8),
        ),
        4,
    )
    pairs = mismatched(update)
    assert pairs is not None
    # The longest sequence of the step has five tokens, so that is where the fourth is cut.
    assert [list(s.tokens) for s in pairs.sequences] == [
        [1, 2, 30, 31, 32],
        [1, 2, 30, 31, 32],
        [3, 40],
        [4, 5, 6, 10, 11],
    ]
    assert [list(s.trained) for s in pairs.sequences] == [[2, 3, 4], [2, 3, 4], [1], [3, 4]]
    assert [s.sample for s in pairs.sequences] == [0, 1, 2, 3]
    assert [s.first for s in pairs.sequences] == [0, 3, 6, 7]
    assert pairs.num_samples == 4
    logprobs, reference = -torch.arange(9.0), torch.full((9,), -4.0)  # Σ = −36 + 36
    scores = Scores(logprobs, torch.zeros(9), reference, hidden=None)
    assert float(reference_point(pairs, scores)) == 0.0
    above = scores._replace(logprobs=logprobs + 2.0)
    assert float(reference_point(pairs, above)) == pytest.approx(18.0 / 4)
    below = scores._replace(logprobs=logprobs - 2.0)
    assert float(reference_point(pairs, below)) == 0.0, "a divergence is never negative"
    assert mismatched(Update(update.sequences[:2], 2)) is None, "one prompt"


# --- likelihood ---------------------------------------------------------------------------------------------------


def test_a_likelihood_needs_no_log_probs_of_what_drew_the_tokens() -> None:
    unknown = torch.full((7,), math.nan, dtype=torch.float64)
    logprobs = draw(3, 7).requires_grad_()
    tokens = tokens_with(logprobs, rollout_logprobs=unknown, knows_rollout=False, staleness=torch.full((7,), -1))
    options = objective("rejection_sampling", entropy_coef=0.1)
    terms = open_objective(options)(tokens, options)
    plain = -(tokens.weights * (tokens.advantages * logprobs + 0.1 * tokens.entropy)).sum()
    assert float(terms.loss.detach()) == pytest.approx(float(plain.detach()), abs=1e-12)
    figures = finished({name: float(value) for name, value in terms.figures.items()})
    assert all(math.isfinite(value) for value in figures.values())
    assert not [name for name in figures if "rollout_logprob" in name or "fresh" in name]


def advantages(name: str, rewards: list[float], groups: list[int], **keys: object) -> list[float]:
    samples = Segments(torch.arange(len(rewards)), len(rewards))
    given = RewardedSamples(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups),
        samples,
        torch.zeros(len(rewards), dtype=torch.int64),
    )
    return token_advantages(given, objective(name, **keys)).tolist()


def test_rejection_sampling_keeps_the_best_of_each_group_that_earn_enough() -> None:
    rewards, groups = [1.0, 1.0, 0.5, 0.2, 0.1], [0, 0, 0, 4, 4]
    assert advantages("rejection_sampling", rewards, groups) == [1, 1, 0, 1, 0]
    assert advantages("rejection_sampling", rewards, groups, min_reward=0.3) == [1, 1, 0, 0, 0]
    kept = advantages("rejection_sampling", rewards, groups, estimator="threshold", min_reward=0.2)
    assert kept == [1, 1, 1, 1, 0]


def test_reward_weights_are_exponential_in_the_distance_from_the_mean_of_the_group() -> None:
    found = advantages("reward_weighted", [1.0, 0.0, 9.0, 9.0], [0, 0, 1, 1], reward_scale=0.5)
    assert found == pytest.approx([math.e, 1 / math.e, 1.0, 1.0], rel=1e-6)
    bounded = advantages("reward_weighted", [1.0, 0.0], [0, 0], reward_scale=0.01, max_weight=20.0)
    assert bounded == pytest.approx([20.0, 0.0], abs=1e-5)


# --- both in one step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dapo", "rejection_sampling"])
def test_a_mixed_step_is_the_sum_of_both_losses_under_the_weights_of_one_step(name: str) -> None:
    logprobs = draw(3, 7).requires_grad_()
    imitated = torch.tensor([False, False, True, True, True, True, False])
    rollout = torch.where(imitated, math.nan, draw(1, 7))
    tokens = tokens_with(logprobs, rollout_logprobs=rollout, imitated=imitated)
    found, gradient = loss_and_gradient(name, tokens, sft_coef=0.5)
    options = objective(name)
    own = tokens.only(~imitated)
    alone = policy_objective(own, options) if name == "dapo" else open_objective(options)(own, options)
    plain = alone.loss - 0.5 * (logprobs[imitated] / 7.0).sum()  # of seven tokens, four are imitated
    (wanted,) = torch.autograd.grad(plain, [logprobs])
    assert found == pytest.approx(float(plain.detach()), abs=1e-12)
    assert torch.allclose(gradient, wanted, atol=1e-12)


def test_the_figure_of_what_is_imitated_is_its_mean_whatever_else_is_in_the_step() -> None:
    logprobs = draw(3, 7).requires_grad_()
    imitated = SAMPLE_OF == 2
    options = objective("dapo", sft_coef=0.25)
    terms = open_objective(options)(tokens_with(logprobs, imitated=imitated), options)
    figures = finished({key: float(value) for key, value in terms.figures.items()})
    assert figures["train/sft_loss"] == pytest.approx(-float(logprobs.detach()[imitated].mean()))
    assert figures["train/loss"] == pytest.approx(float(terms.loss.detach()))


def test_micro_batches_of_one_kind_alone_add_up_to_the_mixed_step() -> None:
    logprobs = draw(3, 7).requires_grad_()
    imitated = SAMPLE_OF == 2
    whole = tokens_with(logprobs, imitated=imitated)
    together, _ = loss_and_gradient("dapo", whole)
    parts = [whole.only(imitated)._replace(imitated=imitated[imitated])]
    parts.append(whole.only(~imitated)._replace(imitated=imitated[~imitated]))
    assert sum(loss_and_gradient("dapo", part)[0] for part in parts) == pytest.approx(together, abs=1e-12)
