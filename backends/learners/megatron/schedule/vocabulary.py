"""Log-probs and entropy from logits whose vocabulary is divided over ranks.

Axis letters: ``T`` tokens, ``V`` the vocabulary as it is filled up, ``n`` ranks that share it.

With the whole row of logits ``z`` at temperature ``τ``, ``p = softmax(z / τ)`` and ``H = −Σ p log p``::

    log p(y) = z_y / τ − logsumexp(z / τ)        ∂ log p(y) / ∂ z = (1[y] − p) / τ
    H = logsumexp(z / τ) − Σ p · z / τ           ∂H / ∂z = −p · (log p + H) / τ

Invariants:

* Every rank of the group gets the same numbers, the same as one rank with the whole row gets but for rounding.
* What the vocabulary is filled up with has probability 0 and no gradient.
* Logits are read in float32 and left as they are.
"""

# torch.autograd and torch.distributed are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from penstock.backends.learners.objectives.logprobs import at_least_float32, kept_logprobs, other_logprobs

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class VocabularyScores(NamedTuple):
    """Of each token ``[T]``, float32."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    """Values by a critic that shares the policy's trunk."""
    top: Tensor | None = None
    """Log-probs of the further tokens that were asked for ``[T, k]``."""

    def first(self, count: int) -> VocabularyScores:
        """Those of the first tokens, with their gradient."""
        return VocabularyScores(*(None if found is None else found[:count] for found in self))  # type: ignore[arg-type]


def vocabulary_scores(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    entropy_gradient: bool = True,
    top_ids: Tensor | None = None,
    kept_ids: Tensor | None = None,
) -> VocabularyScores:
    """Log-probs of ``targets`` and entropy of the distributions that they are drawn from.

    Args:
        logits: this rank's share of each row ``[T, V / n]``, in the order of the ranks.
        targets: int64 ``[T]`` over the whole vocabulary; the same on every rank.
        group: of the ranks.
        vocab_size: without what it is filled up with.
        temperature: τ.
        entropy_gradient: whether gradients go through the entropy.
        top_ids: further tokens of which the log-probs are wanted ``[T, k]``, over the whole vocabulary; those outside
            it get −∞.
        kept_ids: tokens that the log-prob of each target is taken over ``[T, W]``, as for :func:`.kept_logprobs`;
            excludes ``top_ids``.
    """
    made = cast(
        "tuple[Tensor, Tensor]",
        _Scores.apply(logits, targets, group, vocab_size, temperature),  # type: ignore[no-untyped-call]
    )
    logprobs, top = made[0], None
    if kept_ids is not None:
        wanted = _logits_at(logits, torch.cat([targets[:, None], kept_ids], dim=1), group)
        logprobs = kept_logprobs(wanted[:, 0], wanted[:, 1:], kept_ids, whole=logprobs, temperature=temperature)
    if top_ids is not None:
        wanted = _logits_at(logits, torch.cat([targets[:, None], top_ids], dim=1), group)
        others = wanted[:, 1:].masked_fill(top_ids >= vocab_size, float("-inf"))
        top = other_logprobs(made[0], others, wanted[:, 0], temperature=temperature)
    return VocabularyScores(logprobs, made[1] if entropy_gradient else made[1].detach(), top=top)


def _logits_at(logits: Tensor, ids: Tensor, group: ProcessGroup) -> Tensor:
    """Logits of these tokens of the whole vocabulary ``[T, k]``, on every rank; at least float32."""
    own = ids - group.rank() * logits.shape[1]
    is_here = (own >= 0) & (own < logits.shape[1])
    share = at_least_float32(logits.gather(1, own.where(is_here, 0)))
    return sum_of_shares(share.where(is_here, 0.0), group)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        logits: Tensor,
        targets: Tensor,
        group: ProcessGroup,
        vocab_size: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * logits.shape[1]
        # The rows are what is largest on a rank, so as few as possible of their size are there at once: two in float32.
        wide = at_least_float32(logits)
        scaled = wide / temperature if wide is logits else wide.div_(temperature)
        scaled[:, max(0, vocab_size - first) :] = float("-inf")
        top = _reduced(scaled.amax(dim=1), dist.ReduceOp.MAX, group)
        exponents = (scaled - top[:, None]).exp_()
        total = _reduced(exponents.sum(dim=1), dist.ReduceOp.SUM, group)
        own = targets - first
        is_here = (own >= 0) & (own < logits.shape[1])
        place = own.where(is_here, 0)[:, None]
        # A share without the target's column may hold an infinite filler in its place.
        chosen = scaled.gather(1, place)[:, 0].masked_fill(~is_here, 0.0)
        logprobs = _reduced(chosen, dist.ReduceOp.SUM, group) - top - total.log()
        probabilities = exponents.div_(total[:, None])
        scaled[:, max(0, vocab_size - first) :] = 0.0
        weighted = scaled.mul_(probabilities).sum(dim=1)
        entropy = total.log() + top - _reduced(weighted, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(probabilities, place, is_here, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ANN401 - as above
        of_logprobs, of_entropy = gradients
        probabilities, place, is_here, entropy = ctx.saved_tensors
        surprise = torch.special.xlogy(probabilities, probabilities).addcmul_(probabilities, entropy[:, None])
        out = surprise.mul_(-of_entropy[:, None]).addcmul_(probabilities, of_logprobs[:, None], value=-1)
        out.scatter_add_(1, place, (of_logprobs * is_here)[:, None])
        return out.div_(ctx.temperature).to(ctx.dtype), None, None, None, None


class _SumOfShares(torch.autograd.Function):
    """The sum over ranks, each of which then computes the same from it: so the gradient of a share is that of the sum,
    and is not summed again."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401 - torch's own
        return _reduced(share.clone(), dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - as above
        return gradients[0], None


def sum_of_shares(share: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' tensors, for ranks that all go on to compute the same loss from it; each of them
    contributes the gradient of its own share."""
    if group.size() == 1:
        return share
    return cast("Tensor", _SumOfShares.apply(share, group))  # type: ignore[no-untyped-call]


def _reduced(values: Tensor, op: Any, group: ProcessGroup) -> Tensor:  # noqa: ANN401 - an operation of torch's
    if group.size() > 1:
        dist.all_reduce(values, op=op, group=group)
    return values
