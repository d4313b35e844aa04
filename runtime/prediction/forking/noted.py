"""What a past leaves open: what backends owe, what was said that nobody repeats, what was heard last."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, cast

from msgspec import msgpack

from penstock.messages.base import Delivery
from penstock.messages.commands import ChooseRows, Generate, Send
from penstock.messages.local import GenerationAdvanced, LearnerSlept, LearnerWoken, WeightsStagedLocally
from penstock.messages.membership import EnginesWanted
from penstock.messages.names import SUPERVISOR
from penstock.messages.training import StepReported
from penstock.runtime.prediction.forking.owed import answered_by, owed_by

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand, BackendCommand
    from penstock.messages.samples import SampleKey
    from penstock.runtime.observability.recording import Handled
    from penstock.runtime.shell.delivery import Outgoing

LOSSY_KEPT: Final = 4096
"""Of a line: the last of what is not repeated, among which is what was on its way."""


class Noted:
    """Of the incarnations that live at the fork; times are seconds since the start of the run."""

    def __init__(self) -> None:
        self.report: StepReported | None = None
        """What the Buffer said of the last step."""
        self.engines: tuple[str, ...] = ()
        """Those that the run is to have, where the Buffer has said so."""
        self.learner_sleeps = False
        self.owed: dict[str, dict[Hashable, tuple[float, BackendCommand]]] = defaultdict(dict)
        """By actor and key: what its backend has not answered, with the time at which it was asked."""
        self.fetched: dict[str, set[tuple[int, int]]] = defaultdict(set)
        """By engine: version and publish number of the weights that it has fetched."""
        self.reported_s: dict[str, dict[tuple[SampleKey, int], float]] = defaultdict(dict)
        """By engine, sample and attempt: when its tokens were reported last, or when it began."""
        self._chosen: list[ChooseRows] = []
        self._said: dict[tuple[str, str], deque[tuple[float, bytes, Event]]] = defaultdict(
            lambda: deque(maxlen=LOSSY_KEPT)
        )
        """By sender and receiver: what nobody repeats."""
        self._heard: dict[tuple[str, int, str], set[bytes]] = defaultdict(set)
        """By sender, its epoch and receiver: the same, as it was handled."""
        self._newest: dict[tuple[str, str, int, type[Event]], bytes] = {}
        """By receiver, sender, its epoch and class: the last control event that was handled."""

    def handled(self, name: str, row: Handled, event: Event, commands: list[AnyCommand], at_s: float) -> None:
        """An actor has handled a recorded event again, and asked for these."""
        owed = self.owed[name]
        owed.pop(answered_by(event), None)
        if row.sender and event.delivery is Delivery.LOSSY:
            self._heard[row.sender, row.sender_epoch, name].add(row.body)
        elif row.sender and event.delivery is Delivery.CONTROL:
            self._newest[name, row.sender, row.sender_epoch, type(event)] = row.body
        if isinstance(event, GenerationAdvanced):
            self.reported_s[name][event.key, event.attempt] = at_s
        elif isinstance(event, LearnerSlept | LearnerWoken):
            self.learner_sleeps = isinstance(event, LearnerSlept)
        elif isinstance(event, WeightsStagedLocally) and not event.error:
            self.fetched[name].add((event.version, event.publish))
        for command in commands:
            if isinstance(command, Send):
                self._send(name, command, at_s)
            elif isinstance(command, Generate):
                self.reported_s[name][command.key, command.attempt] = at_s
            elif (key := owed_by(command)) is not None:
                if isinstance(command, ChooseRows):
                    self._chosen.append(command)
                owed[key] = at_s, cast("BackendCommand", command)

    def _send(self, name: str, send: Send, at_s: float) -> None:
        event = send.event
        if isinstance(event, StepReported):
            self.report = event
        elif isinstance(event, EnginesWanted):
            self.engines = event.engines
        if event.delivery is Delivery.LOSSY and send.to != SUPERVISOR:
            self._said[name, send.to].append((at_s, msgpack.encode(event), event))

    def chosen(self, name: str) -> list[ChooseRows]:
        """The choices of rows that were answered."""
        owed = [command for _, command in self.owed[name].values()]
        return [command for command in self._chosen if command not in owed]

    def was_heard(self, sender: str, epoch: int, outgoing: Outgoing) -> bool:
        """Whether a control event that its sender keeps is what its receiver has handled last of it."""
        event = outgoing.event
        return self._newest.get((outgoing.to, sender, epoch, type(event))) == msgpack.encode(event)

    def under_way(self, sender: str, epoch: int, to: str, since_s: float) -> Iterator[Event]:
        """What nobody repeats and was said on this line after the last that was handled there, to a receiver that is
        there since ``since_s``."""
        said, heard = self._said.get((sender, to), ()), self._heard[sender, epoch, to]
        last = max((place for place, (_, body, _) in enumerate(said) if body in heard), default=-1)
        return (event for at_s, _, event in list(said)[last + 1 :] if at_s >= since_s)
