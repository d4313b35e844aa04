"""A learner whose steps take modelled time, on whatever clock it is given.

Invariants:

* One command at a time, in order, as on a real device: a publish waits for the step before it.
* The state is copied for a checkpoint between two steps. Writing the copy goes on beside what follows, one at a time.
* The digest of a version and the log-probs of the canary under it are pure functions of the run's seed and the
  version, so an engine that loaded the right weights agrees with the learner exactly, and any other does not.
"""

from __future__ import annotations

import hashlib
import math
import threading
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from penstock.backends.draws import normal
from penstock.backends.simulated.shared_cores import by_the_clock, tell_work
from penstock.messages.arrays import TOKEN_BYTES, pack_floats, pack_tokens, tokens_view
from penstock.messages.base import Metric
from penstock.messages.commands import (
    DeleteCheckpoints,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    SleepLearner,
    Train,
    WakeLearner,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    WeightsCopied,
    WeightsPublished,
)
from penstock.messages.weights import Canary, WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.learners.batch.step_load import SequenceLength
    from penstock.backends.learners.options import SimulatedLearnerOptions
    from penstock.backends.protocol import Emit, Fail, Timers
    from penstock.messages.commands import LearnerCommand
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import Sample

TRANSPORT: Final = "simulated"
NUM_CANARY_TOKENS: Final = 8


@lru_cache(maxsize=16)
def canary_logprobs(tokens: bytes, digest: str) -> bytes:
    """float32 ``[T − 1, T]``: what the weights with this digest say at the places of the int32 tokens ``[T]``; every
    engine is asked for the same."""
    count = len(tokens_view(tokens))
    marks = hashlib.shake_128(digest.encode() + tokens).digest(4 * count * (count - 1))
    return pack_floats(-mark / 2**30 for mark in memoryview(marks).cast("I"))


