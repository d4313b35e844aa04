"""What a batch may do with a group: whose turn it is, how often, and how old its tokens are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.ledger.audited_group import AuditedGroup
    from penstock.messages.ledger import BatchLeased, StepRecorded


class KeptPayloads:
    """Payloads that a release let go of, and those that it left because their groups may be trained again."""

    def __init__(self) -> None:
        self.released_through = 0
        self.ids: set[int] = set()

    def release(self, through: int, kept: Sequence[AuditedGroup]) -> list[AuditedGroup]:
        """Up to this version, but for these groups. Returns those of them that were gone before."""
        gone = [group for group in kept if self.is_released(group)]
        self.released_through = max(through, self.released_through)
        self.ids = {group.group_id for group in kept}
        return gone

    def is_released(self, group: AuditedGroup) -> bool:
        """Whether the payload of a trained group is gone."""
        return group.group_id not in self.ids and (group.version or 0) <= self.released_through


def wrong_use(lease: BatchLeased, use: int, group: AuditedGroup, *, is_released: bool) -> Iterator[str]:
    """What is wrong with this use of a group, which has had ``group.num_uses``."""
    if use != group.num_uses + 1 or use > lease.max_uses:
        yield (
            f"batch {lease.version} is use {use} of group {group.group_id}, which had {group.num_uses}; the bound is "
            f"{lease.max_uses}"
        )
    if use > 1 and is_released:
        yield f"batch {lease.version} has group {group.group_id} again, and its payload was released"


def wrong_ages(entry: StepRecorded, lease: BatchLeased, groups: Sequence[AuditedGroup]) -> Iterator[str]:
    """What is wrong with the ages of these groups, which are all of the batch, and with what the receipt says."""
    consumed_at = entry.version - 1
    oldest_age = 0
    for group in groups:
        oldest = group.oldest_versions[lease.mask_old_tokens]
        if oldest is None:
            continue
        age = consumed_at - oldest
        oldest_age = max(oldest_age, age)
        if age < 0:
            yield f"group {group.group_id} has tokens of version {oldest} and is trained at {consumed_at}"
        if age > group.max_staleness and not lease.mask_stale:
            yield f"group {group.group_id} is trained at age {age}, its bound is {group.max_staleness}"
    if entry.max_staleness > lease.max_staleness:
        yield f"a token of age {entry.max_staleness} was trained, the bound of the batch is {lease.max_staleness}"
    if entry.max_staleness != oldest_age and not (lease.mask_stale and entry.max_staleness < oldest_age):
        yield f"the receipt names an age of {entry.max_staleness}, the samples' versions make it {oldest_age}"
