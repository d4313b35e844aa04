"""What the audit knows of an operator: policies, pauses and engines that are recorded, and whether the run keeps to
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.ledger import EnginesRecorded, PauseRecorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.messages.ledger import GroupsGranted, PolicyRecorded, SampleNote


class AuditedOperator:
    """All by the sequence of their entry."""

    def __init__(self, find: Callable[[str], None]) -> None:
        """``find``: is told what is wrong with the entry at hand."""
        self.policies: dict[int, PolicyRecorded] = {}
        self.pauses: dict[int, PauseRecorded] = {}
        self.engines: dict[int, EnginesRecorded] = {}
        self._were_engines: set[str] = set()
        self._find = find

    def recorded(self, sequence: int, entry: PolicyRecorded | PauseRecorded | EnginesRecorded) -> None:
        """From this entry on it holds."""
        if isinstance(entry, PauseRecorded):
            self.pauses[sequence] = entry
        elif isinstance(entry, EnginesRecorded):
            if set(entry.engines) == set(self.engines[max(self.engines)].engines if self.engines else ()):
                self._find(f"engines are recorded that are those of the run already: {', '.join(entry.engines)}")
            self.engines[sequence] = entry
            self._were_engines.update(entry.engines)
        else:
            self.policies[sequence] = entry

    def generated(self, notes: Iterable[SampleNote]) -> None:
        """Whether who made these samples was ever an engine of the run, where its engines are recorded."""
        for note in notes:
            if self.engines and note.engine not in self._were_engines:
                self._find(f"sample {note.index} was made by {note.engine}, which was never an engine of the run")

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
