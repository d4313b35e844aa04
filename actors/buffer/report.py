"""What the Buffer tells of a step, and how a group that is not trained is written down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.base import Metric
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.messages.training import StepReported

if TYPE_CHECKING:
    from penstock.actors.buffer.machine import Buffer
    from penstock.actors.buffer.table import TrackedGroup
    from penstock.messages.samples import Group
    from penstock.messages.training import BatchReady, StepFinished


def closed_ends(buffer: Buffer, tracked: TrackedGroup, state: TerminalState, cause: str) -> tuple[SampleEnd, ...]:
    """The ends of all samples of a group that is given up. What had failed before keeps its own end."""
    payload = tracked.payload
    if payload is None:
        keys = (SampleKey(tracked.group_id, index) for index in range(buffer.settings.samples_per_group))
        return tuple(SampleEnd(key=key, state=state, cause=cause) for key in keys)
    given_up = (SampleEnd(key=s.key, state=state, cause=cause, num_tokens=s.num_tokens) for s in payload.samples)
    return (*given_up, *payload.ended)


def ages(batch: BatchReady) -> list[int]:
    """Age of each sample of a batch that has tokens, in versions, when it is consumed."""
    consumed_at = batch.version - 1
    samples = (sample for group in batch.groups for sample in group.samples)
    return [consumed_at - oldest for sample in samples if (oldest := sample.oldest_version) is not None]


def step_report(buffer: Buffer, batch: BatchReady, receipt: StepFinished) -> StepReported:
    """The report of a recorded step: the Learner's metrics and the Buffer's own."""
    sample_ages = ages(batch)
    counts = [0] * (max(sample_ages, default=0) + 1)
    for age in sample_ages:
        counts[age] += 1
    own = (
        Metric("buffer/staleness_mean", sum(sample_ages) / max(1, len(sample_ages))),
        Metric("buffer/staleness_max", receipt.max_staleness),
        Metric("buffer/ready_groups", buffer.table.num_ready),
        Metric("buffer/outstanding_groups", buffer.table.num_outstanding),
        Metric("buffer/target_outstanding", buffer.settings.pacing.target_outstanding or buffer.target.value),
        Metric("buffer/announced_lag", receipt.version - (buffer.announced or 0)),
        Metric("rollout/raw_reward", _mean_reward(batch.groups)),
        Metric("train/num_tokens", receipt.num_trained_tokens),
        Metric("train/num_masked_tokens", receipt.num_masked_tokens),
    )
    named = {metric.name: metric for metric in (*receipt.metrics, *own)}
    return StepReported(
        version=receipt.version,
        num_steps=buffer.settings.num_steps,
        group_ids=receipt.group_ids,
        metrics=tuple(named.values()),
        staleness_counts=tuple(counts),
        response_lengths=tuple(sample.num_tokens for group in batch.groups for sample in group.samples),
        balance=buffer.accounts.balance(),
    )


def _mean_reward(groups: tuple[Group, ...]) -> float:
    rewards = [r for group in groups for sample in group.samples if (r := sample.reward) is not None]
    return sum(rewards) / max(1, len(rewards))
