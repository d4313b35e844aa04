"""Keys of an objective that change nothing, found by trying: each configured one is put back once, on made-up tokens.

The rules of an objective (:mod:`.validity`) say why two keys do not go together. What no rule has foreseen is found
here, because a key that moves neither loss nor gradient is one that the user believes in and the run does not have.

Invariants:

* The tokens are drawn from a fixed seed: every rank finds the same, and so does every start.
* They reach every bound that a key may set: ratios from e^-20 to e^20, ages from 0 up, rewards of both signs.
* The chance draws of the process are not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec
import torch

from penstock.backends.learners.hooks.protocols import Segments
from penstock.backends.learners.objectives.asked import rewards_need_kl
from penstock.backends.learners.objectives.kl import kl_estimate
from penstock.backends.learners.objectives.objective import old_logprobs
from penstock.backends.learners.objectives.policy_loss import reduction_weights
from penstock.backends.learners.objectives.preference import preference_pairs
from penstock.backends.learners.objectives.protocol import Judged, PolicyTokens
from penstock.backends.learners.objectives.spec import ESTIMATORS, loss_of, objective
from penstock.backends.learners.objectives.token_advantages import RewardedSamples, token_estimates
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.options import MisOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backends.learners.objectives.protocol import ObjectiveFunction
    from penstock.backends.learners.options import ObjectiveOptions

NUM_SAMPLES: Final = 32
SAMPLES_PER_GROUP: Final = 4
SIZES: Final = tuple(8 + sample % 17 for sample in range(NUM_SAMPLES))
"""Tokens of each sample."""
NUM_TOKENS: Final = sum(SIZES)
TRIED: Final = (
    "clip_low", "clip_high", "normalize_std", "kl_coef", "tis_clip", "reduction", "opd_kl_coef", "entropy_coef",
    "whiten", "discount", "max_ratio", "dual_clip", "kl_estimator", "kl_in", "unbiased_kl", "correction",
    "tis_clip_low", "icepop_low", "icepop_high", "opsm_delta", "gae_lambda", "reward_scale", "max_weight", "dpo_beta",
    "dpo_label_smoothing", "dpo_pairs", "dpo_loss", "dpo_normalize_length", "desirable_weight", "undesirable_weight",
    "distill_beta", "tau_pos", "tau_neg", "behaviour_kl_coef", "gae_length_alpha", "critic_lambda",
)  # fmt: skip
"""Keys that are put back to what the name of the objective says. The others choose between whole ways to compute, are
functions of the user's, or belong to the critic's schedule; rules look after those."""
BOUNDS: Final = ("clip_low", "clip_high", "dual_clip")
"""They hold a policy that moves within a batch, so with one step a batch and recomputed log-probs they are at rest: how
other systems configure them too, and not refused."""


def dead_knob(options: ObjectiveOptions, function: ObjectiveFunction, *, num_steps: int) -> str | None:
    """The first configured key that changes neither loss nor gradient; None where all do.

    Args:
        options: that the rules have found nothing wrong with.
        function: the objective that they mean.
        num_steps: optimizer steps a batch.
    """
    if loss_of(options).is_function:
        return None
    configured = list(_put_back(options))
    if options.old_logprobs == "recompute" and num_steps == 1:
        configured = [(key, other) for key, other in configured if key not in BOUNDS]
    if not configured:
        return None
    drawn = _draw()
    found = _outcome(options, function, drawn, num_steps)
    for key, other in configured:
        if torch.equal(found, _outcome(other, function, drawn, num_steps)):
            return key
    return None


def _put_back(options: ObjectiveOptions) -> Iterator[tuple[str, ObjectiveOptions]]:
    """Each configured key, with the options as they are without it."""
    usual = objective(options.name)
    for key in TRIED:
        value, default = getattr(options, key), getattr(usual, key)
        if value != default and value not in (None, "none"):
            # Corrections may well agree, with the bounds that they have, and each does something.
            other = "none" if key == "correction" else default
            yield key, msgspec.structs.replace(options, **{key: other})
    for key in MisOptions.__struct_fields__:
        value, default = getattr(options.mis, key), getattr(usual.mis, key)
        if value not in (default, None):
            mis = msgspec.structs.replace(options.mis, **{key: default})
            yield f"mis.{key}", msgspec.structs.replace(options, mis=mis)


class _Drawn(NamedTuple):
    """Made-up tokens, float64 ``[N]``, sample by sample."""

    logprobs: Tensor
    entropy: Tensor
    rollout: Tensor
    opening: Tensor
    reference: Tensor
    teacher: Tensor
    values: Tensor
    rewards: Tensor
    """``[S]``"""
    top: Tensor
    """Of two models at two tokens, ``[2, N, 2]``."""


def _draw() -> _Drawn:
    seeded = torch.Generator().manual_seed(0)

    def normal(count: int = NUM_TOKENS) -> Tensor:
        return torch.randn(count, generator=seeded, dtype=torch.float64)

    rare = torch.where(torch.rand(NUM_TOKENS, generator=seeded) < 0.3, 6.0, 0.6)
    rollout = -rare * normal().abs() - 0.05
    far = torch.where(torch.rand(NUM_TOKENS, generator=seeded) < 0.1, 6.0, 0.4)
    opening = (rollout + far * normal()).clamp(max=-1e-3)
    logprobs = (opening + far.roll(1) * normal()).clamp(max=-1e-3)
    reference = (logprobs + far.roll(2) * normal()).clamp(max=-1e-3)
    teacher = rollout + normal()
    values, rewards = normal(), 4.0 * normal(NUM_SAMPLES)
    top = normal(6 * NUM_TOKENS).view(2, NUM_TOKENS, 3).log_softmax(-1)[..., :2]
    return _Drawn(logprobs, normal().abs(), rollout, opening, reference, teacher, values, rewards, top)


def _outcome(options: ObjectiveOptions, function: ObjectiveFunction, drawn: _Drawn, num_steps: int) -> Tensor:
    """Loss, gradients and what a critic is to predict, end to end."""
    sizes = torch.tensor(SIZES)
    samples = Segments(torch.arange(NUM_SAMPLES).repeat_interleave(sizes), NUM_SAMPLES)
    positions = torch.cat([torch.arange(size) for size in SIZES])
    group_ids = torch.arange(NUM_SAMPLES) // SAMPLES_PER_GROUP
    constant = max(SIZES) if options.constant_tokens is None else options.constant_tokens
    weights = samples.spread(reduction_weights(options.reduction, sizes.float(), constant_tokens=constant).double())
    logprobs, entropy = drawn.logprobs.clone().requires_grad_(), drawn.entropy.clone().requires_grad_()
    pairs = None
    if loss_of(options).unit == "pair":
        every = torch.ones(NUM_SAMPLES, dtype=torch.bool)
        pairs = preference_pairs(drawn.rewards, group_ids, every, pairing=options.dpo_pairs)
    tokens = PolicyTokens(
        logprobs=logprobs,
        entropy=entropy,
        rollout_logprobs=drawn.rollout,
        reference_logprobs=drawn.reference if needs_reference(options) else None,
        advantages=torch.zeros_like(drawn.rollout),
        weights=weights,
        figure_weights=weights,
        staleness=torch.arange(NUM_TOKENS) % 4,
        samples=samples,
        opening_logprobs=None if num_steps == 1 else drawn.opening,
        teacher_logprobs=drawn.teacher,
        teacher_top=drawn.top[0],
        student_top=drawn.top[1] + logprobs[:, None],
        pairs=pairs,
        judged=Judged(drawn.rewards >= 0, drawn.rewards.abs().mean()),
    )
    before = tokens if num_steps > 1 else tokens._replace(opening_logprobs=drawn.logprobs)
    old = old_logprobs(before, options)
    in_rewards = kl_estimate(options.kl_estimator, old, drawn.reference) if rewards_need_kl(options) else None
    # MaxRL takes the logarithm of a mean.
    rewards = drawn.rewards.abs() if options.estimator == "maxrl" else drawn.rewards
    components = torch.stack([rewards.roll(shift) for shift in range(len(options.component_weights or "1"))], dim=1)
    given = RewardedSamples(rewards, group_ids, samples, positions, components)
    estimates = token_estimates(
        given,
        options,
        kl=in_rewards,
        values=drawn.values if ESTIMATORS[options.estimator].needs_critic else None,
        reverse_kl=old - drawn.teacher if options.opd_kl_coef else None,
    )
    loss = function(tokens._replace(advantages=estimates.advantages.double()), options).loss
    found = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True)  # None for what the loss does not use
    gradients = [each for each in cast("tuple[Tensor | None, ...]", found) if each is not None]
    returns = [] if estimates.returns is None else [estimates.returns.double()]  # which a critic's loss is made of
    return torch.cat([loss.detach().view(1), *gradients, *returns])
