"""How much a step has to compute, from the shapes of the model's own weights and the lengths of its sequences; and what
share of the device that uses.

Counted is what the step needs, not what it happens to do: padding, contexts that several micro-batches compute again,
activations that are computed twice and the forward passes of reference, critic or opening policy take time and are no
work here. A multiplication with an addition is two operations.

Invariants:

* A weight matrix costs two operations an input token; of experts only those that a token is sent to. The output head
  costs that for trained tokens alone. Attention costs its products for each pair of a token and one before it (or
  itself), within the window where the layer has one; what samples of a group share is counted once.
* The backward pass costs as much again for the gradient of what goes into a matrix, and as much again for that of the
  matrix where it is trained: three times the forward pass, or two where the weights stay as they are.
* There is no utilisation where the peak of the device is not known. None is guessed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from penstock.backends.learners.batch.packing import Laid, longest_shared, shareable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.backends.learners.batch.sequences import TrainSequence

TERA: Final = 1e12

BFLOAT16_PEAKS_TFLOPS: Final[Mapping[str, float]] = {
    "B200": 2250.0,
    "GB200": 2500.0,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 311.8,
    "A800": 311.8,
    "A40": 149.7,
    "A30": 165.0,
    "L40S": 362.05,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}
"""Of the tensor cores with bfloat16 inputs and float32 sums, dense, as NVIDIA's data sheets and architecture white
papers name them (those that only name a figure with sparsity: its half), by what stands in the device's name. The first
that fits whole words of it holds."""


class _Parameter(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def requires_grad(self) -> bool: ...
    def numel(self) -> int: ...


class Matrices(NamedTuple):
    """Operations of the forward pass, a token."""

    every: float = 0.0
    trained: float = 0.0
    """Of these, in matrices that get gradients."""

    def plus(self, operations: float, *, is_trained: bool) -> Matrices:
        return Matrices(self.every + operations, self.trained + operations * is_trained)

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 2.0 * self.every + self.trained


class ModelShape(NamedTuple):
    """What a decoder costs."""

    layers: Matrices
    """An input token."""
    head: Matrices
    """A trained token."""
    pair: float
    """Forward, a pair of tokens in one layer of attention."""
    windows: tuple[int | None, ...]
    """Of each layer of attention; None: it sees everything before."""


class Config(NamedTuple):
    """What the weights do not tell."""

    num_layers: int
    num_heads: int
    key_dim: int
    """Dimension of a head's queries and keys."""
    value_dim: int
    num_experts: int = 0
    experts_per_token: int = 0
    windows: tuple[int | None, ...] = ()
    """As in :class:`ModelShape`; empty: all layers see everything."""


_ONE_EXPERT: Final = re.compile(r"\.experts\.\d+\.")


def model_shape(
    parameters: Mapping[str, _Parameter], config: Config, *, embeddings: frozenset[str], head: _Parameter
) -> ModelShape | None:
    """The cost of a model; None where its experts cannot be told apart.

    Args:
        parameters: by name, each once. Weights that are divided over ranks have the shape of the whole.
        config: of the architecture.
        embeddings: names of tables that are looked up, not multiplied with.
        head: weight of the output head; it may be a table of embeddings as well.
    """
    layers = Matrices()
    for name, parameter in parameters.items():
        if name in embeddings or parameter is head or len(parameter.shape) < 2 or "bias" in name.rpartition(".")[2]:
            continue
        share = _share_of(name, parameter, config)
        if share is None:
            return None
        layers = layers.plus(2.0 * parameter.numel() * share, is_trained=parameter.requires_grad)
    return ModelShape(
        layers=layers,
        head=Matrices().plus(2.0 * head.numel(), is_trained=head.requires_grad),
        pair=2.0 * config.num_heads * (config.key_dim + config.value_dim),
        windows=config.windows or (None,) * config.num_layers,
    )


