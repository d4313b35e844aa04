"""The JSON files of a Hugging Face model folder that say what the model is: the one schema of ``config.json``, and
those of ``generation_config.json``, ``tokenizer_config.json`` and the index of weights.

Invariants:

* Nothing here interprets a key; who needs one asks for it with :func:`need`. A key that is ``null`` is not there.
* A model with images keeps the keys of its language model in ``text_config``: these come before the same keys of the
  whole. ``architectures`` and ``model_type`` are always those of the whole, and every end token counts.
* A file that cannot be read, or has another type than expected, is the user's fault; the message names file and key.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta

from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
INDEX_FILE: Final = "model.safetensors.index.json"

BUILT_AS: Final = {"kimi_k2": "deepseek_v3"}
"""``model_type`` of models that are another one in all but name → ``model_type`` of that one."""
UNQUANTIZED: Final = (
    "expected bfloat16 or float32; penstock convert MODEL COPY --dtype bfloat16 writes such a copy of FP8"
)

Size = Annotated[int, Meta(ge=0)]
"""0 is what the file does not say."""


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """``rope_parameters`` of transformers 5, ``rope_scaling`` before."""

    rope_theta: float | None = None
    mrope_section: tuple[int, ...] | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``config.json`` says about any causal model: enough to serve it and to know its tokens."""

    architectures: tuple[str, ...] = ()
    model_type: str = ""
    vocab_size: Size = 0
    num_hidden_layers: Size = 0
    num_attention_heads: Size = 0
    num_key_value_heads: Size = 0
    max_position_embeddings: Size = 0
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = ()
    """Written as one number or as a list."""
    pad_token_id: int | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads


class DecoderConfig(HfConfig, frozen=True, kw_only=True):
    """What it says besides about how a decoder computes: attention, rotary embedding, experts. The other keys of the
    decoders that we compute change nothing."""

    hidden_size: Size = 0
    intermediate_size: Size = 0
    head_dim: Size = 0
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    use_qk_norm: bool = False
    quantization_config: dict[str, object] | None = None

    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    partial_rotary_factor: float | None = None
    rope_interleave: bool | None = None

    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    num_experts: int | None = None
    num_local_experts: int | None = None
    """Another name of the same; which one is written depends on the version of transformers."""
    n_routed_experts: int | None = None
    """And another, of DeepSeek."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    first_k_dense_replace: int | None = None
    mlp_layer_types: tuple[str, ...] = ()
    """``dense`` or ``sparse``, of each layer."""
    moe_layer_freq: int | tuple[int, ...] = 1
    n_shared_experts: int | None = None
    num_nextn_predict_layers: int | None = None
    """Layers beyond those of the model, that predict further tokens."""
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float | None = None
    scoring_func: str | None = None
    topk_method: str | None = None

    @property
    def rope(self) -> RopeParameters:
        return self.rope_parameters or self.rope_scaling or RopeParameters()

    @property
    def rope_base(self) -> float:
        return self.rope.rope_theta or self.rope_theta or 10_000.0

    @property
    def expert_count(self) -> int | None:
        return self.num_experts or self.num_local_experts or self.n_routed_experts


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is written as an object, with how it is matched."""

    content: str


class TokenizerConfig(msgspec.Struct, frozen=True):
    """The special tokens that ``tokenizer_config.json`` names."""

    eos_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None


class WeightIndex(msgspec.Struct, frozen=True):
    """Which file of the folder holds which tensor, where the weights are in several."""

    weight_map: dict[str, str]


SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
"""What no decoder can be built without."""

ConfigT = TypeVar("ConfigT", bound=HfConfig)
FormT = TypeVar("FormT")


def read_config(folder: Path, form: type[ConfigT]) -> ConfigT:
    """The ``config.json`` of a model folder.

    Raises:
        UserFault: there is no such file, or it is not what belongs there.
    """
    if not folder.is_dir():
        raise UserFault(f"model folder {folder} does not exist; give a folder written by save_pretrained")
    config = find_config(folder / CONFIG_FILE, form)
    if config is None:
        raise UserFault(f"{folder} has no {CONFIG_FILE}; give a folder written by save_pretrained")
    return config


def find_config(file: Path, form: type[ConfigT]) -> ConfigT | None:
    """A ``config.json``, a copy of one, or a ``generation_config.json``, which has some of its keys; None without it.

    Raises:
        UserFault: it cannot be read, or is not what belongs there.
    """
    text = _read(file)
    return None if text is None else decode_config(text, str(file), form)


def find_tokenizer_config(folder: Path) -> TokenizerConfig:
    """The special tokens that the tokenizer's configuration names: none where there is no such file.

    Raises:
        UserFault: it cannot be read, or is not what belongs there.
    """
    file = folder / TOKENIZER_CONFIG_FILE
    text = _read(file)
    return TokenizerConfig() if text is None else _decode(text, str(file), TokenizerConfig)


def find_weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name → name of its file; None: the folder has no index, as all tensors are in one file.

    Raises:
        UserFault: the index cannot be read, or is not what belongs there.
    """
    file = folder / INDEX_FILE
    text = _read(file)
    return None if text is None else _decode(text, str(file), WeightIndex).weight_map


def decode_config(text: bytes, origin: str, form: type[ConfigT]) -> ConfigT:
    """The text of a ``config.json``; ``origin`` is where it is from, for errors.

    Raises:
        UserFault: it is not what belongs there.
    """
    whole = _decode(text, origin, dict[str, Any])
    inner = whole.get("text_config")
    parts = [whole, cast("dict[str, Any]", inner)] if isinstance(inner, dict) else [whole]
    said = {key: value for part in parts for key, value in part.items() if value is not None}
    said |= {key: whole[key] for key in ("architectures", "model_type") if whole.get(key) is not None}
    ends = [end for part in parts if (end := part.get("eos_token_id")) is not None]
    listed = [cast("list[object]", end) if isinstance(end, list) else [end] for end in ends]
    said["eos_token_id"] = [token for tokens in listed for token in tokens]
    with _told(origin):
        return msgspec.convert(said, form)


def need(config: HfConfig, origin: str, *keys: str) -> None:
    """Raise unless the config says these sizes.

    Raises:
        UserFault: names those that it lacks.
    """
    if lacking := [key for key in keys if not getattr(config, key)]:
        raise UserFault(f"{origin}: lacks {', '.join(lacking)}; expected the config of a causal language model")


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserFault(f"{file} cannot be read: {error.strerror}") from error


def _decode(text: bytes, origin: str, form: type[FormT]) -> FormT:
    with _told(origin):
        return msgspec.json.decode(text, type=form)


@contextmanager
def _told(origin: str) -> Generator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise UserFault(f"{origin}: not the JSON that belongs there: {error}; copy it anew from its model") from error
