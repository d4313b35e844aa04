"""The reference point of KTO: the KL to the reference, from prompts with responses to other prompts.

Ethayarajh et al., arXiv 2402.01306: ``z0 = max(0, mean of log π(y_j | x_i) − log π_ref(y_j | x_i))`` with
``j = i + 1`` around the samples of a step. It is a biased estimate of the KL, and costs no generation.

Invariants:

* A response is never put behind its own prompt: where several samples have one prompt, each takes the response of the
  sample of the same number of the next prompt. With a single prompt there is no other, and ``z0`` is 0.
* A pair of a prompt and a response is cut to the longest sequence of the step, so it fits where the step does.
* No gradient flows through any of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.learners.batch.updates import Update

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.training.step import Scores


def mismatched(update: Update) -> Update | None:
    """The sequences that speak for the reference point, one sample for each of ``update``; None where it has a single
    prompt. Of a sample of several parts the context of each goes before the part of the same number."""
    samples: dict[int, list[TrainSequence]] = {}
    for sequence in update.sequences:
        samples.setdefault(sequence.sample, []).append(sequence)
    by_prompt: dict[int, list[list[TrainSequence]]] = {}
    for parts in samples.values():
        by_prompt.setdefault(parts[0].prompt, []).append(parts)
    prompts = list(by_prompt.values())
    if len(prompts) < 2:
        return None
    longest = max(len(sequence.tokens) for sequence in update.sequences)
    made: list[TrainSequence] = []
    num_samples = num_tokens = 0
    for own, others in zip(prompts, [*prompts[1:], prompts[0]], strict=True):
        for index, parts in enumerate(own):
            before = num_tokens
            for place, response in enumerate(others[index % len(others)]):
                context = parts[min(place, len(parts) - 1)]
                trained = response.trained - response.num_context + context.num_context
                trained = trained[trained < longest]
                if len(trained):
                    made.append(_behind(context, response, trained, sample=num_samples, first=num_tokens))
                    num_tokens += len(trained)
            num_samples += num_tokens > before
    return Update(tuple(made), num_samples) if made else None


def _behind(
    context: TrainSequence, response: TrainSequence, trained: NDArray[np.int64], *, sample: int, first: int
) -> TrainSequence:
    """The response with another context; ``trained``: the places of its tokens then."""
    count = len(trained)
    tokens = [context.tokens[: context.num_context], response.tokens[response.num_context :]]
    return context._replace(
        tokens=np.concatenate(tokens)[: trained[-1] + 1],
        trained=trained,
        rollout_logprobs=response.rollout_logprobs[:count],
        positions=response.positions[:count],
        versions=response.versions[:count],
        teacher_logprobs=None,
        teacher_top=None,
        experts=None,
        kept=None,
        sample=sample,
        first=first,
    )


def reference_point(pairs: Update, scores: Scores) -> Tensor:
    """``z0``, a float64 scalar.

    Args:
        pairs: as :func:`mismatched` made them.
        scores: of policy and reference on all their trained tokens, in that order.
    """
    assert scores.reference is not None, "KTO has a reference"
    total = (scores.logprobs.double() - scores.reference.double()).sum()
    return (total / max(1, pairs.num_samples)).clamp(min=0.0).detach()
