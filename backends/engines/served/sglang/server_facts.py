"""What an SGLang server says of itself, of its model and of its weights, read from its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from penstock.backends.engines.served.base.http import BadReply
from penstock.backends.engines.served.sglang import control_wire as wire
from penstock.messages.base import Value


class ServerInfo(Value, frozen=True, kw_only=True):
    """What a server says of itself, as resolved at its start."""

    version: str
    """Version of SGLang that the server runs."""
    model_path: str
    weight_version: str
    tp_size: int
    pp_size: int
    dp_size: int
    max_total_tokens: int
    """Tokens that its KV cache holds."""
    max_request_tokens: int
    """Longest prompt."""
    max_running_requests: int
    """That it decodes side by side, over its data-parallel ranks together."""
    attention_backend: str
    incremental_streaming: bool
    deterministic: bool
    """Whether ``sampling_seed`` is heeded."""
    priority_scheduling: bool
    skips_tokenizer: bool
    drafts_from_model: bool
    """Whether it drafts with layers of the model's own checkpoint."""
    device: str
    """``cpu``, ``cuda``."""
    dtype: str
    context_length: int | None
    """None: the model's own."""

    @classmethod
    def of(cls, info: wire.InfoReply) -> Self:
        """
        Raises:
            BadReply: no scheduler is in it.
        """
        if not info.internal_states:
            raise BadReply("/server_info has no internal_states")
        state = info.internal_states[0]
        return cls(
            version=info.version,
            model_path=info.model_path,
            weight_version=state.weight_version,
            tp_size=state.tp_size,
            pp_size=state.pp_size,
            dp_size=state.dp_size,
            max_total_tokens=info.max_total_num_tokens,
            max_request_tokens=info.max_req_input_len,
            max_running_requests=len(info.internal_states) * state.effective_max_running_requests_per_dp,
            attention_backend=state.attention_backend or "",
            incremental_streaming=state.incremental_streaming_output,
            deterministic=state.enable_deterministic_inference,
            priority_scheduling=state.enable_priority_scheduling,
            skips_tokenizer=state.skip_tokenizer_init,
            drafts_from_model=state.speculative_algorithm is not None
            and state.speculative_draft_model_path == info.model_path,
            device=info.device,
            dtype=info.dtype,
            context_length=info.context_length,
        )


class ModelInfo(Value, frozen=True, kw_only=True):
    """What a server says of its model."""

    model_path: str
    weight_version: str
    architectures: tuple[str, ...]
    """Names of model classes."""
    preferred_sampling: bool
    """The server has sampling parameters of its own, which count where a request gives none."""

    @classmethod
    def of(cls, model: wire.ModelReply) -> Self:
        """Read it."""
        return cls(
            model_path=model.model_path,
            weight_version=model.weight_version,
            architectures=model.architectures or (),
            preferred_sampling=bytes(model.preferred_sampling_params) != b"null",
        )


class Loads(Value, frozen=True, kw_only=True):
    """How busy a server is, over its data-parallel ranks together."""

    num_running: int
    num_waiting: int
    num_retracted: int
    used_tokens: int
    max_total_tokens: int

    @classmethod
    def of(cls, reply: wire.LoadsReply) -> Self:
        """Read them."""
        loads = reply.loads
        return cls(
            num_running=sum(load.num_running_reqs for load in loads),
            num_waiting=sum(load.num_waiting_reqs for load in loads),
            num_retracted=sum(load.queues.retracted for load in loads if load.queues),
            used_tokens=sum(load.num_used_tokens for load in loads),
            max_total_tokens=sum(load.max_total_num_tokens for load in loads),
        )

    @property
    def num_queued(self) -> int:
        """Requests that wait, for the first time or again."""
        return self.num_waiting + self.num_retracted

    @property
    def token_usage(self) -> float:
        """Share of the KV pool in use."""
        return self.used_tokens / self.max_total_tokens if self.max_total_tokens else 0.0


class RankChecksums(Value, frozen=True, kw_only=True):
    """The weights that one rank holds, in the server's own (fused, sharded) layout."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    checksums: Mapping[str, str]
    """Checksum of each parameter by name."""
    overall: str

    @classmethod
    def of(cls, rank: wire.RankReply) -> Self:
        """Read them; a server without parallelism says of no rank where it is."""
        at = rank.parallelism_info[0] if rank.parallelism_info else wire.Rank()
        return cls(
            tp_rank=at.tp_rank, pp_rank=at.pp_rank, dp_rank=at.dp_rank,
            checksums=rank.checksums, overall=rank.per_gpu_checksum,
        )  # fmt: skip


class WeightChecksums(Value, frozen=True, kw_only=True):
    """The weights that a server holds."""

    ranks: tuple[RankChecksums, ...]
    overall: str

    @classmethod
    def of(cls, reply: wire.ChecksumReply) -> Self:
        """
        Raises:
            BadReply: no rank is in it.
        """
        if not reply.ranks:
            raise BadReply("/weights_checker names no rank")
        return cls(ranks=tuple(map(RankChecksums.of, reply.ranks)), overall=reply.per_engine_checksum)
