"""What :mod:`penstock.backends.learners.training.flops` has to know of a torch model and of its device."""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from penstock.backends.learners.training.flops import Config, ModelShape, Speed, model_shape, peak_tflops

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.model import PackedModel

DTYPE_NAMES: Final = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def speed_of(model: PackedModel, options: LearnerOptions, *, num_ranks: int) -> Speed:
    """Of the steps of this model."""
    peak = options.peak_tflops
    if peak is None and model.device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(model.device), DTYPE_NAMES.get(model.dtype, ""))
    return Speed(
        shape=shape_of(model.model),
        peak_tflops=peak,
        num_ranks=num_ranks,
        num_passes=options.num_passes,
    )


def shape_of(model: Any) -> ModelShape | None:  # noqa: ANN401 - a transformers model, typed in part only
    """The cost of a transformers decoder; None for an architecture that does not say what its attention is like."""
    config, head = _config(model.config.get_text_config()), model.get_output_embeddings()
    if config is None or head is None:
        return None
    tables = {id(parameter) for m in model.modules() if isinstance(m, nn.Embedding) for parameter in m.parameters()}
    parameters = dict(model.named_parameters())
    embeddings = frozenset(name for name, parameter in parameters.items() if id(parameter) in tables)
    return model_shape(parameters, config, embeddings=embeddings, head=head.weight)


def _config(config: Any) -> Config | None:  # noqa: ANN401 - of transformers, whose classes have no common fields
    def number(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((int(value) for value in found if value), 0)

    num_layers, num_heads, hidden = (
        number("num_hidden_layers"),
        number("num_attention_heads"),
        number("hidden_size"),
    )
    if not num_layers or not num_heads:
        return None
    head_dim = number("head_dim") or hidden // num_heads
    return Config(
        num_layers=num_layers,
        num_heads=num_heads,
        key_dim=number("qk_head_dim") or head_dim,
        value_dim=number("v_head_dim") or head_dim,
        num_experts=number(*EXPERT_KEYS),
        experts_per_token=number("num_experts_per_tok", "num_experts_per_token", "top_k"),
        windows=_windows(config, num_layers),
    )


def _windows(config: Any, num_layers: int) -> tuple[int | None, ...]:  # noqa: ANN401 - likewise
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    window = getattr(config, "sliding_window", None) or None
    windows = {"full_attention": None, "sliding_attention": window, "chunked_attention": window}
    return tuple(windows[kind] for kind in kinds if kind in windows)  # others have no pairs
