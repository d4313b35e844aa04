"""What TRL, verl, OpenRLHF, slime, AReaL and prime-rl call the keys of a scenario: for the message about a key that is
not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS_NOTE: Final = "prompts a step, each with sampling.samples_per_group samples"
UPDATES_NOTE: Final = "optimizer steps that a batch is divided into"

TERMS: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys(("lr", "actor_lr", "actor_learning_rate"), ("learner.learning_rate", "")),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "early_stopping_patience"),
        ("learner.keep_checkpoints", "and a script that follows the evaluations: docs/evaluation.md, Stopping early"),
    ),
    **dict.fromkeys(
        (
            "batch_size",
            "train_batch_size",
            "global_batch_size",
            "rollout_batch_size",
            "consumer_batch_size",
            "per_device_train_batch_size",
            "gen_batch_size",
        ),
        ("learner.groups_per_batch", GROUPS_NOTE),
    ),
    **dict.fromkeys(
        (
            "mini_batch_size",
            "ppo_mini_batch_size",
            "ppo_n_minibatches",
            "steps_per_generation",
            "num_steps_per_rollout",
        ),
        ("learner.num_updates", UPDATES_NOTE),
    ),
    **dict.fromkeys(("ppo_epochs", "num_iterations", "num_ppo_epochs"), ("learner.num_passes", "passes over a batch")),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "gradient_accumulation_steps",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_max_token_len_per_gpu",
            "max_tokens_per_gpu",
            "max_tokens_per_mb",
        ),
        ("learner.max_tokens_per_micro_batch", "in tokens, as samples are packed; it changes no step"),
    ),
    **dict.fromkeys(
        (
            "num_generations",
            "n",
            "n_samples",
            "n_samples_per_prompt",
            "rollout_n",
            "group_size",
            "num_samples_per_prompt",
            "rollouts_per_example",
        ),
        ("sampling.samples_per_group", ""),
    ),
    **dict.fromkeys(
        (
            "max_completion_length",
            "max_completion_tokens",
            "sampling.max_tokens",
            "max_new_tokens",
            "max_response_length",
            "response_length",
            "rollout_max_response_len",
            "generate_max_len",
        ),
        ("sampling.max_response_tokens", ""),
    ),
    **dict.fromkeys(
        ("max_prompt_length", "prompt_max_len", "rollout_max_prompt_len", "train_dataset.max_length"),
        ("data.max_prompt_tokens", ""),
    ),
    **dict.fromkeys(
        ("max_length", "max_seq_len", "seq_len", "max_model_len", "context_length"), ("model.max_context", "")
    ),
    **dict.fromkeys(
        ("beta", "kl_beta", "kl_ctl", "kl_loss_coef", "init_kl_coef", "kl_coefficient"),
        ("learner.objective.kl_coef", "for dpo it is learner.objective.dpo_beta"),
    ),
    **dict.fromkeys(
        ("epsilon", "clip_ratio", "clip_ratio_low", "eps_clip", "cliprange", "clip_eps", "epsilon_low"),
        ("learner.objective.clip_low", "with learner.objective.clip_high for the other side"),
    ),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high"), ("learner.objective.clip_high", "")),
    **dict.fromkeys(("entropy_coeff", "ent_coef"), ("learner.objective.entropy_coef", "")),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), ("learner.objective.normalize_std", "")),
    **dict.fromkeys(
        ("adv_estimator", "advantage_estimator", "loss_type", "algorithm"),
        ("learner.objective", "a name, such as grpo, dapo, gspo or ppo"),
    ),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_tau_pos"), ("learner.objective.tau_pos", "")),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_tau_neg"), ("learner.objective.tau_neg", "")),
    **dict.fromkeys(
        ("reward_weights", "multi_objective_aggregation"),
        ("reward.components", "each has a weight; learner.objective: gdpo normalizes them one by one"),
    ),
    **dict.fromkeys(("lam", "lambd", "gae_lam"), ("learner.objective.gae_lambda", "")),
    **dict.fromkeys(("optim", "optim.type", "optimizer.type", "optimizer_name"), ("learner.optimizer", "")),
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clipping"), ("learner.max_grad_norm", "")),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style"), ("learner.lr_schedule", "")),
    **dict.fromkeys(
        ("warmup_ratio", "warmup_steps_proportion", "lr_warmup_steps", "lr_warmup_steps_ratio", "num_warmup_steps"),
        ("learner.warmup_steps", "a number of steps"),
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "enable_gradient_checkpointing", "ac.freq"), ("learner.activation_checkpointing", "")
    ),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "param_dtype"), ("model.dtype", "bfloat16, float16 or float32")),
    **dict.fromkeys(
        ("max_steps", "total_training_steps", "total_steps", "num_rollout", "train_steps"), ("run.num_steps", "")
    ),
    **dict.fromkeys(
        ("epochs", "num_train_epochs", "total_train_epochs", "total_epochs", "num_epoch"),
        ("run.num_steps", "the length of a run; data.num_epochs bounds how often rows come"),
    ),
    **dict.fromkeys(
        ("output_dir", "save", "save_path", "default_local_dir", "ckpt_path", "fileroot"), ("run.folder", "")
    ),
    **dict.fromkeys(
        ("save_steps", "save_freq", "save_interval", "ckpt.interval", "saver.freq_steps"), ("learner.save_every", "")
    ),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep", "max_ckpt_num"), ("learner.keep_checkpoints", "")),
    **dict.fromkeys(
        ("eval_steps", "test_freq", "eval_interval", "eval.interval", "evaluator.freq_steps"), ("evaluation.every", "")
    ),
    **dict.fromkeys(
        (
            "model_name_or_path",
            "model_name",
            "model.name",
            "actor.path",
            "hf_checkpoint",
            "pretrain",
            "pretrained_model_name_or_path",
        ),
        ("model.path", ""),
    ),
    "tokenizer_path": ("model.path", "the tokenizer lies in its folder"),
    **dict.fromkeys(
        ("dataset", "dataset_name", "train_dataset.path", "train_files", "prompt_data", "train_data"), ("data.path", "")
    ),
    **dict.fromkeys(("input_key", "prompt_column"), ("data.prompt_key", "")),
    **dict.fromkeys(("answer_key", "answer_column", "ground_truth_key"), ("data.label_key", "")),
    **dict.fromkeys(
        ("reward_funcs", "reward_fn", "rm_type", "custom_rm_path", "custom_reward_function", "reward_function"),
        ("reward.function", ""),
    ),
    **dict.fromkeys(
        ("staleness_threshold", "max_head_offpolicyness", "max_off_policy_steps", "async_level", "max_async_level"),
        ("staleness.max_staleness", "in versions"),
    ),
    **dict.fromkeys(("max_concurrent_rollouts", "max_inflight"), ("staleness.max_concurrent", "in groups")),
    "oversampling_factor": ("staleness.over_sampling", ""),
    **dict.fromkeys(("replay_ratio", "sample_reuse", "num_reuses"), ("staleness.reuse", "uses of a group, at most")),
    **dict.fromkeys(
        ("max_num_seqs", "max_running_requests", "sglang_server_concurrency"),
        ("engines.slots", "requests that an engine runs at once"),
    ),
    **dict.fromkeys(
        ("num_engines", "rollout_num_engines", "vllm_num_engines", "num_infer_gpus", "parallel.dp"),
        ("engines.count", ""),
    ),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "tensor_parallel_size", "tp_size"),
        (
            "learner.tensor_parallel",
            "with backend megatron it is learner.megatron.tensor_parallel; that of SGLang engines is in engines.sglang",
        ),
    ),
    **dict.fromkeys(("pipeline_model_parallel_size", "pp_size"), ("learner.megatron.pipeline_parallel", "")),
    **dict.fromkeys(("context_parallel_size", "cp_size"), ("learner.megatron.context_parallel", "")),
    **dict.fromkeys(("expert_model_parallel_size", "ep_size"), ("learner.megatron.expert_parallel", "")),
    **dict.fromkeys(("lora_rank", "lora_r"), ("learner.lora.rank", "")),
    **dict.fromkeys(
        ("world_size", "nproc_per_node", "num_gpus", "num_train_gpus", "n_gpus_per_node", "nnodes", "n_nodes"),
        ("learner.num_ranks", "GPUs of the learner, on all nodes"),
    ),
    "orchestrator.batch_size": ("learner.groups_per_batch", "samples a step, divided by sampling.samples_per_group"),
    "critic.optim.lr": ("learner.objective.critic_learning_rate", ""),
    "critic.model.path": ("learner.objective.critic", "own: a model beside the policy, which starts as a copy of it"),
    "rollout.name": ("engines.backend", "torch or sglang"),
    **dict.fromkeys(
        (
            "rollout.tensor_model_parallel_size",
            "rollout.tp_size",
            "parallel.tp",
            "vllm_tensor_parallel_size",
            "rollout_tp_size",
        ),
        ("engines.sglang", "tp_size in it"),
    ),
    **dict.fromkeys(
        ("gpu_memory_utilization", "vllm_gpu_memory_utilization", "sglang_mem_fraction_static"),
        ("engines.sglang", "mem_fraction_static in it"),
    ),
    **dict.fromkeys(
        ("megatron.tensor_model_parallel_size", "megatron.tp_size"), ("learner.megatron.tensor_parallel", "")
    ),
    **dict.fromkeys(("strategy", "trainer.backend", "train_backend"), ("learner.backend", "torch or megatron")),
    **dict.fromkeys(
        ("param_offload", "optimizer_offload", "grad_offload", "adam_offload"),
        ("learner.cpu_offload", "for parallel: fsdp"),
    ),
    "filter_overlong_prompts": ("data.skip_long_prompts", "otherwise they are refused"),
    "truncation": ("data.skip_long_prompts", "otherwise they are refused; no prompt is cut"),
    "data.seed": ("run.seed", ""),
    **dict.fromkeys(("reward_manager", "reward_manager.name"), ("reward.function", "")),
    **dict.fromkeys(
        (f"overlong_buffer.{key}" for key in ("enable", "len", "penalty_factor")), ("reward.length_penalty", "")
    ),
    "ulysses_sequence_parallel_size": ("learner.megatron.context_parallel", "with learner.backend: megatron"),
    "expert_tensor_parallel_size": ("learner.megatron.expert_tensor_parallel", ""),
    "use_torch_compile": ("learner.compile", ""),
    "nccl_timeout": ("learner.rank_timeout_s", ""),
    "lora_alpha": ("learner.lora.alpha", ""),
    "enforce_eager": ("engines.sglang", "disable_cuda_graph in it"),
    **dict.fromkeys(
        ("enable_chunked_prefill", "max_num_batched_tokens"), ("engines.sglang", "chunked_prefill_size in it")
    ),
    "recompute_granularity": ("learner.megatron.recompute", ""),
    "free_cache_engine": ("engines.placement", "colocate: who has not the turn sleeps"),
    **dict.fromkeys(("multi_turn", "multi_turn.enable"), ("episode.generate", "multi_turn, with kind: function")),
    "tool_config_path": ("episode.tools", ""),
    "max_assistant_turns": ("episode.max_turns", ""),
    "log_prob_use_dynamic_bsz": ("learner.max_tokens_per_micro_batch", "samples are always packed"),
    "use_dynamic_bsz": ("learner.max_tokens_per_micro_batch", "samples are always packed"),
    "clip_ratio_c": ("learner.objective.dual_clip", ""),
    "loss_agg_mode": ("learner.objective.reduction", "token_mean, sequence_mean or constant"),
    "use_kl_loss": ("learner.objective.kl_coef", "0: none"),
    "use_kl_in_reward": ("learner.objective.kl_in", "reward"),
    **dict.fromkeys(("kl_loss_type", "kl_penalty"), ("learner.objective.kl_estimator", "")),
    "gamma": ("learner.objective.discount", ""),
    **dict.fromkeys(("recompute_logprob", "use_decoupled_loss"), ("learner.objective.old_logprobs", "recompute")),
    "behav_imp_weight_cap": ("learner.objective.tis_clip", ""),
    "allocation_mode": ("engines.count", "and learner.num_ranks; penstock plan divides devices between them"),
    **dict.fromkeys(("weight_broadcast.type", "weight_update_mode"), ("weights.transport", "")),
    **dict.fromkeys(("env", "workflow"), ("episode.generate", "file.py:function, with kind: function")),
    "importance_sampling_level": ("learner.objective", "gspo for sequences"),
    **dict.fromkeys(
        ("rollout_correction", "vllm_importance_sampling_correction"), ("learner.objective.correction", "")
    ),
    "filter_groups": ("filter.drop_zero_spread", ""),
    "filter_groups.enable": ("filter.drop_zero_spread", ""),
    "mask_truncated_completions": ("filter.sample_function", "a function that turns them away"),
    **dict.fromkeys(
        ("val_files", "eval_dataset", "eval_prompt_data", "valid_dataset.path"),
        ("evaluation.datasets", "a list of blocks"),
    ),
    **dict.fromkeys(
        (f"val_kwargs.{key}" for key in ("temperature", "top_p", "top_k")), ("evaluation.defaults.sampling", "")
    ),
    **dict.fromkeys(("val_kwargs", "val_kwargs.n", "num_generations_eval"), ("evaluation.defaults", "")),
    **dict.fromkeys(("val_before_train", "eval_on_start"), ("evaluation.before_first", "")),
    **dict.fromkeys(
        ("custom_reward_function.path", "custom_reward_function.name"), ("reward.function", "file.py:name")
    ),
    "reward_model.enable": ("reward.function", "reward_model, with its block"),
    "train_dataset": ("data.path", ""),
    "peft_config": ("learner.lora", ""),
    **dict.fromkeys(("project_name", "experiment_name", "trial_name", "run_name", "wandb.name"), ("run.name", "")),
    **dict.fromkeys(("report_to", "logger", "log_with", "use_wandb"), ("observability.trackers", "a list of blocks")),
    **dict.fromkeys(
        ("rollout.mode", "async_training", "asynchronous"), ("staleness.policy", "sync, one_step_off or fully_async")
    ),
    **dict.fromkeys(
        ("use_remove_padding", "padding_free"), ("learner.max_tokens_per_micro_batch", "nothing is padded")
    ),
}
"""By the term, in lower case (with the block around it where it means something else in others): the key here, and what
has to be known of it."""


NEEDLESS: Final[dict[str, str]] = {
    "critic_warmup": "the policy is trained from the first batch on, as with 0",
    **dict.fromkeys(("use_mbridge", "vanilla_mbridge"), "weights are always under Hugging Face's names"),
    **dict.fromkeys(
        ("resume_mode", "resume_from_path", "resume_from_checkpoint"), "`penstock resume RUN` goes on with a run"
    ),
    **dict.fromkeys(
        ("include", "includes", "defaults", "extends", "inherits", "imports", "base", "_base_", "hydra"),
        "a scenario is one file over Penstock's defaults; what varies is set on the command line (KEY=VALUE)",
    ),
    "val_only": "`penstock evaluate MODEL` evaluates without training",
    "calculate_log_probs": "engines tell the log-probs of what they draw always",
}
"""What has no key here, and needs none."""
BLOCKS: Final = {
    "override_transformer_config": "learner.megatron.transformer",
    "engine_kwargs.sglang": "engines.sglang",
}
"""Blocks whose keys are those of the same libraries here."""


def known_elsewhere(path: Sequence[str | int]) -> str:
    """A sentence for a key that other systems have at this path, or anywhere; empty where nothing is known of it."""
    names = [str(part).lower().lstrip("+").replace("-", "_") for part in path]
    terms = (".".join(names[first:]) for first in range(len(names)))
    if (term := next((term for term in terms if term in TERMS or term in NEEDLESS), None)) is None:
        found = [(name, key) for name, key in BLOCKS.items() if f".{name}." in ".".join(names)]
        return "".join(f"no such key; what others have in {name} is in {key} here" for name, key in found)
    if term in NEEDLESS:
        return f"no such key, and none is needed: {NEEDLESS[term]}"
    key, note = TERMS[term]
    return f"no such key; what others call {term} is {key} here{f' ({note})' if note else ''}"
