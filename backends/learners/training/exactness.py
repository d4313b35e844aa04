"""What ``learner.true_on_policy`` asserts: every trained token is exactly as likely as the engine said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence

LARGEST_DIFFERENCE: Final = "train/largest_logprob_abs_diff"


class InexactError(UserFault):
    """Engine and learner compute different log-probs, and are to compute the same."""


def require_equal(batch: TrainBatch, logprobs: NDArray[np.float32], *, step: int) -> float:
    """The largest difference of all trained tokens in nats, which is 0.

    Args:
        batch: with what the engine reported.
        logprobs: what the learner finds before the batch has changed its weights ``[N]``, in the order of the batch.
        step: that trains it.

    Raises:
        InexactError: a value differs, by whatever; the message has the token that differs most.
    """
    reported = np.concatenate([sequence.rollout_logprobs for sequence in batch.sequences])
    differs = ~np.equal(logprobs, reported)
    difference = np.abs(logprobs.astype(np.float64) - reported)
    if not differs.any():
        return float(difference.max(initial=0.0))
    worst = int(np.argmax(np.where(differs, np.nan_to_num(difference, nan=np.inf), -1.0)))
    sequence = next(each for each in batch.sequences if worst < each.first + len(each.trained))
    at = worst - sequence.first
    raise InexactError(
        f"step {step}: learner.true_on_policy is true, and engine and learner differ at {int(differs.sum()):,} of "
        f"{len(reported):,} trained tokens, by up to {difference[worst]:.3g} nats: sample {_name(batch, sequence)}, "
        f"token {int(sequence.positions[at])} of its response (id {int(sequence.tokens[sequence.trained[at]])}): the "
        f"engine says {float(reported[worst]):.9g}, the learner {float(logprobs[worst]):.9g}. Nothing was trained with "
        "this batch. Look at what computes the two: the same versions of torch and transformers on the same kind of "
        "processor, the same attention and norms, model.dtype, num_threads, sampling.temperature, and the weights that "
        "the engine has (penstock audit); or set learner.true_on_policy to false"
    )


def _name(batch: TrainBatch, sequence: TrainSequence) -> str:
    names: list[str] = []
    for group in batch.groups:
        names += [str(sample.key) for sample in group.samples]
        names += [str(group.group_id)] * len(group.counted)
    return names[sequence.sample]
