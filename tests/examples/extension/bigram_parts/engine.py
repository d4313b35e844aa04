"""An engine: reads a model without its layers, so that the next token follows from the last one alone."""

from __future__ import annotations

import json
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, assert_never

import torch

from penstock.backends.draws import uniform
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.transports import open_fetcher
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens, tokens_view
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
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    Outcome,
    Part,
    StopReason,
    Truncated,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bigram_parts.spec import BigramOptions
    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.engines.spec import EngineContext
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import EngineCommand
    from penstock.messages.weights import WeightManifest


class Request:
    """One response that is being made."""

    def __init__(self, command: Generate, limit: int) -> None:
        self.command = command
        self.limit = limit
        prefix = command.prefix or Part()  # what an earlier engine, or earlier weights, made of it
        self.tokens: list[int] = tokens_view(prefix.tokens).tolist()
        self.logprobs: list[float] = list(floats_view(prefix.logprobs))
        self.versions = [span.version for span in prefix.spans for _ in range(span.num_tokens)]
        self.num_told = len(self.tokens)

    @property
    def last(self) -> int:
        """The newest token."""
        return int(tokens_view(self.command.prompt.tokens)[-1]) if not self.tokens else self.tokens[-1]

    def part(self, begin: int = 0) -> Part:
        """From this token on."""
        versions = self.versions[begin:]
        spans = tuple(VersionSpan(version, versions.count(version)) for version in sorted(set(versions)))
        return Part(tokens=pack_tokens(self.tokens[begin:]), logprobs=pack_floats(self.logprobs[begin:]), spans=spans)


class BigramEngine:
    """Behind :class:`penstock.backends.protocol.Backend`: one thread does everything, in the order of the commands."""

    def __init__(self, context: EngineContext, options: BigramOptions) -> None:
        self._context = context
        self._smoothing = options.smoothing
        config = json.loads((context.model_folder / "config.json").read_text())
        self._end_token = int(config["eos_token_id"])
        self._commands: SimpleQueue[EngineCommand | None] = SimpleQueue()
        self._requests: list[Request] = []
        self._staged: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._tables: dict[float, torch.Tensor] = {}
        self._weights: Mapping[str, torch.Tensor] = {}
        self._version = -1
        self._thread = threading.Thread(target=self._work, name="bigram-engine", daemon=True)

    def start(self, emit: Emit, fail: Fail) -> None:
        self._emit, self._fail = emit, fail
        self._thread.start()

    def execute(self, command: EngineCommand, /) -> None:
        self._commands.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        return (Metric("engine/running", len(self._requests)),)

    def close(self, timeout_s: float) -> None:
        self._commands.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            while True:
                while not self._requests or not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        return
                    self._carry_out(command)
                for request in self._requests[: self._context.options.slots]:
                    self._advance(request)
        except BaseException as error:
            self._fail(error)  # its process ends with the story, and the supervisor decides

    def _carry_out(self, command: EngineCommand) -> None:
        match command:
            case OpenEngine():
                self._emit(EngineOpened(num_slots=self._context.options.slots))
            case Generate():
                self._generate(command)
            case AbortGeneration():
                asked = (command.key, command.attempt)
                for request in [r for r in self._requests if (r.command.key, r.command.attempt) == asked]:
                    self._end(request, Cancelled(cause="aborted"))
            case InterruptGenerations():
                for request in list(self._requests):
                    self._end(request, Cancelled(cause="interrupted"))
            case FetchWeights():
                self._fetch(command.manifest)
            case ApplyWeights():
                version, publish = command.manifest.version, command.manifest.publish
                self._weights, self._tables = self._staged[version, publish], {}
                self._staged, self._version = {(version, publish): dict(self._weights)}, version
                self._emit(WeightsSwapped(version=version, publish=publish, digest=command.manifest.digest))
            case SleepEngine():
                self._emit(EngineSlept())
            case _:
                assert_never(command)

    def _fetch(self, manifest: WeightManifest) -> None:
        digest = error = ""
        try:
            fetched = open_fetcher().fetch(manifest)  # it knows every transport, those of other packages too
            names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
            tensors = {name: fetched.tensors[name].float().clone() for name in names if name in fetched.tensors}
            self._staged[manifest.version, manifest.publish] = tensors
            digest = fetched.digest
            fetched.close()
        except WeightFetchError as problem:
            error = str(problem)
        version, publish = manifest.version, manifest.publish
        self._emit(WeightsStagedLocally(version=version, publish=publish, digest=digest, error=error))

    def _generate(self, command: Generate) -> None:
        most = self._sampling(command).max_response_tokens if command.max_new_tokens is None else command.max_new_tokens
        room = self._context.max_context - len(tokens_view(command.prompt.tokens))
        request = Request(command, min(most, room))
        self._requests.append(request)
        if self._version < 0:
            self._end(request, InfraError(detail="the engine has no weights yet"))

    def _sampling(self, command: Generate) -> SamplingOptions:
        """Of the run, or of the dataset of an evaluation."""
        dataset = command.prompt.dataset
        return self._context.sampling if dataset is None else self._context.by_dataset[dataset]

    def _advance(self, request: Request) -> None:
        row = self._table(self._sampling(request.command).temperature or 1.0)[request.last]
        drawn = uniform(request.command.seed, len(request.tokens))
        token = min(int(torch.searchsorted(row.exp().cumsum(0), drawn)), len(row) - 1)
        request.tokens.append(token)
        request.logprobs.append(float(row[token]))
        request.versions.append(self._version)
        if token == self._end_token:
            self._end(request, Completed(stop=StopReason.END_TOKEN))
        elif len(request.tokens) >= request.limit:
            self._end(request, Truncated())
        elif len(request.tokens) - request.num_told >= self._context.options.progress_tokens:
            chunk = request.part(request.num_told)
            key, attempt = request.command.key, request.command.attempt
            self._emit(GenerationAdvanced(key=key, attempt=attempt, from_token=request.num_told, chunk=chunk))
            request.num_told = len(request.tokens)

    def _table(self, temperature: float) -> torch.Tensor:
        """Log-probs ``[V, V]`` of each token after each token."""
        if temperature not in self._tables:
            embedded = self._weights["model.embed_tokens.weight"]
            normed = embedded * torch.rsqrt(embedded.square().mean(-1, keepdim=True) + 1e-6)
            head = self._weights.get("lm_head.weight", embedded)
            said = torch.softmax(normed * self._weights["model.norm.weight"] @ head.T / temperature, -1)
            self._tables[temperature] = torch.log((1 - self._smoothing) * said + self._smoothing / len(said))
        return self._tables[temperature]

    def _end(self, request: Request, outcome: Outcome) -> None:
        self._requests.remove(request)
        command = request.command
        self._emit(GenerationEnded(key=command.key, attempt=command.attempt, outcome=outcome, part=request.part()))
