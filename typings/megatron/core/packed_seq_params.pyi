from torch import Tensor

class PackedSeqParams:
    cu_seqlens_q: Tensor
    cu_seqlens_q_padded: Tensor | None
    def __init__(
        self,
        *,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        cu_seqlens_q_padded: Tensor,
        cu_seqlens_kv_padded: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
    ) -> None: ...
