"""A batch at the Learner: how old its tokens are, what is asked of the backend, and the receipt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.commands import Train
from penstock.messages.training import StepFinished

if TYPE_CHECKING:
    from penstock.messages.local import BatchTrained
    from penstock.messages.training import BatchReady


def training_of(batch: BatchReady) -> Train:
    """One step on this batch; where it masks what is too old, with the oldest version that is trained."""
    oldest = max(0, batch.version - 1 - batch.max_staleness) if batch.mask_stale else 0
    return Train(
        version=batch.version,
        groups=batch.groups,
        min_token_version=oldest,
        mask_old_tokens=batch.mask_old_tokens,
    )


def receipt_of(batch: BatchReady, event: BatchTrained, age: int) -> StepFinished:
    """What the Buffer hears of the step; ``age``: of its oldest token."""
    return StepFinished(
        version=event.version,
        group_ids=tuple(group.group_id for group in batch.groups),
        num_trained_tokens=event.num_trained_tokens,
        num_masked_tokens=event.num_masked_tokens,
        max_staleness=age,
        metrics=event.metrics,
        uses=batch.uses,
    )


def oldest_age(batch: BatchReady) -> int:
    """Age of the oldest token that is trained, in versions, when the batch is consumed."""
    consumed_at = batch.version - 1
    least = consumed_at - batch.max_staleness if batch.mask_stale else -1
    samples = (sample for group in batch.groups for sample in group.samples)
    if batch.mask_old_tokens:
        made_by = {version for sample in samples if (version := sample.newest_version) is not None}
    else:
        made_by = {version for sample in samples for version in sample.versions}
    return consumed_at - min((version for version in made_by if version >= least), default=consumed_at)
