"""The fields of the pinned megatron-core's configuration, and what of them a scenario may set.

``config_fields.json`` has the list as the library's own classes give it; a test compares the two.

Invariants:

* What reaches a configuration class of megatron-core has been checked here: its name, its type, its choices.
* What Penstock sets itself, from the model or from another key, is refused with the key that is meant.
* Nothing here imports megatron-core or torch.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.learners.megatron_options import ConfigValue, MegatronOptions

MEGATRON_VERSION: Final = "0.16.1"
KEY: Final = "learner.megatron"
Section = Literal["transformer", "ddp", "optimizer"]
_FIELD_LIST: Final = Path(__file__).with_name("config_fields.json")
_CLASSES: Final[dict[Section, str]] = {
    "transformer": "TransformerConfig",
    "ddp": "DistributedDataParallelConfig",
    "optimizer": "OptimizerConfig",
}
_TYPE_NAMES: Final = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "null": "null",
    "list": "a list", "enum": "a word", "dtype": "the name of a dtype",
}  # fmt: skip
DTYPE_NAMES: Final = ("float32", "bfloat16", "float16", "uint8")

_LAYOUT: Final = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallel": "sequence_parallel",
    "recompute_granularity": "recompute",
    "params_dtype": "precision",
    "pipeline_dtype": "precision",
    "autocast_dtype": "precision",
    "bf16": "precision",
    "fp16": "precision",
    "use_distributed_optimizer": "distributed_optimizer",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "overlap_p2p_comm": "overlap_p2p",
    "mtp_num_layers": "mtp",
    "mtp_loss_scaling_factor": "mtp.loss_coef",
    "mtp_standalone": "mtp",
}
"""Fields that a key of ``learner.megatron`` sets."""
_LEARNER: Final = {
    "lr": "learning_rate", "min_lr": "lr_schedule", "weight_decay": "weight_decay", "clip_grad": "max_grad_norm",
    "adam_beta1": "betas", "adam_beta2": "betas",
}  # fmt: skip
"""Fields that a key of ``learner`` sets."""
_MODEL: Final = frozenset({
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels",
    "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias",
    "gated_linear_unit", "qk_layernorm", "rotary_interleaved", "num_moe_experts", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_layer_freq",
    "moe_shared_expert_intermediate_size", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
})  # fmt: skip
"""Fields that the model's ``config.json`` decides."""
_OURS: Final = {
    "hidden_dropout": "the learner's log-probs would differ from the engine's",
    "attention_dropout": "the learner's log-probs would differ from the engine's",
    "variable_seq_lengths": "micro-batches are packed, so their lengths differ",
    "calculate_per_token_loss": "losses are divided by their objective's denominator",
    "use_cpu_initialization": "weights come from the checkpoint",
    "perform_initialization": "weights come from the checkpoint",
    "transformer_impl": "it follows from the device",
    "moe_grouped_gemm": "it follows from the layer's parameter names",
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "the loss scale is the learner's own, the same with backend: torch; model.dtype: float16 has it",
    ),
}
"""Fields that are decided, with the reason."""
_OVER_GLOO: Final = {
    "batch_p2p_comm": "over gloo the messages of two stages in both directions are taken for one another",
    "deallocate_pipeline_outputs": "gloo may still be sending an output that would be freed",
}
"""Fields that compute wrong numbers in silence without NCCL."""


class ConfigFieldError(UserFault):
    """A field that the pinned megatron-core does not have, would not take, or that is not the user's to set."""

    def __init__(self, section: Section, name: str, text: str) -> None:
        super().__init__(section, name, text)
        self.section: Section = section
        self.name = name
        self.text = text

    def __str__(self) -> str:
        return f"{KEY}.{self.section}.{self.name}: {self.text}"


class ConfigField(msgspec.Struct, frozen=True):
    """One field of a configuration class."""

    name: str
    types: tuple[str, ...]
    """``object`` is what no scenario can write."""
    choices: tuple[str, ...]
    """Words that the field may be; empty: any."""


class _FieldList(msgspec.Struct, frozen=True):
    version: str
    transformer: tuple[ConfigField, ...]
    ddp: tuple[ConfigField, ...]
    optimizer: tuple[ConfigField, ...]


