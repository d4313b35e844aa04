"""One group being put together.

A group of ``n`` has ``n`` places. Place ``i`` is filled by the sample of index ``i``, or by a replacement of index
``i + n``, ``i + 2n``, …, each of which is asked for when the one before it has failed.

Invariants: a place is filled, waited for, or given up; a failed sample stays on the record, and so does one that a
user's filter dropped: its place is not filled again. A place counts once: a sample whose replacement is known has
failed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.samples import (
    CountedSample,
    Group,
    Loss,
    Prompt,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
)

if TYPE_CHECKING:
    from penstock.messages.local import DroppedSample


SCORING_FAILED: Final = "scoring_failed"
REPLACED: Final = "it had failed before, and its replacement is there"


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
    dropped: dict[int, SampleEnd] = {}
    """Those of ``samples`` that a user's filter does not keep."""
    is_sifted: bool = False
    """A user's filter has judged the samples one by one."""

    def add(self, sample: Sample) -> bool:
        """A scored sample; False when this one is known."""
        index = sample.key.index
        if self._is_known(index):
            return False
        self.samples[index] = sample
        self._write_off(index % self.size)
        return True

    def fail(self, end: SampleEnd) -> bool:
        """A sample that will not come; False when that was known."""
        index = end.key.index
        if self._is_known(index):
            return False
        self.failed[index] = end
        self._write_off(index % self.size)
        return True

    def _write_off(self, place: int) -> None:
        """What is replaced has failed, as a Filter knew that is gone, though a Scorer that took another's place may
        have a reward for it."""
        newest = max((*self.samples, *self.failed))
        known = [index for index in range(place, newest + 1, self.size) if self._is_known(index)]
        for index in known[:-1]:
            if (sample := self.samples.pop(index, None)) is not None:
                self.failed[index] = _ended(sample, SCORING_FAILED, REPLACED, TerminalState.FAILED)

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
        if len({index % self.size for index in self.samples} | self.given_up) < self.size:
            return False
        return all(self._is_known(i - self.size) for i in (*self.samples, *self.failed) if i >= self.size)

    def _is_known(self, index: int) -> bool:
        return index in self.failed or index in self.samples

    def sift(self, dropped: tuple[DroppedSample, ...]) -> None:
        """The verdicts on its samples have come."""
        self.is_sifted = True
        for item in dropped:
            if (sample := self.samples.get(item.index)) is not None:
                self.dropped[item.index] = _ended(sample, item.cause, item.reason)

    def group(self, *, counts_dropped: bool = False) -> Group:
        """What is left, as a group. ``counts_dropped``: the rewards of what was dropped belong to its statistics."""
        counted = (
            CountedSample(index, reward.value, reward.components)
            for index in sorted(self.dropped)
            if (sample := self.samples[index]).loss is Loss.OBJECTIVE and (reward := sample.outcome.reward) is not None
        )
        return Group(
            group_id=self.group_id,
            prompt=self.prompt,
            samples=tuple(self.samples[index] for index in sorted(self.samples) if index not in self.dropped),
            ended=(*self.failed.values(), *self.dropped.values()),
            counted=tuple(counted) if counts_dropped else (),
        )

    def all_samples(self) -> Group:
        """Everything that came: dropped samples stand among the others, and their ends beside them."""
        samples = tuple(self.samples[index] for index in sorted(self.samples))
        ended = (*self.failed.values(), *self.dropped.values())
        return Group(group_id=self.group_id, prompt=self.prompt, samples=samples, ended=ended)

    def came(self, cause: str, reason: str = "") -> Group:
        """Everything that came with a reward; ends only of those on which something went wrong or that were dropped."""
        samples = tuple(self.samples[index] for index in sorted(self.samples))
        ended = [self.dropped[index] for index in sorted(self.dropped)]
        if reason:
            ended += [_ended(sample, cause, reason) for sample in samples if sample.key.index not in self.dropped]
        return Group(group_id=self.group_id, prompt=self.prompt, samples=samples, ended=tuple(ended))

    def rejected(self, cause: str, reason: str = "") -> tuple[SampleEnd, ...]:
        """The ends of all samples of a group that is turned away. What never came is cancelled."""
        ended = [self.dropped.get(index) or _ended(sample, cause, reason) for index, sample in self.samples.items()]
        known = {index % self.size for index in (*self.samples, *self.failed)}
        never_came = [
            SampleEnd(key=SampleKey(self.group_id, place), state=TerminalState.CANCELLED, cause="group_rejected")
            for place in range(self.size)
            if place not in known
        ]
        return (*ended, *self.failed.values(), *never_came)


def _ended(sample: Sample, cause: str, reason: str, state: TerminalState = TerminalState.FILTERED) -> SampleEnd:
    return SampleEnd(
        key=sample.key,
        state=state,
        cause=cause,
        num_tokens=sample.num_tokens,
        num_given_tokens=sample.num_given_tokens,
        reason=reason,
    )
