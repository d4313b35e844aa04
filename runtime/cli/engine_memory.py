"""What models take of the memory of embedded engines, and of the GPUs of SGLang's, as a dry run prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES
from penstock.backends.learners.megatron.layout.memory import WEIGHT_BYTES
from penstock.backends.protocol import Capability
from penstock.runtime.cli.tables import bytes_text
from penstock.runtime.preflight.gpu_memory import (
    DEFAULT_GPU_GB,
    FRACTION,
    GB,
    cache_numbers,
    gpus_of_server,
    weight_bytes,
)
from penstock.runtime.scenario.architecture import UnreadableModelError, find_architecture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.engines.options import EngineGroupOptions
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.scenario import Scenario


def embedded_text(scenario: Scenario) -> str:
    """The sets of weights of each kind of embedded engine, as comment lines; empty where there are none, or the model
    is not here to be counted."""
    engines = scenario.engines
    held = [
        (f"engines.more[{index - 1}]" if index else "engines", group)
        for index, group in enumerate(engine_groups(engines))
        if {Capability.EMBEDDED, Capability.HOLDS_WEIGHTS} <= ENGINES.spec(group.backend).capabilities
    ]
    try:
        found = find_architecture(scenario) if held else None
    except UnreadableModelError:
        return ""
    if found is None:
        return ""
    size = weight_bytes(scenario, found.architecture)
    lora = scenario.learner.lora
    has_one = engines.placement == "colocate" or (lora is not None and lora.publish == "adapter")
    lines = [f"# {key}: {_sets(group, size, has_one=has_one)}" for key, group in held]
    return "\n".join([*lines, "#", ""])


def _sets(group: EngineGroupOptions, size: int, *, has_one: bool) -> str:
    each = f"{bytes_text(size)} of weights in each of {group.count}"
    wanted = False if has_one else group.double_buffering
    if wanted is None:
        wanted = None if group.device in ("auto", "cpu") else False
    if wanted is False:
        return each
    when = "" if wanted else " on a CPU with two cores or more, where ten sets would go into what memory is free"
    return f"{each}, and as much again for the set that is prepared (double_buffering){when}"


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
