"""Who sits in which slot: the queue, the running requests, and how they move up.

Invariants:

* After ``admit`` the running requests occupy the slots 0 … n−1, without a gap.
* Requests are admitted in the order of the queue, except that one whose prompt another one is about to compute waits a
  step, until it can copy it; its place is kept for it.
* Long contexts gather in the front, the first eighth of the slots: a slot that becomes free there takes the longest
  context from behind. So the short ones behind do not have to attend as far as the longest of all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.torch.attention import SlotRange
from penstock.backends.engines.torch.cache import BLOCK, round_up

if TYPE_CHECKING:
    from penstock.backends.engines.torch.admission import Admission, Prefill
    from penstock.backends.engines.torch.requests import Running
    from penstock.backends.engines.torch.slots import PromptIndex, SlotState

FRONT_SHARE: Final = 8
MIN_SAVED_POSITIONS: Final = 512
"""Attention is split where it spares so many masked positions: what a further call costs."""


class SlotScheduler:
    """The requests of one engine."""

    def __init__(self, num_slots: int, slots: SlotState, admission: Admission, prompts: PromptIndex) -> None:
        self.queue: deque[Running] = deque()
        self.running: list[Running | None] = []
        """By slot; None where a request has ended since the last ``admit``."""
        self._num_slots = num_slots
        self._num_front = num_slots // FRONT_SHARE
        self._slots = slots
        self._admission = admission
        self._prompts = prompts
        self._reach_offsets = (0, 0)
        """So many tokens more than the clock shows has the longest context in the front, and the longest behind it."""
        self._offsets = 0
        """Likewise of all that run, added up."""
        self.num_read_tokens = 0
        """See :attr:`.Tick.num_read_tokens`: of the last ``admit``."""

    def admit(self, clock: int, version: int | None) -> Prefill | None:
        """Let the queue have what slots there are and close the gaps. The prefill that is returned is still to be
        made, together with the next decode step."""
        self.num_read_tokens = 0
        if None in self.running:
            self._fill_front(clock)
        alive = {slot for slot, running in enumerate(self.running) if running is not None}
        chosen = self._choose(self._num_slots - len(alive)) if self.queue else []
        if not chosen and len(alive) == len(self.running):
            return None
        size = len(alive) + len(chosen)
        free = set(range(size)) - alive
        self.running += [None] * (size - len(self.running))
        newcomers = [(self._take_slot(running, free), running) for running in chosen]
        prefill = None
        if newcomers:
            assert version is not None
            for _, running in newcomers:
                running.begin(clock, version)
            prefill = self._admission.fill(newcomers)
            self._slots.place(newcomers)
            self.num_read_tokens = sum(running.num_unread_tokens for running in chosen)
        for source, target in zip(sorted(slot for slot in alive if slot >= size), sorted(free), strict=True):
            self._move(source, target, clock)
        del self.running[size:]
        offsets = [running.offset for running in self.running if running is not None]
        self._offsets = sum(offsets)
        front, back = offsets[: self._num_front], offsets[self._num_front :]
        self._reach_offsets = (max(front, default=-clock) + 1, max(back, default=-clock) + 1)
        return prefill

    def num_context_tokens(self, clock: int) -> int:
        """That those hold together which the last ``admit`` has left."""
        return self._offsets + len(self.running) * clock

    def reach(self, clock: int) -> int:
        """Before which position the longest context ends."""
        return round_up(max(self._reach_offsets) + clock)

    def ranges(self, num_rows: int, clock: int) -> list[SlotRange]:
        """How attention over the first ``num_rows`` slots is split: the front apart, where that saves more than a call
        costs."""
        front, back = (round_up(offset + clock) for offset in self._reach_offsets)
        if (num_rows - self._num_front) * (front - back) < MIN_SAVED_POSITIONS:
            return [SlotRange(0, num_rows, max(front, back))]
        return [SlotRange(0, self._num_front, front), SlotRange(self._num_front, num_rows, back)]

    def _fill_front(self, clock: int) -> None:
        holes = [slot for slot, running in enumerate(self.running[: self._num_front]) if running is None]
        if not holes:
            return
        behind = [
            (running.position_at(clock), slot)
            for slot, running in enumerate(self.running[self._num_front :], self._num_front)
            if running is not None
        ]
        for target, (length, source) in zip(holes, sorted(behind, reverse=True), strict=False):
            if length < BLOCK:
                return
            self._move(source, target, clock)

    def _choose(self, num_free: int) -> list[Running]:
        chosen: list[Running] = []
        deferred: list[Running] = []
        computed: set[bytes] = set()
        while self.queue and len(chosen) + len(deferred) < num_free:
            running = self.queue.popleft()
            prompt = running.request.prompt_key
            if prompt in computed:
                deferred.append(running)
                continue
            if self._prompts.find(prompt, set()) is None:
                computed.add(prompt)
            chosen.append(running)
        self.queue.extendleft(reversed(deferred))
        return chosen

    def _take_slot(self, running: Running, free: set[int]) -> int:
        """Put a request into one of the free slots, best into one that holds its prompt, else far behind."""
        held = self._prompts.find(running.request.prompt_key, free)
        slot = held if held in free else max(free)
        free.remove(slot)
        self.running[slot] = running
        return slot

    def _move(self, source: int, target: int, clock: int) -> None:
        running = self.running[source]
        assert running is not None
        self._slots.move(source, target, running.position_at(clock))
        self.running[target], self.running[source] = running, None
        self._prompts.put(target, self._prompts.prompt_in(source))
