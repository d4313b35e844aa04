"""Of which modules megatron-core builds the layers of a model.

Where CUDA is they are Transformer Engine's; elsewhere those of :mod:`.layers` and :mod:`.attention`, with the same
parameter names. A layer is looked up by its number in the whole model, so layers with experts and without may mix.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import functools
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from penstock.backends.learners.megatron.cpu.attention import CoreAttention
from penstock.backends.learners.megatron.cpu.layers import (
    ColumnGroupedLinear,
    NormedColumnParallelLinear,
    RMSNorm,
    RowGroupedLinear,
    RowParallelLinearNormed,
    WholeLinear,
)
from penstock.backends.learners.megatron.model.moe import Router
from penstock.backends.learners.megatron.model.mtp import PredictionLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig

    from penstock.backends.learners.megatron.bridge.architecture import Architecture


_INNER = next(each.name for each in fields(MultiTokenPredictionLayerSubmodules) if each.name.endswith("_layer"))
"""What the decoder layer in a layer that predicts a further token is called: ``transformer_layer``, and from 0.17 on
``mtp_model_layer``."""


def block_spec(
    architecture: Architecture, config: TransformerConfig, *, virtual_stage: int | None, is_cpu: bool
) -> TransformerBlockSubmodules:
    """The layers of this rank's stage, and the final norm."""
    if not is_cpu:
        return _engine_block_spec(architecture, config, virtual_stage)
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    kinds = {has_experts: layer_spec(architecture, config, has_experts=has_experts) for has_experts in (False, True)}
    specs = [kinds[architecture.has_experts(layer)] for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def mtp_spec(architecture: Architecture, config: TransformerConfig, *, is_cpu: bool) -> ModuleSpec:
    """The layers that predict further tokens, each around a layer like the model's last ones."""
    if is_cpu:
        layer = layer_spec(architecture, config, has_experts=architecture.has_experts(architecture.num_layers))
        outer = MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm, hnorm=RMSNorm, eh_proj=ColumnParallelLinear, layer_norm=RMSNorm, **{_INNER: layer}
        )
        each = ModuleSpec(module=PredictionLayer, submodules=outer)
    else:
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        layers = block.layer_specs or []
        _take_own_layers(architecture, layers)
        each = get_mtp_layer_spec(layers[-1], use_transformer_engine=True)
        each.module = PredictionLayer
    block_of_them = MultiTokenPredictionBlockSubmodules(layer_specs=[each] * architecture.num_mtp_layers)
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=block_of_them)


def _engine_block_spec(
    architecture: Architecture, config: TransformerConfig, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    """The same of Transformer Engine's layers."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual_stage)
    _take_own_layers(architecture, block.layer_specs or [])
    return block


def _take_own_layers(architecture: Architecture, specs: Sequence[ModuleSpec]) -> None:
    """In the place of Transformer Engine's, where it has none that do."""
    for spec in specs:
        layer: Any = spec.submodules
        mlp = _mlp_submodules(layer)
        if hasattr(mlp, "experts"):
            mlp.router = Router
        if architecture.family.has_post_norms:
            # Only now: it needs Transformer Engine.
            from penstock.backends.learners.megatron.model.engine_layers import EngineRowParallelLinearNormed

            layer.self_attention.submodules.linear_proj = mlp.linear_fc2 = EngineRowParallelLinearNormed


def layer_spec(architecture: Architecture, config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    """One layer in plain torch."""
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts if has_experts else None,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=architecture.latent is not None,
            normalization="RMSNorm",
        )
    )
    layer: Any = spec.submodules
    layer.sharded_state_dict_keys_map = {}
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if architecture.latent:
        layer.input_layernorm = RMSNorm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
        attention.linear_q_up_proj = attention.linear_kv_up_proj = NormedColumnParallelLinear
        attention.q_layernorm = attention.kv_layernorm = IdentityOp
    else:
        layer.input_layernorm = IdentityOp
        attention.linear_qkv = NormedColumnParallelLinear
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    mlp = _mlp_submodules(layer)
    if has_experts:
        layer.pre_mlp_layernorm = RMSNorm
        mlp.experts = _experts()
        mlp.router = Router
    else:
        layer.pre_mlp_layernorm = IdentityOp
        mlp.linear_fc1 = NormedColumnParallelLinear
    if architecture.family.has_post_norms:
        attention.linear_proj = mlp.linear_fc2 = RowParallelLinearNormed
    return spec


def _mlp_submodules(layer: Any) -> Any:  # noqa: ANN401 - megatron-core's own
    """From 0.17 on it is a partial function and no specification."""
    return layer.mlp.submodules if hasattr(layer.mlp, "submodules") else layer.mlp.keywords["submodules"]


def _experts() -> Any:  # noqa: ANN401 - a specification up to 0.16, a partial function after
    kinds: Any = experts
    own = {"linear_fc1": ColumnGroupedLinear, "linear_fc2": RowGroupedLinear}
    later = getattr(kinds, "GroupedMLPSubmodules", None) or getattr(kinds, "TEGroupedMLPSubmodules", None)
    if later is None:
        return ModuleSpec(module=kinds.TEGroupedMLP, submodules=MLPSubmodules(**own))
    return functools.partial(kinds.TEGroupedMLP, submodules=later(**own))
