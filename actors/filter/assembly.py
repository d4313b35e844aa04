"""One group being put together.

A group of ``n`` has ``n`` places. Place ``i`` is filled by the sample of index ``i``, or by a replacement of index
``i + n``, ``i + 2n``, …, each of which is asked for when the one before it has failed.

Invariants: a place is filled, waited for, or given up; a failed sample stays on the record.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from penstock.messages.samples import Group, Prompt, Sample, SampleEnd, SampleKey, TerminalState


class Assembly(msgspec.Struct):
    """The state of one group."""

    group_id: int
    size: int
    prompt: Prompt
    samples: dict[int, Sample] = {}
    failed: dict[int, SampleEnd] = {}
    given_up: set[int] = set()
    """Places that stay empty."""
    num_refills: int = 0

    def add(self, sample: Sample) -> bool:
        """A scored sample; False when this one is known, or given up."""
        index = sample.key.index
        if index in self.samples or index in self.failed:
            return False
        self.samples[index] = sample
        return True

    def fail(self, key: SampleKey, cause: str, num_tokens: int) -> bool:
        """A sample that will not come; False when that was known."""
        if key.index in self.failed or key.index in self.samples:
            return False
        self.failed[key.index] = SampleEnd(key=key, state=TerminalState.FAILED, cause=cause, num_tokens=num_tokens)
        return True

    def missing(self) -> tuple[SampleKey, ...]:
        """The replacements that are waited for."""
        filled = {index % self.size for index in self.samples}
        latest: dict[int, int] = {}
        for index in self.failed:
            place = index % self.size
            latest[place] = max(latest.get(place, index), index)
        open_places = ((p, index) for p, index in latest.items() if p not in filled and p not in self.given_up)
        return tuple(SampleKey(self.group_id, index + self.size) for _, index in open_places)

    @property
    def num_here(self) -> int:
        """Samples that have come."""
        return len(self.samples)

    def lacking(self, limit: int) -> list[SampleKey]:
        """The first few of the samples that it waits for, replacements among them."""
        filled = {index % self.size for index in self.samples} | self.given_up
        places = (place for place in range(self.size) if place not in filled)
        return [SampleKey(self.group_id, self._latest(place)) for place in islice(places, limit)]

    def _latest(self, place: int) -> int:
        index = place
        while index in self.failed:
            index += self.size
        return index

    @property
    def is_complete(self) -> bool:
        """Every place is filled or given up, and what a replacement stands for is known too: after the loss of a
        Filter, word of the failure may come later than the replacement."""
        if len(self.samples) + len(self.given_up) < self.size:
            return False
        if len({index % self.size for index in self.samples} | self.given_up) < self.size:
            return False
        return all(self._is_known(i - self.size) for i in (*self.samples, *self.failed) if i >= self.size)

    def _is_known(self, index: int) -> bool:
        return index in self.failed or index in self.samples

    def group(self) -> Group:
        """What is there, as a group."""
        samples = tuple(self.samples[index] for index in sorted(self.samples))
        return Group(group_id=self.group_id, prompt=self.prompt, samples=samples, ended=tuple(self.failed.values()))

    def rejected(self, cause: str) -> tuple[SampleEnd, ...]:
        """The ends of all samples of a group that is turned away. What never came is cancelled."""
        ended = [
            SampleEnd(key=s.key, state=TerminalState.FILTERED, cause=cause, num_tokens=s.num_tokens)
            for s in self.samples.values()
        ]
        known = {index % self.size for index in (*self.samples, *self.failed)}
        never_came = [
            SampleEnd(key=SampleKey(self.group_id, place), state=TerminalState.CANCELLED, cause="group_rejected")
            for place in range(self.size)
            if place not in known
        ]
        return (*ended, *self.failed.values(), *never_came)