class SimulatedLearner:
    """A learner that trains in modelled time and keeps no weights."""

    def __init__(
        self,
        options: SimulatedLearnerOptions,
        *,
        seed: int,
        epoch: int,
        timers: Timers,
        max_tokens_per_micro_batch: int = 1024,
    ) -> None:
        self._model = options
        self._max_tokens = max_tokens_per_micro_batch
        self._seed = seed
        self._epoch = epoch
        self._timers = timers
        self._tell_work = tell_work(timers)
        self._lock = threading.RLock()
        self._free_s = 0.0
        self._digested_s = 0.0
        """When the last export is published; the next begins no sooner."""
        self._is_digesting = False
        self._held: Callable[[], None] | None = None
        """Takes the next copy when the last one was looked at."""
        self._writing: int | None = None
        """Version of the checkpoint that is copied or written."""
        self._is_asleep = False
        self._num_waiting = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit

    def execute(self, command: LearnerCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        if self._is_asleep and isinstance(command, Train | PublishWeights):
            raise RuntimeError(f"{type(command).__name__} came while the learner sleeps")
        match command:
            case Train():
                self._finish_after(self._step_s(command), _trained(command))
            case PublishWeights():
                self._publish(command)
            case SaveCheckpoint():
                self._save(command.version)
            case OpenLearner():
                self._finish_after(self._model.start_s, _opened(command))
            case SleepLearner():
                self._is_asleep = True
                self._finish_after(self._model.sleep_s, LearnerSlept())
            case WakeLearner():
                self._is_asleep = False
                self._finish_after(self._model.wake_s, LearnerWoken())
            case ReleaseWeights() | DeleteCheckpoints():
                pass  # nothing was kept

    def take_over(self, *, is_asleep: bool) -> None:
        """Stand where another learner stood, which holds its device memory or has given it up."""
        self._is_asleep = is_asleep

    def gauges(self) -> tuple[Metric, ...]:
        """Commands under way or waiting; a checkpoint counts until its state is copied."""
        return (Metric("learner/commands", self._num_waiting),)

    def close(self, timeout_s: float) -> None:
        """Nothing to end: the clock is not ours."""

    def _step_s(self, command: Train) -> float:
        num_tokens = sum(group.num_tokens for group in command.groups)
        noise = math.exp(self._model.jitter_sigma * normal(self._seed, command.version))
        model = self._model
        if not model.packs:
            return (model.step_s + model.token_s * num_tokens) * noise
        from penstock.backends.learners.batch.step_load import step_load  # brings numpy, which few simulations need

        load = step_load(_lengths(command), num_ranks=model.num_ranks, max_tokens=self._max_tokens)
        token_s = model.token_s * load.imbalance
        return (model.step_s + model.micro_batch_s * load.num_rounds + token_s * num_tokens) * noise

    def _publish(self, command: PublishWeights) -> None:
        model, published = self._model, WeightsPublished(manifest=self._manifest(command))
        publish_s = model.publish_s + model.publish_byte_s * model.size_bytes
        if not model.digest_s:
            self._finish_after(publish_s, published)
            return
        copied = self._answering(WeightsCopied(version=command.version, size_bytes=model.size_bytes))
        with self._lock:
            self._free_s = max(self._free_s, self._digested_s)
            self._call_after(publish_s, partial(self._copied, copied, published))
            self._digested_s = self._free_s + model.digest_s

    def _save(self, version: int) -> None:
        with self._lock:
            if self._writing is not None:
                raise RuntimeError(f"SaveCheckpoint({version}) came while that of version {self._writing} is written")
            self._writing = version
        self._call_after(self._model.snapshot_s, partial(self._write, version))

    def _write(self, version: int) -> None:
        """The disk is what takes time, and no core."""
        checkpoint_s = self._model.checkpoint_s
        self._ended()
        write_s = self._model.publish_s if checkpoint_s is None else checkpoint_s
        by_the_clock(self._timers).call_later(write_s, partial(self._written, version))

    def _written(self, version: int) -> None:
        with self._lock:
            self._writing = None
        self._emit(CheckpointWritten(version=version, path=checkpoint_path(version)))

    def _copied(self, copied: Callable[[], None], published: WeightsPublished) -> None:
        """A copy is taken, and looked at from now on; a process that is slow may look at the last one still."""
        with self._lock:
            if self._is_digesting:
                self._held = partial(self._copied, copied, published)
                return
            self._is_digesting = True
            self._num_waiting += 1
        copied()
        self._timers.call_later(self._model.digest_s, partial(self._digested, self._answering(published)))

    def _digested(self, published: Callable[[], None]) -> None:
        with self._lock:
            self._is_digesting = False
            held, self._held = self._held, None
        published()
        if held is not None:
            held()

    def _finish_after(self, duration_s: float, answer: LocalEvent) -> None:
        self._call_after(duration_s, self._answering(answer))

    def _call_after(self, duration_s: float, call: Callable[[], None]) -> None:
        with self._lock:
            self._tell_work(True)
            now_s = self._timers.now_s()
            self._free_s = max(self._free_s, now_s) + duration_s
            self._num_waiting += 1
            self._timers.call_later(self._free_s - now_s, call)

    def _answering(self, answer: LocalEvent) -> Callable[[], None]:
        def call() -> None:
            self._ended()
            self._emit(answer)

        return call

    def _ended(self) -> None:
        with self._lock:
            self._num_waiting -= 1
            self._tell_work(self._num_waiting > 0)

    def _manifest(self, command: PublishWeights) -> WeightManifest:
        digest = hashlib.blake2b(f"{self._seed} {command.version}".encode(), digest_size=16).hexdigest()
        tokens = pack_tokens(range(NUM_CANARY_TOKENS))
        return WeightManifest(
            version=command.version,
            publish=command.publish,
            learner_epoch=self._epoch,
            transport=TRANSPORT,
            location=f"version-{command.version}",
            size_bytes=self._model.size_bytes,
            digest=digest,
            canary=Canary(tokens=tokens, logprobs=canary_logprobs(tokens, digest)),
        )


def _lengths(command: Train) -> list[SequenceLength]:
    """Of the parts of all samples; what an episode read between its turns is context of its own part."""
    from penstock.backends.learners.batch.step_load import SequenceLength

    found: list[SequenceLength] = []
    for index, group in enumerate(command.groups):
        own = group.prompt.num_tokens
        for sample in group.samples:
            for part in sample.parts:
                context = len(part.context_tokens) // TOKEN_BYTES
                prompt = -1 - len(found) if context else index
                found.append(SequenceLength(prompt, context or own, part.num_tokens))
    return found


def checkpoint_path(version: int) -> str:
    """What stands for the checkpoint of a version."""
    return f"simulated/checkpoint-{version}"


def _opened(command: OpenLearner) -> LearnerOpened:
    expected = checkpoint_path(command.version) if command.version or command.path else ""
    if command.path != expected:
        raise ValueError(f"OpenLearner: expected {expected!r} for version {command.version}, found {command.path!r}")
    return LearnerOpened(version=command.version)


def _trained(command: Train) -> BatchTrained:
    num_masked = sum(
        _num_below(sample, command.min_token_version, mask_old_tokens=command.mask_old_tokens)
        for group in command.groups
        for sample in group.samples
    )
    num_tokens = sum(group.num_tokens for group in command.groups)
    rewards = [r for group in command.groups for sample in group.samples if (r := sample.reward) is not None]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    return BatchTrained(
        version=command.version,
        num_trained_tokens=num_tokens - num_masked,
        num_masked_tokens=num_masked,
        metrics=(Metric("reward/mean", mean), Metric("train/tokens", float(num_tokens - num_masked))),
    )


def _num_below(sample: Sample, version: int, *, mask_old_tokens: bool) -> int:
    oldest, newest = sample.version_bounds or (version, version)
    least = max(version, newest) if mask_old_tokens else version
    if oldest >= least:  # as of most
        return 0
    return sum(span.num_tokens for span in sample.spans if span.version < least)
