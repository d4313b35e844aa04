"""Entries of a small run: groups of two samples, batches of two groups, a bound of 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.flow import GrantSpan
from penstock.messages.ledger import (
    BatchLeased,
    CheckpointRecorded,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    PayloadsReleased,
    PolicyRecorded,
    RunRecorded,
    SampleNote,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    VersionSpan,
)
from penstock.messages.training import OnStale, UpdateMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.ledger import LedgerEntry

TOKENS = 3
"""Of every sample."""
BOUND = 2


def run() -> RunRecorded:
    return RunRecorded(seed=0, num_rows=100, shuffle=True, samples_per_group=2, groups_per_batch=2)


def granted(first: int, num: int, *, ordinal: int | None = None, version: int = 0) -> GroupsGranted:
    span = GrantSpan(first, num, first if ordinal is None else ordinal, version, version + BOUND)
    return GroupsGranted(span=span, total=first + num, max_staleness=BOUND)


def sample(group_id: int, index: int, version: int = 0, *, loss_mask: bytes = b"") -> Sample:
    part = Part(
        tokens=pack_tokens([group_id, index, version]),
        logprobs=pack_floats([-0.5, -1.0, -1.5]),
        spans=(VersionSpan(version, TOKENS),),
        loss_mask=loss_mask,
    )
    reward = Reward(value=0.5, components=(Metric("format", 1.0),))
    outcome = Completed(reward=reward)
    return Sample(key=SampleKey(group_id, index), attempt=1, engine="engine_worker/0", parts=(part,), outcome=outcome)


def admitted(
    group_id: int,
    version: int = 0,
    *,
    indices: Sequence[int] = (0, 1),
    failed: Sequence[int] = (),
    deadline: int | None = None,
    loss_mask: bytes = b"",
) -> GroupRecorded:
    samples = tuple(sample(group_id, index, version, loss_mask=loss_mask) for index in indices)
    ended = tuple(end(group_id, index, TerminalState.FAILED, "reward_timeout") for index in failed)
    prompt = Prompt(row=group_id, epoch=0, tokens=pack_tokens([7, 8]), text="2 + 2 =", label="4", metadata=b'{"a": 1}')
    return GroupRecorded(
        group_id=group_id,
        deadline_version=version + BOUND if deadline is None else deadline,
        samples=tuple(SampleNote(i, 1, "engine_worker/0", "completed", TOKENS, version, version, 0.5) for i in indices),
        ended=ended,
        payload=Group(group_id=group_id, prompt=prompt, samples=samples, ended=ended),
    )


def end(
    group_id: int,
    index: int,
    state: TerminalState = TerminalState.FILTERED,
    cause: str = "zero_spread",
    num_tokens: int = TOKENS,
) -> SampleEnd:
    return SampleEnd(key=SampleKey(group_id, index), state=state, cause=cause, num_tokens=num_tokens)


def closed(group_id: int, *ended: SampleEnd, is_requeued: bool = False) -> GroupClosed:
    return GroupClosed(group_id=group_id, ended=ended or (end(group_id, 0), end(group_id, 1)), is_requeued=is_requeued)


def stale(group_id: int, index: int) -> SampleEnd:
    return end(group_id, index, TerminalState.STALE, "past_deadline")


def leased(version: int, *group_ids: int, is_last: bool = False, mask_stale: bool = False) -> BatchLeased:
    return BatchLeased(
        version=version,
        group_ids=group_ids,
        max_staleness=BOUND,
        update_mode=UpdateMode.IN_FLIGHT,
        is_last=is_last,
        mask_stale=mask_stale,
    )


def trained(
    version: int, *group_ids: int, age: int = 0, num_tokens: int | None = None, masked: int = 0
) -> StepRecorded:
    made = 2 * TOKENS * len(group_ids) if num_tokens is None else num_tokens
    return StepRecorded(
        version=version,
        group_ids=group_ids,
        num_trained_tokens=made - masked,
        num_masked_tokens=masked,
        max_staleness=age,
    )


def whole_run() -> list[LedgerEntry]:
    """Nothing is wrong with it. Groups 0, 1, 3 and 4 are trained, 2, 5 and 6 closed, 7 and 8 open."""
    return [
        run(),  # 1
        VersionRecorded(version=0),
        granted(0, 4),  # 3
        admitted(0),
        admitted(1, indices=(1, 2), failed=(0,)),  # 5
        closed(2),
        leased(1, 0, 1),  # 7
        admitted(3),
        trained(1, 0, 1),  # 9
        CheckpointRecorded(version=1, path="simulated/checkpoint-1"),
        VersionRecorded(version=1),  # 11
        granted(4, 3, version=1),
        admitted(4, version=1),  # 13
        PolicyRecorded(policy="x", max_staleness=BOUND, update_mode=UpdateMode.DRAIN, on_stale=OnStale.REQUEUE),
        closed(5, stale(5, 0), stale(5, 1), is_requeued=True),  # 15
        granted(7, 1, ordinal=5, version=1),
        granted(8, 1, ordinal=7, version=1),  # 17
        admitted(6, version=1, indices=(0, 3), failed=(1,)),
        closed(6, stale(6, 0), stale(6, 3), end(6, 1, TerminalState.FAILED, "reward_timeout")),  # 19
        admitted(8, version=1),
        leased(2, 3, 4),  # 21
        trained(2, 3, 4, age=1),
        CheckpointRecorded(version=2, path="simulated/checkpoint-2"),  # 23
        PayloadsReleased(through_version=1),
    ]
