"""The families of models, each as a table: which parameter of megatron-core's GPT model holds which tensors of a
Hugging Face checkpoint, and in which form.

Invariants:

* A name of megatron-core is global here: ``{layer}`` and ``{expert}`` count over the whole model, whatever the layout.
* The order of a table is the order in which weights leave: it depends on nothing but the architecture.
* Every parameter of a model is in its table once, and every tensor of a checkpoint is in one parameter. (Tied
  embeddings are one tensor; the copy that a last pipeline stage holds is loaded from it and not written. Layers that
  a checkpoint has beyond those of the model, to predict several tokens at once, are left out unless they are trained,
  and their copies of embedding and output head in any case.)
* A rule one of whose sizes is 0 is of something that the model does not have.

The parameter names of megatron-core are those of its Transformer Engine layers, which our own layers share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Literal, NamedTuple

from penstock.backends.checkpoint.hf_config import BUILT_AS


class Form(Enum):
    """How the tensors of a checkpoint lie in one parameter, and how that is divided over tensor-parallel ranks."""

    WHOLE = "whole"
    """One tensor, the same on every rank."""
    ROWS = "rows"
    """Tensors above each other, each divided by rows: a rank has its share of the first, then of the second."""
    COLUMNS = "columns"
    """One tensor, divided by columns."""
    FUSED_ROWS = "fused rows"
    """One tensor that is two halves above each other in the checkpoint, each divided by rows."""
    QKV = "qkv"
    """Queries, keys and values, interleaved by groups of heads that share a key; then divided by rows."""
    VOCABULARY = "vocabulary"
    """One tensor, filled up with rows of zeros and divided by rows."""


class Part(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    sizes: tuple[str, ...]
    """Of its axes, by the names that :func:`.weight_map.sizes_of` gives them."""


class Rule(NamedTuple):
    """One parameter."""

    megatron: str
    checkpoint: tuple[Part, ...]
    form: Form

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron


def _rule(megatron: str, form: Form, checkpoint: str) -> Rule:
    """A rule from the text of a table; ``name[size,size]`` are separated by blanks."""
    parts = (part.removesuffix("]").split("[") for part in checkpoint.split())
    return Rule(megatron, tuple(Part(name, tuple(sizes.split(","))) for name, sizes in parts), form)


def _in_layer(megatron: str, form: Form, checkpoint: str) -> Rule:
    names = " ".join(f"model.layers.{{layer}}.{part}" for part in checkpoint.split())
    return _rule(f"decoder.layers.{{layer}}.{megatron}", form, names)


EXPERT_BIAS: Final = ".mlp.router.expert_bias"
"""How the one name ends that is no parameter but a buffer: nothing trains it, it is float32 whatever the model is."""
EMBEDDING: Final = _rule("embedding.word_embeddings.weight", Form.VOCABULARY, "model.embed_tokens.weight[vocab,hidden]")
FINAL_NORM: Final = _rule("decoder.final_layernorm.weight", Form.WHOLE, "model.norm.weight[hidden]")
HEAD: Final = _rule("output_layer.weight", Form.VOCABULARY, "lm_head.weight[vocab,hidden]")

_ATTENTION: Final = (
    _in_layer("self_attention.linear_qkv.layer_norm_weight", Form.WHOLE, "input_layernorm.weight[hidden]"),
    _in_layer(
        "self_attention.linear_qkv.weight",
        Form.QKV,
        "self_attn.q_proj.weight[q,hidden] self_attn.k_proj.weight[kv,hidden] self_attn.v_proj.weight[kv,hidden]",
    ),
)
_QKV_BIAS: Final = (
    _in_layer(
        "self_attention.linear_qkv.bias",
        Form.QKV,
        "self_attn.q_proj.bias[q] self_attn.k_proj.bias[kv] self_attn.v_proj.bias[kv]",
    ),
)
_QK_NORM: Final = (
    _in_layer("self_attention.q_layernorm.weight", Form.WHOLE, "self_attn.q_norm.weight[head]"),
    _in_layer("self_attention.k_layernorm.weight", Form.WHOLE, "self_attn.k_norm.weight[head]"),
)
_PROJECTION: Final = (
    _in_layer("self_attention.linear_proj.weight", Form.COLUMNS, "self_attn.o_proj.weight[hidden,q]"),
)
_NORM_OF_DENSE: Final = (
    _in_layer("mlp.linear_fc1.layer_norm_weight", Form.WHOLE, "post_attention_layernorm.weight[hidden]"),
)
_DOWN: Final = (_in_layer("mlp.linear_fc2.weight", Form.COLUMNS, "mlp.down_proj.weight[hidden,ffn]"),)
_DENSE: Final = (
    *_NORM_OF_DENSE,
    _in_layer("mlp.linear_fc1.weight", Form.ROWS, "mlp.gate_proj.weight[ffn,hidden] mlp.up_proj.weight[ffn,hidden]"),
    *_DOWN,
)
_FUSED_DENSE: Final = (
    *_NORM_OF_DENSE,
    _in_layer("mlp.linear_fc1.weight", Form.FUSED_ROWS, "mlp.gate_up_proj.weight[two_ffn,hidden]"),
    *_DOWN,
)
_ROUTER: Final = (
    _in_layer("pre_mlp_layernorm.weight", Form.WHOLE, "post_attention_layernorm.weight[hidden]"),
    _in_layer("mlp.router.weight", Form.WHOLE, "mlp.gate.weight[experts,hidden]"),
)
_EXPERT: Final = (
    _in_layer(
        "mlp.experts.linear_fc1.weight{expert}",
        Form.ROWS,
        "mlp.experts.{expert}.gate_proj.weight[expert_ffn,hidden] "
        "mlp.experts.{expert}.up_proj.weight[expert_ffn,hidden]",
    ),
    _in_layer(
        "mlp.experts.linear_fc2.weight{expert}",
        Form.COLUMNS,
        "mlp.experts.{expert}.down_proj.weight[hidden,expert_ffn]",
    ),
)
_LATENT_ATTENTION: Final = (
    _in_layer("input_layernorm.weight", Form.WHOLE, "input_layernorm.weight[hidden]"),
    *(
        _in_layer(f"self_attention.{megatron}", form, f"self_attn.{checkpoint}")
        for megatron, form, checkpoint in (
            ("linear_q_proj.weight", Form.ROWS, "q_proj.weight[q_of_hidden,hidden]"),
            ("linear_q_down_proj.weight", Form.WHOLE, "q_a_proj.weight[q_rank,hidden]"),
            ("linear_q_up_proj.layer_norm_weight", Form.WHOLE, "q_a_layernorm.weight[q_rank]"),
            ("linear_q_up_proj.weight", Form.ROWS, "q_b_proj.weight[q,q_rank]"),
            ("linear_kv_down_proj.weight", Form.WHOLE, "kv_a_proj_with_mqa.weight[kv_rank_rope,hidden]"),
            ("linear_kv_up_proj.layer_norm_weight", Form.WHOLE, "kv_a_layernorm.weight[kv_rank]"),
            ("linear_kv_up_proj.weight", Form.ROWS, "kv_b_proj.weight[plain_k_v,kv_rank]"),
            ("linear_proj.weight", Form.COLUMNS, "o_proj.weight[hidden,v]"),
        )
    ),
)
_CHOICE_BIAS: Final = (
    _in_layer(EXPERT_BIAS.removeprefix("."), Form.WHOLE, "mlp.gate.e_score_correction_bias[experts]"),
)
_SHARED_EXPERT: Final = (
    _in_layer(
        "mlp.shared_experts.linear_fc1.weight",
        Form.ROWS,
        "mlp.shared_experts.gate_proj.weight[shared_ffn,hidden] mlp.shared_experts.up_proj.weight[shared_ffn,hidden]",
    ),
    _in_layer(
        "mlp.shared_experts.linear_fc2.weight", Form.COLUMNS, "mlp.shared_experts.down_proj.weight[hidden,shared_ffn]"
    ),
)
_POST_ATTENTION_NORM: Final = (
    _in_layer("self_attention.linear_proj.post_norm_weight", Form.WHOLE, "post_self_attn_layernorm.weight[hidden]"),
)
_POST_MLP_NORM: Final = (_in_layer("mlp.linear_fc2.post_norm_weight", Form.WHOLE, "post_mlp_layernorm.weight[hidden]"),)


MTP_BLOCK: Final = "mtp."
"""How the parameters of layers begin that predict further tokens."""
MTP_LAYER: Final = "mtp.layers.{mtp}.transformer_layer."
"""How the parameters of the decoder layer begin that is in a layer which predicts further tokens."""
MTP: Final = tuple(
    _rule(f"mtp.layers.{{mtp}}.{megatron}", form, f"model.layers.{{layer}}.{checkpoint}")
    for megatron, form, checkpoint in (
        ("enorm.weight", Form.WHOLE, "enorm.weight[hidden]"),
        ("hnorm.weight", Form.WHOLE, "hnorm.weight[hidden]"),
        ("eh_proj.weight", Form.ROWS, "eh_proj.weight[hidden,two_hidden]"),
        ("final_layernorm.weight", Form.WHOLE, "shared_head.norm.weight[hidden]"),
    )
)
"""What such a layer has around its decoder layer: norms of the next token's embedding and of the hidden state, the
matrix that makes one vector of both, and the norm before the output head."""
MTP_COPIES: Final = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""What a checkpoint has of such a layer once more, and of which tensor it is a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of model."""

    model_type: str
    attention: tuple[Rule, ...]
    """Parameters of the attention of every layer."""
    dense: tuple[Rule, ...] = _DENSE
    """Parameters that a layer without experts has besides."""
    sparse: tuple[Rule, ...] = ()
    """Of a layer with experts, besides: what there is once."""
    expert: tuple[Rule, ...] = ()
    """Parameters of each expert of a layer with experts."""
    qkv_bias: Literal["always", "as said", "never"] = "never"
    qk_norm: Literal["always", "as said", "never"] = "never"
    has_post_norms: bool = False
    """Whether what attention and MLP give is normed before it is added."""
    rope_kinds: tuple[str, ...] = ("default",)
    rope_fraction: float = 1.0
    """Share of rotated channels where the config says nothing."""
    has_interleaved_rope: bool = False
    head_dim: int | None = None
    """Where the config says nothing; None: the hidden size divided by the heads."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What experts are scored by; sigmoids come with a bias, groups and shared experts."""
    renormalizes: bool = False
    """Whether the weights of a token's experts add up to one, where the config says nothing."""
    num_dense_first: int = 0
    """Layers in front that have no experts, where the config says nothing."""
    has_mtp: bool = False
    """Whether its checkpoints have layers that predict further tokens as :data:`MTP` names them."""
    has_latent_attention: bool = False
    latent_norm_epsilon: float = 1e-6
    """Of the norms inside of latent attention: no config has it, and it is not that of the other norms."""

    @property
    def has_experts(self) -> bool:
        return bool(self.expert)


