"""Why a flag has no key of its own in the scenario, and what that means for the job.

Invariant: each flag that slime's argument parser declares is here or in :mod:`.mapping`; a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Effect = Literal["same", "but_for", "other"]
"""On what is trained: none; one that can be named, and the job is the same but for it; or another job."""

_PROFILED: Final = ("same", "learner.profile and engines.profile name the steps to be profiled (docs/profiling.md)")
_CI: Final = ("same", "a check of slime's own tests")
_BUFFER: Final = (
    "other",
    "slime's rollout buffer; agents of another process come by the gateway (docs/gateway.md)",
)
_KERNEL: Final = ("but_for", "layers compute with Transformer Engine's kernels")
_FRAGILE: Final = ("other", "what a run has recorded is trained by `penstock run --only learner --from RUN`")
_LOGGED: Final = ("same", "figures and samples: docs/observability.md")
_SIZE: Final = ("same", "not needed: the checkpoint's config.json says it")
_ADAPTERS: Final = (
    "other",
    "adapters are for learner.backend: torch (learner.lora), beside linear layers alone",
)
_ON_DISK: Final = ("same", "how a checkpoint is written changes nothing that is trained")

REASONS: Final[Mapping[str, tuple[Effect, str]]] = {
    "allgather-cp": ("same", "how attention is divided over context-parallel ranks is megatron-core's choice"),
    "async-save": _ON_DISK,
    "use-lora": _ADAPTERS,
    "lora-target-preset": _ADAPTERS,
    "lora-rank": _ADAPTERS,
    "lora-alpha": _ADAPTERS,
    "lora-weight-decay": _ADAPTERS,
    "lora-learning-rate": _ADAPTERS,
    "lora-load": _ADAPTERS,
    "save-lora": ("same", "with learner.lora a checkpoint has the adapters beside the merged model"),
    "lora-save-merged-hf": ("same", "a checkpoint's model has the adapters merged"),
    "no-save-optim": ("same", "a checkpoint has what it takes to go on"),
    "no-load-optim": ("same", "a run begins with a fresh optimizer; `penstock resume` goes on with its own"),
    "no-load-rng": ("same", "a run begins with its own seed"),
    "finetune": ("same", "a run begins at step 0; `penstock resume RUN` goes on with one"),
    "save-hf": ("same", "a checkpoint's model is in Hugging Face's format"),
    "start-rollout-id": ("same", "`penstock resume RUN` goes on at the step that the run has reached"),
    "release-train": ("same", "colocated parts sleep in turn (engines.placement)"),
    "balance-by-flops": ("same", "micro-batches are balanced over ranks by cost in any case"),
    "log-probs-max-tokens-per-gpu": ("same", "log-probs are of the same micro-batches as the step"),
    "ref-micro-batch-size": ("same", "micro-batches are packed by tokens"),
    "recompute-loss-function": ("same", "saves memory only; see learner.megatron.recompute"),
    "check-weight-update-equal": ("same", "each update is compared with what was sent, by checksum"),
    "ci-test": _CI,
    "ci-disable-kl-checker": _CI,
    "ci-train-rollout-logprob-abs-diff-threshold": _CI,
    "ci-save-grad-norm": _CI,
    "ci-load-grad-norm": _CI,
    "custom-model-provider-path": ("other", "the model is that of config.json; no function builds another"),
    "custom-update-weight-post-write-path": ("but_for", "weights.transport sends the weights, and no function follows"),
    "rollout-sample-hook-path": ("but_for", "what it does belongs in reward.function or episode.generate"),
    "disable-rollout-global-dataset": ("other", "prompts come from data.path or data.sources"),
    "distributed-backend": ("same", "NCCL on GPUs, gloo on CPUs"),
    "rollout-buffer-url": _BUFFER,
    "rollout-task-type": _BUFFER,
    "fetch-trajectory-retry-times": _BUFFER,
    "min-batch-collection-ratio": _BUFFER,
    "freeze-indexer": ("other", "no model with an indexer is trained (DeepSeek-V3.2)"),
    "http-proxy": ("same", "no request goes through a proxy"),
    "use-distributed-post": ("same", "each engine has a process of its own that sends its requests"),
    "keep-old-actor": ("but_for", "the ratio is taken to what learner.objective.old_logprobs says"),
    "load-debug-rollout-data": _FRAGILE,
    "load-debug-rollout-data-subsample": _FRAGILE,
    "load-forge-rollout-data": _FRAGILE,
    "log-correct-samples": _LOGGED,
    "log-multi-turn": _LOGGED,
    "log-reward-category": _LOGGED,
    "loss-mask-type": ("same", "the chat template itself shows which tokens are the assistant's (docs/learner.md)"),
    "megatron-config-path": ("other", "a file with options of roles; write them under learner.megatron"),
    "megatron-deepgemm-forward-layers": _KERNEL,
    "megatron-deepgemm-forward-modules": _KERNEL,
    "megatron-deepgemm-moe-forward-layers": _KERNEL,
    "megatron-deepgemm-moe-forward-modules": _KERNEL,
    "qwen-gdn-backend": _KERNEL,
    "memory-recorder": _PROFILED,
    "memory-snapshot-dir": _PROFILED,
    "memory-snapshot-num-steps": _PROFILED,
    "record-memory-history": _PROFILED,
    "profile-target": _PROFILED,
    "save-debug-train-data": ("same", "learner.dump writes single steps down (docs/profiling.md)"),
    "padded-vocab-size": ("same", "the vocabulary is filled up by learner.megatron.vocab_multiple"),
    "ref-ckpt-step": ("other", "the reference is the model as it was before the first step"),
    "reset-optimizer-states": ("other", "what the optimizer has seen lasts for the whole run"),
    "rollout-data-transport": ("same", "samples go to the learner by Penstock's own messages"),
    "train-env-vars": ("same", "set them where the run is started"),
    "use-rollout-entropy": ("same", "entropy is reported in any case"),
    "use-routing-replay": (
        "but_for", "learner.megatron.router_replay takes the engine's choice of experts, not that of an earlier pass",
    ),
    "enable-experimental": ("same", "megatron-core's features of that kind are set one by one"),
    "seq-length": ("same", "micro-batches are packed by tokens"),
    "max-position-embeddings": _SIZE,
    "no-position-embedding": _SIZE,
    "no-rope-fusion": ("same", "kernels are chosen by megatron-core"),
    "use-gated-attention": _SIZE,
    "apply-layernorm-1p": _SIZE,
    "post-self-attn-layernorm": _SIZE,
    "post-mlp-layernorm": _SIZE,
    "rotary-interleaved": _SIZE,
    "sglang-router-ip": ("same", "engines are asked by themselves, or through engines.router"),
    "sglang-router-port": ("same", "engines are asked by themselves, or through engines.router"),
    "sglang-router-request-timeout-secs": ("same", "engines.request_timeout_s"),
}  # fmt: skip
"""Flag → effect, reason."""

EFFECTS: Final[Mapping[str, Effect]] = {
    **dict.fromkeys(
        (
            "prefill-num-servers", "update-weight-disk-dir",
            "update-weight-disk-keep-files", "update-weight-mode", "update-weight-delta-encoding",
            "update-weight-delta-checksum", "update-weight-local-checkpoint-dir", "save-debug-rollout-data",
            "dump-details", "use-wandb", "disable-compute-advantages-and-returns",
        ),
        "same",
    ),
    **dict.fromkeys(
        (
            "custom-megatron-init-path", "custom-megatron-before-log-prob-hook-path",
            "custom-megatron-before-train-step-hook-path", "use-opd", "opd-type", "opd-kl-coef", "opd-teacher-load",
            "opd-teacher-ckpt-step", "debug-train-only", "debug-rollout-only", "use-stateless-adam", "multimodal-keys",
        ),
        "other",
    ),
}  # fmt: skip
"""Of the flags in ``mapping.NO_COUNTERPART``, where it is not ``but_for``."""

SGLANG_NAMES: Final[Mapping[str, str]] = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "nsa_decode_backend": "dsa_decode_backend",
    "nsa_prefill_backend": "dsa_prefill_backend",
}
"""Options that an older SGLang called so → their names in the pinned one."""
