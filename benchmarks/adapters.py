"""LoRA published as an adapter takes at most 5 % of the bytes of the merged model and at most 20 % of its time until an
embedded engine has loaded it, and the engine's log-probs are the same to 1e-5.

A learner's model of about 360 MB with random weights and adapters of the default rank beside all of its matrices, in
float32, and an engine beside it. Publish: the learner's end, from the weights in its memory until they can be fetched.
Fetch: the engine's end, until the digest is checked. Load: into the memory that the engine computes with. What goes
along with both ways is left out: the canary on both sides, and messages. The model beneath the adapters, which goes
once, is a row of its own, and so is what the engine generates either way.
"""

from __future__ import annotations

import tempfile
import uuid
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.checkpoint.make import ModelShape, write_made_model
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.fetching import fetch_publish
from penstock.backends.engines.torch.requests import GenerationRequest
from penstock.backends.learners.options import LoraOptions
from penstock.backends.learners.torch.adapter_publishing import AdapterPublisher
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.publishing import GatheredWeights
from penstock.backends.learners.torch.reference import BasePolicy
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.backends.weights.segments import sweep
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.benchmarks._harness import Benchmark, Measured, claim, fact, figures, interleaved, pairs, plain_figure
from penstock.messages.arrays import pack_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.weights import WeightManifest

QUICK: Final = ("--layers", "2", "--repetitions", "1")
QUICK_S: Final = 20
SHAPE: Final = ModelShape(hidden=768, layers=12, heads=12, kv_heads=12, head_dim=64, intermediate=2240)
TRANSPORTS: Final = ("shared_memory", "disk")
PROBED: Final = range(2, 34)
MOST_BYTES: Final = 0.05
MOST_TIME: Final = 0.2
TOLERANCE: Final = 1e-5
NUM_SLOTS: Final = 16
NEW_TOKENS: Final = 24


class Brought(NamedTuple):
    """One publish, until an engine has it."""

    size_bytes: int
    publish_s: float
    fetch_s: float
    load_s: float

    @property
    def whole_s(self) -> float:
        """All three, one after the other."""
        return self.publish_s + self.fetch_s + self.load_s


class Way:
    """A learner's end of one transport and an engine that takes what it publishes."""

    def __init__(self, folder: Path, engine: TorchEngine, exporter: WeightExporter) -> None:
        self.engine = engine
        self._config = read_model_config(folder)
        self._exporter = exporter
        self._version = 0
        self._loaded_base = ""

    def bring(self, publish: Callable[[int], WeightManifest]) -> Brought:
        """One version from the learner's memory into the engine's."""
        self._version += 1
        began_s = perf_counter()
        manifest = publish(self._version)
        published_s = perf_counter()
        fetched = fetch_publish(open_fetcher(), manifest, self._loaded_base)
        assert not fetched.what_is_wrong(self._config)
        fetched_s = perf_counter()
        self.engine.load(fetched.model, self._version, fetched.adapters)
        self._loaded_base = manifest.base_digest
        loaded_s = perf_counter()
        size_bytes = manifest.size_bytes
        if fetched.has_base and manifest.base is not None:
            size_bytes += manifest.base.size_bytes
        fetched.close()
        self._exporter.release(self._version)
        return Brought(size_bytes, published_s - began_s, fetched_s - published_s, loaded_s - fetched_s)


def measure(given: argparse.Namespace) -> Measured:
    """Both ways in turn, over each transport."""
    torch.set_num_threads(1)
    measured = Measured([], [])
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        folder = Path(name) / "model"
        write_made_model(SHAPE._replace(layers=given.layers), folder, seed=0)
        model = PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))
        model.adapt(LoraOptions(publish="adapter"))
        assert model.adapters is not None
        generator = torch.Generator().manual_seed(1)
        for tensor in model.adapters.state().values():
            tensor.data.normal_(std=0.02, generator=generator)
        for transport in TRANSPORTS:
            _measure(transport, folder, model, Path(name) / transport, given.repetitions, measured)
    return measured


def _measure(transport: str, folder: Path, model: PackedModel, place: Path, repetitions: int, into: Measured) -> None:
    assert model.adapters is not None
    run_id, base = f"adapters{uuid.uuid4().hex[:12]}", BasePolicy(model, model.adapters)
    exporters = [
        open_exporter(transport, run_id=run_id, learner_epoch=1, folder=place / way) for way in ("merged", "adapter")
    ]
    try:
        merged, alone = (Way(folder, _engine(folder), exporter) for exporter in exporters)
        publisher = AdapterPublisher(SOLO, exporters[1])

        def publish_merged(version: int) -> WeightManifest:
            return exporters[0].export(GatheredWeights(model, SOLO), version=version, publish=version, canary=None)

        def publish_alone(version: int) -> WeightManifest:
            manifest = publisher.publish(model, base, version=version, publish=version, canary=None)
            assert manifest is not None
            return manifest

        first = alone.bring(publish_alone)
        turns = interleaved(
            {"merged": partial(merged.bring, publish_merged), "adapter": partial(alone.bring, publish_alone)},
            repetitions,
        )
        difference = (merged.engine.probe(PROBED) - alone.engine.probe(PROBED)).abs().max()
        if transport == TRANSPORTS[0]:
            arms = {"merged": partial(_generate, merged.engine), "adapter": partial(_generate, alone.engine)}
            into.figures.extend(figures(interleaved(arms, repetitions), "tokens/s generated", float))
    finally:
        for exporter in exporters:
            exporter.close()
        sweep(run_id)
    named = f"{transport}: {{}}"
    sizes = figures(turns, "MB", lambda each: each.size_bytes / 1e6, named)
    whole = figures(turns, "s until it is loaded", lambda each: each.whole_s, named)
    into.figures.extend(sizes)
    into.figures.extend(figures(turns, "s to publish", lambda each: each.publish_s, named))
    into.figures.extend(figures(turns, "s to fetch", lambda each: each.fetch_s, named))
    into.figures.extend(figures(turns, "s to load", lambda each: each.load_s, named))
    into.figures.extend(whole)
    into.figures.append(plain_figure(f"{transport}: the first, with its model", "MB", [first.size_bytes / 1e6]))
    into.figures.append(
        plain_figure(f"{transport}: the first, with its model", "s until it is loaded", [first.whole_s])
    )
    into.claims.extend(
        (
            claim(f"{transport}: bytes, adapter ÷ merged", pairs(sizes[1], sizes[0]), at_most=MOST_BYTES),
            claim(f"{transport}: time until it is loaded, likewise", pairs(whole[1], whole[0]), at_most=MOST_TIME),
            fact(f"{transport}: log-probs are the same to {TOLERANCE:g}", holds=float(difference) <= TOLERANCE),
        )
    )


def _generate(engine: TorchEngine) -> float:
    """Tokens a second, with all slots in use."""
    for slot in range(NUM_SLOTS):
        prompt = pack_tokens(range(2, 10))
        engine.submit(GenerationRequest(tag=slot, prompt=prompt, seed=slot, max_new_tokens=NEW_TOKENS))
    began_s = perf_counter()
    while engine.num_running or engine.num_queued:
        engine.step()
    return NUM_SLOTS * NEW_TOKENS / (perf_counter() - began_s)


def _engine(folder: Path) -> TorchEngine:
    return TorchEngine(read_model_config(folder), EngineSettings(num_slots=NUM_SLOTS, max_context=64))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--layers", type=int, default=SHAPE.layers, help=f"of the model (default: {SHAPE.layers})")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