_QWEN3_ATTENTION: Final = (*_ATTENTION, *_QK_NORM, *_PROJECTION)
_DEEPSEEK_SPARSE: Final = (*_ROUTER, *_CHOICE_BIAS, *_SHARED_EXPERT)
_DEEPSEEK_V3: Final = Family(
    model_type="deepseek_v3",
    attention=_LATENT_ATTENTION,
    sparse=_DEEPSEEK_SPARSE,
    expert=_EXPERT,
    rope_kinds=("default", "yarn"),
    router="sigmoid",
    renormalizes=True,
    has_mtp=True,
    has_latent_attention=True,
)

FAMILIES: Final[dict[str, Family]] = {
    family.model_type: family
    for family in (
        Family(model_type="qwen2", attention=(*_ATTENTION, *_QKV_BIAS, *_PROJECTION), qkv_bias="always"),
        Family(model_type="qwen3", attention=_QWEN3_ATTENTION, qk_norm="always", head_dim=128),
        Family(model_type="qwen3_moe", attention=_QWEN3_ATTENTION, sparse=_ROUTER, expert=_EXPERT, qk_norm="always"),
        Family(model_type="llama", attention=(*_ATTENTION, *_PROJECTION), rope_kinds=("default", "llama3")),
        Family(
            model_type="glm4",
            attention=(*_ATTENTION, *_QKV_BIAS, *_PROJECTION, *_POST_ATTENTION_NORM),
            dense=(*_FUSED_DENSE, *_POST_MLP_NORM),
            qkv_bias="as said",
            has_post_norms=True,
            rope_fraction=0.5,
            has_interleaved_rope=True,
            head_dim=128,
        ),
        Family(
            model_type="glm4_moe",
            attention=(*_ATTENTION, *_QKV_BIAS, *_QK_NORM, *_PROJECTION),
            sparse=_DEEPSEEK_SPARSE,
            expert=_EXPERT,
            qkv_bias="as said",
            qk_norm="as said",
            rope_fraction=0.5,
            router="sigmoid",
            renormalizes=True,
            has_mtp=True,
        ),
        _DEEPSEEK_V3,
        replace(_DEEPSEEK_V3, model_type="glm4_moe_lite", num_dense_first=1),
        *(replace(_DEEPSEEK_V3, model_type=name) for name, built_as in BUILT_AS.items() if built_as == "deepseek_v3"),
    )
}
"""By ``model_type`` of ``config.json``."""
