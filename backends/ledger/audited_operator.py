"""What the audit knows of an operator: the policies and pauses that are recorded, and whether grants keep to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.ledger import PauseRecorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.ledger import GroupsGranted, PolicyRecorded


class AuditedOperator:
    """Both by the sequence of their entry."""

    def __init__(self, find: Callable[[str], None]) -> None:
        """``find``: is told what is wrong with the entry at hand."""
        self.policies: dict[int, PolicyRecorded] = {}
        self.pauses: dict[int, PauseRecorded] = {}
        self._find = find

    def recorded(self, sequence: int, entry: PolicyRecorded | PauseRecorded) -> None:
        """From this entry on it holds."""
        if isinstance(entry, PauseRecorded):
            self.pauses[sequence] = entry
        else:
            self.policies[sequence] = entry

    def granted(self, entry: GroupsGranted) -> None:
        """Whether a grant keeps to the policy and to the pause before it. What the first policy is no entry says."""
        policy = next(reversed(self.policies.values()), None)
        if policy is not None and entry.max_staleness != policy.max_staleness:
            self._find(
                f"groups are granted with a bound of {entry.max_staleness} under {policy.policy}, which has a "
                f"max_staleness of {policy.max_staleness}"
            )
        pause = next(reversed(self.pauses.values()), None)
        if pause is not None and pause.is_paused:
            self._find("groups are granted while new grants are paused")
