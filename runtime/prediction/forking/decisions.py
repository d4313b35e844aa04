"""The first decision in which two futures of one past differ.

A decision is a command of an actor that both have, but for timers. Those of each actor are compared in their order,
whatever the time. None is what only says what was asked for at the fork (the record of a policy, a notice for people,
the slots with which an engine opens, a word to an engine that the other future has not), or asks who holds what. Of the
actors whose decisions differ the one counts that decided first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from penstock.messages.commands import Record, Send, StartTimer, StopTimer
from penstock.messages.ledger import EnginesRecorded, PolicyRecorded
from penstock.messages.membership import LeasesAsked
from penstock.messages.weights import EngineReady
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.observability.subjects import subject_text
from penstock.runtime.run.replay import STORY_LINES, StoryLine

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

_NO_DECISION: Final = (EngineReady, LeasesAsked)
OWN_LINES: Final = 6
LINES_KEPT: Final = 20_000
"""Events of one future that a story is looked for in."""


class Decision(NamedTuple):
    """One command of one future."""

    at_s: float
    incarnation: str
    """``buffer-1``: actor and epoch."""
    event: Event
    """That the actor was handling."""
    sender: str
    command: AnyCommand


class Difference(NamedTuple):
    """What each future decides in the same place; None where one decides nothing more there."""

    first: Decision | None
    second: Decision | None

    @property
    def at_s(self) -> float:
        """When the earlier of the two is taken."""
        return min(each.at_s for each in self if each is not None)


class Decisions(IdleWatcher):
    """Watches one future."""

    def __init__(self, actors: Collection[str]) -> None:
        """``actors``: that both futures have."""
        self._actors = actors
        self.of: defaultdict[str, deque[Decision]] = defaultdict(deque)
        """By actor, those that are not compared yet."""
        self.story: deque[StoryLine] = deque(maxlen=LINES_KEPT)
        self._is_over = False
        self._number = 0

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        if self._is_over:
            return
        self._number += 1
        at_s, incarnation = process.now_s(), f"{process.name.replace('/', '-')}-{process.epoch}"
        sender = "" if header is None else header.sender
        place = f"{incarnation}+{self._number}"
        self.story.append(StoryLine(place, at_s, type(event).__name__, subject_text(event), sender))
        decided = [kept for command in commands if (kept := self._decided(command)) is not None]
        self.of[process.name].extend(Decision(at_s, incarnation, event, sender, command) for command in decided)

    def _decided(self, command: AnyCommand) -> AnyCommand | None:
        if isinstance(command, StartTimer | StopTimer):
            return None
        if isinstance(command, Send) and (command.to not in self._actors or isinstance(command.event, _NO_DECISION)):
            return None
        if isinstance(command, Record):
            entries = tuple(each for each in command.entries if not isinstance(each, PolicyRecorded | EnginesRecorded))
            return replace(command, entries=entries) if entries else None
        return command

    def story_of(self, decision: Decision, subjects: frozenset[str]) -> tuple[StoryLine, ...]:
        """The last events up to a decision that were about one of these subjects, and the last few of its actor."""
        about: deque[StoryLine] = deque(maxlen=STORY_LINES)
        own: deque[StoryLine] = deque(maxlen=OWN_LINES)
        for line in self.story:
            if line.at_s > decision.at_s:
                break
            if line.subject in subjects or line.subject.partition("/")[0] in subjects:
                about.append(line)
            elif line.event_id.partition("+")[0] == decision.incarnation:
                own.append(line)
        return tuple(sorted((*about, *own), key=lambda line: int(line.event_id.partition("+")[2])))

    def stop(self) -> None:
        """Nothing is compared any more, and nothing is kept."""
        self._is_over = True
        self.of.clear()


def first_difference(
    first: Decisions, second: Decisions, actors: Sequence[str], *, has_ended: bool
) -> Difference | None:
    """Of what the two have decided so far; what is the same in both is forgotten.

    Args:
        first: one future.
        second: the other, as far in virtual time.
        actors: that both have.
        has_ended: nothing more comes, so what only one has decided is a difference.

    Returns:
        The difference, once nothing that is still to come can be an earlier one.
    """
    open_s, found = float("inf"), None
    for actor in actors:
        one, other = first.of[actor], second.of[actor]
        while one and other and one[0].command == other[0].command:
            one.popleft()
            other.popleft()
        if not one and not other:
            continue
        difference = Difference(one[0] if one else None, other[0] if other else None)
        if not (one and other) and not has_ended:
            open_s = min(open_s, difference.at_s)
        elif found is None or difference.at_s < found.at_s:
            found = difference
    return found if found is not None and found.at_s <= open_s else None
