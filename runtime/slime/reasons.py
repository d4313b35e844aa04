"""Why a flag has no key of its own in the scenario, and what that means for the job.

Invariant: each flag that slime's argument parser declares is here or in :mod:`.mapping`; a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Effect = Literal["same", "but_for", "other"]
"""On what is trained: none; one that can be named, and the job is the same but for it; or another job."""

_REASONS: Final[dict[tuple[Effect, str], str]] = {
    ("same", "not needed: micro-batches are balanced over ranks by cost in any case"): "balance-data",
    ("same", "not needed: micro-batches are packed by tokens in any case"): "use-dynamic-batch-size",
    ("same", "not needed: micro-batches are packed by tokens (learner.max_tokens_per_micro_batch)"): "micro-batch-size",
    ("same", "not needed: the reference is the model as it was before the first step"): "ref-load",
    ("same", "not needed: checkpoints lie in the run's folder (run.folder)"): "save",
    ("same", "not needed: lost parts are replaced in any case"): "use-fault-tolerance",
    ("same", "not needed: engines are watched in any case (engines.hang_timeout_s)"): (
        "rollout-health-check-interval rollout-health-check-timeout"
    ),
    ("same", "not needed: engines are watched in any case (engines.start_timeout_s)"): (
        "rollout-health-check-first-wait"
    ),
    ("same", "not needed: the difference between engine and learner is reported in any case"): "get-mismatch-metrics",
    ("same", "not needed: learner.megatron.distributed_optimizer is true by default"): "use-distributed-optimizer",
    ("same", "not needed: gradients are added up in float32 in any case"): "accumulate-allreduce-grads-in-fp32",
    ("same", "not needed: softmax is computed in float32 where megatron-core computes it"): "attention-softmax-in-fp32",
    ("same", "not needed: AdamW"): "optimizer",
    ("same", "not needed: rewards see the text without special tokens in any case"): "rollout-skip-special-tokens",
    ("same", "not needed: colocated parts sleep in turn in any case (engines.placement)"): (
        "offload offload-train offload-rollout"
    ),
    ("same", "not needed: Ray says how many GPUs each node has"): "num-gpus-per-node",
    ("same", "not needed: pass@k of the trained groups is reported in any case"): "log-passrate",
    ("same", "not needed: no token is dropped, as engines drop none"): "moe-token-drop-policy",
    ("same", "not needed: slime takes it where --fp16 is not given"): "bf16",
    ("same", "not needed: Transformer Engine's layers are taken where CUDA is"): "transformer-impl",
    ("same", "not needed: learner.backend"): "train-backend",
    ("same", "not needed: the checkpoint's config.json says it"): (
        "model-name max-position-embeddings no-position-embedding use-gated-attention apply-layernorm-1p "
        "post-self-attn-layernorm post-mlp-layernorm rotary-interleaved"
    ),
    ("same", "not needed: a step that is not finite changes nothing, and is said"): "no-check-for-nan-in-loss-and-grad",
    ("same", "not needed: engines.placement says what shares GPUs"): "no-offload-train no-offload-rollout",
    ("same", "not needed: log-probs are of the same micro-batches as the step"): "log-probs-chunk-size",
    ("same", "not needed: sequences are filled up as far as the layout needs"): "data-pad-size-multiplier",
    ("same", "not needed: weights go by Penstock's own tables"): "megatron-to-hf-mode",
    ("but_for", "evaluation.defaults.reward has a key of its own (docs/rewards.md)"): "eval-reward-key",
    ("but_for", "model.max_context holds for everything"): "eval-max-context-len",
    ("but_for", "answers end where they end"): "eval-min-new-tokens",
    ("other", "learner.backend: torch trains on images (data.multimodal_keys); Megatron takes text"): (
        "multimodal-keys"
    ),
    ("other", "the learner's own code is not a place for functions"): (
        "custom-megatron-init-path custom-megatron-before-log-prob-hook-path "
        "custom-megatron-before-train-step-hook-path"
    ),
    (
        "other",
        "a teacher is a block of its own (teacher.model.path); learner.objective.opd_kl_coef is its weight",
    ): "use-opd opd-type opd-kl-coef opd-teacher-load opd-teacher-ckpt-step",
    ("same", "engines that prefill and engines that decode: docs/sglang.md"): "prefill-num-servers",
    ("same", "weights.transport: disk writes below the run's folder"): "update-weight-disk-dir",
    ("same", "weights that no engine needs any more are removed"): "update-weight-disk-keep-files",
    ("same", "weights are sent whole"): (
        "update-weight-mode update-weight-delta-encoding update-weight-delta-checksum "
        "update-weight-local-checkpoint-dir"
    ),
    ("same", "run.keep_samples: true keeps every trained sample as Parquet"): "save-debug-rollout-data",
    (
        "same",
        "run.keep_samples: true keeps every trained sample as Parquet, learner.dump what the learner "
        "computes of its tokens (docs/profiling.md)",
    ): "dump-details",
    ("other", "`penstock run --only learner --from RUN` trains what a run has recorded"): "debug-train-only",
    ("other", "`penstock run --only rollout` generates and trains nothing"): "debug-rollout-only",
    ("same", "what an objective does not need is not computed"): "disable-compute-advantages-and-returns",
    (
        "same",
        "metrics lie in the run's folder and at /metrics; observability.trackers names others (docs/observability.md)",
    ): "use-wandb",
    ("other", "the optimizer is AdamW"): "use-stateless-adam",
    ("same", "how attention is divided over context-parallel ranks is megatron-core's choice"): "allgather-cp",
    ("same", "how a checkpoint is written changes nothing that is trained"): "async-save",
    ("other", "adapters are for learner.backend: torch (learner.lora), beside linear layers alone"): (
        "use-lora lora-target-preset lora-rank lora-alpha lora-weight-decay lora-learning-rate lora-load"
    ),
    ("same", "with learner.lora a checkpoint has the adapters beside the merged model"): "save-lora",
    ("same", "a checkpoint's model has the adapters merged"): "lora-save-merged-hf",
    ("same", "a checkpoint has what it takes to go on"): "no-save-optim",
    ("same", "a run begins with a fresh optimizer; `penstock resume` goes on with its own"): "no-load-optim",
    ("same", "a run begins with its own seed"): "no-load-rng",
    ("same", "a run begins at step 0; `penstock resume RUN` goes on with one"): "finetune",
    ("same", "a checkpoint's model is in Hugging Face's format"): "save-hf",
    ("same", "`penstock resume RUN` goes on at the step that the run has reached"): "start-rollout-id",
    ("same", "colocated parts sleep in turn (engines.placement)"): "release-train",
    ("same", "micro-batches are balanced over ranks by cost in any case"): "balance-by-flops",
    ("same", "log-probs are of the same micro-batches as the step"): "log-probs-max-tokens-per-gpu",
    ("same", "micro-batches are packed by tokens"): "ref-micro-batch-size seq-length",
    ("same", "saves memory only; see learner.megatron.recompute"): "recompute-loss-function",
    ("same", "each update is compared with what was sent, by checksum"): "check-weight-update-equal",
    ("same", "a check of slime's own tests"): (
        "ci-test ci-disable-kl-checker ci-train-rollout-logprob-abs-diff-threshold ci-save-grad-norm ci-load-grad-norm"
    ),
    ("other", "the model is that of config.json; no function builds another"): "custom-model-provider-path",
    ("but_for", "weights.transport sends the weights, and no function follows"): "custom-update-weight-post-write-path",
    ("but_for", "what it does belongs in reward.function or episode.generate"): "rollout-sample-hook-path",
    ("other", "prompts come from data.path or data.sources"): "disable-rollout-global-dataset",
    ("same", "NCCL on GPUs, gloo on CPUs"): "distributed-backend",
    ("other", "slime's rollout buffer; agents of another process come by the gateway (docs/gateway.md)"): (
        "rollout-buffer-url rollout-task-type fetch-trajectory-retry-times min-batch-collection-ratio"
    ),
    ("other", "no model with an indexer is trained (DeepSeek-V3.2)"): "freeze-indexer",
    ("same", "no request goes through a proxy"): "http-proxy",
    ("same", "each engine has a process of its own that sends its requests"): "use-distributed-post",
    ("but_for", "the ratio is taken to what learner.objective.old_logprobs says"): "keep-old-actor",
    ("other", "what a run has recorded is trained by `penstock run --only learner --from RUN`"): (
        "load-debug-rollout-data load-debug-rollout-data-subsample load-forge-rollout-data"
    ),
    ("same", "figures and samples: docs/observability.md"): "log-correct-samples log-multi-turn log-reward-category",
    ("same", "the chat template itself shows which tokens are the assistant's (docs/learner.md)"): "loss-mask-type",
    ("other", "a file with options of roles; write them under learner.megatron"): "megatron-config-path",
    ("but_for", "layers compute with Transformer Engine's kernels"): (
        "megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules "
        "megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules qwen-gdn-backend"
    ),
    ("same", "learner.profile and engines.profile name the steps to be profiled (docs/profiling.md)"): (
        "memory-recorder memory-snapshot-dir memory-snapshot-num-steps record-memory-history profile-target"
    ),
    ("same", "learner.dump writes single steps down (docs/profiling.md)"): "save-debug-train-data",
    ("same", "the vocabulary is filled up by learner.megatron.vocab_multiple"): "padded-vocab-size",
    ("other", "the reference is the model as it was before the first step"): "ref-ckpt-step",
    ("other", "what the optimizer has seen lasts for the whole run"): "reset-optimizer-states",
    ("same", "samples go to the learner by Penstock's own messages"): "rollout-data-transport",
    ("same", "set them where the run is started"): "train-env-vars",
    ("same", "entropy is reported in any case"): "use-rollout-entropy",
    (
        "but_for",
        "learner.megatron.router_replay takes the engine's choice of experts, not that of an earlier pass",
    ): "use-routing-replay",
    ("same", "megatron-core's features of that kind are set one by one"): "enable-experimental",
    ("same", "kernels are chosen by megatron-core"): "no-rope-fusion",
    ("same", "engines are asked by themselves, or through engines.router"): "sglang-router-ip sglang-router-port",
    ("same", "engines.request_timeout_s"): "sglang-router-request-timeout-secs",
}
REASONS: Final = {flag: known for known, flags in _REASONS.items() for flag in flags.split()}
"""Flag → effect, reason."""

SGLANG_NAMES: Final[Mapping[str, str]] = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "nsa_decode_backend": "dsa_decode_backend",
    "nsa_prefill_backend": "dsa_prefill_backend",
}
"""Options that an older SGLang called so → their names in the pinned one."""
