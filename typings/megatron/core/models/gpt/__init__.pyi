from collections.abc import Sequence
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

class _Layer(nn.Module):
    layer_number: int
    self_attention: nn.Module

class _Decoder(nn.Module):
    layers: Sequence[_Layer]

class GPTModel(nn.Module):
    config: TransformerConfig
    decoder: _Decoder
    output_layer: nn.Module
    rotary_pos_emb: object
    post_process: bool
    embedding: nn.Module
    mtp: MultiTokenPredictionBlock
    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        mtp_block_spec: ModuleSpec | None = None,
        vp_stage: int | None = None,
    ) -> None: ...
    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]: ...
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor: ...
