"""The embedded engine as a backend: a thread that decodes and a thread that fetches weights.

Invariants:

* Only the decoding thread touches the engine; everything else reaches it through one queue, in order, and is taken
  between two decode steps.
* What happens to requests is told some milliseconds later, together (:class:`.HeldAnswers`), and before anything else.
* Every ``Generate`` is answered by exactly one ``GenerationEnded``: with an ``InfraError`` where the request itself
  cannot be served, which touches no other.
* With a second set of weights, what was fetched is prepared in it while the engine decodes, and compared, before it
  counts as fetched; a swap is then an exchange. The first weights, and adapters, which are small, are loaded where the
  engine decodes. A fetch is brought to its end when newer weights come: the actor asks for one at a time, and may
  commit what is here. At the end of the engine it is broken off.
* Weights that were fetched are kept until they are applied or two newer ones were fetched: the actor commits the
  newest that it knows of, and the one before that may be on its way already.
* What was loaded at a swap is compared before the next step, by a new hash where another process could have changed it
  since the fetch. If it is not what was exported, every request ends there.
* Whatever else goes wrong ends the thread and is told through ``fail``.

| waits for | who ends it |
|---|---|
| the decoding thread, idle, for the next command | ``execute``, or ``close`` |
| the fetching thread for the next manifest | ``execute``, or ``close`` |
| ``close`` for both threads | its own deadline |
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

import torch

from penstock.backends.engines.decode_passes import DecodePasses
from penstock.backends.engines.staged_weights import StagedWeights
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.fetching import fetch_publish
from penstock.backends.engines.torch.generic_config import GenericConfig
from penstock.backends.engines.torch.held_answers import HeldAnswers
from penstock.backends.engines.torch.requests import GenerationRequest, RequestError
from penstock.backends.engines.torch.second_set import StoppedError, second_set
from penstock.backends.engines.torch.stopping import EndReason
from penstock.backends.weights.protocol import WeightFetchError
from penstock.messages.arrays import TOKEN_BYTES, tokens_view
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
from penstock.messages.local import (
    EngineOpened,
    EngineSlept,
    GenerationAdvanced,
    GenerationEnded,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Cancelled, Completed, InfraError, Part, SampleKey, StopReason, Truncated
from penstock.messages.texts import counted, does
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.engine_settings import EngineSettings
    from penstock.backends.engines.torch.fetching import FetchedPublish
    from penstock.backends.engines.torch.generic import GenericEngine
    from penstock.backends.engines.torch.profile import EngineProfile
    from penstock.backends.engines.torch.requests import Ended
    from penstock.backends.engines.torch.second_set import SecondSet
    from penstock.backends.protocol import Emit, Fail
    from penstock.backends.weights.protocol import WeightFetcher
    from penstock.messages.commands import EngineCommand
    from penstock.messages.samples import Outcome
    from penstock.messages.weights import WeightManifest

NO_NUMBERS: Final = (
    "the model's logits for it are not finite: its numbers are beyond model.dtype, so the learner has diverged, or the "
    "model cannot be computed in that type; lower learner.learning_rate, or set model.dtype: float32"
)

_log: Final = logging.getLogger(__name__)


class RequestTag(NamedTuple):
    """How the actor names a request."""

    key: SampleKey
    attempt: int


class _Staged(NamedTuple):
    """The fetching thread to the decoding thread: these are here."""

    manifest: WeightManifest
    weights: FetchedPublish


class TorchEngineBackend:
    """One embedded engine behind :class:`penstock.backends.protocol.Backend`."""

    def __init__(
        self,
        config: ModelConfig | GenericConfig,
        settings: EngineSettings,
        *,
        max_response_tokens: Sequence[int],
        num_threads: int,
        fetcher: WeightFetcher,
        profile: EngineProfile | None = None,
        double_buffering: bool | None = False,
    ) -> None:
        """``double_buffering``: whether it has a second set of weights; None: if it pays."""
        self._config = config
        self._settings = settings
        self._max_response_tokens = max_response_tokens
        self._num_threads = num_threads
        self._fetcher = fetcher
        self._profile = profile
        self._double_buffering = double_buffering
        self._engine: TorchEngine | GenericEngine | None = None
        self._second: SecondSet | None = None
        self._inbox: SimpleQueue[EngineCommand | _Staged | None] = SimpleQueue()
        self._fetches: SimpleQueue[WeightManifest | None] = SimpleQueue()
        self._staged: StagedWeights[FetchedPublish] = StagedWeights()
        self._loaded_base = ""
        """Digest of the model that it has beneath adapters. The decoding thread writes it; the fetching one reads it to
        spare a fetch, and where that was wrong the model is fetched before the swap."""
        self._passes = DecodePasses()
        self._spent_s = time.thread_time if settings.device.type == "cpu" else time.perf_counter
        """Of a pass: on a CPU the time in which it had a core, as others may want it too."""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._fail = fail
        self._answers = HeldAnswers(emit)
        for name, body in (("torch-engine", self._decode_forever), ("torch-engine-fetch", self._fetch_forever)):
            thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        if isinstance(command, FetchWeights):
            self._fetches.put(command.manifest)
        else:
            self._inbox.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Requests that run and wait, the share of slots in use, tokens generated and prefilled since the start, and
        :class:`.DecodePasses`."""
        engine = self._engine
        if engine is None:
            return ()
        return (
            Metric("engine/running", engine.num_running),
            Metric("engine/queued", engine.num_queued),
            Metric("engine/occupancy", engine.num_running / self._settings.num_slots),
            Metric("engine/generated_tokens", engine.num_generated),
            Metric("engine/prefill_tokens", engine.num_prefilled),
            *self._passes.metrics(),
        )

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`. A fetch that outlasts the time is left to end with the
        process."""
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._inbox.put(None)
        self._fetches.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._drain_inbox()
            self._staged.close()

    # --- threads ----------------------------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            body()
        except BaseException as error:  # the contract of Backend: the process ends with this story
            self._fail(error)

    def _decode_forever(self) -> None:
        while not self._closing.is_set():
            engine = self._engine
            is_idle = engine is None or not (engine.num_running or engine.num_queued)
            if is_idle:
                self._answers.tell()
                self._take(self._inbox.get())
            self._take_all()
            if engine is not None:
                self._step(engine)
        if self._profile is not None:
            self._profile.end()

    def _take_all(self) -> None:
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _fetch_forever(self) -> None:
        while (manifest := self._fetches.get()) is not None and not self._closing.is_set():
            self._fetch(manifest)

    def _drain_inbox(self) -> None:
        """Take note of weights that arrived after the decoding thread had ended, so that they are let go of too."""
        while True:
            try:
                left = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(left, _Staged):
                self._staged.keep(left.manifest, left.weights)

    # --- commands ---------------------------------------------------------------------------------------------

    def _take(self, command: EngineCommand | _Staged | None) -> None:
        match command:
            case None:
                return
            case _Staged():
                self._staged.keep(command.manifest, command.weights)
            case OpenEngine():
                self._engine = _open(self._config, self._settings)
                self._second = second_set(self._engine, self._settings.device, is_wanted=self._double_buffering)
                self._answers.tell(EngineOpened(num_slots=self._settings.num_slots))
            case Generate():
                self._generate(command)
            case AbortGeneration():
                ended = self._opened.abort(RequestTag(command.key, command.attempt))
                if ended is not None:
                    self._answer(ended)
            case InterruptGenerations():
                for ended in self._opened.interrupt():
                    self._answer(ended)
            case ApplyWeights():
                self._apply(command.manifest, command.update_mode)
            case SleepEngine():
                _log.info("asleep: %d bytes are given up", self._opened.sleep())
                self._loaded_base, self._second = "", None  # nothing runs beside which anything could be prepared
                self._answers.tell(EngineSlept())
            case FetchWeights():
                raise AssertionError("fetches go to their own thread")
            case _:
                assert_never(command)

    @property
    def _opened(self) -> TorchEngine | GenericEngine:
        if self._engine is None:
            raise RuntimeError("the engine was given work before it was opened")
        return self._engine

    def _generate(self, command: Generate) -> None:
        prefix = command.prefix or Part()
        try:
            ended = self._opened.submit(self._requested(command, prefix))
        except RequestError as error:
            self._fail_request(command.key, command.attempt, str(error), prefix)
            return
        if ended is not None:
            self._answer(ended)

    def _requested(self, command: Generate, prefix: Part) -> GenerationRequest:
        """
        Raises:
            RequestError: it asks for a way to draw that this run does not have.
        """
        prompt = prefix.context_tokens or command.prompt.tokens
        dataset = command.prompt.dataset
        sampling_index = 0 if dataset is None else 1 + dataset
        if not 0 <= sampling_index < len(self._max_response_tokens):
            raise RequestError(
                f"it is of evaluation dataset {dataset}, and there are {len(self._max_response_tokens) - 1}"
            )
        limit = self._max_response_tokens[sampling_index]
        if command.max_new_tokens is not None:
            limit = min(limit, command.max_new_tokens)
        room = self._settings.max_context - len(prompt) // TOKEN_BYTES
        asked = command.sampling
        if asked is not None and asked.is_constrained:
            raise RequestError("an embedded engine cannot hold a turn to a schema or an expression; SGLang's can")
        return GenerationRequest(
            tag=RequestTag(command.key, command.attempt),
            prompt=prompt,
            seed=command.seed,
            max_new_tokens=min(limit, room),
            sampling_index=sampling_index,
            sampler=None if asked is None else self._settings.sampler_of(sampling_index).turned(asked),
            media=command.prompt.media,
            prefix=prefix,
        )

    def _fail_request(self, key: SampleKey, attempt: int, story: str, prefix: Part) -> None:
        outcome = InfraError(detail=f"sample {key}: {story}")
        self._answers.tell(GenerationEnded(key=key, attempt=attempt, outcome=outcome, part=prefix))

    def _step(self, engine: TorchEngine | GenericEngine) -> None:
        is_idle = not (engine.num_running or engine.num_queued)
        began_s, at_s = self._spent_s(), time.perf_counter()
        with nullcontext() if self._profile is None or is_idle else self._profile.step():
            tick = engine.step()
        for advanced in tick.advanced:
            tag = advanced.tag
            assert isinstance(tag, RequestTag)
            self._answers.hold(
                GenerationAdvanced(
                    key=tag.key, attempt=tag.attempt, from_token=advanced.from_token, chunk=advanced.chunk
                )
            )
        for ended in tick.ended:
            self._answer(ended)
        self._answers.tell_due(engine.num_running + engine.num_queued)
        if not tick.num_decoded:
            return
        seconds, wall_s, read = self._spent_s() - began_s, time.perf_counter() - at_s, tick.num_read_tokens
        self._passes.add(tick.num_decoded, tick.num_context_tokens, seconds, wall_s, read_tokens=read)

    def _answer(self, ended: Ended) -> None:
        tag = ended.tag
        assert isinstance(tag, RequestTag)
        if ended.reason is EndReason.FAILED:
            self._fail_request(tag.key, tag.attempt, NO_NUMBERS, ended.part)
            return
        outcome = _outcome(ended.reason)
        self._answers.hold(GenerationEnded(key=tag.key, attempt=tag.attempt, outcome=outcome, part=ended.part))

    # --- weights ----------------------------------------------------------------------------------------------

    def _fetch(self, manifest: WeightManifest) -> None:
        """Fetch and check; on the fetching thread."""
        digest, story = "", ""
        try:
            weights = fetch_publish(self._fetcher, manifest, self._loaded_base)
        except WeightFetchError as error:
            story = str(error)
        else:
            try:
                story = weights.what_is_wrong(self._config) or self._prepare(manifest, weights)
            except StoppedError:
                weights.close()
                return
            if story:
                weights.close()
            else:
                digest = weights.digest
                self._inbox.put(_Staged(manifest, weights))
        # After the weights: whoever hears this may ask for the swap at once, and the queue keeps the order.
        self._emit(WeightsStagedLocally(version=manifest.version, publish=manifest.publish, digest=digest, error=story))

    def _prepare(self, manifest: WeightManifest, weights: FetchedPublish) -> str:
        """Fill the second set with them, if there is one and anything is decoded meanwhile; on the fetching thread.

        Returns:
            Why they cannot be served; empty when they can.

        Raises:
            StoppedError: the engine is closed.
        """
        engine, second, model = self._engine, self._second, weights.model
        if second is None or engine is None or engine.version is None or model is None or weights.adapters is not None:
            return ""
        second.fill(model, self._closing.is_set)
        digest = weights.digest_now()
        if digest != manifest.digest:
            return (
                f"the bytes of version {manifest.version}, publish {manifest.publish} were changed while they were "
                f"prepared: their digest is {digest[:16]}… and was {manifest.digest[:16]}…"
            )
        second.offer(digest)
        return ""

    def _apply(self, manifest: WeightManifest, mode: UpdateMode) -> None:
        engine = self._opened
        num_requests = engine.num_running + engine.num_queued
        if num_requests and mode is not UpdateMode.IN_FLIGHT:
            what = f"{counted(num_requests, 'request')} {does(num_requests, 'run')}"
            raise RuntimeError(f"{what} at a swap in mode {mode}, which wants none")
        weights = self._staged.take(manifest)
        if self._second is not None and self._second.swap_in(manifest.digest, manifest.version):
            digest = manifest.digest  # compared when it was prepared, in memory that is this process's own
        else:
            digest = self._load(manifest, weights)
        self._loaded_base = manifest.base_digest if digest == manifest.digest else ""
        if self._profile is not None:
            self._profile.serve(manifest.version)
        weights.close()
        canary = manifest.canary
        logprobs = b"" if canary is None else engine.probe(tokens_view(canary.tokens)).numpy().tobytes()
        self._answers.tell(
            WeightsSwapped(version=manifest.version, publish=manifest.publish, digest=digest, canary_logprobs=logprobs)
        )

    def _load(self, manifest: WeightManifest, weights: FetchedPublish) -> str:
        """Load them where the engine decodes; the digest of what was loaded."""
        engine = self._opened
        if manifest.base_digest != self._loaded_base and not weights.has_base and manifest.base is not None:
            weights.close()  # it slept, or loaded another model, since it fetched the adapters alone
            weights = fetch_publish(self._fetcher, manifest, self._loaded_base)
        engine.load(weights.model, manifest.version, weights.adapters)
        digest = weights.digest_now()
        if digest != manifest.digest:  # changed since they were fetched: not one token is made with them
            for ended in engine.interrupt():
                self._answer(ended)
        weights.close()
        return digest


def _open(config: ModelConfig | GenericConfig, settings: EngineSettings) -> TorchEngine | GenericEngine:
    if not isinstance(config, GenericConfig):
        return TorchEngine(config, settings)
    from penstock.backends.engines.torch.generic import GenericEngine  # brings transformers

    return GenericEngine(config, settings)


def _outcome(reason: EndReason) -> Outcome:
    match reason:
        case EndReason.STOP_TOKEN:
            return Completed(stop=StopReason.END_TOKEN)
        case EndReason.STOP_STRING:
            return Completed(stop=StopReason.STOP_STRING)
        case EndReason.LENGTH:
            return Truncated()
        case EndReason.ABORTED | EndReason.INTERRUPTED:
            return Cancelled(cause=reason.value)
        case EndReason.FAILED:
            raise AssertionError("a failure is answered with its story")
        case _:
            assert_never(reason)
