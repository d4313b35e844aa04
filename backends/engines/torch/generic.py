"""The embedded engine for any architecture: transformers' own layers and cache, where ours compute another model.

Requests whose contexts are equally long are a *cohort*: one batch with one cache, which grows by a token a step,
without padding, so that recurrent states, sliding windows and whatever else a model keeps need no mask. Samples of a
group are one cohort, whose context is computed once; so are prompts of one length that come together. A step runs each
cohort once, so it costs as many passes as there are cohorts.

Invariants:

* As for :class:`.TorchEngine`: a step draws one token for each running request; each drawn token has the version that
  was loaded when it was drawn; every request that was taken ends exactly once, with all its tokens; the uniform number
  of a token depends on the sample alone; one whose logits are no numbers fails, and no other is touched.
* Requests are admitted in the order of the queue. The samples of a group wait until there is room for all of them.
* Every drawn token comes out of a step that fed one token.

Not thread-safe: one thread calls everything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import torch

from penstock.backends.device_memory import ParkedMemory
from penstock.backends.engines.kept_tokens import pack_kept
from penstock.backends.engines.torch.generic_weights import GenericWeights
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
from penstock.backends.engines.torch.sampling import uniforms
from penstock.backends.engines.torch.second_set import exchange, size_of
from penstock.backends.engines.torch.stopping import EndReason, StopStringWatch
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.engine_counts import EngineCounts
from penstock.messages.errors import UserFault
from penstock.messages.kept_tokens import KeptTokens, joined_kept
from penstock.messages.parts import join
from penstock.messages.samples import Part

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import Cache

    from penstock.backends.engines.torch.engine_settings import EngineSettings
    from penstock.backends.engines.torch.generic_config import GenericConfig
    from penstock.backends.engines.torch.low_rank import Adapters
    from penstock.backends.engines.torch.sampling import Sampler

MAX_PREFILL_TOKENS: Final = 4096
"""Of the contexts that are computed in one pass; a longer one has a pass of its own."""


@dataclass(slots=True)
class _Row:
    """A running request."""

    running: Running
    uniform: NDArray[np.float64]
    """The number that draws each token of the response."""
    tokens: list[int] = field(default_factory=list[int])
    """Drawn since it was admitted."""
    logprobs: list[float] = field(default_factory=list[float])
    kept: list[KeptTokens | None] = field(default_factory=list["KeptTokens | None"])
    """What each of them was drawn from."""

    @property
    def num_response(self) -> int:
        return len(self.running.prefix_tokens) + len(self.tokens)

    @property
    def fed(self) -> int:
        """The token that it feeds next."""
        return self.tokens[-1] if self.tokens else self.running.last_token

    def part(self, begin: int) -> Part:
        """What was drawn, from this token on."""
        spans = new_spans(self.running.marks, begin, len(self.tokens))
        return Part(
            tokens=pack_tokens(self.tokens[begin:]),
            logprobs=pack_floats(self.logprobs[begin:]),
            spans=spans,
            kept=joined_kept((each, 1) for each in self.kept[begin:]),
        )


@dataclass(slots=True)
class _Cohort:
    """Requests whose contexts are equally long, a row of the cache each."""

    rows: list[_Row]
    cache: Cache

    def keep(self, kept: Sequence[int], device: torch.device) -> None:
        """Let the other rows go."""
        if len(kept) < len(self.rows):
            self.rows = [self.rows[place] for place in kept]
            self.cache.reorder_cache(torch.tensor(kept, dtype=torch.int64, device=device))  # type: ignore[arg-type]


class GenericEngine:
    """One model of any architecture in one process; see :class:`.TorchEngine` for what is asked of it."""

    def __init__(self, config: GenericConfig, settings: EngineSettings) -> None:
        """
        Raises:
            UserFault: see :meth:`EngineSettings.check` and :class:`.GenericWeights`; or it is to record experts, or to
                have the learner's bits.
        """
        if settings.records_experts or settings.learner_model is not None:
            key = "engines.record_experts" if settings.records_experts else "learner.true_on_policy"
            raise UserFault(f"{key}: true, and {config.notice}; set it to false")
        settings.check(config)
        self.config, self.settings = config, settings
        self.version: int | None = None
        """Of the loaded weights; None before the first."""
        self.num_generated = 0
        """Tokens drawn since the start."""
        self.num_prefilled = 0
        """Tokens that were computed ahead of decoding, since the start."""
        self._weights = GenericWeights(config, settings.dtype, settings.device)
        self._queue: deque[Running] = deque()
        self._cohorts: list[_Cohort] = []
        self._clock = 0
        self._max_scored = min(config.max_positions, max(settings.max_context, MAX_SCORED_ROWS))
        self._second: GenericWeights | None = None
        self._parked: ParkedMemory | None = None

    @property
    def num_running(self) -> int:
        """Requests that are in a cohort."""
        return sum(len(cohort.rows) for cohort in self._cohorts)

    @property
    def num_queued(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    def load(self, tensors: Mapping[str, torch.Tensor] | None, version: int, adapters: Adapters | None = None) -> None:
        """See :meth:`.TorchEngine.load`; adapters were refused when they were fetched.

        Raises:
            UserFault: see :meth:`.GenericWeights.load`.
        """
        assert tensors is not None, "without adapters a publish is a whole model"
        assert adapters is None, "refused when they were fetched"
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        with torch.inference_mode():
            self._weights.load(tensors)
        self._serve(version)

    def add_second(self) -> GenericWeights:
        """See :class:`.Doubled`."""
        self._second = GenericWeights(self.config, self.settings.dtype, self.settings.device)
        return self._second

    @property
    def weight_bytes(self) -> int:
        """See :class:`.Doubled`."""
        return size_of(self._weights.tensors())

    def swap(self, version: int) -> None:
        """See :meth:`.TorchEngine.swap`."""
        assert self._second is not None
        exchange(self._weights, self._second)
        self._serve(version)

    def _serve(self, version: int) -> None:
        self.version = version
        for cohort in self._cohorts:
            for row in cohort.rows:
                row.running.mark_version(version, self._clock)

    def sleep(self) -> int:
        """See :meth:`.TorchEngine.sleep`.

        Raises:
            RuntimeError: requests run or wait.
        """
        check_may_sleep(self.num_running + self.num_queued)
        if self._parked is None:
            self._second = None
            self._parked = ParkedMemory(self._weights.tensors(), keeps_values=False)
            self.version = None
        return self._parked.size_bytes

    def submit(self, request: GenerationRequest) -> Ended | None:
        """See :meth:`.TorchEngine.submit`.

        Raises:
            RequestError: no weights were loaded yet, a token outside the vocabulary, no prompt, no room, or images.
        """
        running = self._checked(request)
        prefix = running.prefix_tokens
        reason = self._ended_by(running, prefix[-1], len(prefix)) if prefix else None
        if running.watch is not None and any(running.watch.push(token) for token in prefix):
            reason = reason if reason is EndReason.STOP_TOKEN else EndReason.STOP_STRING
        if reason is None and request.max_new_tokens <= len(prefix):
            reason = EndReason.LENGTH
        if reason is not None:
            return Ended(request.tag, reason, request.prefix)
        self._queue.append(running)
        return None

    def abort(self, tag: Hashable) -> Ended | None:
        """End this request; None when there is none of this tag."""
        for running in self._queue:
            if running.request.tag == tag:
                self._queue.remove(running)
                return Ended(tag, EndReason.ABORTED, running.request.prefix)
        for cohort in self._cohorts:
            for row in cohort.rows:
                if row.running.request.tag == tag:
                    self._let_go(cohort, {id(row)})
                    return self._end(row, EndReason.ABORTED)
        return None

    def interrupt(self) -> list[Ended]:
        """End everything that runs or waits, with what there is."""
        ended = [self._end(row, EndReason.INTERRUPTED) for cohort in self._cohorts for row in cohort.rows]
        ended += [Ended(each.request.tag, EndReason.INTERRUPTED, each.request.prefix) for each in self._queue]
        self._cohorts.clear()
        self._queue.clear()
        return ended

    def step(self) -> Tick:
        """Admit what fits and draw one token for each running request."""
        ended: list[Ended] = []
        with torch.inference_mode():
            num_read_tokens = self._admit()
            for cohort in self._cohorts:
                self._draw(cohort)
        self._clock += bool(self._cohorts)
        rows = [row.running for cohort in self._cohorts for row in cohort.rows]
        num_context_tokens = sum(running.position_at(self._clock) for running in rows)
        for cohort in list(self._cohorts):
            over = {id(row): reason for row in cohort.rows if (reason := self._over(row)) is not None}
            ended += [self._end(row, over[id(row)]) for row in cohort.rows if id(row) in over]
            self._let_go(cohort, over.keys())
        return Tick(ended, self._reports(), len(rows), num_context_tokens, num_read_tokens)

    def score(self, tokens: Iterable[int]) -> torch.Tensor:
        """See :meth:`.TorchEngine.score`.

        Raises:
            RequestError: see :meth:`probe`.
        """
        ids = list(tokens)
        return self._scored(ids, [[token] for token in ids[1:]]).flatten()

    def probe(self, tokens: Iterable[int]) -> torch.Tensor:
        """See :meth:`.TorchEngine.probe`.

        Raises:
            RequestError: no weights were loaded yet, or the tokens do not fit the model.
        """
        ids = list(tokens)
        return self._scored(ids, [ids] * (len(ids) - 1))

    def _scored(self, ids: Sequence[int], wanted: Sequence[Sequence[int]]) -> torch.Tensor:
        has_weights = self.version is not None
        check_scored(ids, vocab_size=self.config.vocab_size, max_tokens=self._max_scored, has_weights=has_weights)
        if len(ids) < 2:
            return torch.zeros(0)
        with torch.inference_mode():
            logits = self._weights.logits(self._tensor(ids[:-1]))
            return logits.log_softmax(-1).gather(1, self._tensor(wanted)).cpu()

    def _checked(self, request: GenerationRequest) -> Running:
        if self.version is None:
            raise RequestError("the engine has no weights yet")
        if request.media:
            raise RequestError("its prompt has images, and this engine computes the model for text only")
        prompt = checked_tokens(request.prompt, "prompt", self.config.vocab_size)
        prefix = checked_tokens(request.prefix.tokens, "prefix", self.config.vocab_size)
        room = self.settings.max_context - len(prompt)
        if not prompt or request.max_new_tokens > room:
            raise RequestError(
                f"a prompt and {request.max_new_tokens} new tokens must fit into {self.settings.max_context} "
                f"(max_context), and the prompt has {len(prompt)}"
            )
        stop_strings = self.settings.stop_strings_of(request.sampling_index)
        return Running(request, prompt, prefix, None if stop_strings is None else StopStringWatch(stop_strings))

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self) -> int:
        """See :attr:`.Tick.num_read_tokens`."""
        num_read_tokens = 0
        while self._queue:
            chosen = self._chosen(self.settings.num_slots - self.num_running)
            if not chosen:
                break
            for running in chosen:
                self._queue.remove(running)
            self._cohorts.append(self._begun(chosen))
            num_read_tokens += sum(running.num_unread_tokens for running in chosen)
        return num_read_tokens

    def _chosen(self, num_free: int) -> list[Running]:
        """Whole groups of one length that are to run together, the first of the queue among them; none: no room yet."""
        groups: dict[bytes, list[Running]] = {}
        length = self._queue[0].first_position
        for running in self._queue:
            group = groups.setdefault(_context(running), []) if running.first_position == length else []
            if len(group) < self.settings.num_slots:
                group.append(running)
        chosen: list[Running] = []
        for group in list(groups.values())[: max(1, MAX_PREFILL_TOKENS // (length + 1))]:
            if len(chosen) + len(group) > num_free:
                break
            chosen += group
        return chosen

    def _begun(self, chosen: Sequence[Running]) -> _Cohort:
        assert self.version is not None
        places: dict[bytes, int] = {}
        contexts: list[list[int]] = []
        for running in chosen:
            running.begin(self._clock, self.version)
            context = _context(running)
            running.num_cached_tokens = len(running.prompt_tokens) - 1 if context in places else 0
            if context not in places:
                places[context] = len(contexts)
                contexts.append([*running.prompt_tokens, *running.prefix_tokens][:-1])
        cache = self._weights.new_cache()
        if contexts[0]:
            self._weights.extend(cache, self._tensor(contexts))
            self.num_prefilled += sum(map(len, contexts))
            cache.reorder_cache(self._tensor([places[_context(running)] for running in chosen]))  # type: ignore[arg-type]
        rows = [_Row(running, uniforms(running.request.seed, running.request.max_new_tokens)) for running in chosen]
        return _Cohort(rows, cache)

    # --- decoding ---------------------------------------------------------------------------------------------

    def _draw(self, cohort: _Cohort) -> None:
        rows = cohort.rows
        logits = self._weights.extend(cohort.cache, self._tensor([[row.fed] for row in rows]))
        uniform = torch.as_tensor(np.asarray([[row.uniform[row.num_response]] for row in rows])).to(logits.device)
        alike: dict[Sampler, list[int]] = {}
        for place, row in enumerate(rows):
            request = row.running.request
            sampler = request.sampler or self.settings.sampler_of(request.sampling_index)
            alike.setdefault(sampler, []).append(place)
        for sampler, places in alike.items():
            drawn = sampler.recorded(logits[places], uniform[places])
            tokens, logprobs = drawn.tokens.view(-1).cpu(), drawn.logprobs.view(-1).cpu()
            kept = [None] * len(places) if drawn.kept is None else drawn.kept.cpu().numpy()[:, None]
            for place, token, logprob, own in zip(places, tokens, logprobs, kept, strict=True):
                rows[place].tokens.append(int(token))
                rows[place].logprobs.append(float(logprob))
                rows[place].kept.append(None if own is None else pack_kept(own))
        self.num_generated += len(rows)

    def _over(self, row: _Row) -> EndReason | None:
        """Why the token that was just drawn ends its request; None: it does not."""
        if not isfinite(row.logprobs[-1]):
            return EndReason.FAILED
        token, running = row.tokens[-1], row.running
        has_string = running.watch is not None and running.watch.push(token)
        reason = self._ended_by(running, token, row.num_response)
        return EndReason.STOP_STRING if has_string and reason is not EndReason.STOP_TOKEN else reason

    def _ended_by(self, running: Running, token: int, num_response: int) -> EndReason | None:
        if token in self.settings.stop_ids_of(running.request.sampling_index):
            return EndReason.STOP_TOKEN
        return EndReason.LENGTH if num_response >= running.request.max_new_tokens else None

    def _let_go(self, cohort: _Cohort, over: Iterable[int]) -> None:
        gone = set(over)
        kept = [place for place, row in enumerate(cohort.rows) if id(row) not in gone]
        if not kept:
            self._cohorts = [other for other in self._cohorts if other is not cohort]
            return
        with torch.inference_mode():
            cohort.keep(kept, self.settings.device)

    def _end(self, row: _Row, reason: EndReason) -> Ended:
        request = row.running.request
        if reason is EndReason.FAILED:
            return Ended(request.tag, reason, request.prefix)
        counts = EngineCounts(row.running.first_position + 1, row.running.num_cached_tokens)
        return Ended(request.tag, reason, join((request.prefix, msgspec.structs.replace(row.part(0), counts=counts))))

    def _reports(self) -> list[Advanced]:
        num_tokens = self.settings.progress_tokens
        if num_tokens is None:
            return []
        reports: list[Advanced] = []
        for row in (row for cohort in self._cohorts for row in cohort.rows):
            running, begin = row.running, row.running.num_reported
            if len(row.tokens) - begin >= num_tokens:
                reports.append(Advanced(running.request.tag, len(running.prefix_tokens) + begin, row.part(begin)))
                running.num_reported = len(row.tokens)
        return reports

    def _tensor(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.settings.device)


def _context(running: Running) -> bytes:
    return running.request.prompt + running.request.prefix.tokens
