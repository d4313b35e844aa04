"""Weights from the learner's device to an engine's by each transport of one machine, and what sleep gives back.

Publish: the exporter's end, from weights on the device until they can be fetched. Fetch: the engine's end, until the
digest is checked. Load: into the fused weights of an embedded engine. Sleep: the engine's memory, given up and taken
again with a ``load``, alone on the device; the driver gives and takes memory in blocks of megabytes. What was fetched
equals what was exported, bit for bit.
"""

from __future__ import annotations

import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.weights.segments import sweep
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.benchmarks._harness import Measured, claim, fact, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks.gpu._stage import made_checkpoint, stage, stand_of

if TYPE_CHECKING:
    import argparse

    from penstock.benchmarks.gpu._stage import Stand

TRANSPORTS: Final = ("shared_memory", "disk")


def measure(given: argparse.Namespace) -> Measured:
    stand = stand_of(given)
    measured = Measured([], [], ("NCCL and CUDA IPC: they go to SGLang servers, of which this stage starts none",))
    with tempfile.TemporaryDirectory() as name:
        folder = made_checkpoint(stand, Path(name) / "model")
        with CheckpointTensors(folder) as tensors:
            weights = {key: tensors[key] for key in tensors}
        size = sum(tensor.nbytes for tensor in weights.values()) / 1e9
        measured.figures.append(plain_figure("weights", "GB", [size]))
        settings = EngineSettings(num_slots=64, max_context=1024, dtype=stand.dtype, device=stand.device)
        engine = TorchEngine(read_model_config(folder), settings)
        _sleep(stand, engine, weights, given.repetitions, measured)
        weights = {key: tensor.to(stand.device) for key, tensor in weights.items()}
        for transport in in_turn(TRANSPORTS):
            _transport(stand, transport, weights, engine, Path(name) / transport, given.repetitions, measured)
    return measured


def _transport(
    stand: Stand, transport: str, weights: dict[str, torch.Tensor], engine: TorchEngine, folder: Path, repetitions: int,
    into: Measured,
) -> None:  # fmt: skip
    run_id = f"gpu{uuid.uuid4().hex[:12]}"
    exporter, fetcher = open_exporter(transport, run_id=run_id, learner_epoch=1, folder=folder), open_fetcher()
    seconds: dict[str, list[float]] = {"publish": [], "fetch": [], "load": []}
    are_equal = True
    try:
        for version in range(repetitions + 1):
            export = partial(exporter.export, weights, version=version, publish=version, canary=None)
            manifest, publish_s = stand.timed(export)
            fetched, fetch_s = stand.timed(partial(fetcher.fetch, manifest))
            _, load_s = stand.timed(partial(engine.load, fetched.tensors, version))
            are_equal &= all(torch.equal(fetched.tensors[key], tensor.cpu()) for key, tensor in weights.items())
            fetched.close()
            exporter.release(version)
            if version:  # the first one warms up
                for part, took_s in (("publish", publish_s), ("fetch", fetch_s), ("load", load_s)):
                    seconds[part].append(took_s)
    finally:
        exporter.close()
        sweep(run_id)
    into.figures.extend(plain_figure(f"{transport}: {part}", "s", values) for part, values in seconds.items())
    into.claims.append(fact(f"{transport}: what was fetched is what was exported", holds=are_equal))


def _sleep(
    stand: Stand, engine: TorchEngine, weights: dict[str, torch.Tensor], repetitions: int, into: Measured
) -> None:
    seconds: dict[str, list[float]] = {"sleep": [], "wake and load": []}
    shares: list[float] = []
    for version in range(repetitions + 1):
        free = stand.free_bytes()
        size_bytes, sleep_s = stand.timed(engine.sleep)
        freed = stand.free_bytes() - free
        _, wake_s = stand.timed(partial(engine.load, weights, version))
        if version:  # the first one warms up
            seconds["sleep"].append(sleep_s)
            seconds["wake and load"].append(wake_s)
            shares.append(freed / size_bytes)
    into.figures.extend(plain_figure(f"engine: {part}", "s", values) for part, values in seconds.items())
    if stand.is_real:
        text = "engine: of the memory that it says it gives up, the driver has"
        into.claims.append(claim(text, shares, at_least=0.95))


def main(argv: list[str] | None = None) -> int:
    return stage(__file__, __doc__, repetitions=5).run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
