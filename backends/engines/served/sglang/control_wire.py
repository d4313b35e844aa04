"""The bodies and answers of the control calls as they stand on the wire, as far as they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

TARGET: Final = "target"
"""Weights go into the model, and not into one that drafts for it: they are none of that one's."""
WITH_DRAFT: Final = "all"
"""Into the model, and into what drafts for it."""


class Ack(msgspec.Struct):
    """Whether a call succeeded; the shape of most answers."""

    success: bool = True
    message: str = ""
    error_message: str = ""
    """In place of the other, of calls about adapters."""
    num_paused_requests: int = 0


class Internal(msgspec.Struct):
    """What the scheduler says in ``/server_info``: its options as resolved."""

    weight_version: str
    effective_max_running_requests_per_dp: int
    attention_backend: str | None = None
    enable_deterministic_inference: bool = False
    enable_priority_scheduling: bool = False
    incremental_streaming_output: bool = False
    skip_tokenizer_init: bool = False
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1


class InfoReply(msgspec.Struct):
    """``/server_info``."""

    version: str
    model_path: str
    max_total_num_tokens: int
    max_req_input_len: int
    internal_states: list[Internal]
    device: str = ""
    dtype: str = ""
    context_length: int | None = None


class ModelReply(msgspec.Struct):
    """``/model_info``."""

    model_path: str
    weight_version: str
    architectures: tuple[str, ...] | None = None
    preferred_sampling_params: msgspec.Raw = msgspec.Raw(b"null")


class Queues(msgspec.Struct):
    """Of one load."""

    retracted: int = 0


class Load(msgspec.Struct):
    """Of one data-parallel rank."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    queues: Queues | None = None


class LoadsReply(msgspec.Struct):
    """``/v1/loads``."""

    loads: list[Load]


class Rank(msgspec.Struct):
    """Where a rank stands."""

    tp_rank: int = 0
    pp_rank: int = 0
    dp_rank: int = 0


class RankReply(msgspec.Struct):
    """The weights of one rank."""

    checksums: dict[str, str]
    per_gpu_checksum: str
    parallelism_info: list[Rank]


class ChecksumReply(msgspec.Struct):
    """``/weights_checker``."""

    success: bool
    message: str = ""
    ranks: list[RankReply] = []
    per_engine_checksum: str = ""


class PauseBody(msgspec.Struct):
    """``/pause_generation``."""

    mode: str


class _TrialSampling(msgspec.Struct, frozen=True):
    max_new_tokens: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True


class TrialBody(msgspec.Struct, frozen=True):
    """The smallest request; its salt keeps what it caches from every other request."""

    rid: str
    extra_key: str
    input_ids: tuple[int, ...] = (0,)
    sampling_params: _TrialSampling = _TrialSampling()


class AbortBody(msgspec.Struct, omit_defaults=True):
    """``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


class DiskBody(msgspec.Struct):
    """``/update_weights_from_disk``."""

    model_path: str
    weight_version: str | None
    flush_cache: bool
    abort_all_requests: bool = False


class TensorBody(msgspec.Struct):
    """``/update_weights_from_tensor``."""

    serialized_named_tensors: Sequence[str]
    load_format: str | None
    flush_cache: bool
    weight_version: str | None
    abort_all_requests: bool = False
    selector: str = TARGET


class DistributedBody(msgspec.Struct):
    """``/update_weights_from_distributed``."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    group_name: str
    weight_version: str | None
    flush_cache: bool
    load_format: str | None
    abort_all_requests: bool = False
    selector: str = TARGET


class GroupBody(msgspec.Struct):
    """``/init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class GroupNameBody(msgspec.Struct):
    """``/destroy_weights_update_group``."""

    group_name: str


class VersionBody(msgspec.Struct):
    """``/update_weight_version``."""

    new_version: str
    abort_all_requests: bool


class AdapterBody(msgspec.Struct, omit_defaults=True):
    """``/load_lora_adapter``, and without the folder ``/unload_lora_adapter``."""

    lora_name: str
    lora_path: str = ""


class CheckerBody(msgspec.Struct):
    """``/weights_checker``."""

    action: str


class TagsBody(msgspec.Struct, omit_defaults=True):
    """``/release_memory_occupation``, ``/resume_memory_occupation``."""

    tags: Sequence[str] | None = None


class BeginBody(msgspec.Struct):
    """``/begin_weight_update``."""

    selector: str = TARGET


class Empty(msgspec.Struct):
    """A body without fields."""


class ProfileBody(msgspec.Struct):
    """``/start_profile``."""

    output_dir: str
    num_steps: int
    """Forward passes after which it ends by itself."""
    activities: Sequence[str]
    with_stack: bool
    record_shapes: bool = True
