"""An engine that answers after modelled latencies, on whatever clock it is given.

Invariants:

* The length of a response depends on the seed of its sample and nothing else, so every schedule generates the same
  tokens; only the versions that made them differ.
* Arrays are real: token ``t`` of any response is ``t % 1000``, so a hole or a repeat shows.
* Every ``Generate`` is answered by exactly one ``GenerationEnded``.
* Asleep it generates nothing; the next ``ApplyWeights`` wakes it.
* Nothing happens per token. All running requests advance alike, one token each ``token_s + (running − 1)·token_load_s``
  seconds, so one shared count of tokens says when which of them is next.

A prefill is modelled as the tokens that a lone request would make in its time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from typing import TYPE_CHECKING

from penstock.backends.draws import normal
from penstock.backends.simulated.engine_request import LENGTH, SLACK, SimulatedRequest
from penstock.backends.simulated.learner import canary_logprobs
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
from penstock.messages.samples import Cancelled, Completed, InfraError, Truncated
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.engines.options import EnginesOptions, LatencyOptions
    from penstock.backends.protocol import Emit, Fail, Timers
    from penstock.messages.commands import EngineCommand
    from penstock.messages.samples import Outcome, SampleKey
    from penstock.messages.weights import WeightManifest


class SimulatedEngine:
    """One engine with a number of slots; requests beyond them queue in order."""

    def __init__(self, options: EnginesOptions, *, max_response_tokens: int, timers: Timers) -> None:
        self.corrupt_fetches = 0
        """So many of the next fetches bring other bytes than the manifest says (a fault to inject)."""
        self.corrupt_swaps = 0
        """So many of the next swaps leave wrong weights in place (a fault to inject)."""
        self.num_hangs = 0
        """So many of the next requests stand still after their first report (a fault to inject)."""
        self.is_frozen = False
        """Nothing that runs makes a token any more (a fault to inject)."""
        self._model: LatencyOptions = options.simulated
        self._speed = options.simulated_speed
        self._num_slots = options.slots
        self._progress_tokens = options.progress_tokens
        self._max_tokens = max_response_tokens
        self._timers = timers
        self._lock = threading.RLock()
        self._version = -1
        self._fetched: set[tuple[int, int]] = set()
        self._queued: deque[SimulatedRequest] = deque()
        self._requests: dict[tuple[SampleKey, int], SimulatedRequest] = {}
        self._running: dict[SimulatedRequest, None] = {}
        self._next: list[tuple[float, int, SimulatedRequest]] = []
        self._order = itertools.count()
        self._count = 0.0
        """Tokens that a request would have made that ran from the start."""
        self._counted_s = 0.0
        self._paused = False
        self._is_asleep = False
        self._wake_s = math.inf
        self._wake_id = 0
        self._num_generated = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._counted_s = self._timers.now_s()

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        with self._lock:
            match command:
                case Generate():
                    self._generate(command)
                case AbortGeneration():
                    request = self._requests.get((command.key, command.attempt))
                    if request is not None:
                        self._cancel([request], "aborted")
                case InterruptGenerations():
                    self._cancel(list(self._requests.values()), "interrupted")
                case FetchWeights():
                    self._after(self._model.fetch_weights_s, self._fetch, command.manifest)
                case ApplyWeights():
                    self._apply(command)
                case SleepEngine():
                    self._sleep()
                case OpenEngine():
                    self._emit(EngineOpened(num_slots=self._num_slots))

    def gauges(self) -> tuple[Metric, ...]:
        """Running and queued requests, and the share of slots in use."""
        running = len(self._running)
        return (
            Metric("engine/running", running),
            Metric("engine/queued", len(self._queued)),
            Metric("engine/occupancy", running / self._num_slots),
            Metric("engine/generated_tokens", self._num_generated),
        )

    def close(self, timeout_s: float) -> None:
        """Nothing to end: the clock is not ours."""

    # --- requests ---------------------------------------------------------------------------------------------

    def _generate(self, command: Generate) -> None:
        if self._version < 0 or self._is_asleep:
            why = "while it sleeps" if self._is_asleep else "before any weights were loaded"
            raise RuntimeError(f"sample {command.key} was to be generated {why}")
        request = SimulatedRequest(command, self._num_tokens(command.seed), self._model.failure_rate)
        if self.num_hangs:
            self.num_hangs -= 1
            request.hangs = True
        self._requests[command.key, command.attempt] = request
        self._queued.append(request)
        self._fill_slots()

    def _num_tokens(self, seed: int) -> int:
        model = self._model
        drawn = model.response_tokens_median * math.exp(model.response_tokens_sigma * normal(seed, LENGTH))
        return max(1, min(self._max_tokens, int(drawn)))

    def _fill_slots(self) -> None:
        if not self._queued or len(self._running) >= self._num_slots:
            return
        self._advance()
        while self._queued and len(self._running) < self._num_slots:
            request = self._queued.popleft()
            request.start = self._count + self._model.prefill_s / self._model.token_s
            request.version = self._version
            self._running[request] = None
            self._plan(request)
        self._arm()

    def _plan(self, request: SimulatedRequest) -> None:
        """Enter the next moment at which there is something to say about this request."""
        report = request.num_reported + self._progress_tokens
        request.next_tokens = min(report, request.last)
        at = request.start + request.next_tokens - request.num_prefix
        heapq.heappush(self._next, (at, next(self._order), request))

    def _cancel(self, requests: list[SimulatedRequest], cause: str) -> None:
        self._advance()
        for request in requests:
            if request in self._running:
                request.make(request.tokens_at(self._count))
            self._end(request, Cancelled(cause=cause))
        self._queued = deque(request for request in self._queued if not request.ended)
        self._fill_slots()
        self._arm()

    def _end(self, request: SimulatedRequest, outcome: Outcome) -> None:
        request.ended = True
        self._running.pop(request, None)
        del self._requests[request.key, request.attempt]
        self._num_generated += request.made - request.num_prefix
        self._emit(
            GenerationEnded(key=request.key, attempt=request.attempt, outcome=outcome, part=request.part_from(0))
        )

    # --- the shared count -------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Bring the count up to now, at the rate that held since it was last brought up."""
        now_s = self._timers.now_s()
        if self._running and not self._paused:
            self._count += (now_s - self._counted_s) / self._token_s()
        self._counted_s = now_s

    def _token_s(self) -> float:
        return (self._model.token_s + (len(self._running) - 1) * self._model.token_load_s) / self._speed

    def _arm(self) -> None:
        """See to it that we are woken when the next request is due, or earlier."""
        while self._next and self._next[0][2].ended:
            heapq.heappop(self._next)
        if not self._next or self._paused:
            return
        due_s = self._counted_s + max(0.0, self._next[0][0] - self._count) * self._token_s()
        if due_s < self._wake_s:
            self._wake_s = due_s
            self._wake_id += 1
            wake_id = self._wake_id
            self._timers.call_later(due_s - self._timers.now_s(), lambda: self._wake(wake_id))

    def _wake(self, wake_id: int) -> None:
        with self._lock:
            if wake_id != self._wake_id:
                return  # an earlier one took its place
            self._wake_s = math.inf
            if self._paused or self.is_frozen:
                return
            self._advance()
            while self._next and self._next[0][0] <= self._count + SLACK:
                request = heapq.heappop(self._next)[2]
                if not request.ended:
                    self._reach(request)
            self._fill_slots()
            self._arm()

    def _reach(self, request: SimulatedRequest) -> None:
        """The request has made the tokens that it was planned for: it ends, or reports and goes on."""
        request.make(request.next_tokens)
        if request.made == request.last:
            if request.fails:
                self._end(request, InfraError(detail="simulated failure of the engine"))
            elif request.last == self._max_tokens:
                self._end(request, Truncated())
            else:
                self._end(request, Completed())
            return
        chunk = request.part_from(request.num_reported)
        self._emit(
            GenerationAdvanced(key=request.key, attempt=request.attempt, from_token=request.num_reported, chunk=chunk)
        )
        request.num_reported = request.made
        if not request.hangs:
            self._plan(request)

    # --- weights ----------------------------------------------------------------------------------------------

    def _fetch(self, manifest: WeightManifest) -> None:
        digest = manifest.digest
        if self.corrupt_fetches:
            self.corrupt_fetches -= 1
            digest = f"not {digest}"
        else:
            self._fetched.add((manifest.version, manifest.publish))
        self._emit(WeightsStagedLocally(version=manifest.version, publish=manifest.publish, digest=digest))

    def _apply(self, command: ApplyWeights) -> None:
        manifest = command.manifest
        if (manifest.version, manifest.publish) not in self._fetched:
            raise RuntimeError(f"version {manifest.version} was to be applied, and was never fetched")
        if self._requests and command.update_mode is not UpdateMode.IN_FLIGHT:
            raise RuntimeError(f"{len(self._requests)} requests run at a swap in mode {command.update_mode}")
        self._advance()
        self._paused = True
        wake_s = self._model.wake_s if self._is_asleep else 0.0
        self._is_asleep = False
        self._after(wake_s + self._model.apply_weights_s, self._swap, manifest)

    def _sleep(self) -> None:
        if self._requests or self._is_asleep:
            raise RuntimeError(f"it was to sleep while {len(self._requests)} requests run (asleep: {self._is_asleep})")
        self._is_asleep = True
        self._timers.call_later(self._model.sleep_s, lambda: self._emit(EngineSlept()))

    def _swap(self, manifest: WeightManifest) -> None:
        self._advance()
        self._paused = False
        self._version = manifest.version
        for request in self._running:
            request.make(request.tokens_at(self._count))
            request.version = manifest.version
        digest = manifest.digest
        if self.corrupt_swaps:
            self.corrupt_swaps -= 1
            digest = f"not {digest}"
        canary = b"" if manifest.canary is None else canary_logprobs(manifest.canary.tokens, digest)
        self._fetched = {(v, p) for v, p in self._fetched if (v, p) > (manifest.version, manifest.publish)}
        self._emit(
            WeightsSwapped(
                version=manifest.version, publish=manifest.publish, digest=manifest.digest, canary_logprobs=canary
            )
        )
        self._arm()

    def _after(self, delay_s: float, act: Callable[[WeightManifest], None], manifest: WeightManifest) -> None:
        def call() -> None:
            with self._lock:
                act(manifest)

        self._timers.call_later(delay_s, call)
