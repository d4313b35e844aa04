"""An engine that answers after modelled latencies, on whatever clock it is given.

Invariants:

* The length of a response depends on the seed of its sample and nothing else, so every schedule generates the same
  tokens; only the versions that made them differ.
* Arrays are real: token ``t`` of any response is ``t % 1000``, so a hole or a repeat shows.
* Every ``Generate`` is answered by exactly one ``GenerationEnded``.
* An episode (``engines.simulated.episode``) that waits for its tools holds its slot and no tokens; then it goes on.
* Asleep it generates nothing; the next ``ApplyWeights`` wakes it.
* Nothing happens per token. All running requests advance alike, so one shared count of tokens
  (:mod:`.decode_clock`) says when which of them is next.
* Running requests hold at most ``kv_tokens`` tokens together: those beyond wait in order, and when what runs grows into
  the limit, the one that was admitted last goes back to the head of the queue and is read again later. A lone request
  is never sent back, so the run goes on however small the limit is.

``prefill_s`` is modelled as the tokens that a running request makes in its time: it holds up nobody else. What a
token of a prefill costs (``prefill_token_s``) holds up all. A prompt is read once as long as the engine remembers it:
the prompts of as many groups as it has slots, until new weights come; or ``prompt_reread_tokens`` of it are read again.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from penstock.backends.simulated.decode_clock import DecodeClock
from penstock.backends.simulated.engine_request import SLACK, SimulatedRequest
from penstock.backends.simulated.learner import TRANSPORT, canary_logprobs
from penstock.backends.simulated.lengths import planned, tool_wait_s
from penstock.backends.simulated.shared_cores import by_the_clock, tell_work
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
    EpisodeMoved,
    GenerationAdvanced,
    GenerationEnded,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Cancelled, Completed, InfraError, Truncated
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.backends.engines.options import EnginesOptions, LatencyOptions
    from penstock.backends.protocol import Emit, Fail, Timers
    from penstock.messages.commands import EngineCommand
    from penstock.messages.samples import Outcome, SampleKey
    from penstock.messages.weights import WeightManifest


class SimulatedEngine:
    """One engine with a number of slots; requests beyond them queue in order."""

    def __init__(self, options: EnginesOptions, *, max_response_tokens: int, timers: Timers, seed: int = 0) -> None:
        self.corrupt_fetches = 0
        """So many of the next fetches bring other bytes than the manifest says (a fault to inject)."""
        self.corrupt_swaps = 0
        """So many of the next swaps leave wrong weights in place (a fault to inject)."""
        self.num_hangs = 0
        """So many of the next requests stand still after their first report (a fault to inject)."""
        self.is_frozen = False
        """Nothing that runs makes a token any more (a fault to inject)."""
        self._model: LatencyOptions = options.simulated
        slow_s = options.simulated_fetch_s
        self._fetch_s = self._model.fetch_weights_s if slow_s is None else slow_s
        self._fetch_byte_s = self._model.fetch_byte_s + options.count * self._model.fetch_shared_byte_s
        self._seed = seed
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
        self._outside: dict[SimulatedRequest, None] = {}
        """They wait for tools."""
        self._tell_work = tell_work(timers)
        self._next: list[tuple[float, int, SimulatedRequest]] = []
        self._order = itertools.count()
        self._clock = DecodeClock(options.simulated, speed=options.simulated_speed, now_s=0.0)
        self._read: OrderedDict[int, None] = OrderedDict()
        """Groups whose prompts need not be read again, the last one used last."""
        self._paused = False
        self._is_asleep = False
        self._wake_s = math.inf
        self._wake_id = 0
        self._num_generated = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._advance()

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
                    fetch_s = self._fetch_s + self._fetch_byte_s * command.manifest.size_bytes
                    self._after(fetch_s, self._fetch, command.manifest)
                case ApplyWeights():
                    self._apply(command)
                case SleepEngine():
                    self._sleep()
                case OpenEngine():
                    self._say_after(self._model.start_s, EngineOpened(num_slots=self._num_slots))

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

    def take_over(
        self,
        version: int,
        fetched: Iterable[tuple[int, int]],
        begun: Sequence[tuple[Generate, float]],
        *,
        is_asleep: bool = False,
    ) -> None:
        """Stand where another engine stood.

        Args:
            version: of the weights that it serves; −1: none.
            fetched: version and publish number of those that it has fetched.
            is_asleep: it has given its memory up.
            begun: its requests in their order, each with what is reported of its response as its prefix, and with the
                seconds since that report. What was made since is worked out from these by the model.
        """
        with self._lock:
            self._version, self._fetched, self._is_asleep = version, set(fetched), is_asleep
            self._advance()
            since: list[tuple[SimulatedRequest, float]] = []
            for command, since_s in begun:
                request = self._added(command)
                if len(self._running) < self._num_slots and self._fits(request):
                    self._unread_prompt(request)  # it was read there
                    self._admit(request, num_unread=0)
                    since.append((request, since_s))
                else:
                    self._queued.append(request)
            for request, since_s in since:
                most = min(self._progress_tokens, request.last - request.num_prefix)
                request.start -= min(since_s / self._clock.step_s, most)
                self._plan(request)
            self._arm()

    # --- requests ---------------------------------------------------------------------------------------------

    def _added(self, command: Generate) -> SimulatedRequest:
        plan = planned(self._model, self._max_tokens, command, run_seed=self._seed)
        request = SimulatedRequest(command, plan, self._model.failure_rate)
        self._requests[command.key, command.attempt] = request
        return request

    def _admit(self, request: SimulatedRequest, *, num_unread: float) -> None:
        """It runs from now on, after so many tokens have been read."""
        if self._model.episode is not None and request.awaits_reply:
            request.hear(self._model.episode.reply_tokens)
        request.version = self._version
        self._running[request] = None
        self._tell_work(True)
        self._clock.admit(request.context_tokens, num_unread)
        request.start = self._clock.count - (request.made - request.num_prefix)  # it may have more than its prefix
        request.admitted = self._clock.count - request.context_tokens

    def _generate(self, command: Generate) -> None:
        if self._version < 0 or self._is_asleep:
            why = "while it sleeps" if self._is_asleep else "before any weights were loaded"
            raise RuntimeError(f"sample {command.key} was to be generated {why}")
        request = self._added(command)
        if self.num_hangs:
            self.num_hangs -= 1
            request.hangs = True
        self._queued.append(request)
        self._fill_slots()

    def _fill_slots(self) -> None:
        if not self._queued or not self._has_free_slot:
            return
        self._advance()
        while self._queued and self._has_free_slot and self._fits(self._queued[0]):
            request = self._queued.popleft()
            self._run(request, num_unread=request.made + self._unread_prompt(request))
        self._arm()

    @property
    def _has_free_slot(self) -> bool:
        return len(self._running) + len(self._outside) < self._num_slots

    def _run(self, request: SimulatedRequest, *, num_unread: float) -> None:
        self._admit(request, num_unread=num_unread)
        request.start += self._model.prefill_s / self._clock.step_s
        self._plan(request)

    def _fits(self, request: SimulatedRequest) -> bool:
        limit = self._model.kv_tokens
        if limit is None or not self._running:
            return True
        return self._clock.context_tokens + request.context_tokens + len(self._running) < limit

    def _unread_prompt(self, request: SimulatedRequest) -> float:
        """Tokens of its prompt that nobody has read for it, or that are read again."""
        group_id = request.key.group_id
        is_read = group_id in self._read
        self._read[group_id] = None
        self._read.move_to_end(group_id)
        if len(self._read) > self._num_slots:
            self._read.popitem(last=False)
        return min(self._model.prompt_reread_tokens if is_read else math.inf, request.num_prompt_tokens)

    def _stop(self, request: SimulatedRequest) -> None:
        """It runs no more."""
        if request in self._running:
            del self._running[request]
            self._clock.leave(self._clock.count - request.admitted)
            self._tell_work(self._paused or bool(self._running))

    def _send_back(self, limit: int) -> None:
        """Make room where the running requests have grown into the limit."""
        while len(self._running) > 1 and self._clock.context_tokens >= limit - SLACK:
            request = next(reversed(self._running))
            request.make(request.tokens_at(self._clock.count))
            self._stop(request)
            self._read.pop(request.key.group_id, None)
            self._queued.appendleft(request)
            self._next = [entry for entry in self._next if entry[2] is not request]
            heapq.heapify(self._next)

    def _plan(self, request: SimulatedRequest) -> None:
        """Enter the next moment at which there is something to say about this request."""
        report = max(request.num_reported + self._progress_tokens, request.made + 1)
        request.next_tokens = min(report, request.turn_end, request.last)
        at = request.start + request.next_tokens - request.num_prefix
        heapq.heappush(self._next, (at, next(self._order), request))

    def _cancel(self, requests: list[SimulatedRequest], cause: str) -> None:
        self._advance()
        for request in requests:
            if request in self._running:
                request.make(request.tokens_at(self._clock.count))
            self._end(request, Cancelled(cause=cause))
        self._queued = deque(request for request in self._queued if not request.ended)
        self._fill_slots()
        self._arm()

    # --- tools ------------------------------------------------------------------------------------------------

    def _go_outside(self, request: SimulatedRequest, wait_s: float) -> None:
        """It asks tools, and goes on, or ends, when they have answered: they are not slowed by who works here."""
        self._stop(request)
        self._outside[request] = None
        self._tell_outside(request)
        by_the_clock(self._timers).call_later(wait_s, lambda: self._come_back(request))

    def _come_back(self, request: SimulatedRequest) -> None:
        with self._lock:
            episode = self._model.episode
            if request.ended or episode is None:
                return
            del self._outside[request]
            self._tell_outside(request)
            self._advance()
            if request.made == request.last:
                self._finish(request)
            else:
                again = round(episode.reread_share * request.context_tokens)
                self._run(request, num_unread=again + episode.reply_tokens)
            self._fill_slots()
            self._arm()

    def _tell_outside(self, request: SimulatedRequest) -> None:
        self._emit(EpisodeMoved(key=request.key, attempt=request.attempt, num_outside=len(self._outside)))

    def _finish(self, request: SimulatedRequest) -> None:
        whole = Truncated() if request.is_cut else Completed()
        self._end(request, InfraError(detail="simulated failure of the engine") if request.fails else whole)

    def _end(self, request: SimulatedRequest, outcome: Outcome) -> None:
        request.ended = True
        self._stop(request)
        if self._outside.pop(request, request) is None:
            self._tell_outside(request)
        del self._requests[request.key, request.attempt]
        self._num_generated += request.made - request.num_prefix
        self._emit(
            GenerationEnded(key=request.key, attempt=request.attempt, outcome=outcome, part=request.part_from(0))
        )

    # --- the shared count -------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._clock.advance(self._timers.now_s(), is_paused=self._paused)

    def _arm(self) -> None:
        """See to it that we are woken when the next request is due or the limit of tokens is reached, or earlier."""
        while self._next and self._next[0][2].ended:
            heapq.heappop(self._next)
        if not self._next or self._paused:
            return
        due = self._next[0][0]
        if self._model.kv_tokens is not None and len(self._running) > 1:
            due = min(due, self._clock.count_at(self._model.kv_tokens))
        due_s = self._clock.when(due)
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
            while self._next and self._next[0][0] <= self._clock.count + SLACK:
                request = heapq.heappop(self._next)[2]
                if not request.ended:
                    self._reach(request)
            if self._model.kv_tokens is not None:
                self._send_back(self._model.kv_tokens)
            self._fill_slots()
            self._arm()

    def _reach(self, request: SimulatedRequest) -> None:
        """The request has made the tokens that it was planned for: it ends, or reports and goes on."""
        request.make(request.next_tokens)
        episode = self._model.episode
        if request.made == request.last:
            if episode is not None and episode.end_s and not request.fails:
                self._go_outside(request, episode.end_s)
            else:
                self._finish(request)
            return
        chunk = request.part_from(request.num_reported)
        self._emit(
            GenerationAdvanced(key=request.key, attempt=request.attempt, from_token=request.num_reported, chunk=chunk)
        )
        request.num_reported = request.made
        if episode is not None and request.awaits_reply:
            self._go_outside(request, tool_wait_s(episode, request.seed, request.made))
        elif not request.hangs:
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
            raise RuntimeError(f"requests that run at a swap in mode {command.update_mode}: {len(self._requests)}")
        self._advance()
        self._paused = True
        self._tell_work(True)
        wake_s = self._model.wake_s if self._is_asleep else 0.0
        self._is_asleep = False
        apply_s = self._model.apply_weights_s + self._model.apply_byte_s * manifest.size_bytes
        self._after(wake_s + apply_s, self._swap, manifest)

    def _sleep(self) -> None:
        if self._requests or self._is_asleep:
            raise RuntimeError(f"it was to sleep; requests: {len(self._requests)}, asleep: {self._is_asleep}")
        self._is_asleep = True
        self._timers.call_later(self._model.sleep_s, lambda: self._emit(EngineSlept()))

    def _swap(self, manifest: WeightManifest) -> None:
        self._advance()
        self._paused = False
        self._tell_work(bool(self._running))
        self._version = manifest.version
        self._read.clear()  # keys and values of the old weights are of no use to those that come
        for request in self._running:
            request.make(request.tokens_at(self._clock.count))
            request.version = manifest.version
        digest = manifest.digest
        if self.corrupt_swaps:
            self.corrupt_swaps -= 1
            digest = f"not {digest}"
        canary = b"" if manifest.canary is None else canary_logprobs(manifest.canary.tokens, digest)
        if manifest.canary is not None and manifest.transport != TRANSPORT:
            canary = manifest.canary.logprobs  # of a recorded run's learner: what it has said of them is taken as right
        self._fetched = {(v, p) for v, p in self._fetched if (v, p) > (manifest.version, manifest.publish)}
        self._emit(
            WeightsSwapped(
                version=manifest.version, publish=manifest.publish, digest=manifest.digest, canary_logprobs=canary
            )
        )
        self._arm()

    def _say_after(self, delay_s: float, event: EngineOpened) -> None:
        if delay_s:
            self._timers.call_later(delay_s, lambda: self._emit(event))
        else:
            self._emit(event)

    def _after(self, delay_s: float, act: Callable[[WeightManifest], None], manifest: WeightManifest) -> None:
        def call() -> None:
            with self._lock:
                act(manifest)

        self._timers.call_later(delay_s, call)
