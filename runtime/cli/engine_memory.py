"""Whether a model has room on the GPUs of its SGLang engines, as a dry run prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.options import engine_groups
from penstock.backends.learners.megatron.layout.memory import WEIGHT_BYTES
from penstock.runtime.cli.tables import bytes_text
from penstock.runtime.preflight.gpu_memory import (
    DEFAULT_GPU_GB,
    FRACTION,
    GB,
    cache_numbers,
    gpus_of_server,
    weight_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.scenario import Scenario


def engine_lines(scenario: Scenario, architecture: Architecture, gpu_gb: float | None) -> Iterator[str]:
    """Weights and cache of a GPU of each kind of engine; nothing of those that this cannot tell of."""
    width = WEIGHT_BYTES[scenario.model.dtype]
    weights = weight_bytes(scenario, architecture)
    for index, group in enumerate(engine_groups(scenario.engines)):
        num_gpus = gpus_of_server(group)
        if num_gpus is None:
            continue
        own = weights / num_gpus
        yield ""
        key = f"engines.more[{index - 1}]" if index else "engines"
        over = "one GPU each" if num_gpus == 1 else f"{num_gpus} GPUs each, {bytes_text(own)} on one"
        yield f"{key}: {bytes_text(weights)} of weights on {over}"
        fraction, memory = group.sglang.get(FRACTION), (gpu_gb or DEFAULT_GPU_GB) * GB
        if not isinstance(fraction, float):
            continue
        room = fraction * memory - own
        if room <= 0:
            yield f"  which {FRACTION} {fraction:g} of {bytes_text(memory)} does not hold; give an engine more GPUs"
            continue
        tokens = int(room / (cache_numbers(architecture, num_gpus) * width))
        contexts = tokens // scenario.model.max_context
        room_text = f"{bytes_text(room)} of {memory / GB:g} GB for the cache"
        yield f"  {FRACTION} {fraction:g} leaves {room_text}: {tokens} tokens, {contexts} samples of model.max_context"
