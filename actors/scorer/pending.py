"""One sample that is being scored: what it lacks, and how it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from penstock.messages.commands import Score, ScoreGroup
from penstock.messages.flow import SampleGenerated, ScoringFailed
from penstock.messages.local import GroupScored, SampleJudged
from penstock.messages.samples import Reward, SampleKey
from penstock.messages.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.actors.scorer.group_scoring import HeldGroup
    from penstock.messages.samples import Sample


NO_ANSWER: Final = "the reward backend did not answer"
SUPERSEDED: Final = "it had failed to be scored before, and its replacement is there"


class Pending(msgspec.Struct):
    """One sample being scored."""

    event: SampleGenerated
    num_tries: int
    sweep: int
    reward: Reward | None
    """None: it is being computed."""
    teacher_logprobs: tuple[bytes, ...] | None
    """Of each part, none where no teacher is needed; None: a teacher is to say them."""
    teacher_top: tuple[TopLogprobs, ...] = ()
    """The teacher's likeliest tokens for each part of the sample; None: no teacher was asked."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing any more."""
        return self.reward is not None and self.teacher_logprobs is not None

    def asked(self, timeout_s: float) -> Score:
        """What the backend is asked for."""
        return Score(sample=self.event.sample, prompt=self.event.prompt, timeout_s=timeout_s)

    def whole(self) -> Sample:
        """The sample with its reward, and with what a teacher said of it."""
        sample, parts = self.event.sample, self.event.sample.parts
        if self.teacher_logprobs:
            said = zip(parts, self.teacher_logprobs, self.teacher_top or [None] * len(parts), strict=True)
            parts = tuple(replace(part, teacher_logprobs=logprobs, teacher_top=top) for part, logprobs, top in said)
        return replace(sample, outcome=replace(sample.outcome, reward=self.reward), parts=parts)

    def failed(self, reason: str) -> ScoringFailed:
        """It cannot be had whole."""
        event, sample = self.event, self.event.sample
        return ScoringFailed(
            key=sample.key,
            attempt=sample.attempt,
            group_size=event.group_size,
            purpose=event.purpose,
            prompt=event.prompt,
            reason=reason,
            num_tokens=sample.num_tokens,
            num_given_tokens=sample.num_given_tokens,
            sample=sample,
        )


def asked_together(items: Sequence[Pending], timeout_s: float) -> ScoreGroup:
    """What the backend is asked for of samples of one group."""
    samples = tuple(item.event.sample for item in items)
    return ScoreGroup(samples=samples, prompt=items[0].event.prompt, timeout_s=timeout_s)


def unanswered(group: HeldGroup, pending: Mapping[SampleKey, Pending]) -> GroupScored:
    """As if the backend had answered that it has no reward for any sample of the group that it was asked about."""
    items = [(index, pending.get(SampleKey(group.group_id, index))) for index in group.asked]
    judged = tuple(
        SampleJudged(
            key=SampleKey(group.group_id, index),
            attempt=0 if item is None else item.event.sample.attempt,
            reward=None,
            reason=NO_ANSWER,
        )
        for index, item in items
    )
    return GroupScored(group_id=group.group_id, samples=judged)
