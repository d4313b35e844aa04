"""What is trained in the tests of experts: the same for transformers and for every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import training_plan as plan

from penstock.backends.learners.batch.sequences import TrainSequence, demonstration_sequence

NUM_STEPS = 2
NUM_EXPERTS = 8
PER_TOKEN = 2
LOSSES: dict[str, dict[str, float]] = {
    "sequences and step": {"seq_aux_loss": 0.3, "global_aux_loss": 0.5, "z_loss": 0.05},
    "step": {"aux_loss": 0.5},
    "sequences": {"seq_aux_loss": 0.5, "z_loss": 0.05},
    "z": {"z_loss": 0.05},
}
"""Coefficients by kind; large, so that one that is missing shows."""


def fields(losses: str) -> dict[str, Any]:
    """As a scenario says them."""
    coefficients = dict(LOSSES[losses])
    z_loss = coefficients.pop("z_loss", None)
    found: dict[str, Any] = {} if z_loss is None else {"moe_z_loss_coeff": z_loss}
    if len(coefficients) > 1:
        found |= {"moe_router_load_balancing_type": list(coefficients), "moe_aux_loss_coeff": [*coefficients.values()]}
    for name, value in coefficients.items() if len(coefficients) == 1 else ():
        found |= {"moe_router_load_balancing_type": name, "moe_aux_loss_coeff": value}
    return found


def recorded(
    lengths: list[list[int]], vocab_size: int, choices: str | list[Any], num_layers: int = 4
) -> list[list[TrainSequence]]:
    """Micro-batches of sequences of these lengths, whose inputs have drawn experts.

    Args:
        choices: ``all`` inputs have; ``some``, that is, the first half of every second sequence; ``ignored``; or those
            of each sequence.
    """
    given = iter(choices) if isinstance(choices, list) else None
    drawn = np.random.default_rng(11)
    batches: list[list[TrainSequence]] = []
    for row in lengths:
        batch: list[TrainSequence] = []
        for number, length in enumerate(row):
            tokens = drawn.integers(0, vocab_size, length).tolist()
            orders = drawn.random((length - 1, num_layers, NUM_EXPERTS)).argsort(-1)
            experts = orders[..., :PER_TOKEN].astype(np.int16)
            if given is not None:
                experts = next(given)
            if choices == "some":
                experts = experts[: length // 2]
            sequence = demonstration_sequence(tokens[:2], tokens[2:], sample=number)
            batch.append(sequence._replace(experts=experts if choices != "some" or number % 2 == 0 else None))
        batches.append(batch)
    return batches


__all__ = ["LOSSES", "NUM_STEPS", "fields", "plan", "recorded"]
