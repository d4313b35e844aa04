"""Delivery, once for all actors: keep until settled, dedupe, absolute control events, the answer to a census.

Invariants:

* A data event that this actor sent is kept until its group is settled. It is sent again when its receiver was
  replaced, and with back-off while it is not settled.
* A data event is handed to the actor once per key: the first wins, whatever its attempt. What belongs to a settled
  group is dropped.
* Of the control events of one sender and class only a later one is handed on. The newest of each class is kept per
  receiver, and repeated when the receiver was replaced and, with back-off, on the timer.
* Nothing is kept for a group below the settled floor.
* Where bytes are sent, a data event is encoded once, when it is first said, and kept so: its many objects go while they
  are still in a cache, and what is said again is the same byte by byte.

Pure: time comes in as an argument, what is to be sent goes out as a list.

| waits for | who ends it |
|---|---|
| a kept data event: its settlement | the Buffer, through ``SamplesSettled``; repeated by this module until then |
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.actors.settled import KnownSettled
from penstock.messages.base import CONTROL, DATA, LOSSY, Event
from penstock.messages.evaluation import EvaluationDue
from penstock.messages.flow import (
    DemandGranted,
    GenerationClosed,
    GroupAdmitted,
    GroupRejected,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
    SettledState,
)
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.wire import EncodedEvent, InboxDecoder, encode_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_BACKOFF: Final = 12.0
"""The longest pause between two repeats, as a multiple of ``resend_after_s``."""
_NEVER: Final = (-1, -1)
_MESSAGE_ID: Final = attrgetter("message_id")


class Outgoing(msgspec.Struct, gc=False):
    """One event to one receiver, with the id that it keeps when it is sent again."""

    to: str
    event: Event
    """Of data that is kept, what goes on the wire: see :class:`.EncodedEvent`."""
    message_id: int
    cause: int = 0
    due_s: float = math.inf
    """When it is to be said again; never, of what nobody keeps."""
    pause_s: float = 0.0
    """Between the last time and then."""


class Delivery:
    """The delivery state of one actor incarnation."""

    __slots__ = (
        "_accepted", "_control", "_data", "_heard", "_keeps_encoded", "_resend_after_s", "next_due_s",
        "num_duplicate_tokens", "num_duplicates", "num_late", "settled",
    )  # fmt: skip

    def __init__(self, *, resend_after_s: float, keeps_encoded: bool = False) -> None:
        """
        Args:
            resend_after_s: what is not settled after so long is said again.
            keeps_encoded: data events are kept as bytes, which the host sends.
        """
        self._resend_after_s = resend_after_s
        self._keeps_encoded = keeps_encoded
        self._data: dict[int, dict[tuple[str, type[Event], int], Outgoing]] = {}
        """By group id, then by receiver, class and index in the group."""
        self._control: defaultdict[type[Event], dict[str, Outgoing]] = defaultdict(dict)
        """By class and receiver."""
        self._accepted: dict[int, dict[int, int]] = {}
        """Attempt of the first result, by group id and index (−1 for the group itself)."""
        self._heard: defaultdict[type[Event], dict[str, tuple[int, int]]] = defaultdict(dict)
        """Newest (epoch, message id) by class and sender."""
        self.settled = KnownSettled()
        self.next_due_s = math.inf
        """Nothing is overdue before this."""
        self.num_duplicates = 0
        self.num_duplicate_tokens = 0
        self.num_late = 0

    # --- sending ----------------------------------------------------------------------------------------------

    def sent(self, outgoing: Outgoing, now_s: float) -> None:
        """Note what is sent, so that it can be repeated; a data event that is kept is encoded from now on."""
        event = outgoing.event
        delivery = event.delivery
        if delivery is LOSSY:
            return
        if delivery is DATA:
            group_id, index, _ = _KEY_OF[type(event)](event)
            if group_id in self.settled:
                return
            if self._keeps_encoded:
                outgoing.event = EncodedEvent(body=encode_event(event))
            self._data.setdefault(group_id, {})[outgoing.to, type(event), index] = outgoing
        else:
            self._control[type(event)][outgoing.to] = outgoing
            if type(event) is SamplesSettled or type(event) is DemandGranted or type(event) is EvaluationDue:
                self.settle(event.settled)
        outgoing.pause_s = self._resend_after_s
        outgoing.due_s = due_s = now_s + outgoing.pause_s
        if due_s < self.next_due_s:
            self.next_due_s = due_s

    def returned(self, name: str, now_s: float) -> list[Outgoing]:
        """What a peer that was replaced, or could not be reached for a while, has to hear again."""
        again = [kept for kept in self.kept() if kept.to == name]
        for kept in again:
            kept.pause_s = self._resend_after_s
            kept.due_s = now_s + kept.pause_s
            self.next_due_s = min(self.next_due_s, kept.due_s)
        return sorted(again, key=_MESSAGE_ID)

    def overdue(self, now_s: float) -> list[Outgoing]:
        """What is to be repeated now; each repeat doubles the pause to the next."""
        if now_s < self.next_due_s:
            return []
        again: list[Outgoing] = []
        next_due_s = math.inf
        for kept in self.kept():
            if kept.due_s <= now_s:
                again.append(kept)
                kept.pause_s = min(2 * kept.pause_s, MAX_BACKOFF * self._resend_after_s)
                kept.due_s = now_s + kept.pause_s
            if kept.due_s < next_due_s:
                next_due_s = kept.due_s
        self.next_due_s = next_due_s
        return sorted(again, key=_MESSAGE_ID)

    def kept(self) -> Iterator[Outgoing]:
        """What would be said again."""
        for by_receiver in self._control.values():
            yield from by_receiver.values()
        for group in self._data.values():
            yield from group.values()

    # --- receiving --------------------------------------------------------------------------------------------

    def accepts(self, event: Event, sender: str, epoch: int, message_id: int) -> bool:
        """Whether the actor is to hear this event: it is neither old nor a duplicate nor settled."""
        delivery = event.delivery
        if delivery is DATA:
            return self._accepts_data(event)
        if delivery is CONTROL:
            heard, said = self._heard[type(event)], (epoch, message_id)
            if heard.get(sender, _NEVER) >= said:
                return False
            heard[sender] = said
            if type(event) is SamplesSettled or type(event) is DemandGranted or type(event) is EvaluationDue:
                self.settle(event.settled)
        return True

    def _accepts_data(self, event: Event) -> bool:
        group_id, index, attempt = _KEY_OF[type(event)](event)
        if group_id in self.settled:
            self.num_late += 1
            return False
        if type(event) is GenerationClosed:
            return True  # PromptSource compares attempts itself: a later failure is news, not a duplicate
        accepted = self._accepted.setdefault(group_id, {})
        if index not in accepted:
            accepted[index] = attempt
            return True
        if accepted[index] != attempt:  # generated twice; the same attempt again is only a repeat on the wire
            self.num_duplicates += 1
            self.num_duplicate_tokens += sum(lease.num_tokens for lease in _leases_of(event))
        return False

    def knows(self, sender: str, epoch: int, outgoing: Outgoing) -> None:
        """This control event of a peer was heard: neither it nor an earlier one is handed on again."""
        self._heard[type(outgoing.event)][sender] = (epoch, outgoing.message_id)

    # --- settlement and census --------------------------------------------------------------------------------

    def settle(self, state: SettledState) -> None:
        """Forget everything about groups that are settled."""
        if state.sequence <= self.settled.sequence:
            return  # said to each of many engines, it is news once
        for group_id in self.settled.newly(state, self._data, self._accepted):
            self._data.pop(group_id, None)
            self._accepted.pop(group_id, None)

    def leases(self) -> Iterator[HeldLease]:
        """The samples that were sent on from here and are kept."""
        for group in self._data.values():
            for kept in group.values():
                yield from _leases_of(kept.event)

    @property
    def num_kept(self) -> int:
        """Data events that wait for their settlement."""
        return sum(len(group) for group in self._data.values())


def _of_sample(event: SampleGenerated | SampleScored) -> tuple[int, int, int]:
    sample = event.sample
    return sample.key.group_id, sample.key.index, sample.attempt


def _of_end(event: ScoringFailed | SampleFailed | GenerationClosed) -> tuple[int, int, int]:
    return event.key.group_id, event.key.index, event.attempt


_KEY_OF: Final[dict[type[Event], Callable[[Any], tuple[int, int, int]]]] = {
    SampleGenerated: _of_sample,
    SampleScored: _of_sample,
    ScoringFailed: _of_end,
    SampleFailed: _of_end,
    GenerationClosed: _of_end,
    GroupAdmitted: lambda event: (event.group.group_id, -1, 0),
    GroupRejected: lambda event: (event.group_id, -1, 0),
}
"""By class of each data event, group id, index and attempt of what it is about; index −1 and attempt 0 for the group as
a whole."""


@cache
def _decoder() -> InboxDecoder[Event]:
    samples, groups = SampleGenerated | SampleScored, GroupAdmitted | GroupRejected
    return InboxDecoder(samples | groups | SampleFailed | ScoringFailed | GenerationClosed)


def _leases_of(event: Event) -> Iterator[HeldLease]:
    match event:
        case EncodedEvent():  # read only when there is a census: to keep leases beside it would cost every sample
            yield from _leases_of(_decoder().decode_event(event.body))
        case SampleGenerated() | SampleScored():
            sample = event.sample
            yield HeldLease(sample.key, sample.attempt, LeaseStage.PASSED_ON, sample.num_tokens)
        case ScoringFailed() | SampleFailed():
            yield HeldLease(event.key, event.attempt, LeaseStage.PASSED_ON, event.num_tokens)
        case GroupAdmitted():
            for sample in event.group.samples:
                yield HeldLease(sample.key, sample.attempt, LeaseStage.PASSED_ON, sample.num_tokens)
            for end in event.group.ended:
                yield HeldLease(end.key, 0, LeaseStage.PASSED_ON, end.num_tokens)
        case GroupRejected():
            for end in event.ended:
                yield HeldLease(end.key, 0, LeaseStage.PASSED_ON, end.num_tokens)
        case _:  # GenerationClosed: the engine's own leases tell what failed there
            return
