"""Losses of which a token's depends on the log-probs of others, and what ranks exchange for them.

A pass without gradient finds all log-probs, the loss of the step gives its gradient with respect to each of them, and a
second pass sends these back through the model. That is exact for any function of the log-probs, at the cost of one more
forward pass.

Invariants:

* The loss is computed over all tokens of the step at once, in the order of the batch, on every rank alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.backends.learners.hooks.agreement import check_agreement
from penstock.backends.learners.hooks.objective import IMPORTANCE
from penstock.backends.learners.objectives.spec import loss_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.objectives.protocol import ObjectiveFunction
    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.backends.learners.training.step import Scores, StepTokens
    from penstock.backends.learners.worker_group.workers import WorkerGroup


class LogprobGradients(NamedTuple):
    """The loss of a step, and how it changes with what the policy says of some of its tokens, in their order."""

    figures: Mapping[str, Tensor]
    """Figures of the whole step."""
    logprobs: Tensor
    """``[T]``"""
    entropy: Tensor
    """``[T]``"""

    def surrogate(self, part: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """A scalar whose gradient is that of the loss.

        Args:
            part: which of these tokens.
            logprobs: of them, with gradient.
            entropy: of them, with gradient where it is trained on.
        """
        value = (self.logprobs[part] * logprobs).sum()
        return value + (self.entropy[part] * entropy).sum() if entropy.requires_grad else value


def logprob_gradients(
    objective: ObjectiveFunction,
    options: ObjectiveOptions,
    whole: StepTokens,
    scores: Scores,
    places: Tensor,
    *,
    workers: WorkerGroup,
) -> LogprobGradients:
    """
    Args:
        objective: whose loss it is.
        options: of the objective.
        whole: all tokens of the step, in the order of the batch.
        scores: of all of them.
        places: of the tokens that gradients are wanted for, see :func:`places_in`.
        workers: all ranks, which all come here.

    Raises:
        UserCodeError: a function of the user's failed, or gave another loss on another rank.
    """
    leaves = [scores.logprobs.requires_grad_(), scores.entropy.requires_grad_()]
    terms = objective(whole.tokens(slice(None), scores), options)
    found = torch.autograd.grad(terms.loss, leaves, allow_unused=True, materialize_grads=True)
    if (function := _user_function(options)) is not None:
        check_agreement(workers, found[0], f"{function}: the gradients that came of it")
    return LogprobGradients(terms.figures, *(gradient[places] for gradient in found))


def _user_function(options: ObjectiveOptions) -> str | None:
    """The key of a function of the user's that the loss depends on."""
    if loss_of(options).is_function:
        return "learner.objective"
    return None if options.importance_function is None else IMPORTANCE


def places_in(update: Update, parts: Sequence[Sequence[TrainSequence]]) -> Tensor:
    """Of the tokens of some parts among those of the step in the order of the batch, int64 ``[T]`` on the CPU."""
    starts: dict[int, int] = {}
    num_tokens = 0
    for sequence in update.sequences:
        starts[sequence.first] = num_tokens
        num_tokens += len(sequence.trained)
    places = [
        torch.arange(starts[sequence.first], starts[sequence.first] + len(sequence.trained))
        for part in parts
        for sequence in part
    ]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *places])
