"""What ranks do in the tests of weights and logits. Imported by ranks only."""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from penstock.backends.learners.batch.sequences import TrainSequence, demonstration_sequence
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.model.build import ParallelModel, build_model, close_groups, open_groups
from penstock.backends.learners.megatron.schedule.schedule import MicroBatchRunner
from penstock.backends.learners.megatron.weights.gather import WeightGatherer
from penstock.backends.learners.megatron.weights.load import load_weights
from penstock.backends.learners.megatron_options import MegatronOptions

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.layout.model_config import Precision

CPU = torch.device("cpu")
BUCKET_BYTES = 40_000


def opened(
    rank: int, folder: str, keys: dict[str, Any], num_ranks: int, *, precision: Precision = "float32"
) -> tuple[ParallelModel, MegatronOptions]:
    """A model with its weights."""
    options = MegatronOptions(**keys)
    layout = layout_of(options, num_ranks)
    open_groups(layout, seed=1)
    model = build_model(read_architecture(Path(folder)), layout, options, precision=precision, device=CPU)
    load_weights(model, Path(folder), rank=rank)
    return model, options


def gathered(model: ParallelModel, rank: int) -> list[list[tuple[str, torch.Tensor]]]:
    gatherer = WeightGatherer(model, rank=rank, device=CPU, max_bucket_bytes=BUCKET_BYTES)
    return [[(name, tensor) for name, tensor in bucket] for bucket in gatherer.buckets()]


def round_trip(
    rank: int, folder: str, keys: dict[str, Any], num_ranks: int, precision: Precision = "float32"
) -> tuple[list[str], str] | None:
    """What :func:`compare` says of a model of this precision."""
    model, _ = opened(rank, folder, keys, num_ranks, precision=precision)
    compared = compare(model, rank, folder)
    close_groups()
    return compared


def compare(model: ParallelModel, rank: int, folder: str) -> tuple[list[str], str] | None:
    """On the first rank: tensors that are not those of the checkpoint, in the model's dtype but for what stays float32,
    and a digest of what came with its buckets."""
    buckets = gathered(model, rank)
    if rank:
        return None
    found = {name: tensor for bucket in buckets for name, tensor in bucket}
    wanted = {
        name: tensor if name.endswith("correction_bias") else tensor.to(model.config.params_dtype)
        for name, tensor in load_file(Path(folder) / "model.safetensors").items()
    }
    wrong = sorted(found.keys() ^ wanted.keys())
    wrong += [
        name
        for name in found.keys() & wanted.keys()
        if found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])
    ]
    digest = hashlib.sha256()
    for bucket in buckets:
        digest.update(f"{len(bucket)}".encode())
        for name, tensor in bucket:
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return wrong, digest.hexdigest()


def noted_while_loading(rank: int, folder: str) -> list[str]:
    """What is said about a checkpoint."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("penstock.backends.learners.megatron.weights.load")
    logger.addHandler(handler)
    opened(rank, folder, {}, 1)
    logger.removeHandler(handler)
    close_groups()
    return said


def sequences(vocab_size: int, lengths: list[int], *, seed: int = 5) -> list[TrainSequence]:
    """Whose tokens but the first are all trained."""
    drawn = np.random.default_rng(seed)
    rows = [drawn.integers(0, vocab_size, length).tolist() for length in lengths]
    return [demonstration_sequence(row[:1], row[1:], sample=number) for number, row in enumerate(rows)]


def outputs(
    rank: int, folder: str, keys: dict[str, Any], num_ranks: int, batches: list[list[int]], temperature: float
) -> tuple[tuple[list[str], str] | None, list[tuple[Any, Any]]]:
    """What :func:`compare` says; and log-probs and entropy of micro-batches of sequences of these lengths, on ranks of
    the last stage."""
    model, _ = opened(rank, folder, keys, num_ranks)
    compared = compare(model, rank, folder)
    runner = MicroBatchRunner(model, model.chunks, device=CPU, temperature=temperature)
    vocab_size = model.architecture.vocab_size
    found = runner.scores([sequences(vocab_size, lengths, seed=n) for n, lengths in enumerate(batches)])
    close_groups()
    return compared, [(part.logprobs.numpy(), part.entropy.numpy()) for part in found]
