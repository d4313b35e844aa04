"""Learning from what is given: demonstrations, and one's own best responses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.objectives.distillation import top_divergence
from penstock.backends.learners.objectives.kl import kl_estimate
from penstock.backends.learners.objectives.objective import (
    NLL_SUM,
    NLL_TOKENS,
    SFT_SUM,
    SFT_TOKENS,
    always_reported,
    weighted,
)
from penstock.backends.learners.objectives.protocol import ObjectiveTerms

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.objectives.protocol import ObjectiveFunction, PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions


def supervised_loss(logprobs: Tensor) -> Tensor:
    """``−log π(y_t)`` for each token ``[N]``: maximum likelihood. Its mean over the trained tokens is the SFT loss."""
    return -logprobs


def best_of_group(rewards: Tensor, group_ids: Tensor, *, threshold: float) -> Tensor:
    """True ``[S]`` for the samples that rejection sampling keeps: the best of each group, all of them where several
    are equally good, if their reward is at least ``threshold``.

    Rejection sampling fine-tuning, Touvron et al., arXiv 2307.09288 (§3.2.3), Yuan et al., arXiv 2308.01825.
    """
    same = group_ids[:, None] == group_ids[None, :]
    best = torch.where(same, rewards[None, :], float("-inf")).amax(dim=1)
    return (rewards == best) & (rewards >= threshold)


def exponential_weights(centred_rewards: Tensor, *, scale: float, max_weight: float) -> Tensor:
    """``min(exp((r − group mean) / β), max_weight)`` for each sample ``[S]``: how much its likelihood weighs.

    Advantage-weighted regression, Peng et al., arXiv 1910.00177, with the mean of the group in place of a critic.

    Args:
        centred_rewards: rewards less the mean of their group ``[S]``.
        scale: β.
        max_weight: the bound.
    """
    return (centred_rewards / scale).clamp(max=math.log(max_weight)).exp()


def likelihood_objective(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    """``Σ weight · (A · x + kl_coef · kl − entropy_coef · entropy)``, where ``x`` is ``−lp`` or the divergence from the
    teacher: no ratio to whatever drew the tokens, so it needs no log-probs of theirs. With the weights of rejection
    sampling, what is turned away stays in the denominator.
    """
    nll = supervised_loss(tokens.logprobs)
    values = {"train/entropy_loss": tokens.entropy}
    if options.policy_loss == "divergence":
        values["train/teacher_divergence"] = _teacher_divergence(tokens, options)
    per_token = tokens.advantages * values.get("train/teacher_divergence", nll)
    pg_loss = per_token
    if tokens.reference_logprobs is not None and options.kl_in == "loss":
        kl = kl_estimate(options.kl_estimator, tokens.logprobs, tokens.reference_logprobs)
        per_token = per_token + options.kl_coef * kl
        values["train/kl_loss"] = kl
    if options.entropy_coef:
        per_token = per_token - options.entropy_coef * tokens.entropy
    loss = weighted(tokens.weights, per_token)
    weighs = (tokens.advantages > 0).double()
    figures = {
        **always_reported(tokens),
        **{name: weighted(tokens.figure_weights, value.detach()) for name, value in values.items()},
        NLL_SUM: (weighs * nll.detach()).sum(),
        NLL_TOKENS: weighs.sum(),
        "train/imitated_ratio": weighted(tokens.figure_weights, weighs),
        "train/pg_loss": weighted(tokens.weights, pg_loss.detach()),
        "train/loss": loss.detach(),
    }
    return ObjectiveTerms(loss, figures, (tokens.weights * per_token).detach())


def _teacher_divergence(tokens: PolicyTokens, options: ObjectiveOptions) -> Tensor:
    if not tokens.logprobs.numel():  # a rank without tokens of its own, which only takes part
        return tokens.logprobs
    assert tokens.student_top is not None, "the learner computes it where a teacher has spoken"
    assert tokens.teacher_top is not None, "checked when the batch was opened"
    return top_divergence(tokens.student_top, tokens.teacher_top, beta=options.distill_beta)


def imitation_terms(tokens: PolicyTokens, *, coef: float) -> ObjectiveTerms:
    """``coef · Σ weight · −lp`` over tokens that are imitated whatever the objective is, under the step's weights."""
    nll = supervised_loss(tokens.logprobs)
    loss = coef * weighted(tokens.weights, nll)
    figures = {
        SFT_SUM: nll.detach().sum(dtype=torch.float64),
        SFT_TOKENS: nll.new_tensor(nll.numel(), dtype=torch.float64),
        "train/loss": loss.detach(),
    }
    return ObjectiveTerms(loss, figures, (coef * tokens.weights * nll).detach())


def beside_imitation(function: ObjectiveFunction) -> ObjectiveFunction:
    """The objective for the tokens of samples that are its own, and imitation for the others: two sums over the tokens
    of one step, under the weights of one reduction, so that a token weighs the same in both."""

    def call(tokens: PolicyTokens, options: ObjectiveOptions, /) -> ObjectiveTerms:
        if tokens.imitated is None:
            return function(tokens, options)
        own, given = tokens.only(~tokens.imitated), tokens.only(tokens.imitated)
        terms = [imitation_terms(given, coef=options.sft_coef)] if len(given.logprobs) else []
        which = [tokens.imitated] if terms else []
        if len(own.logprobs) or not terms:
            terms.append(function(own, options))
            which.append(~tokens.imitated)
        figures: dict[str, Tensor] = {}
        for part in terms:
            figures |= part.figures
        loss = torch.stack([part.loss.double() for part in terms]).sum()
        per_token = tokens.logprobs.detach().new_full((len(tokens.logprobs),), math.nan)
        for part, places in zip(terms, which, strict=True):
            if part.per_token is not None:
                per_token[places] = part.per_token.to(per_token)
        return ObjectiveTerms(loss, {**figures, "train/loss": loss.detach()}, per_token)

    return call
