"""The decode loop: continuous batching over a fixed number of slots.

Invariants:

* At each decode step the running requests are in slots 0 … n−1, n ≤ S. A slot that became free takes the next request
  of the queue, or the request in the last slot.
* A step feeds one token per running request and draws one; nothing that is in the cache is computed again, except
  under other weights after an interruption, which is what an interruption is for.
* Each drawn token is stamped with the version that was loaded when it was drawn.
* Every request that was taken ends exactly once, with all its tokens.
* A request whose logits are no numbers fails, and no other is touched: what it left in the cache is cleared until
  another one has its slot.
* Asleep it has neither weights nor cache; the next ``load`` takes the memory again.

Not thread-safe: one thread calls everything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.backends.device_memory import ParkedMemory
from penstock.backends.engines.torch.admission import Admission
from penstock.backends.engines.torch.attention import (
    DecodeAttention,
    FreshAttention,
    RaggedRows,
    Segments,
    SlotRange,
)
from penstock.backends.engines.torch.cache import KeyValueCache
from penstock.backends.engines.torch.decode_graphs import CudaCapture, DecodeGraphs, Drawn, can_capture
from penstock.backends.engines.torch.model import Rows, open_model, open_weights
from penstock.backends.engines.torch.requests import (
    MAX_SCORED_ROWS,
    Advanced,
    Ended,
    GenerationRequest,
    RequestError,
    Running,
    Tick,
    check_may_sleep,
    check_scored,
    checked_tokens,
    new_spans,
)
from penstock.backends.engines.torch.second_set import copy_across, exchange, size_of
from penstock.backends.engines.torch.slot_scheduler import SlotScheduler
from penstock.backends.engines.torch.slots import MIN_ROWS, PromptIndex, RunningSlots, SlotState, integers
from penstock.backends.engines.torch.stopping import EndReason, StopStringWatch
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.engine_counts import EngineCounts
from penstock.messages.errors import UserFault
from penstock.messages.parts import join
from penstock.messages.samples import Part

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.admission import Prefill
    from penstock.backends.engines.torch.attention import Attention
    from penstock.backends.engines.torch.engine_settings import EngineSettings
    from penstock.backends.engines.torch.learner_model import LearnerWeights
    from penstock.backends.engines.torch.low_rank import Adapters
    from penstock.backends.engines.torch.sampling import Sampler
    from penstock.backends.engines.torch.sight import Sight
    from penstock.backends.engines.torch.weights import FusedWeights


class TorchEngine:
    """One model in one process, on a CPU or one GPU."""

    def __init__(self, config: ModelConfig, settings: EngineSettings) -> None:
        """Allocates everything; the weights are unset.

        Raises:
            UserFault: see :meth:`EngineSettings.check`.
        """
        settings.check(config)
        self.config = config
        self.settings = settings
        self.version: int | None = None
        """Of the loaded weights; None before the first."""
        self.num_generated = 0
        """Tokens drawn since the start."""
        device, dtype = settings.device, settings.dtype
        with torch.inference_mode():
            num_slots = max(settings.num_slots, MIN_ROWS)
            self._cache = KeyValueCache(config, num_slots, settings.max_context, dtype, device)
            if settings.records_experts:
                self._cache.record_experts(config)
            self._max_scored = min(config.max_positions, max(settings.max_context, MAX_SCORED_ROWS))
            self._weights = open_weights(config, settings)
            self._model = open_model(self._weights, self._cache, self._max_scored)
            self._slots = SlotState(num_slots, self._cache, dtype, device, settings.sampler.num_recorded)
            self._stops_of = settings.stop_tables(config)
            self._has_others = bool(settings.others)
        self._prompts = PromptIndex(settings.num_slots)
        is_exact = settings.learner_model is not None
        self._whole_length = self._cache.capacity if is_exact else None
        """Over which attention reads the cache in each step; None: as far as the longest context reaches."""
        self._admission = Admission(self._model, self._prompts, is_exact=is_exact)
        self._scheduler = SlotScheduler(settings.num_slots, self._slots, self._admission, self._prompts)
        self._clock = 0
        """Decode steps since the start."""
        self._next_report = 0
        """No running request has a report due before."""
        self._attention = DecodeAttention(config, self._cache)
        is_captured = can_capture(config, settings)
        open_capture = partial(CudaCapture, device)
        self._graphs = DecodeGraphs(num_slots, self._cache.capacity, open_capture) if is_captured else None
        self._window: RunningSlots | None = None
        self._second: FusedWeights | LearnerWeights | None = None
        self._parked: ParkedMemory | None = None
        self._tainted: set[int] = set()
        """Slots of requests that have failed."""

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return sum(running is not None for running in self._scheduler.running)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._scheduler.queue)

    @property
    def num_prefilled(self) -> int:
        """Tokens whose keys and values were computed ahead of decoding, since the start."""
        return self._admission.num_prefilled

    def load(self, tensors: Mapping[str, torch.Tensor] | None, version: int, adapters: Adapters | None = None) -> None:
        """Serve these weights (Hugging Face names; None: those that are loaded) with these adapters beside them from
        the next token on. What runs goes on with its cache.

        Raises:
            UserFault: they are not of this model; nothing has changed.
        """
        self._wake()
        with torch.inference_mode():
            is_elsewhere = self._weights.load(tensors, adapters)
        if is_elsewhere and self._graphs is not None:
            self._graphs.clear()
        self._serve(version)

    def add_second(self) -> FusedWeights | LearnerWeights:
        """See :class:`.Doubled`."""
        self._second = open_weights(self.config, self.settings)
        return self._second

    @property
    def weight_bytes(self) -> int:
        """See :class:`.Doubled`."""
        return size_of(self._weights.tensors())

    def swap(self, version: int) -> None:
        """See :class:`.Doubled`; what runs goes on with its cache. What the second set holds then is to be set anew."""
        assert self._second is not None
        if self._graphs is None:
            exchange(self._weights, self._second)
        elif copy_across(self._second, self._weights):
            self._graphs.clear()
        self._serve(version)

    def _serve(self, version: int) -> None:
        self.version = version
        self._prompts.clear()
        for running in self._scheduler.running:
            if running is not None:
                running.mark_version(version, self._clock)

    def sleep(self) -> int:
        """Give the memory of weights and cache up; how many bytes. They are gone: until the next ``load`` it serves
        nothing.

        Raises:
            RuntimeError: requests run or wait.
        """
        check_may_sleep(self.num_running + self.num_queued)
        if self._parked is None:
            if self._graphs is not None:
                self._graphs.clear()
            kept = () if self._slots.kept is None else (self._slots.kept,)
            self._second = None
            self._parked = ParkedMemory([*self._weights.tensors(), self._cache.data, *kept], keeps_values=False)
            self.version = None
        return self._parked.size_bytes

    def _wake(self) -> None:
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
            with torch.inference_mode():
                self._cache.data.zero_()  # what is masked counts nothing only while it is a number

    def submit(self, request: GenerationRequest) -> Ended | None:
        """Take a request into the queue; the answer is its end where its prefix is a whole response already.

        Raises:
            RequestError: no weights were loaded yet, a token outside the vocabulary, no prompt, no room.
        """
        running = self._checked(request)
        self._has_others |= request.sampler is not None
        reason = self._already_over(running)
        if reason is not None:
            return Ended(request.tag, reason, request.prefix)
        self._scheduler.queue.append(running)
        return None

    def abort(self, tag: Hashable) -> Ended | None:
        """End this request; None when there is none of this tag."""
        for running in self._scheduler.queue:
            if running.request.tag == tag:
                self._scheduler.queue.remove(running)
                return Ended(tag, EndReason.ABORTED, running.request.prefix)
        for slot, occupant in enumerate(self._scheduler.running):
            if occupant is not None and occupant.request.tag == tag:
                return self._end(slot, occupant, EndReason.ABORTED)
        return None

    def interrupt(self) -> list[Ended]:
        """End everything that runs or waits, with what there is."""
        ended = [
            self._end(slot, running, EndReason.INTERRUPTED)
            for slot, running in enumerate(self._scheduler.running)
            if running is not None
        ]
        ended += [Ended(r.request.tag, EndReason.INTERRUPTED, r.request.prefix) for r in self._scheduler.queue]
        self._scheduler.queue.clear()
        return ended

    def step(self) -> Tick:
        """Admit what fits and draw one token for each running request."""
        with torch.inference_mode():
            for slot in self._tainted:  # in each step, as an idle slot is fed as well
                self._cache.clear(slot)
            prefill = self._scheduler.admit(self._clock, self.version)
            self._tainted = {slot for slot in self._tainted if slot >= len(self._scheduler.running)}
            n = len(self._scheduler.running)
            if not n:
                return Tick([], [])
            ended_slots, tokens = self._decode(n, prefill)
        self._clock += 1
        self.num_generated += n
        watched: set[int] = self._watched(tokens) if tokens else set()
        ended = [self._end_drawn(slot, has_string=slot in watched) for slot in sorted({*ended_slots, *watched})]
        scheduler = self._scheduler
        return Tick(ended, self._reports(), n, scheduler.num_context_tokens(self._clock), scheduler.num_read_tokens)

    def score(self, tokens: Iterable[int]) -> torch.Tensor:
        """Float32 ``[T − 1]``: log-prob, at temperature 1, of each of ``tokens [T]`` but the first given those before.

        Raises:
            RequestError: see :meth:`probe`.
        """
        ids = list(tokens)
        return self._scored(ids, [[token] for token in ids[1:]]).flatten()

    def probe(self, tokens: Iterable[int]) -> torch.Tensor:
        """Float32 ``[T − 1, T]``: log-prob, at temperature 1, of every one of ``tokens [T]`` after tokens 0 … t.

        Raises:
            RequestError: no weights were loaded yet, or the tokens do not fit the model.
        """
        ids = list(tokens)
        return self._scored(ids, [ids] * (len(ids) - 1))

    def _scored(self, ids: Sequence[int], wanted: Sequence[Sequence[int]]) -> torch.Tensor:
        """Float32 ``[T − 1, K]``: of the ids that are wanted after each of ``ids [T]`` but the last."""
        has_weights = self.version is not None
        check_scored(ids, vocab_size=self.config.vocab_size, max_tokens=self._max_scored, has_weights=has_weights)
        if len(ids) < 2:
            return torch.zeros(0)
        with torch.inference_mode():
            ragged = RaggedRows.pack([ids[:-1]], [0], self.settings.device)
            rows = Rows(ragged.tokens, ragged.positions, None, num_kept=len(ids) - 1)
            hidden = self._model.hidden_states(rows, FreshAttention(self.config, ragged))
            targets = torch.tensor(wanted, device=self.settings.device)
            scored: list[torch.Tensor] = []
            for begin in range(0, len(ids) - 1, MAX_SCORED_ROWS):
                part = slice(begin, begin + MAX_SCORED_ROWS)
                logprobs = torch.log_softmax(self._model.logits(hidden[part]), -1)
                scored.append(logprobs.gather(1, targets[part]))
            return torch.cat(scored).cpu()

    def _checked(self, request: GenerationRequest) -> Running:
        if self.version is None:
            raise RequestError("the engine has no weights yet")
        vocab_size = self.config.vocab_size
        prompt = checked_tokens(request.prompt, "prompt", vocab_size)
        prefix = checked_tokens(request.prefix.tokens, "prefix", vocab_size)
        room = self.settings.max_context - len(prompt)
        if not prompt or room < 1:
            raise RequestError(
                f"a prompt must have 1 to {self.settings.max_context - 1} tokens, so that a response fits into"
                f" max_context, got {len(prompt)}"
            )
        if request.max_new_tokens > room:
            raise RequestError(f"max_new_tokens must be at most {room} after this prompt, got {request.max_new_tokens}")
        stop_strings = self.settings.stop_strings_of(request.sampling_index)
        watch = None if stop_strings is None else StopStringWatch(stop_strings)
        return Running(request, prompt, prefix, watch, self._sight_of(request, prompt))

    def _sight_of(self, request: GenerationRequest, prompt: list[int]) -> Sight | None:
        if not request.media:
            return None
        if self._weights.eyes is None:
            raise RequestError("its prompt has images, and the model takes text only; name one that sees (model.path)")
        try:
            return self._weights.eyes.sight(prompt, request.media)
        except UserFault as error:
            raise RequestError(str(error)) from error

    def _already_over(self, running: Running) -> EndReason | None:
        prefix = running.prefix_tokens
        if prefix and prefix[-1] in self.settings.stop_ids_of(running.request.sampling_index):
            return EndReason.STOP_TOKEN
        if running.watch is not None and any(running.watch.push(token) for token in prefix):
            return EndReason.STOP_STRING
        return EndReason.LENGTH if len(prefix) >= running.request.max_new_tokens else None

    def _decode(self, n: int, prefill: Prefill | None) -> tuple[list[int], list[int]]:
        """One step of the first ``n`` slots: which of them ended, and the drawn tokens if someone watches them."""
        if self._graphs is not None and prefill is None and not self._has_others:
            shape = self._graphs.shape(n, self._scheduler.reach(self._clock))
            state = self._running_slots(n, shape.end)
            drawn = self._graphs.run(shape, lambda: self._draw(state, [shape], None))
        else:
            state = self._running_slots(n, max(n, MIN_ROWS))
            num_rows = state.fed.shape[0]
            ranges = self._scheduler.ranges(num_rows, self._clock)
            if self._whole_length is not None:
                ranges = [SlotRange(0, num_rows, self._whole_length)]
            drawn = self._draw(state, ranges, prefill)
        state.advancing.add_(1)
        tokens = integers(drawn.ids) if self.settings.has_stop_strings else []
        return integers(drawn.over.narrow(0, 0, n).nonzero()), tokens

    def _draw(self, state: RunningSlots, ranges: list[SlotRange], prefill: Prefill | None) -> Drawn:
        """One forward pass over the rows of ``state``, and what is drawn of it."""
        num_rows = state.fed.shape[0]
        decoding = self._attention.prepare(ranges, state.mask.scatter_(1, state.at, 0.0))
        attention: Attention = decoding
        turned = state.position if self._weights.eyes is None else state.position + state.shift
        addresses = (state.first_address + state.at).view(-1)
        rows = Rows(state.fed, turned, addresses, num_rows, num_rows - state.num_running)
        if prefill is not None:
            rows = rows.with_prefill(prefill.rows)
            attention = Segments([(num_rows, decoding), *prefill.parts])
        logits = self._model.logits(self._model.hidden_states(rows, attention))
        uniform = state.uniform.gather(1, state.at)
        drawn, logprobs, kept = self.settings.sampler.recorded(logits, uniform)
        others = self._rows_drawn_otherwise() if self._has_others else ()
        for sampler, _, rows_of_it in others:
            found = sampler.recorded(logits[rows_of_it], uniform[rows_of_it])
            drawn[rows_of_it], logprobs[rows_of_it] = found.tokens, found.logprobs
            if kept is not None:
                kept[rows_of_it] = -1 if found.kept is None else found.kept
        state.tokens.scatter_(1, state.at, drawn)
        state.logprobs.scatter_(1, state.at, logprobs)
        if state.kept is not None and kept is not None:
            state.kept.scatter_(1, state.at[:, :, None].expand(-1, 1, kept.shape[1]), kept[:, None])
        ids = drawn.view(-1)
        state.fed.copy_(ids)
        is_stop = self._stops_of[0].index_select(0, ids)
        for _, stops, rows_of_it in others:
            is_stop[rows_of_it] = stops[ids[rows_of_it]]
        is_no_number = (logprobs - logprobs).view(-1) != 0  # isfinite is four kernels on a CPU
        over = (state.position == state.last).logical_or_(is_stop).logical_or_(is_no_number)
        return Drawn(over, ids)

    def _rows_drawn_otherwise(self) -> list[tuple[Sampler, torch.Tensor, torch.Tensor]]:
        """Of each other way to draw that is used now: how, its stop tokens, and the slots."""
        slots: dict[tuple[int, Sampler | None], list[int]] = {}
        for slot, running in enumerate(self._scheduler.running):
            if running is not None and (running.request.sampling_index or running.request.sampler):
                slots.setdefault((running.request.sampling_index, running.request.sampler), []).append(slot)
        device = self.settings.device
        return [
            (own or self.settings.sampler_of(place), self._stops_of[place], torch.tensor(found, device=device))
            for (place, own), found in slots.items()
        ]

    def _running_slots(self, n: int, num_rows: int) -> RunningSlots:
        window = self._window
        if window is None or (window.num_running, window.fed.shape[0]) != (n, num_rows):
            window = self._window = self._slots.running(n, num_rows)
        return window

    def _end_drawn(self, slot: int, *, has_string: bool) -> Ended:
        """End the request in this slot, at a stop token or string, at its limit, or at logits that are no numbers."""
        running = self._scheduler.running[slot]
        assert running is not None
        ended = self._end(slot, running, EndReason.LENGTH)
        if not isfinite(floats_view(ended.part.logprobs)[-1]):
            self._prompts.put(slot, None)
            self._tainted.add(slot)
            return Ended(ended.tag, EndReason.FAILED, running.request.prefix)
        if tokens_view(ended.part.tokens)[-1] in self.settings.stop_ids_of(running.request.sampling_index):
            return replace(ended, reason=EndReason.STOP_TOKEN)
        return replace(ended, reason=EndReason.STOP_STRING) if has_string else ended

    def _watched(self, tokens: list[int]) -> set[int]:
        """Show every running request its new token; the slots of those that now have a stop string."""
        return {
            slot
            for slot, running in enumerate(self._scheduler.running)
            if running is not None and running.watch is not None and running.watch.push(tokens[slot])
        }

    def _end(self, slot: int, running: Running, reason: EndReason) -> Ended:
        new = self._new_tokens(slot, running, 0, running.num_new(self._clock))
        self._scheduler.running[slot] = None
        counts = EngineCounts(running.first_position + 1, running.num_cached_tokens)
        part = join((running.request.prefix, msgspec.structs.replace(new, counts=counts)))
        if self.settings.records_experts and part.num_tokens:
            num_inputs = running.position_at(self._clock)
            part = msgspec.structs.replace(part, experts=self._cache.experts_of(slot, num_inputs))
        return Ended(running.request.tag, reason, part)

    def _new_tokens(self, slot: int, running: Running, begin: int, end: int) -> Part:
        first = running.first_position
        tokens, logprobs = self._slots.drawn(slot, first + begin, first + end)
        kept = self._slots.kept_for(slot, first + begin, first + end)
        return Part(tokens=tokens, logprobs=logprobs, spans=new_spans(running.marks, begin, end), kept=kept)

    def _reports(self) -> list[Advanced]:
        num_tokens = self.settings.progress_tokens
        if num_tokens is None or self._clock < self._next_report:
            return []
        reports: list[Advanced] = []
        self._next_report = self._clock + num_tokens
        for slot, running in enumerate(self._scheduler.running):
            if running is None:
                continue
            begin, end = running.num_reported, running.num_new(self._clock)
            if end - begin >= num_tokens:
                chunk = self._new_tokens(slot, running, begin, end)
                reports.append(Advanced(running.request.tag, len(running.prefix_tokens) + begin, chunk))
                running.num_reported = begin = end
            self._next_report = min(self._next_report, running.born + begin + num_tokens)
        return reports
