"""Whether a model has room on the GPUs of its SGLang engines, as a dry run prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES
from penstock.backends.learners.megatron.bridge.weight_map import parameters_of
from penstock.backends.learners.megatron.layout.memory import WEIGHT_BYTES
from penstock.messages.errors import UserFault
from penstock.runtime.cli.tables import bytes_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.engines.options import EngineGroupOptions
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.scenario import Scenario

DEFAULT_GPU_GB: Final = 80.0
GB: Final = 1e9
COPIES: Final = ("dp_size", "data_parallel_size", "attn_dp_size", "enable_dp_attention", "moe_dp_size", "quantization")
"""Options of a server under which its GPUs do not share the weights evenly."""
FRACTION: Final = "mem_fraction_static"


def engine_lines(scenario: Scenario, architecture: Architecture, gpu_gb: float | None) -> Iterator[str]:
    """Weights and cache of a GPU of each kind of engine; nothing of those that this cannot tell of."""
    width = WEIGHT_BYTES[scenario.model.dtype]
    weights = width * sum(parameter.num_elements for parameter in parameters_of(architecture))
    for index, group in enumerate(engine_groups(scenario.engines)):
        num_gpus = _num_gpus(group)
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
        tokens = int(room / (_cache_numbers(architecture, num_gpus) * width))
        contexts = tokens // scenario.model.max_context
        room_text = f"{bytes_text(room)} of {memory / GB:g} GB for the cache"
        yield f"  {FRACTION} {fraction:g} leaves {room_text}: {tokens} tokens, {contexts} samples of model.max_context"


def _num_gpus(group: EngineGroupOptions) -> int | None:
    """Of an engine; None where its GPUs do not share the weights evenly, or where it has none that we start."""
    spec = ENGINES.spec(group.backend)
    if "sglang" not in spec.keys or group.device == "cpu" or any(key in group.sglang for key in COPIES):
        return None
    try:
        size = spec.size(group)
    except UserFault:
        return None
    return None if size is None else size.num_gpus


def _cache_numbers(architecture: Architecture, num_gpus: int) -> float:
    """Numbers in the cache of a GPU for each token."""
    if architecture.latent is not None:  # every GPU has all of the short vectors
        return architecture.num_layers * (architecture.latent.kv_rank + architecture.latent.rope_dim)
    heads = max(1.0, architecture.num_kv_heads / num_gpus)
    return 2 * architecture.num_layers * heads * architecture.head_dim
