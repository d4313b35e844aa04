"""A warm start that an earlier run has made bit for bit is taken from the user's cache.

Invariants:

* Kept and taken are only those of one rank on a CPU with :data:`~penstock.backends.result_cache.MAX_ENTRY_BYTES` of
  weights at most: there the same steps give the same bits. Others are computed every time.
* The key is everything that the steps depend on: weights and config before them, every token, the whole ``learner:``
  block, torch's settings and random state, and what :func:`~penstock.backends.result_cache.key_of` adds.
* After it weights and torch's random state are those that the steps leave, whether they were made or not.
"""

# torch's functions are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec
import torch
from safetensors.torch import load, save

from penstock.backends.learners.torch.warm_start import warm_start
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.backends.result_cache import MAX_ENTRY_BYTES, Kept, key_of, open_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.options import LearnerOptions, WarmStartOptions
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.worker_group.workers import WorkerGroup

KIND: Final = "warm_starts"
WEIGHT: Final = "weight/"
RANDOM_STATE: Final = "random_state"
LOSS: Final = "loss"
NOT_COMPUTED: Final = "the warm start is not computed"
"""How the sentence begins that says so: something to know, and nothing wrong."""


def warm_start_or_kept(
    model: PackedModel,
    demonstrations: Sequence[TrainSequence],
    options: LearnerOptions,
    block: WarmStartOptions,
    *,
    seed: int,
    report: Callable[[float, float], None],
    check_stop: Callable[[], None],
    workers: WorkerGroup = SOLO,
) -> str:
    """As :func:`.warm_start`, or what it gave before; what people should know of that, in a sentence, or nothing."""

    def steps(report: Callable[[float, float], None]) -> None:
        warm_start(
            model, demonstrations, options, block, seed=seed, report=report, check_stop=check_stop, workers=workers
        )

    cache = open_cache(KIND) if _gives_the_same_bits(model, workers) else None
    if cache is None:
        steps(report)
        return ""
    key = _key(model, demonstrations, options, seed)
    kept = cache.read(key)
    if (loss := _restored(model, kept)) is not None:
        report(1.0, loss)
        return f"{NOT_COMPUTED}: its weights are those of an earlier run that began alike ({kept.file})"
    losses: list[float] = []

    def note(fraction: float, loss: float) -> None:
        losses.append(loss)
        report(fraction, loss)

    steps(note)
    tensors = {f"{WEIGHT}{name}": tensor.detach().contiguous() for name, tensor in model.model.named_parameters()}
    tensors |= {RANDOM_STATE: torch.get_rng_state(), LOSS: torch.tensor(losses[-1], dtype=torch.float64)}
    cache.keep(key, save(tensors))
    return kept.refusal


def _gives_the_same_bits(model: PackedModel, workers: WorkerGroup) -> bool:
    parameters = list(model.model.parameters())
    return (
        workers.is_alone
        and all(parameter.device.type == "cpu" for parameter in parameters)
        and sum(parameter.nbytes for parameter in parameters) < MAX_ENTRY_BYTES
    )


def _key(model: PackedModel, demonstrations: Sequence[TrainSequence], options: LearnerOptions, seed: int) -> str:
    tokens = hashlib.blake2b()
    for sequence in demonstrations:
        tokens.update(f"{len(sequence.tokens)} {sequence.num_context} ".encode())
        tokens.update(sequence.tokens.tobytes() + sequence.trained.tobytes())
    settings = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,  # pyright: ignore[reportUnknownArgumentType]
        torch.backends.cpu.get_cpu_capability(),
    )
    config = {name: value for name, value in model.model.config.to_dict().items() if name != "_name_or_path"}
    named = (*model.model.named_parameters(), *model.model.named_buffers())
    return key_of(
        {
            "tokens": tokens.digest(),
            "options": msgspec.msgpack.encode(options),
            "seed": str(seed),
            "settings": repr(settings),
            "random state": _bytes_of(torch.get_rng_state()),
            "model": f"{type(model.model)} {sorted(config.items())}",
            "weights": _digest_of(named),
        }
    )


def _digest_of(named: Iterable[tuple[str, Tensor]]) -> bytes:
    digest = hashlib.blake2b()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} ".encode())
        digest.update(_bytes_of(tensor))
    return digest.digest()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@torch.no_grad()
def _restored(model: PackedModel, kept: Kept) -> float | None:
    """Put what was kept into the model; the loss of the last step, or None where there is nothing."""
    if kept.content is None:
        return None
    tensors = load(kept.content)
    for name, parameter in model.model.named_parameters():
        parameter.copy_(tensors[f"{WEIGHT}{name}"])
    torch.set_rng_state(tensors[RANDOM_STATE])
    return float(tensors[LOSS])
