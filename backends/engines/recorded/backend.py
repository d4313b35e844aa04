"""An engine that answers with the responses that rows hold, at once.

Invariants:

* A response is stamped with the version that the engine serves when it answers. It has no version of its own: a number
  from another run counts that run's batches and says nothing here. So a demonstration is as fresh as what a model would
  have begun to draw at that moment: never older than the ``min_version`` of its group, its age is the time that it
  waits for its batch, and the staleness bound holds for it as for any other. Under ``on_stale: mask`` none of its
  tokens is ever masked for the version that it "began" with, as it begins and ends under one.
* A response that was pushed from outside says which version of this run made it, and keeps that: it is as old as it is.
* What nobody knows of a response is said to be unknown: its log-probs are NaN, and its reward is left to the Scorer.
* Sample ``i`` of a group of ``n`` is answered with response ``i``, a replacement ``i + n`` with the same one.
* A prefix is not looked at: a response is given whole, so nothing ever stands before it.
* It holds no weights. It takes every version as soon as it hears of it, with the digest that the manifest names, since
  nothing is loaded that could be wrong; that is what keeps its stamps up to date and the announcements going. The
  WeightPublisher draws no conclusion from it.

Nothing runs between two commands, so there is nothing to abort or to interrupt, and no wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from penstock.messages.base import Metric
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
    SleepEngine,
)
from penstock.messages.local import EngineOpened, EngineSlept, GenerationEnded, WeightsStagedLocally, WeightsSwapped
from penstock.messages.samples import Completed, InfraError, Part, Truncated, VersionSpan

if TYPE_CHECKING:
    from penstock.backends.data.dataset import Dataset
    from penstock.backends.data.pushed.responses import PushedResponses
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import EngineCommand
    from penstock.messages.samples import Outcome


class RecordedEngine:
    """Carries out an EngineWorker's commands from a dataset in memory, or from what was pushed."""

    def __init__(self, dataset: Dataset | PushedResponses, *, num_slots: int) -> None:
        """``dataset``: read as the PromptSource's, with its responses."""
        self._dataset = dataset
        self._num_slots = num_slots
        self._version = -1
        self._num_tokens = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        match command:
            case Generate():
                self._answer(command)
            case FetchWeights():
                manifest = command.manifest
                self._emit(
                    WeightsStagedLocally(version=manifest.version, publish=manifest.publish, digest=manifest.digest)
                )
            case ApplyWeights():
                manifest = command.manifest
                self._version = manifest.version
                self._emit(WeightsSwapped(version=manifest.version, publish=manifest.publish, digest=manifest.digest))
            case OpenEngine():
                self._emit(EngineOpened(num_slots=self._num_slots))
            case SleepEngine():
                self._emit(EngineSlept())
            case AbortGeneration() | InterruptGenerations():
                pass  # nothing runs
            case _:
                assert_never(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Tokens that it has answered with, under the name that they have with other engines."""
        return (
            Metric("engine/running", 0),
            Metric("engine/queued", 0),
            Metric("engine/occupancy", 0.0),
            Metric("engine/generated_tokens", self._num_tokens),
        )

    def close(self, timeout_s: float) -> None:
        """Nothing runs, so nothing ends."""

    def _answer(self, command: Generate) -> None:
        if self._version < 0:
            raise RuntimeError(f"sample {command.key} was asked for before any version was served")
        samples = self._dataset.responses(command.prompt.row)
        outcome: Outcome
        if not samples:
            part, outcome = Part(), InfraError(detail=f"row {command.prompt.row} of the dataset holds no response")
        else:
            sample = samples[command.key.index % len(samples)]
            span = VersionSpan(self._version, sample.part.num_tokens)
            part = sample.part if sample.is_dated else msgspec.structs.replace(sample.part, spans=(span,))
            outcome = Truncated(reward=sample.reward) if sample.is_truncated else Completed(reward=sample.reward)
            self._num_tokens += part.num_tokens - part.num_given_tokens
        self._emit(GenerationEnded(key=command.key, attempt=command.attempt, outcome=outcome, part=part))
