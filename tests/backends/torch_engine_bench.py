"""An embedded engine behind its queue, with a real transport, and what it said."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from engine_cases import random_tokens, weights_of

from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.torch.factory import open_torch_engine
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import pack_tokens
from penstock.messages.commands import ApplyWeights, FetchWeights, Generate, OpenEngine
from penstock.messages.local import (
    EngineOpened,
    GenerationAdvanced,
    GenerationEnded,
    LocalEvent,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Part, Prompt, Purpose, SampleKey
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from engine_cases import Case

    from penstock.backends.protocol import Backend
    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter, WeightFetcher
    from penstock.messages.commands import EngineCommand
    from penstock.messages.weights import Canary, WeightManifest

WAIT_S = 60.0
PROMPT = random_tokens(6, seed=3)
EventT = TypeVar("EventT", bound=LocalEvent)


class CountingFetcher:
    """A real fetcher that keeps what it fetched in sight."""

    def __init__(self) -> None:
        self.fetched: list[FetchedWeights] = []

    def fetch(self, manifest: WeightManifest) -> FetchedWeights:
        weights = open_fetcher().fetch(manifest)
        self.fetched.append(weights)
        return weights

    @property
    def num_held(self) -> int:
        return sum(bool(weights.tensors) for weights in self.fetched)


@dataclass
class Bench:
    """An engine, what it said, and the learner's end of its weights."""

    engine: Backend[EngineCommand]
    exporter: WeightExporter
    said: SimpleQueue[LocalEvent | BaseException]
    then: dict[type[LocalEvent], list[EngineCommand]]
    """Given to the engine at the first event of this kind, on the engine's own thread: so it takes all of them before
    its next step."""
    publish: int = 0

    def emit(self, event: LocalEvent) -> None:
        for command in self.then.pop(type(event), ()):
            self.engine.execute(command)
        self.said.put(event)

    def hear(self, kind: type[EventT]) -> EventT:
        """The next thing said, which must be of this kind."""
        event = self.said.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event

    def export(self, tensors: dict[str, torch.Tensor], version: int, canary: Canary | None = None) -> WeightManifest:
        self.publish += 1
        return self.exporter.export(tensors, version=version, publish=self.publish, canary=canary)

    def stage(self, case: Case, version: int, canary: Canary | None = None) -> WeightManifest:
        manifest = self.export(weights_of(case.model), version, canary)
        self.fetch(manifest)
        return manifest

    def fetch(self, manifest: WeightManifest) -> None:
        self.engine.execute(FetchWeights(manifest))
        staged = self.hear(WeightsStagedLocally)
        assert (staged.version, staged.publish, staged.error) == (manifest.version, self.publish, "")
        assert staged.digest == manifest.digest

    def serve(self, case: Case, version: int = 0, mode: UpdateMode = UpdateMode.DRAIN) -> WeightsSwapped:
        self.engine.execute(ApplyWeights(self.stage(case, version), mode))
        return self.hear(WeightsSwapped)

    def generate(self, index: int, prompt: list[int] | None = None, prefix: Part | None = None) -> None:
        self.engine.execute(generate_command(index, prompt, prefix))

    def hear_ends(self, count: int) -> dict[int, GenerationEnded]:
        """So many ends by index; reports of progress are passed over."""
        ends: dict[int, GenerationEnded] = {}
        while len(ends) < count:
            event = self.said.get(timeout=WAIT_S)
            if isinstance(event, GenerationEnded):
                ends[event.key.index] = event
            else:
                assert isinstance(event, GenerationAdvanced), event
        return ends


def generate_command(index: int, prompt: list[int] | None = None, prefix: Part | None = None) -> Generate:
    """A sample; its index is its seed."""
    tokens = pack_tokens(PROMPT if prompt is None else prompt)
    return Generate(
        key=SampleKey(0, index),
        attempt=0,
        purpose=Purpose.TRAIN,
        prompt=Prompt(row=0, epoch=0, tokens=tokens),
        seed=index,
        deadline_version=9,
        prefix=prefix,
    )


class BenchFactory:
    """Opens benches and closes them at the end of the test."""

    def __init__(self, case: Case, folder: Path, *, double_buffering: bool) -> None:
        self.case = case
        self.folder = folder
        self.double_buffering = double_buffering
        self.benches: list[Bench] = []

    def __call__(
        self,
        *,
        max_response_tokens: int = 40,
        stop: tuple[str, ...] = (),
        fetcher: WeightFetcher | None = None,
    ) -> Bench:
        engine = open_torch_engine(
            model_folder=self.case.folder,
            options=EnginesOptions(slots=4, device="cpu", progress_tokens=8, double_buffering=self.double_buffering),
            sampling=SamplingOptions(max_response_tokens=max_response_tokens, stop=stop),
            max_context=64,
            dtype="float32",
            fetcher=open_fetcher() if fetcher is None else fetcher,
        )
        exporter = open_exporter("disk", run_id="engine", learner_epoch=0, folder=self.folder)
        bench = Bench(engine, exporter, SimpleQueue(), {})
        self.benches.append(bench)
        engine.start(bench.emit, bench.said.put)
        engine.execute(OpenEngine())
        assert bench.hear(EngineOpened).num_slots == 4
        return bench

    def close(self) -> None:
        """All of them; no thread of theirs is left."""
        for bench in self.benches:
            bench.engine.close(timeout_s=WAIT_S)
            bench.exporter.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("torch-engine")]
