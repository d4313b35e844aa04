"""What ranks do in the tests against mbridge, another project's converter. Imported by ranks only."""

# mbridge has no types, and transformers in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (mbridge is installed by `make test-megatron` only)
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from weight_cases import CPU, opened

from penstock.backends.learners.megatron.model.build import build_model, close_groups
from penstock.backends.learners.megatron.weights.load import own_parameters

ON_CPU: dict[str, Any] = {
    "use_cpu_initialization": True, "bias_activation_fusion": False, "bias_dropout_fusion": False,
    "masked_softmax_fusion": False, "persist_layer_norm": False, "gradient_accumulation_fusion": False,
    "moe_shared_expert_overlap": False,
}  # fmt: skip


@torch.no_grad()
def differing(rank: int, folder: str, keys: dict[str, Any], num_ranks: int) -> tuple[list[str], int]:
    """Parameters of this rank that mbridge fills otherwise than we do, and how many there are."""
    from mbridge import AutoBridge
    from mbridge.core.bridge import Bridge
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    ours, options = opened(rank, folder, keys, num_ranks)
    theirs = build_model(ours.architecture, ours.layout, options, precision="float32", device=CPU)
    for _, parameter in own_parameters(theirs, rank):
        parameter.fill_(torch.nan)
    config: Any = transformers.AutoConfig.from_pretrained(Path(folder))
    config.rope_theta, config.rope_scaling = ours.architecture.rope.theta, None  # named as before transformers 5
    if ours.architecture.latent:
        latent: Any = DeepseekV3Bridge
        # The configuration that it makes has a field that megatron-core has not, and it reads quantized tensors only.
        plain: Any = Bridge

        def config_of_ours(_: object) -> object:
            return ours.config

        latent._build_config, latent._get_safetensor_io = config_of_ours, plain._get_safetensor_io
    bridge: Any = AutoBridge.from_config(config, dtype=torch.float32)
    bridge.set_extra_args(**ON_CPU)
    bridge.make_vocab_size_divisible_by = options.vocab_multiple
    bridge.vocab_size, bridge.padded_vocab_size = ours.architecture.vocab_size, ours.padded_vocab_size
    bridge.load_weights(theirs.chunks, folder)
    filled = dict(own_parameters(theirs, rank))
    wrong = [name for name, wanted in own_parameters(ours, rank) if not torch.equal(filled[name], wanted)]
    close_groups()
    return wrong, len(filled)
