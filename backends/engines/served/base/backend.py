"""Servers as an engine behind :class:`penstock.backends.protocol.Backend`: one event loop on one thread.

Invariants:

* Everything but the staging of weights happens on the loop; commands reach it in order.
* Every ``Generate`` is answered by exactly one ``GenerationEnded``, unless the engine is given up first: then ``fail``
  is called, and whoever supervises takes its requests elsewhere.
* From the pause of a swap until its weights are in, no request is sent; what had not begun then is sent again under the
  new version, so that the prefix cache never holds what older weights made under a newer name.
* Between the first token of new weights and the canary's log-probs nothing is told: the actor hears of the swap first,
  and drops what follows if it was wrong.
* Asleep it holds no device memory. It falls asleep only when the server is idle, and wakes within a swap: memory for
  weights, their load, memory for the rest.
* A server that dies, hangs or fails in a swap is given up whole.

| waits for | who ends it |
|---|---|
| the server to be ready | the server; ``engines.start_timeout_s`` |
| a generation | the server; ``engines.request_timeout_s``, an abort, the server's death |
| room in a server that queues | the end of another request; ``LOAD_CHECK_S``, then it looks again |
| word that the server is dead, when a connection was lost | the server's end; ``LOST_S``, then the request has failed |
| a call of a swap, or of falling asleep | the server; ``SWAP_CALL_S`` |
| requests that were revoked, before it falls asleep | the server, which aborts them; ``ABORTED_S`` |
| the canary's log-probs | the server; ``CANARY_S`` |
| what a router needs after a swap | the router; the dialect's deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, assert_never

from penstock.backends.engines.served.base import updates
from penstock.backends.engines.served.base.calls import EndReason
from penstock.backends.engines.served.base.dialect import EndpointT, EngineFailedError, Memory
from penstock.backends.engines.served.base.fetches import Fetches
from penstock.backends.engines.served.base.generator import BadTokenError, DrawnImageError
from penstock.backends.engines.served.base.health import HealthState
from penstock.backends.engines.served.base.http import CallError
from penstock.backends.engines.served.base.log_passes import LogPasses
from penstock.backends.engines.served.base.loop import LoopBackend
from penstock.backends.engines.served.base.prober import Prober
from penstock.backends.engines.served.base.requests import LOST, OpenRequest
from penstock.backends.engines.served.base.taking_over import LeftWeights
from penstock.backends.engines.served.base.versions import label_of
from penstock.messages.arrays import TOKEN_BYTES
from penstock.messages.base import Metric
from penstock.messages.canary import canary_difference
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    EngineCommand,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
    SleepEngine,
)
from penstock.messages.errors import UserFault
from penstock.messages.local import EngineOpened, EngineSlept, WeightsSwapped
from penstock.messages.samples import Cancelled, InfraError
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable

    from penstock.backends.engines.served.base.calls import Chunk, Generated
    from penstock.backends.engines.served.base.dialect import Staging
    from penstock.backends.engines.served.base.health import HealthChange, HealthLimits
    from penstock.backends.engines.served.base.opened import Opened
    from penstock.backends.engines.served.base.requests import RequestRules
    from penstock.backends.processes.remote_ranks import RemoteRanks
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import Outcome, SampleKey
    from penstock.messages.weights import WeightManifest

SWAP_CALL_S: Final = 600.0
LOST_S: Final = 15.0
LOAD_CHECK_S: Final = 1.0
CANARY_S: Final = 120.0
ABORTED_S: Final = 60.0
FULL: Final = 0.9
"""Share of the server's cache from which on its queue is taken for want of memory."""

_log: Final = logging.getLogger(__name__)