def check_config_fields(options: MegatronOptions, *, is_cpu: bool) -> None:
    """Check what a scenario passes through to megatron-core.

    Args:
        options: of the learner.
        is_cpu: whether ranks talk over gloo.

    Raises:
        UserFault: the first thing that is wrong; mostly a :class:`ConfigFieldError`.
    """
    if is_cpu and options.virtual_pipeline > 1 and not options.overlap_p2p:
        raise UserFault(
            f"{KEY}.overlap_p2p: must be true on a CPU with virtual_pipeline {options.virtual_pipeline}: without it "
            "two stages send in both directions at once, and over gloo their messages are taken for one another"
        )
    _check_section("transformer", options.transformer, is_cpu=is_cpu)
    _check_section("ddp", options.ddp, is_cpu=is_cpu)
    _check_section("optimizer", options.optimizer, is_cpu=is_cpu)


def _check_section(section: Section, given: Mapping[str, ConfigValue], *, is_cpu: bool) -> None:
    for name, value in given.items():
        field = _field(section, name)
        if reason := _reserved(name):
            raise ConfigFieldError(section, name, f"cannot be set: {reason}")
        if is_cpu and value is True and name in _OVER_GLOO:
            raise ConfigFieldError(section, name, f"must be false on a CPU: {_OVER_GLOO[name]}")
        _check_value(section, field, value)


def fields_of(section: Section) -> Mapping[str, ConfigField]:
    """The fields of one configuration class, by name."""
    return _by_name()[section]


def pinned_version() -> str:
    """Of megatron-core, whose fields the list has."""
    return _field_list().version


@cache
def _field_list() -> _FieldList:
    return msgspec.json.decode(_FIELD_LIST.read_bytes(), type=_FieldList)


@cache
def _by_name() -> dict[Section, dict[str, ConfigField]]:
    listed = _field_list()
    return {
        "transformer": {field.name: field for field in listed.transformer},
        "ddp": {field.name: field for field in listed.ddp},
        "optimizer": {field.name: field for field in listed.optimizer},
    }


def _field(section: Section, name: str) -> ConfigField:
    known = fields_of(section)
    if name in known:
        return known[name]
    elsewhere = [other for other in _CLASSES if name in fields_of(other)]
    near = difflib.get_close_matches(name, known, n=1)
    if elsewhere:
        hint = f"it belongs under {KEY}.{elsewhere[0]}"
    else:
        hint = f"did you mean '{near[0]}'?" if near else f"see {_CLASSES[section]} in its documentation"
    raise ConfigFieldError(section, name, f"megatron-core {MEGATRON_VERSION} has no such field; {hint}")


def _reserved(name: str) -> str | None:
    if name in _LAYOUT:
        return f"use {KEY}.{_LAYOUT[name]}"
    if name in _LEARNER:
        return f"use learner.{_LEARNER[name]}"
    if name in _MODEL:
        return "it follows from the model's config.json"
    return _OURS.get(name)


def _check_value(section: Section, field: ConfigField, value: ConfigValue) -> None:
    takes = [kind for kind in field.types if kind in _TYPE_NAMES]
    if takes in ([], ["null"]):
        raise ConfigFieldError(section, field.name, "cannot be set: it takes an object of Python")
    if not any(_fits(kind, value) for kind in takes):
        wanted = " or ".join(_TYPE_NAMES[kind] for kind in takes)
        raise ConfigFieldError(section, field.name, f"takes {wanted}; found {json.dumps(value)}")
    if isinstance(value, str):
        _check_word(section, field, value)


def _check_word(section: Section, field: ConfigField, value: str) -> None:
    choices = DTYPE_NAMES if field.types == ("dtype",) else field.choices
    is_free = "str" in field.types and ("enum" in field.types or not field.choices)
    if is_free or value in choices:
        return
    near = difflib.get_close_matches(value, choices, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(choices)}"
    raise ConfigFieldError(section, field.name, f"'{value}' is none of its choices; {hint}")


def _fits(kind: str, value: ConfigValue) -> bool:
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "list":
            return isinstance(value, list)
        case "null":
            return value is None
        case _:
            return isinstance(value, str)
