"""One census at a time: who was asked, who has answered, when the answers may be judged, and what a replacement takes
over from its predecessor.

Invariants:

* Only answers of the current round, to this incarnation, from the incarnation that was asked, count.
* The answers may be judged when everyone who was asked has answered and the asker knows at least as much to be settled
  as any of them.
* What was found for a group that is not known here yet waits for the group; a later census confirms it or strikes it.
  So does what its engine has reported since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.membership import LeaseStage
from penstock.messages.names import is_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.actors.settled import KnownSettled
    from penstock.messages.flow import GenerationProgressed
    from penstock.messages.membership import HeldLease, LeasesHeld
    from penstock.messages.samples import SampleKey

Found = tuple[str, "HeldLease"]
"""Who holds a sample, and how far it has come."""


ENDED: Final = (LeaseStage.FAILED, LeaseStage.HANDED_BACK)
"""Records of attempts on which nobody works."""
_OPEN: Final = (LeaseStage.WAITING, LeaseStage.RUNNING)


class Census:
    """The state of the current round."""

    def __init__(self) -> None:
        self.round = 0
        self.is_open = False
        self._asked: dict[str, int | None] = {}
        """Epoch by name; None for one that is lost and whose successor is waited for."""
        self._answers: dict[str, LeasesHeld] = {}

    def open(self, members: dict[str, int], awaited: tuple[str, ...]) -> None:
        """Start a new round; ``awaited`` are those without whom it cannot end, even when they are not there now."""
        self.round += 1
        self.is_open = True
        self._answers = {}
        self._asked = {**dict.fromkeys(name for name in awaited if name not in members), **members}

    def joined(self, name: str, epoch: int) -> None:
        """A keeper that returned meanwhile is asked too."""
        if self.is_open:
            self._asked[name] = epoch

    def answered(self, event: LeasesHeld, own_epoch: int) -> None:
        """Take an answer, if it counts."""
        actor = event.actor
        counts = event.round == self.round and event.asker_epoch == own_epoch
        if counts and self._asked.get(actor.name) == actor.epoch:
            self._answers[actor.name] = event

    def missing(self) -> list[str]:
        """Who is there and has not answered."""
        return [name for name, epoch in self._asked.items() if epoch is not None and name not in self._answers]

    def awaited(self) -> list[str]:
        """Who is lost and has to come back before this can end."""
        return [name for name, epoch in self._asked.items() if epoch is None]

    def is_complete(self, settled_sequence: int) -> bool:
        """Whether the answers may be judged."""
        if not self.is_open or len(self._answers) < len(self._asked):
            return False
        return settled_sequence >= max((a.settled_sequence for a in self._answers.values()), default=0)

    def requests(self) -> Iterator[Found]:
        """What engines wait to generate, or generate, by their answers."""
        for name, answer in self._answers.items():
            if is_engine(name):
                yield from ((name, lease) for lease in answer.leases if lease.stage in _OPEN)

    def close(self) -> dict[SampleKey, Found]:
        """End the round: who holds what. The record of an attempt that is over counts only where nobody holds the
        sample; of several holders the one with the latest attempt counts, and of those the one that is furthest down
        the line."""
        self.is_open = False
        held: dict[SampleKey, Found] = {}
        for name in sorted(self._answers, key=lambda name: (not name.startswith("engine/"), name)):
            for lease in self._answers[name].leases:
                known = held.get(lease.key)
                if known is None or _weight(lease) >= _weight(known[1]):
                    held[lease.key] = (name, lease)
        return held


def _weight(lease: HeldLease) -> tuple[bool, int]:
    return lease.stage not in ENDED, lease.attempt


class Inheritance:
    """What the first census of a replacement found, until the groups are known here."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, Found]] = {}
        self._progress: dict[SampleKey, list[GenerationProgressed]] = {}

    def progressed(self, event: GenerationProgressed) -> None:
        """A report on a sample whose lease is not known here yet."""
        self._progress.setdefault(event.key, []).append(event)

    def progress_of(self, key: SampleKey) -> list[GenerationProgressed]:
        """What was reported of this sample; it is handed out once."""
        return self._progress.pop(key, [])

    def take(self, held: dict[SampleKey, Found]) -> None:
        """The first census is judged."""
        for key, found in held.items():
            self._found.setdefault(key.group_id, {})[key.index] = found

    def confirm(self, held: dict[SampleKey, Found]) -> None:
        """A later one is: what nobody holds any more is struck."""
        known = self._found
        self._found = {}
        of_known = {
            key: _with_prefix_of(known[key.group_id][key.index], found)
            for key, found in held.items()
            if key.index in known.get(key.group_id, {})
        }
        self.take(of_known)

    def of(self, group_id: int) -> dict[int, Found]:
        """What was found of this group, by index; it is handed out once."""
        return self._found.pop(group_id, {})

    def forget(self, settled: KnownSettled) -> None:
        """Strike what is settled."""
        self._found = {group_id: found for group_id, found in self._found.items() if group_id not in settled}
        self._progress = {key: events for key, events in self._progress.items() if key.group_id not in settled}


def _with_prefix_of(before: Found, now: Found) -> Found:
    """What the first census was told of a response holds on: later ones do not ask for it."""
    (_, known), (holder, lease) = before, now
    if lease.attempt == known.attempt:
        lease = msgspec.structs.replace(lease, prefix=known.prefix)
    return holder, lease