class ServedEngineBackend(LoopBackend[EngineCommand], Generic[EndpointT]):
    """One engine of servers of one kind."""

    def __init__(
        self,
        open_engine: Callable[[Callable[[str], None]], Awaitable[Opened[EndpointT]]],
        *,
        rules: RequestRules,
        staging: Staging[EndpointT],
        limits: HealthLimits,
    ) -> None:
        """``open_engine`` starts or attaches; it is given what hears how a start goes on."""
        super().__init__("served-engine")
        self._open_engine = open_engine
        self._rules = rules
        self._fetches = Fetches(staging)
        self._limits = limits
        self._requests: dict[tuple[SampleKey, int], OpenRequest] = {}
        self._running: dict[OpenRequest, asyncio.Task[None]] = {}
        self._gate = asyncio.Event()
        """Open while requests may be sent."""
        self._room = asyncio.Event()
        """Cleared while the server itself queues for want of memory."""
        self._room.set()
        self._held: list[LocalEvent] | None = None
        """Told after the canary's log-probs."""
        self._served: WeightManifest | None = None
        self._is_asleep = False
        self._opened: Opened[EndpointT] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._probers: tuple[Prober, ...] = ()
        self._num_generated = self._num_cached = self._num_retractions = 0
        self._token_usage = 0.0
        self._passes = LogPasses(lambda: [r.num_held for r in self._requests.values() if r.rid and r.has_tokens])

    def gauges(self) -> tuple[Metric, ...]:
        """Requests at the server and here, the share of slots and of the server's cache in use, tokens so far, and
        :class:`.LogPasses`."""
        if self._opened is None:
            return ()
        running = sum(1 for request in tuple(self._requests.values()) if request.rid)
        return (
            Metric("engine/running", running),
            Metric("engine/queued", len(self._requests) - running),
            Metric("engine/occupancy", running / self._opened.num_slots),
            Metric("engine/generated_tokens", self._num_generated),
            Metric("engine/cached_tokens", self._num_cached),
            Metric("engine/retractions", self._num_retractions),
            Metric("engine/token_usage", self._token_usage),
            *self._passes.metrics(),
        )

    def leaves(self) -> None:
        """See :class:`penstock.backends.protocol.Leaver`. A server of ours waits for no successor then; one that runs
        already is left alone."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the server ended with it
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self._is_leaving = True
        if self._opened is not None:
            self._opened.be_last()
        elif self._opening is not None:
            self._opening.cancel()  # which ends what it has started

    # --- the loop ---------------------------------------------------------------------------------------------

    async def _shut(self, timeout_s: float) -> None:
        for prober in self._probers:
            await prober.close()
        await self._fetches.close(is_open=self._opened is not None)
        if self._opened is not None:
            await self._opened.close(timeout_s)

    def _tell(self, event: LocalEvent) -> None:
        if self._has_failed:
            return
        if self._held is None:
            self._emit(event)
        else:
            self._held.append(event)

    def _take(self, command: EngineCommand) -> None:
        match command:
            case OpenEngine():
                if not self._is_leaving:
                    self._opening = self._spawn(self._open(), "open")
            case Generate():
                request = OpenRequest(command, self._rules)
                self._requests[command.key, command.attempt] = request
                self._running[request] = self._spawn(self._generate(request), f"generate {command.key}")
            case AbortGeneration():
                self._cancel(self._requests.get((command.key, command.attempt)), "aborted")
            case InterruptGenerations():
                for request in tuple(self._requests.values()):
                    self._cancel(request, "interrupted")
            case FetchWeights():
                self._spawn(self._fetch(command.manifest), f"fetch version {command.manifest.version}")
            case ApplyWeights():
                self._spawn(self._swap(command.manifest, command.update_mode), f"swap to {command.manifest.version}")
            case SleepEngine():
                self._spawn(self._sleep(), "sleep")
            case _:
                assert_never(command)

    # --- opening ----------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._opened = opened = await self._open_engine(lambda line: _log.info("server: %s", line))
        self._rules = replace(self._rules, is_seeded=opened.is_seeded, has_priorities=opened.has_priorities)
        self._probers = tuple(
            Prober(endpoint.control, self._on_health, limits=self._limits, server=opened.server)
            for endpoint in opened.endpoints
        )
        for prober in self._probers:
            prober.start()
        if opened.server is not None and opened.passes_per_line:
            self._passes.follow(opened.server, opened.passes_per_line)
        self._spawn(self._watch_load(opened), "load")
        if opened.remote_ranks is not None:
            self._spawn(self._watch_ranks(opened.remote_ranks), "ranks")
        self._tell(EngineOpened(num_slots=opened.num_slots, notices=opened.notices))

    def _on_health(self, change: HealthChange) -> None:
        _log.info("server: %s, was %s: %s", change.after, change.before, change.cause)
        if change.after is HealthState.DEAD:
            server = None if self._opened is None else self._opened.server
            story = server.ended.result().story if server is not None and server.ended.done() else change.cause
            self._fail(EngineFailedError(story))

    async def _watch_ranks(self, ranks: RemoteRanks) -> None:
        ended = await ranks.ended()
        last = "".join(f"\n    {line}" for line in ended.last_lines)
        raise EngineFailedError(f"node {ended.rank} of the server ended: {ended.reason}. The end of its log:{last}")

    async def _watch_load(self, opened: Opened[EndpointT]) -> None:
        while True:
            await asyncio.sleep(LOAD_CHECK_S)
            if not self._requests:
                self._room.set()
                continue
            with contextlib.suppress(CallError):  # the prober sees what is the matter
                loads = [await endpoint.control.loads() for endpoint in opened.endpoints]
                self._token_usage = max(load.token_usage for load in loads)
                is_full = any(load.num_queued and load.token_usage > FULL for load in loads)
                (self._room.clear if is_full else self._room.set)()

    # --- requests ---------------------------------------------------------------------------------------------

    async def _generate(self, request: OpenRequest) -> None:
        try:
            outcome = await self._outcome_of(request)
        finally:
            self._forget(request)
        self._tell(request.ended(outcome))

    def _forget(self, request: OpenRequest) -> None:
        self._running.pop(request, None)
        self._requests.pop((request.command.key, request.command.attempt), None)

    async def _outcome_of(self, request: OpenRequest) -> Outcome:
        outcome = request.already_over()
        while outcome is None:
            while not (self._gate.is_set() and self._room.is_set()):
                await self._gate.wait()
                await self._room.wait()
            try:
                generated = await self._ask(request)
            except DrawnImageError as error:
                return request.behind_drawn_image(error)
            except BadTokenError as error:
                return InfraError(detail=f"sample {request.command.key}: {error}")
            outcome = request.take(generated)
            self._num_generated += len(generated.tokens) // TOKEN_BYTES
            self._num_cached += generated.cached_tokens or 0
            self._num_retractions += generated.num_retractions
            if generated.failure in LOST and isinstance(outcome, InfraError):
                await self._wait_for_death()
        return outcome

    async def _ask(self, request: OpenRequest) -> Generated:
        assert self._opened is not None
        assert self._served is not None, "the actor submits nothing before weights are served"
        generator = self._opened.generator
        call = request.call(self._served)

        def on_chunk(chunk: Chunk) -> None:
            for prober in self._probers:
                prober.token()
            advanced = request.advance(chunk)
            if advanced is None:
                generator.abort_soon(call.rid)
            else:
                self._tell(advanced)

        for prober in self._probers:
            prober.submitted()
        try:
            generated = await generator.generate(call, on_chunk)
        finally:
            for prober in self._probers:
                prober.finished()
        if generated.end is not EndReason.FAILED:
            for prober in self._probers:
                prober.token()
        return generated

    async def _wait_for_death(self) -> None:
        """A connection was lost. When the server has died, the whole engine is given up, and that is not the fault of
        each of its requests."""
        assert self._opened is not None
        server = self._opened.server
        if server is None:
            await asyncio.sleep(LOST_S)
        else:
            await asyncio.wait({server.ended}, timeout=LOST_S)

    def _cancel(self, request: OpenRequest | None, cause: str) -> None:
        if request is None or request.cause:
            return
        request.cause = cause
        if request.rid:
            self._spawn(self._abort(request.rid), f"abort {request.rid}")
            return
        task = self._running[request]
        self._forget(request)
        task.cancel()
        self._tell(request.ended(Cancelled(cause=cause)))

    async def _abort(self, rid: str) -> None:
        assert self._opened is not None
        with contextlib.suppress(CallError):  # the request's own deadline, and the prober, see to the rest
            await self._opened.generator.abort(rid)

    # --- weights ----------------------------------------------------------------------------------------------

    async def _fetch(self, manifest: WeightManifest) -> None:
        told = await self._fetches.fetch(manifest)
        if not self._has_failed:  # past the canary, not held: it says nothing of what is served
            self._emit(told)

    async def _swap(self, manifest: WeightManifest, mode: UpdateMode) -> None:
        assert self._opened is not None
        opened, staged = self._opened, self._fetches.staged.take(manifest)
        if not any(request.rid for request in self._requests.values()):
            mode = UpdateMode.DRAIN  # nothing runs, so the cache can be flushed
        self._gate.clear()
        try:
            with contextlib.closing(staged):
                async with self._occupied("the swap of weights"):
                    await _each(endpoint.pause(mode, SWAP_CALL_S) for endpoint in opened.endpoints)
                    await self._take_back_unbegun()
                    if self._is_asleep:
                        await _each(endpoint.wake(Memory.WEIGHTS, SWAP_CALL_S) for endpoint in opened.endpoints)
                    opened.keep(None)
                    loaded = await updates.load(opened.endpoints, staged, mode, SWAP_CALL_S)
                    opened.keep(LeftWeights(label=label_of(manifest), checksum=loaded.checksum))
                    if self._is_asleep:
                        await _each(endpoint.wake(Memory.REST, SWAP_CALL_S) for endpoint in opened.endpoints)
                        self._is_asleep = False
                    self._served, self._held = manifest, []
                    await _each(endpoint.resume(SWAP_CALL_S) for endpoint in opened.endpoints)
                    used = {label_of(manifest), *(r.label for r in self._requests.values() if r.rid)}
                    await _each(endpoint.forget_adapters(used, SWAP_CALL_S) for endpoint in opened.endpoints)
            if opened.after_swap is not None:
                await opened.after_swap()
            if opened.on_version is not None:
                async with self._occupied("the profile"):
                    await opened.on_version(manifest.version)
            canary = await _score_canary(opened, manifest)
        except (CallError, UserFault) as error:
            raise EngineFailedError(f"the swap to version {manifest.version} failed: {error}") from error
        held, self._held = self._held, None
        self._tell(
            WeightsSwapped(
                version=manifest.version,
                publish=manifest.publish,
                digest=loaded.digest,
                canary_logprobs=canary,
                layout=loaded.layout,
                checksum=loaded.checksum,
            )
        )
        for event in held:
            self._tell(event)
        self._gate.set()

    async def _sleep(self) -> None:
        """The gate stays closed until the swap that wakes it. What the actor has revoked may be ending still."""
        assert self._opened is not None
        self._gate.clear()
        if self._running:
            _, pending = await asyncio.wait(set(self._running.values()), timeout=ABORTED_S)
            if pending:
                raise EngineFailedError(f"a request has not ended {ABORTED_S:g} s after the server was to sleep")
        try:
            async with self._occupied("the release of memory"):
                await _each(endpoint.sleep(SWAP_CALL_S) for endpoint in self._opened.endpoints)
        except CallError as error:
            raise EngineFailedError(f"the server cannot give its memory up: {error}") from error
        self._is_asleep = True
        self._tell(EngineSlept())

    async def _take_back_unbegun(self) -> None:
        """End the requests that have made nothing yet: they are sent again under the new version's key."""
        unbegun = [r for r in self._requests.values() if r.rid and not r.has_tokens and not r.cause]
        for request in unbegun:
            request.is_sent_again = True
        await asyncio.gather(*(self._abort(request.rid) for request in unbegun))

    @contextlib.asynccontextmanager
    async def _occupied(self, call: str) -> AsyncGenerator[None]:
        """No server's silence is held against it meanwhile, and no pass counts that it may be amid."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._passes.held_up())
            for prober in self._probers:
                await stack.enter_async_context(prober.occupied(call, SWAP_CALL_S))
            yield


async def _each(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """One call at each server, all at once."""
    await asyncio.gather(*calls)


async def _score_canary(opened: Opened[EndpointT], manifest: WeightManifest) -> bytes:
    """Of the servers behind an engine, the log-probs that are furthest from the learner's."""
    canary = manifest.canary
    if canary is None:
        return b""
    label = label_of(manifest)
    rid, adapter = f"canary-{label}-{secrets.token_hex(4)}", "" if manifest.low_rank is None else label
    found = await asyncio.gather(
        *(
            scorer.probe(canary.tokens, rid=rid, extra_key=rid, timeout_s=CANARY_S, adapter=adapter)
            for scorer in opened.scorers
        )
    )
    return max(found, key=partial(canary_difference, canary))
