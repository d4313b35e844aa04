"""Weights through shared memory hold an engine up for less than one and a half times the copying of their bytes.

A publish of ``--megabytes`` in float32 from a learner's memory into an embedded engine's. Held up is what nothing can
be generated in: loading, and whatever is looked at again after it. The publish and the fetch, with its digest, go on
while the engine decodes and are figures beside it. The copy is of the same tensors into memory that has been written to
before, made right before the load in the same turn, on as many threads. The canary's few tokens are left out.

At the swap bytes are hashed again only if somebody has opened the segment for writing since the fetch: the other arm,
in which somebody does, shows what that takes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.checkpoint.make import ModelShape, write_made_model
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.fetching import fetch_publish
from penstock.backends.weights.segments import sweep
from penstock.backends.weights.shared_memory import SharedMemoryExporter
from penstock.backends.weights.transports import open_fetcher
from penstock.benchmarks._harness import Benchmark, Measured, claim, fact, figures, interleaved, pairs, plain_figure

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

QUICK: Final = ("--megabytes", "120", "--repetitions", "5")
QUICK_S: Final = 20
MOST: Final = 1.5
LAYER: Final = ModelShape(hidden=768, layers=1, heads=12, kv_heads=12, head_dim=64, intermediate=2240)
LAYER_BYTES: Final = 4 * (4 * 768 * 768 + 3 * 768 * 2240)
"""Of its matrices in float32."""
ARMS: Final = {"nobody comes": False, "somebody opens it for writing": True}


class Brought(NamedTuple):
    """One publish, until an engine serves it."""

    publish_s: float
    fetch_s: float
    copy_s: float
    load_s: float
    check_s: float
    """For the digest after the load."""
    is_same: bool
    """Whether that is the manifest's."""


class Way:
    """A learner's weights, an exporter, an engine, and memory to copy to."""

    def __init__(self, folder: Path, run_id: str) -> None:
        with CheckpointTensors(folder) as tensors:
            self.weights: Mapping[str, torch.Tensor] = {name: tensors[name].float() for name in tensors}
        self.size_bytes = sum(tensor.nbytes for tensor in self.weights.values())
        self.exporter = SharedMemoryExporter(run_id, 1)
        self._engine = TorchEngine(read_model_config(folder), EngineSettings(num_slots=1, max_context=64))
        self._copies = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self._version = 0

    def bring(self, *, is_written: bool = False) -> Brought:
        """One version.

        Args:
            is_written: somebody opens the segment for writing after the fetch.
        """
        self._version += 1
        began_s = perf_counter()
        manifest = self.exporter.export(self.weights, version=self._version, publish=self._version, canary=None)
        published_s = perf_counter()
        fetched = fetch_publish(open_fetcher(), manifest, "")
        fetched_s = perf_counter()
        if is_written:
            with contextlib.suppress(BlockingIOError):  # the engine is told, and whoever it is has to wait
                os.close(os.open(manifest.location, os.O_RDWR | os.O_NONBLOCK))
        assert fetched.model is not None
        from_s = perf_counter()
        for name, tensor in fetched.model.items():
            self._copies[name].copy_(tensor)
        copied_s = perf_counter()
        self._engine.load(fetched.model, self._version)
        loaded_s = perf_counter()
        digest = fetched.digest_now()
        checked_s = perf_counter()
        fetched.close()
        self.exporter.release(self._version)
        return Brought(
            publish_s=published_s - began_s,
            fetch_s=fetched_s - published_s,
            copy_s=copied_s - from_s,
            load_s=loaded_s - copied_s,
            check_s=checked_s - loaded_s,
            is_same=digest == manifest.digest,
        )


def measure(given: argparse.Namespace) -> Measured:
    """Both arms in turn."""
    torch.set_num_threads(1)
    run_id, layers = f"publish{uuid.uuid4().hex[:12]}", max(1, round(given.megabytes * 1e6 / LAYER_BYTES))
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        write_made_model(LAYER._replace(layers=layers), Path(name) / "model", seed=0)
        way = Way(Path(name) / "model", run_id)
        try:
            arms = {arm: partial(way.bring, is_written=is_written) for arm, is_written in ARMS.items()}
            turns = interleaved(arms, given.repetitions)
        finally:
            way.exporter.close()
            sweep(run_id)
    copied = figures(turns, "s to copy it", lambda each: each.copy_s)
    held_up = figures(turns, "s held up", lambda each: each.load_s + each.check_s)
    found = [plain_figure("a publish", "MB", [way.size_bytes / 1e6]), *copied, *held_up]
    found += figures(turns, "s of that to look at it again", lambda each: each.check_s)
    found += figures(turns, "s to publish", lambda each: each.publish_s)
    found += figures(turns, "s to fetch", lambda each: each.fetch_s)
    found.append(plain_figure("somebody opens it for writing: held up", "× the copy", pairs(held_up[1], copied[1])))
    are_same = all(turn.value.is_same for arm in turns.values() for turn in arm)
    claims = [
        claim("nobody comes: held up ÷ copying it", pairs(held_up[0], copied[0]), at_most=MOST),
        fact("the digest after the load is that of the learner", holds=are_same),
    ]
    return Measured(found, claims)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    benchmark = Benchmark(__file__, __doc__, repetitions=7)
    benchmark.option("--megabytes", type=float, default=1000.0, help="of a publish (default: 1000)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
