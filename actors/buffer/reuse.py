"""Groups that were trained and may be trained again, off-policy, while they are young enough.

Invariants:

* A group has ended with its first use: its samples are ``trained`` once, whatever follows. Each further use stands in
  the lease and in the receipt of its batch, and nowhere else.
* The uses of a group are numbered from 1 without gaps; one batch has a group once. No use is later than
  ``oldest token + η``, by the bound of its grant and by that of the policy that holds then.
* Payloads are not kept here. They are read from the ledger, which keeps them as long as a release names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.messages.ledger import GroupRecorded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.buffer.table import TrackedGroup
    from penstock.messages.ledger import BatchLeased, PayloadsReleased


class UsedGroup(msgspec.Struct):
    """One group that was trained."""

    record: GroupRecorded | None
    """Without payload. None: this drive wants no reuse, and the batch that has it was leased in an earlier one."""
    max_staleness: int
    """η of the policy that it was granted under."""
    oldest_version: int
    last_version: int
    """That the newest batch which has it makes."""
    num_uses: int = 1


class UsedGroups:
    """By id: those that may be used again, and those that batches since the last release have used again."""

    def __init__(self, max_uses: int) -> None:
        self.max_uses = max_uses
        self._groups: dict[int, UsedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def trained(self, version: int, groups: Iterable[TrackedGroup]) -> None:
        """These groups were trained for the first time, and made this version."""
        for tracked in groups if self.max_uses > 1 else ():
            record = tracked.record
            oldest = None if record is None else record.oldest_version
            if record is not None and oldest is not None:  # without a token of a known version there is no age
                record = msgspec.structs.replace(record, payload=None)
                self._groups[tracked.group_id] = UsedGroup(record, tracked.max_staleness, oldest, version)
        for group_id, group in list(self._groups.items()):
            if group.num_uses == 1 and not self._is_usable(group, version):
                del self._groups[group_id]

    def leased(self, lease: BatchLeased) -> None:
        """A batch takes some of them again."""
        for group_id, use in lease.again.items():
            group = self._groups.setdefault(group_id, UsedGroup(None, 0, 0, lease.version))
            group.num_uses, group.last_version = use, lease.version

    def released(self, entry: PayloadsReleased) -> None:
        """The ledger has let go of what this names not."""
        kept = set(entry.kept)
        for group_id, group in list(self._groups.items()):
            if group.last_version <= entry.through_version and group_id not in kept:
                del self._groups[group_id]

    # --- looks ------------------------------------------------------------------------------------------------

    def usable(self, version: int, max_staleness: int) -> list[int]:
        """What a batch that is taken at ``version`` may train again: the least used first, then the oldest."""
        found = [
            (group.num_uses, group.oldest_version, group_id)
            for group_id, group in self._groups.items()
            if self._is_usable(group, version) and version - group.oldest_version <= max_staleness
        ]
        return [group_id for _, _, group_id in sorted(found)]

    def needed(self, version: int, through: int) -> tuple[int, ...]:
        """Of which the payloads stay when those of the batches up to ``through`` go: they may be used again at
        ``version`` or later, or a later batch has them."""
        ids = (
            g for g, group in self._groups.items() if group.last_version > through or self._is_usable(group, version)
        )
        return tuple(sorted(ids))

    def next_use(self, group_id: int) -> int:
        return self._groups[group_id].num_uses + 1

    def max_staleness(self, group_id: int) -> int:
        """η of its grant."""
        return self._groups[group_id].max_staleness

    def records(self, group_ids: Iterable[int]) -> list[GroupRecorded]:
        """Of these groups, as far as they are known; without payloads."""
        found = (self._groups[group_id].record for group_id in group_ids)
        return [record for record in found if record is not None]

    def _is_usable(self, group: UsedGroup, version: int) -> bool:
        is_young = version - group.oldest_version <= group.max_staleness
        return group.record is not None and group.num_uses < self.max_uses and is_young
