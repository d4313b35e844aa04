"""Groups of samples through the observers of all actors, as the shells of a run hand them over: what tracing costs a
group beside the event log, without sockets, ledger and the actors themselves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import Generate, Score, Send, Train
from penstock.messages.flow import GenerationClosed, GroupAdmitted, SampleGenerated, SampleIssued, SampleScored
from penstock.messages.local import BatchTrained, GenerationEnded, PromptsFetched, SampleJudged
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Purpose,
    Reward,
    Sample,
    SampleKey,
    VersionSpan,
)
from penstock.messages.training import BatchReady, UpdateMode
from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.span_file import SpanFile, actor_attributes
from penstock.runtime.observability.spans import SpanRecorder, new_salt
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.trace_ids import TraceIds
from penstock.runtime.observability.trackers import EventLog

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand

SAMPLES_A_GROUP: Final = 8
GROUPS_A_BATCH: Final = 32
SPANS_A_BATCH: Final = 512
PROMPT: Final = Prompt(row=0, epoch=0, tokens=pack_tokens(range(16)))
PART: Final = Part(tokens=pack_tokens([1]), logprobs=pack_floats([-1.0]), spans=(VersionSpan(1, 1),))
ACTORS: Final = ("prompt_source", "engine/0", "scorer", "filter", "buffer", "learner")


class TracedGroups:
    """The observers of one run; without traces where ``fraction`` is None."""

    def __init__(self, folder: Path, fraction: float | None) -> None:
        self._recorder = SpanRecorder()
        self._file = SpanFile(folder / "spans.jsonl", actor_attributes("engine/0", 1))
        self._log = EventLog(folder / "events.jsonl")
        salt = new_salt()
        self._observers = {
            name: EventObserver(
                self._log,
                name=name,
                epoch=1,
                now_s=time.monotonic,
                stages=None if fraction is None else StageRecorder(self._recorder, TraceIds(salt, fraction)),
            )
            for name in ACTORS
        }

    def run(self, num_groups: int) -> None:
        """So many groups, and what was recorded of them is written."""
        groups: list[Group] = []
        for group_id in range(num_groups):
            groups.append(self._group(group_id))
            if len(groups) == GROUPS_A_BATCH:
                self._batch(tuple(groups), group_id)
                groups = []
                while spans := self._recorder.take(SPANS_A_BATCH):
                    self._file.write(spans)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._log.close()

    def _group(self, group_id: int) -> Group:
        keys = [SampleKey(group_id, index) for index in range(SAMPLES_A_GROUP)]
        issued = [
            SampleIssued(
                key=key, attempt=0, group_size=SAMPLES_A_GROUP, prompt=PROMPT, seed=1, min_version=0, deadline_version=9
            )
            for key in keys
        ]
        self._hear("prompt_source", PromptsFetched(prompts=()), *(Send("engine/0", event) for event in issued))
        scored = [self._sample(event) for event in issued]
        group = Group(group_id=group_id, prompt=PROMPT, samples=tuple(event.sample for event in scored))
        self._hear("filter", scored[-1], Send("buffer", GroupAdmitted(group=group)))
        self._hear("buffer", GroupAdmitted(group=group))
        return group

    def _sample(self, issued: SampleIssued) -> SampleScored:
        key = issued.key
        generate = Generate(key=key, attempt=0, purpose=Purpose.TRAIN, prompt=PROMPT, seed=1, deadline_version=9)
        sample = Sample(key=key, parts=(PART,), outcome=Completed(reward=Reward(value=1.0)))
        generated = SampleGenerated(sample=sample, group_size=SAMPLES_A_GROUP, prompt=PROMPT)
        closed = GenerationClosed(engine="engine/0", key=key, attempt=0, outcome=Completed(), num_tokens=1)
        scored = SampleScored(sample=sample, group_size=SAMPLES_A_GROUP, prompt=PROMPT)
        self._hear("engine/0", issued, generate)
        ended = GenerationEnded(key=key, attempt=0, outcome=Completed(), part=PART)
        self._hear("engine/0", ended, Send("scorer", generated), Send("prompt_source", closed))
        self._hear("prompt_source", closed)
        self._hear("scorer", generated, Score(sample=sample, prompt=PROMPT, timeout_s=1.0))
        self._hear("scorer", SampleJudged(key=key, attempt=0, reward=None), Send("filter", scored))
        self._hear("filter", scored)
        return scored

    def _batch(self, groups: tuple[Group, ...], version: int) -> None:
        ready = BatchReady(
            version=version, groups=groups, announced_version=0, max_staleness=8, update_mode=UpdateMode.DRAIN
        )
        self._hear("buffer", PromptsFetched(prompts=()), Send("learner", ready))
        self._hear("learner", ready, Train(version=version, groups=groups, min_token_version=0))
        trained = BatchTrained(version=version, num_trained_tokens=1, num_masked_tokens=0, metrics=())
        self._hear("learner", trained)

    def _hear(self, name: str, event: Event, *commands: AnyCommand) -> None:
        """As a shell tells of an event."""
        self._observers[name].handled(event, None, [*commands])


def cost_us(folder: Path, fraction: float | None, num_groups: int) -> float:
    """CPU time of a group in microseconds, that of making its events included."""
    groups = TracedGroups(folder, fraction)
    began_s = time.thread_time()
    groups.run(num_groups)
    cost_s = time.thread_time() - began_s
    groups.close()
    return cost_s / num_groups * 1e6
