"""How far the canary is from what is allowed, with the right weights and with wrong ones.

A learner writes the canary of a random model, the embedded engine loads the weights and is probed. What is shown is
:func:`penstock.messages.canary.canary_difference`, of each kind of mistake the least that any one makes and the median.
With its matrices three times as large a model is about as sure of its tokens as a trained one.

Two kinds of mistake no canary can show: another temperature is the sampler's, and positions that are all shifted alike
are the same to a rotary embedding. Those two the mismatch alarm names, from the samples themselves.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from rich.console import Console
from rich.table import Table

from penstock.backends.checkpoint.make import ModelSize, make_model
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.learners.torch.model import DTYPES, PackedModel
from penstock.backends.learners.training.canary import canary_under, choose_canary
from penstock.benchmarks._progress import in_turn
from penstock.messages.arrays import tokens_view
from penstock.messages.canary import canary_difference
from penstock.runtime.scenario.resolve import EXACT_CANARY, LOOSE_CANARY

if TYPE_CHECKING:
    from collections.abc import Iterator

Weights = dict[str, torch.Tensor]
QUICK: Final = ()
QUICK_S: Final = 30
MODELS: Final[tuple[ModelSize, ...]] = ("s", "moe_xs")
SHARPNESS: Final = (1.0, 3.0)
LEARNING_RATES: Final = (1e-6, 1e-3)


def mistakes(right: Weights) -> Iterator[tuple[str, Weights]]:
    """Wrong weights, and what is wrong with them."""
    yield "none", right
    for left, other in itertools.combinations(right, 2):
        if right[left].shape == right[other].shape and right[left].ndim > 1:
            swapped = {**right, left: right[other], other: right[left]}
            yield "two experts swapped" if "experts" in left else "two matrices swapped", swapped
    one, two = (f"model.layers.{number}." for number in range(2))
    yield (
        "two layers swapped",
        {name: right[name.replace(one, two) if one in name else name.replace(two, one)] for name in right},
    )
    for name, weight in right.items():
        if weight.ndim > 1 and "experts" not in name:
            half = weight[: (len(weight) + 1) // 2]
            yield "half of a matrix twice", {**right, name: half.repeat(2, 1)[: len(weight)]}
            yield "a matrix of zeros", {**right, name: torch.zeros_like(weight)}
        elif weight.ndim == 1:
            wrong = weight.clone()
            wrong[0] *= 1.3
            yield "one weight of a norm 30% off", {**right, name: wrong}
    chance = torch.Generator().manual_seed(0)
    for rate in LEARNING_RATES:  # the first step of Adam moves each weight by the learning rate
        moved = {
            name: weight + rate * torch.randn(weight.shape, generator=chance).sign() for name, weight in right.items()
        }
        yield f"one step old, learning rate {rate:g}", moved


def differences(size: ModelSize, sharpness: float, dtype: str, folder: Path) -> dict[str, list[float]]:
    """Make the model in ``folder``, and every mistake in turn: how far each is off, by kind."""
    make_model(size, folder, seed=0)
    wide = PackedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in wide.model.parameters():
            parameter.mul_(sharpness if parameter.ndim > 1 else 1.0)
    wide.save(folder)
    right = {name: weight.clone() for name, weight in wide.named_tensors().items()}
    model = PackedModel.load(folder, dtype=dtype, device=torch.device("cpu"))
    canary = canary_under(model, choose_canary(model))
    engine = TorchEngine(read_model_config(folder), EngineSettings(num_slots=1, dtype=DTYPES[dtype]))
    found: dict[str, list[float]] = {}
    for mistake, weights in mistakes(right):
        engine.load(weights, 0)
        logprobs = engine.probe(tokens_view(canary.tokens)).numpy().tobytes()
        found.setdefault(mistake, []).append(canary_difference(canary, logprobs))
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    argparse.ArgumentParser(prog="penstock bench canary", description=__doc__).parse_args(argv)
    table = Table(title=f"share of the spread; {EXACT_CANARY:g} is allowed in float32, {LOOSE_CANARY:g} in bfloat16")
    for heading in ("model", "matrices", "dtype", "mistake", "made", "least", "median", "missed"):
        table.add_column(heading, justify="right" if heading in ("made", "least", "median", "missed") else "left")
    measured = list(itertools.product(MODELS, SHARPNESS, DTYPES))
    for size, sharpness, dtype in in_turn(measured, lambda each: f"{each[0]}, matrices × {each[1]:g}, {each[2]}"):
        tolerance = EXACT_CANARY if dtype == "float32" else LOOSE_CANARY
        with tempfile.TemporaryDirectory() as folder:
            found = differences(size, sharpness, dtype, Path(folder))
        for mistake, off in found.items():
            missed = sum(difference <= tolerance for difference in off)
            figures = (f"{len(off)}", f"{min(off):.2g}", f"{statistics.median(off):.2g}", f"{missed}")
            table.add_row(size, f"× {sharpness:g}", dtype, mistake, *figures)
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
