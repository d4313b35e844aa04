"""What each flag of slime is here: a key of the scenario, something that needs no key, or nothing, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Plain = str | int | float | bool | list["Plain"] | dict[str, "Plain"] | None


def number(text: str) -> int | float:
    """A whole number where it is one.

    Raises:
        ValueError: it is none.
    """
    try:
        return int(text)
    except ValueError:
        return float(text)


def recompute(text: str) -> str:
    """``full`` and ``selective`` are called the same here."""
    if text not in ("full", "selective"):
        raise ValueError(text)
    return text


KEYS: Final[Mapping[str, tuple[str, Callable[[str], Plain]]]] = {
    "hf-checkpoint": ("model.path", str),
    "seed": ("run.seed", int),
    "rollout-seed": ("run.seed", int),
    "num-rollout": ("run.num_steps", int),
    "prompt-data": ("data.path", str),
    "input-key": ("data.prompt_key", str),
    "label-key": ("data.label_key", str),
    "tool-key": ("data.tools_key", str),
    "rollout-max-prompt-len": ("data.max_prompt_tokens", int),
    "rollout-max-context-len": ("model.max_context", int),
    "rollout-batch-size": ("learner.groups_per_batch", int),
    "num-steps-per-rollout": ("learner.num_updates", int),
    "n-samples-per-prompt": ("sampling.samples_per_group", int),
    "rollout-temperature": ("sampling.temperature", number),
    "rollout-top-p": ("sampling.top_p", number),
    "rollout-max-response-len": ("sampling.max_response_tokens", int),
    "eval-interval": ("evaluation.every", int),
    "n-samples-per-eval-prompt": ("evaluation.defaults.samples_per_prompt", int),
    "eval-temperature": ("evaluation.defaults.sampling.temperature", number),
    "eval-top-p": ("evaluation.defaults.sampling.top_p", number),
    "eval-top-k": ("evaluation.defaults.sampling.top_k", int),
    "eval-max-response-len": ("evaluation.defaults.sampling.max_response_tokens", int),
    "eval-max-prompt-len": ("evaluation.defaults.max_prompt_tokens", int),
    "eval-input-key": ("evaluation.defaults.prompt_key", str),
    "eval-label-key": ("evaluation.defaults.label_key", str),
    "eval-tool-key": ("evaluation.defaults.tools_key", str),
    "reward-key": ("reward.key", str),
    "rm-url": ("reward.remote.url", str),
    "lr": ("learner.learning_rate", float),
    "weight-decay": ("learner.weight_decay", float),
    "clip-grad": ("learner.max_grad_norm", float),
    "save-interval": ("learner.save_every", int),
    "tensor-model-parallel-size": ("learner.megatron.tensor_parallel", int),
    "pipeline-model-parallel-size": ("learner.megatron.pipeline_parallel", int),
    "num-virtual-stages-per-pipeline-rank": ("learner.megatron.virtual_pipeline", int),
    "context-parallel-size": ("learner.megatron.context_parallel", int),
    "expert-model-parallel-size": ("learner.megatron.expert_parallel", int),
    "expert-tensor-parallel-size": ("learner.megatron.expert_tensor_parallel", int),
    "recompute-granularity": ("learner.megatron.recompute", recompute),
    "recompute-method": ("learner.megatron.transformer.recompute_method", str),
    "recompute-num-layers": ("learner.megatron.transformer.recompute_num_layers", int),
    "decoder-first-pipeline-num-layers": ("learner.megatron.transformer.num_layers_in_first_pipeline_stage", int),
    "decoder-last-pipeline-num-layers": ("learner.megatron.transformer.num_layers_in_last_pipeline_stage", int),
    "fp8-format": ("learner.megatron.transformer.fp8", str),
    "eps-clip": ("learner.objective.clip_low", float),
    "eps-clip-high": ("learner.objective.clip_high", float),
    "eps-clip-c": ("learner.objective.dual_clip", float),
    "value-clip": ("learner.objective.value_clip", float),
    "entropy-coef": ("learner.objective.entropy_coef", float),
    "kl-loss-type": ("learner.objective.kl_estimator", str),
    "ref-update-interval": ("learner.objective.reference_every", int),
    "gamma": ("learner.objective.discount", float),
    "lambd": ("learner.objective.gae_lambda", float),
    "tis-clip-low": ("learner.objective.tis_clip_low", float),
    "critic-lr": ("learner.objective.critic_learning_rate", float),
    "critic-lr-warmup-iters": ("learner.objective.critic_warmup_steps", int),
    "num-critic-only-steps": ("learner.objective.critic_only_steps", int),
    "update-weights-interval": ("weights.publish_every", int),
    "update-weight-buffer-size": ("weights.bucket_size_bytes", int),
}
"""Flag → key, and how its value is read."""

SWITCHES: Final[Mapping[str, tuple[str, Plain]]] = {
    "apply-chat-template": ("data.chat_template", True),
    "mask-offpolicy-in-partial-rollout": ("staleness.mask_old_tokens", True),
    "sequence-parallel": ("learner.megatron.sequence_parallel", True),
    "overlap-grad-reduce": ("learner.megatron.overlap_grad_reduce", True),
    "overlap-param-gather": ("learner.megatron.overlap_param_gather", True),
    "normalize-advantages": ("learner.objective.whiten", True),
    "disable-grpo-std-normalization": ("learner.objective.normalize_std", False),
    "use-unbiased-kl": ("learner.objective.unbiased_kl", True),
    "calculate-per-token-loss": ("learner.objective.reduction", "token_mean"),
}
"""Flag without a value → key and what it is set to."""

FUNCTIONS: Final[Mapping[str, str]] = {
    "custom-generate-function-path": "episode.generate",
    "custom-rm-path": "reward.function",
    "rollout-sample-filter-path": "filter.sample_function",
    "rollout-all-samples-process-path": "filter.all_samples_hook",
    "buffer-filter-path": "staleness.policy",
    "data-source-path": "data.source",
    "eval-function-path": "evaluation.defaults.generate",
    "custom-reward-post-process-path": "learner.objective.postprocess_function",
    "custom-advantage-function-path": "learner.objective.advantage_function",
    "custom-loss-function-path": "learner.objective.name",
    "custom-pg-loss-reducer-function-path": "learner.objective.reduction_function",
    "custom-tis-function-path": "learner.objective.importance_function",
    "custom-convert-samples-to-train-data-path": "learner.conversion_function",
    "rollout-data-postprocess-path": "learner.conversion_function",
    "custom-rollout-log-function-path": "learner.rollout_log_function",
    "custom-eval-rollout-log-function-path": "evaluation.log_function",
}
"""Flag that names a function → key that names the changed one; docs/from_slime.md has the change."""
ARGUMENTS_DIFFER: Final = "its arguments differ: docs/from_slime.md"
TO_BE_WRITTEN_ANEW: Final[Mapping[str, str]] = {
    "buffer-filter-path": "a class with `rank` and `target` takes its place",
    "data-source-path": "a class with next_rows, state and restore takes its place",
    "eval-function-path": "a function that plays one episode takes its place",
}
"""Of these flags the function is not named in the scenario, as it would not run: what is needed is of another kind."""

READ_TOGETHER: Final = frozenset((
    "advantage-estimator", "loss-type", "use-kl-loss", "kl-loss-coef", "kl-coef", "use-tis", "tis-clip",
    "use-rollout-logprobs", "use-opsm", "opsm-delta", "rm-type", "group-rm",
    "dynamic-sampling-filter-path", "over-sampling-batch-size", "global-batch-size", "max-tokens-per-gpu",
    "adam-beta1", "adam-beta2", "lr-decay-style", "min-lr", "actor-num-nodes", "actor-num-gpus-per-node",
    "critic-num-nodes", "critic-num-gpus-per-node",
    "rollout-num-gpus", "rollout-num-gpus-per-engine", "rollout-top-k", "rollout-stop", "rollout-stop-token-ids",
    "rollout-shuffle", "metadata-key", "rollout-function-path", "update-weight-transport",
    "rollout-external-engine-addrs", "colocate", "optimizer-cpu-offload", "optimizer-offload-fraction",
    "lr-warmup-fraction", "use-rollout-routing-replay", "eval-prompt-data", "eval-config", "skip-eval-before-train",
    "num-epoch", "attention-dropout", "hidden-dropout", "lr-warmup-iters", "lr-decay-iters", "load", "partial-rollout",
    "apply-chat-template-kwargs",
    "freeze-params-name-list", "disable-rewards-normalization", "only-train-params-name-list",
    "distributed-timeout-minutes", "sglang-server-concurrency", "custom-config-path", "enable-mtp-training",
    "mtp-num-layers", "mtp-loss-scaling-factor", "fp16", "loss-scale", "initial-loss-scale", "min-loss-scale",
    "loss-scale-window", "hysteresis", "sglang-dtype",
))  # fmt: skip
"""Flags that mean something with others only; :mod:`.convert` reads them."""

NEEDS_NO_KEY: Final[Mapping[str, str]] = {
    "balance-data": "micro-batches are balanced over ranks by cost in any case",
    "use-dynamic-batch-size": "micro-batches are packed by tokens in any case",
    "micro-batch-size": "micro-batches are packed by tokens (learner.max_tokens_per_micro_batch)",
    "ref-load": "the reference is the model as it was before the first step",
    "save": "checkpoints lie in the run's folder (run.folder)",
    "use-fault-tolerance": "lost parts are replaced in any case",
    "rollout-health-check-interval": "engines are watched in any case (engines.hang_timeout_s)",
    "rollout-health-check-timeout": "engines are watched in any case (engines.hang_timeout_s)",
    "rollout-health-check-first-wait": "engines are watched in any case (engines.start_timeout_s)",
    "get-mismatch-metrics": "the difference between engine and learner is reported in any case",
    "use-distributed-optimizer": "learner.megatron.distributed_optimizer is true by default",
    "accumulate-allreduce-grads-in-fp32": "gradients are added up in float32 in any case",
    "attention-softmax-in-fp32": "softmax is computed in float32 where megatron-core computes it",
    "optimizer": "AdamW",
    "rollout-skip-special-tokens": "rewards see the text without special tokens in any case",
    "offload": "colocated parts sleep in turn in any case (engines.placement)",
    "offload-train": "colocated parts sleep in turn in any case (engines.placement)",
    "offload-rollout": "colocated parts sleep in turn in any case (engines.placement)",
    "num-gpus-per-node": "Ray says how many GPUs each node has",
    "log-passrate": "pass@k of the trained groups is reported in any case",
    "moe-token-drop-policy": "no token is dropped, as engines drop none",
    "bf16": "slime takes it where --fp16 is not given",
    "transformer-impl": "Transformer Engine's layers are taken where CUDA is",
    "train-backend": "learner.backend",
    "model-name": "the checkpoint's config.json says it",
    "no-check-for-nan-in-loss-and-grad": "a step that is not finite changes nothing, and is said",
    "no-offload-train": "engines.placement says what shares GPUs",
    "no-offload-rollout": "engines.placement says what shares GPUs",
    "log-probs-chunk-size": "log-probs are of the same micro-batches as the step",
    "data-pad-size-multiplier": "sequences are filled up as far as the layout needs",
    "megatron-to-hf-mode": "weights go by Penstock's own tables",
}

_TEACHER: Final = "a teacher is a block of its own (teacher.model.path); learner.objective.opd_kl_coef is its weight"
NO_COUNTERPART: Final[Mapping[str, str]] = {
    "eval-reward-key": "evaluation.defaults.reward has a key of its own (docs/rewards.md)",
    "eval-max-context-len": "model.max_context holds for everything",
    "eval-min-new-tokens": "answers end where they end",
    "multimodal-keys": "learner.backend: torch trains on images (data.multimodal_keys); Megatron takes text",
    "custom-megatron-init-path": "the learner's own code is not a place for functions",
    "custom-megatron-before-log-prob-hook-path": "the learner's own code is not a place for functions",
    "custom-megatron-before-train-step-hook-path": "the learner's own code is not a place for functions",
    "use-opd": _TEACHER,
    "opd-type": _TEACHER,
    "opd-kl-coef": _TEACHER,
    "opd-teacher-load": _TEACHER,
    "opd-teacher-ckpt-step": _TEACHER,
    "prefill-num-servers": "engines that prefill and engines that decode: docs/sglang.md",
    "update-weight-disk-dir": "weights.transport: disk writes below the run's folder",
    "update-weight-disk-keep-files": "weights that no engine needs any more are removed",
    "update-weight-mode": "weights are sent whole",
    "update-weight-delta-encoding": "weights are sent whole",
    "update-weight-delta-checksum": "weights are sent whole",
    "update-weight-local-checkpoint-dir": "weights are sent whole",
    "save-debug-rollout-data": "run.keep_samples: true keeps every trained sample as Parquet",
    "dump-details": "run.keep_samples: true keeps every trained sample as Parquet, learner.dump what the learner "
    "computes of its tokens (docs/profiling.md)",
    "debug-train-only": "`penstock run --only learner --from RUN` trains what a run has recorded",
    "debug-rollout-only": "`penstock run --only rollout` generates and trains nothing",
    "disable-compute-advantages-and-returns": "what an objective does not need is not computed",
    "use-wandb": "metrics lie in the run's folder and at /metrics; observability.trackers names others "
    "(docs/observability.md)",
    "use-stateless-adam": "the optimizer is AdamW",
}
"""Flag → why the scenario has nothing for it."""

TRACKER_PREFIXES: Final = ("wandb-", "tb-", "disable-wandb", "use-tensorboard")
"""How flags about experiment trackers begin."""

SHAPE_OF_MODEL: Final = frozenset((
    "swiglu", "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "group-query-attention",
    "num-query-groups", "kv-channels", "use-rotary-position-embeddings", "disable-bias-linear", "add-qkv-bias",
    "normalization", "norm-epsilon", "rotary-base", "rotary-percent", "vocab-size", "qk-layernorm", "num-experts",
    "untie-embeddings-and-output-weights", "position-embedding-type", "moe-ffn-hidden-size", "moe-router-topk",
    "moe-layer-freq", "moe-grouped-gemm", "moe-router-score-function",
    "make-vocab-size-divisible-by",
    "moe-router-load-balancing-type", "moe-router-dtype", "moe-permute-fusion", "moe-shared-expert-intermediate-size",
    "multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim",
    "rotary-scaling-factor", "mscale", "mscale-all-dim", "moe-router-num-groups", "moe-router-group-topk",
    "moe-router-topk-scaling-factor", "moe-router-pre-softmax", "moe-router-enable-expert-bias", "spec",
))  # fmt: skip
"""What the checkpoint's config.json says here."""