def _share_of(name: str, parameter: _Parameter, config: Config) -> float | None:
    """Of a weight, that one token goes through; None where that is not known."""
    is_stack = len(parameter.shape) == 3
    if not is_stack and not _ONE_EXPERT.search(name):
        return 1.0 if len(parameter.shape) == 2 else 0.0  # convolutions over a few tokens: nothing beside the rest
    if is_stack and parameter.shape[0] != config.num_experts:
        return None if ".experts" in name else 0.0
    if not config.experts_per_token:
        return None
    return config.experts_per_token / config.num_experts


class Work(NamedTuple):
    """Of one pass over a batch."""

    num_inputs: int
    num_trained: int
    sequences: tuple[tuple[int, int], ...]
    """Of each how many inputs are those that another one begins with, and all of them."""

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> Work:
        """What :func:`.pack` would lay out, if it got all of them at once."""
        laid: dict[int, list[Laid]] = {}
        lengths: list[tuple[int, int]] = []
        for sequence in sequences:
            own = shareable(sequence) if sequence.media else sequence.tokens[:-1]
            siblings = laid.setdefault(sequence.prompt, [])
            lengths.append((len(longest_shared(own, siblings)), len(sequence.tokens) - 1))
            siblings.append(Laid(own, np.arange(len(own))))
        return cls(
            num_inputs=sum(length - shared for shared, length in lengths),
            num_trained=sum(len(sequence.trained) for sequence in sequences),
            sequences=tuple(lengths),
        )

    def num_pairs(self, window: int | None) -> int:
        """Of a token and one that it sees, in a layer with this window."""
        return sum(causal_pairs(length, window) - causal_pairs(shared, window) for shared, length in self.sequences)


def causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a token and one before it, or itself, at most ``window`` in all of each."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(shape: ModelShape, work: Work) -> float:
    """Operations of a forward pass."""
    pairs = sum(_pairs_by_layer(shape, work))
    return shape.layers.every * work.num_inputs + shape.head.every * work.num_trained + shape.pair * pairs


def training_flops(shape: ModelShape, work: Work) -> float:
    """Operations of a forward and a backward pass."""
    pairs = sum(_pairs_by_layer(shape, work))
    return shape.layers.training * work.num_inputs + shape.head.training * work.num_trained + 3.0 * shape.pair * pairs


def _pairs_by_layer(shape: ModelShape, work: Work) -> Iterator[int]:
    of_window = {window: work.num_pairs(window) for window in set(shape.windows)}
    return (of_window[window] for window in shape.windows)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Of a device in this type of number; None where it is not known."""
    if dtype not in ("bfloat16", "float16"):  # of equal speed on all of these
        return None
    words = f" {re.sub(r'[^A-Za-z0-9]+', ' ', device_name)} "
    return next((peak for name, peak in BFLOAT16_PEAKS_TFLOPS.items() if f" {name} " in words), None)


class Speed(NamedTuple):
    """What the figures of a step's speed are made from."""

    shape: ModelShape | None
    peak_tflops: float | None
    """Peak of one device in TFLOP/s; None: not known."""
    num_ranks: int
    num_passes: int

    def figures(self, sequences: Sequence[TrainSequence], step_time_s: float) -> dict[str, float]:
        """``perf/…`` of a step on these sequences: tokens a second of all ranks, operations a second of each."""
        num_tokens = sum(len(sequence.tokens) for sequence in sequences)
        figures = {
            "perf/actor_train_time": step_time_s,
            "perf/actor_train_tok_per_s": num_tokens / step_time_s,
        }
        if self.shape is not None:
            operations = training_flops(self.shape, Work.of(sequences)) * self.num_passes
            figures["perf/actor_train_tflops"] = operations / step_time_s / self.num_ranks / TERA
            if self.peak_tflops is not None:
                figures["perf/mfu"] = figures["perf/actor_train_tflops"] / self.peak_tflops
        return figures
