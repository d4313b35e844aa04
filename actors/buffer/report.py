"""What the Buffer tells of a step, and how a group that is not trained is written down."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock.messages.base import Metric
from penstock.messages.engine_counts import added
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.messages.training import StepFinished, StepReported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.actors.buffer.books import Books
    from penstock.actors.buffer.table import TrackedGroup
    from penstock.messages.ledger import GroupRecorded
    from penstock.messages.samples import Group
    from penstock.messages.training import Balance

REUSE: Final = "reuse"
"""Begins the names of figures about groups that were trained before."""
OF_SAMPLES: Final = ("rollout/", "passrate/")


def closed_ends(
    tracked: TrackedGroup, state: TerminalState, cause: str, *, samples_per_group: int
) -> tuple[SampleEnd, ...]:
    """The ends of all samples of a group that is given up. What had failed before keeps its own end."""
    record = tracked.record
    if record is None:
        keys = (SampleKey(tracked.group_id, index) for index in range(samples_per_group))
        return tuple(SampleEnd(key=key, state=state, cause=cause) for key in keys)
    given_up = (
        SampleEnd(
            key=SampleKey(tracked.group_id, note.index),
            state=state,
            cause=cause,
            num_tokens=note.num_tokens,
            num_given_tokens=note.num_given_tokens,
        )
        for note in record.samples
    )
    return (*given_up, *record.ended)


def ages(groups: tuple[Group, ...], version: int, *, of_newest: bool = False) -> list[int]:
    """Age of each sample that has tokens, in versions, when its batch is consumed to make ``version``: that of its
    oldest token, or of its newest ones where no others are trained."""
    consumed_at = version - 1
    samples = (sample for group in groups for sample in group.samples)
    made = (sample.newest_version if of_newest else sample.oldest_version for sample in samples)
    return [consumed_at - version for version in made if version is not None]


def step_report(
    groups: tuple[Group, ...],
    receipt: StepFinished,
    gauges: tuple[Metric, ...],
    *,
    num_steps: int,
    balance: Balance,
    policy: str = "",
    masks_old: bool = False,
    again: Sequence[GroupRecorded] = (),
) -> StepReported:
    """The report of a recorded step: the Learner's metrics, the batch's own figures, and ``gauges``. ``again``: the
    groups that were trained before. Their ages count, and nothing else of them: they are no new samples."""
    sample_ages = ages(groups, receipt.version, of_newest=masks_old)
    notes = [note for record in again for note in record.samples]
    made_by = (note.newest_version if masks_old else note.oldest_version for note in notes)
    sample_ages += [receipt.version - 1 - version for version in made_by if version is not None]
    counts = [0] * (max(sample_ages, default=0) + 1)
    for age in sample_ages:
        counts[age] += 1
    own = (
        Metric("buffer/staleness_mean", sum(sample_ages) / max(1, len(sample_ages))),
        Metric("buffer/staleness_max", receipt.max_staleness),
        *_rewards(groups),
        *_mean_components(groups),
        *_engine_counts(groups),
        Metric("train/num_tokens", receipt.num_trained_tokens),
        Metric("train/num_masked_tokens", receipt.num_masked_tokens),
    )
    named = {metric.name: metric for metric in (*_of_learner(receipt), *own, *gauges)}
    return StepReported(
        version=receipt.version,
        num_steps=num_steps,
        group_ids=receipt.group_ids,
        metrics=tuple(named.values()),
        staleness_counts=tuple(counts),
        response_lengths=tuple(sample.num_tokens for group in groups for sample in group.samples),
        balance=balance,
        policy=policy,
    )


def _of_learner(receipt: StepFinished) -> list[Metric]:
    """Its figures; those of the samples go by another name in a batch with samples that have been in an earlier one, so
    that a curve of what engines make stays one."""
    if max(receipt.uses, default=1) == 1:
        return list(receipt.metrics)
    return [
        Metric(f"{REUSE}/{each.name}", each.value) if each.name.startswith(OF_SAMPLES) else each
        for each in receipt.metrics
    ]


def _reused(books: Books, again: Sequence[GroupRecorded]) -> tuple[Metric, ...]:
    """How much of a step was trained before; nothing where no group ever is."""
    if books.used.max_uses == 1:
        return ()
    notes = [note for record in again for note in record.samples]
    return (
        Metric(f"{REUSE}/num_groups", len(again)),
        Metric(f"{REUSE}/num_samples", len(notes)),
        Metric(f"{REUSE}/num_tokens", sum(note.num_made_tokens for note in notes)),
    )


def trained_report(
    books: Books,
    groups: tuple[Group, ...],
    receipt: StepFinished,
    *,
    target: int,
    bound: int,
    again: Sequence[GroupRecorded] = (),
) -> StepReported:
    """Of a step that has just been recorded.

    Args:
        books: with the step.
        groups: that it trained for the first time.
        receipt: of the Learner.
        target: groups that may be outstanding.
        bound: of the batch: by the policies under which its groups were granted.
        again: what the ledger keeps of the groups that it trained once more.
    """
    gauges = (
        Metric("buffer/ready_groups", books.table.num_ready),
        Metric("buffer/outstanding_groups", books.table.num_outstanding),
        Metric("buffer/target_outstanding", target),
        Metric("buffer/staleness_bound", bound),
        Metric("buffer/max_staleness", books.policy.max_staleness),
        Metric("buffer/announced_lag", receipt.version - (books.announced or 0)),
        *books.rejections.metrics(),
        *_reused(books, again),
    )
    return step_report(
        groups,
        receipt,
        gauges,
        num_steps=books.num_steps,
        balance=books.accounts.balance(),
        policy=books.policy_name,
        masks_old=books.settings.mask_old_tokens,
        again=again,
    )


def collected_report(books: Books, wanted: int) -> StepReported | None:
    """As many of the groups that are collected as a batch has, as if they were one; None between two of these."""
    size, ids = books.settings.groups_per_batch, books.table.ready_ids()
    if len(ids) % size and len(ids) < wanted:
        return None
    number = -(-len(ids) // size)
    newest = ids[(number - 1) * size :]
    none_trained = StepFinished(version=number, group_ids=newest, num_trained_tokens=0, max_staleness=0)
    report = step_report(
        tuple(map(books.payload, newest)),
        none_trained,
        books.rejections.metrics(),
        num_steps=-(-wanted // size),
        balance=books.accounts.balance(),
    )
    return replace(report, staleness_counts=())


def _rewards(groups: tuple[Group, ...]) -> tuple[Metric, ...]:
    """Mean and standard deviation over the samples that have a reward; nothing where none has, because all are
    imitated."""
    rewards = [r for group in groups for sample in group.samples if (r := sample.reward) is not None]
    if not rewards:
        return ()
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return Metric("rollout/raw_reward", mean), Metric("rollout/raw_reward_std", std)


def _mean_components(groups: tuple[Group, ...]) -> tuple[Metric, ...]:
    """Of each named component of the rewards, over the samples whose reward has it."""
    found: dict[str, list[float]] = {}
    for sample in (sample for group in groups for sample in group.samples):
        for component in () if sample.outcome.reward is None else sample.outcome.reward.components:
            found.setdefault(component.name, []).append(component.value)
    return tuple(Metric(f"rollout/reward/{name}", sum(values) / len(values)) for name, values in sorted(found.items()))


def _engine_counts(groups: tuple[Group, ...]) -> Iterator[Metric]:
    """Shares over all samples of the batch; nothing of what no engine tells."""
    told = [counts for group in groups for sample in group.samples if (counts := sample.counts) is not None]
    cached = added(counts for counts in told if counts.num_cached_tokens is not None)
    drafted = added(counts for counts in told if counts.num_drafted_tokens is not None)
    if cached is not None and cached.num_read_tokens:
        yield Metric("rollout/prefix_cache_hit_rate", (cached.num_cached_tokens or 0) / cached.num_read_tokens)
    if drafted is not None and drafted.num_drafted_tokens:
        yield Metric("rollout/spec_accept_rate", (drafted.num_accepted_tokens or 0) / drafted.num_drafted_tokens)
