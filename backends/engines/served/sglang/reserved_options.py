"""Server options that are not a scenario's to set, each with the reason that its user is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_ADDRESS: Final = "each server gets an address and a free port of its own"
_KEYS: Final = "each run makes keys of its own for its servers"
_NODES: Final = "it follows from where the engine's GPUs are"
_HTTP: Final = "Penstock speaks plain HTTP/1.1 with its servers"

RESERVED: Final[Mapping[str, str]] = {
    "model_path": "it is model.path of the scenario",
    "tokenizer_path": "the tokenizer is that of model.path, with which prompts are tokenised",
    "dtype": "it is model.dtype of the scenario",
    "device": "it is engines.device of the scenario",
    "host": _ADDRESS,
    "port": _ADDRESS,
    "fastapi_root_path": _ADDRESS,
    "gated_launch_port": "a server that waits for a call before it loads its model would never be ready",
    "checkpoint_engine_wait_weights_before_ready": "a server gets weights once it is ready, so it would never be",
    "api_key": _KEYS,
    "admin_api_key": _KEYS,
    "config": "what a file sets could not be checked; write its options here",
    "node_rank": _NODES,
    "dist_init_addr": _NODES,
    "nccl_port": _NODES,
    "base_gpu_id": _NODES,
    "gpu_id_step": _NODES,
    "use_ray": "Penstock starts the processes of a server itself",
    "skip_server_warmup": "it is always on; the canary is Penstock's own warm-up",
    "weight_version": "it names the version that Penstock has loaded",
    "incremental_streaming_output": "it is set as Penstock reads streams",
    "grpc_mode": _HTTP,
    "smg_grpc_mode": _HTTP,
    "enable_http2": _HTTP,
    "ssl_keyfile": _HTTP,
    "ssl_certfile": _HTTP,
    "ssl_ca_certs": _HTTP,
    "ssl_keyfile_password": _HTTP,
    "enable_ssl_refresh": _HTTP,
    "tokenizer_worker_num": "one process has to know all requests of an engine, to pause and to abort them",
    "is_embedding": "an engine generates text",
    "allow_auto_truncate": "a sample would be trained with another prompt than the one that it was generated from",
    "preferred_sampling_params": "how responses are drawn stands in the block sampling:",
    "delete_ckpt_after_loading": "the other engines load the same checkpoint, and so does a restart",
}
