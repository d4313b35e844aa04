"""What TRL, verl, OpenRLHF, slime, AReaL and prime-rl call the keys of a scenario: for the message about a key that is
not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_TERMS: Final[dict[tuple[str, str], str]] = {
    ("learner.learning_rate", ""): "lr actor_lr actor_learning_rate",
    ("learner.keep_checkpoints", "and a script that follows the evaluations: docs/evaluation.md, Stopping early"): (
        "load_best_model_at_end metric_for_best_model early_stopping_patience"
    ),
    ("learner.groups_per_batch", "prompts a step, each with sampling.samples_per_group samples"): (
        "batch_size train_batch_size global_batch_size rollout_batch_size consumer_batch_size "
        "per_device_train_batch_size gen_batch_size"
    ),
    ("learner.num_updates", "optimizer steps that a batch is divided into"): (
        "mini_batch_size ppo_mini_batch_size ppo_n_minibatches steps_per_generation num_steps_per_rollout"
    ),
    ("learner.num_passes", "passes over a batch"): "ppo_epochs num_iterations num_ppo_epochs",
    ("learner.max_tokens_per_micro_batch", "in tokens, as samples are packed; it changes no step"): (
        "micro_batch_size gradient_accumulation_steps ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu max_tokens_per_gpu max_tokens_per_mb"
    ),
    ("sampling.samples_per_group", ""): (
        "num_generations n n_samples n_samples_per_prompt rollout_n group_size num_samples_per_prompt "
        "rollouts_per_example"
    ),
    ("sampling.max_response_tokens", ""): (
        "max_completion_length max_completion_tokens sampling.max_tokens max_new_tokens max_response_length "
        "response_length rollout_max_response_len generate_max_len"
    ),
    ("data.max_prompt_tokens", ""): "max_prompt_length prompt_max_len rollout_max_prompt_len train_dataset.max_length",
    ("model.max_context", ""): "max_length max_seq_len seq_len max_model_len context_length",
    ("learner.objective.kl_coef", "for dpo it is learner.objective.dpo_beta"): (
        "beta kl_beta kl_ctl kl_loss_coef init_kl_coef kl_coefficient"
    ),
    ("learner.objective.clip_low", "with learner.objective.clip_high for the other side"): (
        "epsilon clip_ratio clip_ratio_low eps_clip cliprange clip_eps epsilon_low"
    ),
    ("learner.objective.clip_high", ""): "epsilon_high clip_ratio_high eps_clip_high",
    ("learner.objective.entropy_coef", ""): "entropy_coeff ent_coef",
    ("learner.objective.normalize_std", ""): "scale_rewards norm_adv_by_std_in_grpo",
    ("learner.objective", "a name, such as grpo, dapo, gspo or ppo"): (
        "adv_estimator advantage_estimator loss_type algorithm"
    ),
    ("learner.objective.tau_pos", ""): "sapo_temperature_pos sapo_tau_pos",
    ("learner.objective.tau_neg", ""): "sapo_temperature_neg sapo_tau_neg",
    ("reward.components", "each has a weight; learner.objective: gdpo normalizes them one by one"): (
        "reward_weights multi_objective_aggregation"
    ),
    ("learner.objective.gae_lambda", ""): "lam lambd gae_lam",
    ("learner.optimizer", ""): "optim optim.type optimizer.type optimizer_name",
    ("learner.max_grad_norm", ""): "clip_grad grad_clip gradient_clipping",
    ("learner.lr_schedule", ""): "lr_scheduler_type lr_scheduler scheduler lr_decay_style",
    ("learner.warmup_steps", "a number of steps"): (
        "warmup_ratio warmup_steps_proportion lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps"
    ),
    ("learner.activation_checkpointing", ""): "gradient_checkpointing enable_gradient_checkpointing ac.freq",
    ("model.dtype", "bfloat16, float16 or float32"): "bf16 fp16 torch_dtype param_dtype",
    ("run.num_steps", ""): "max_steps total_training_steps total_steps num_rollout train_steps",
    ("run.num_steps", "the length of a run; data.num_epochs bounds how often rows come"): (
        "epochs num_train_epochs total_train_epochs total_epochs num_epoch"
    ),
    ("run.folder", ""): "output_dir save save_path default_local_dir ckpt_path fileroot",
    ("learner.save_every", ""): "save_steps save_freq save_interval ckpt.interval saver.freq_steps",
    ("learner.keep_checkpoints", ""): "save_total_limit max_actor_ckpt_to_keep max_ckpt_num",
    ("evaluation.every", ""): "eval_steps test_freq eval_interval eval.interval evaluator.freq_steps",
    ("model.path", ""): (
        "model_name_or_path model_name model.name actor.path hf_checkpoint pretrain pretrained_model_name_or_path"
    ),
    ("model.path", "the tokenizer lies in its folder"): "tokenizer_path",
    ("data.path", ""): "dataset dataset_name train_dataset.path train_files prompt_data train_data train_dataset",
    ("data.prompt_key", ""): "input_key prompt_column",
    ("data.chat_template", ""): "apply_chat_template",
    ("data.template_arguments", ""): "chat_template_kwargs apply_chat_template_kwargs",
    ("data.shuffle", ""): "shuffle_dataset",
    ("data.label_key", ""): "answer_key answer_column ground_truth_key",
    ("reward.function", ""): (
        "reward_funcs reward_fn rm_type custom_rm_path custom_reward_function reward_function reward_manager "
        "reward_manager.name"
    ),
    ("staleness.max_staleness", "in versions"): (
        "staleness_threshold max_head_offpolicyness max_off_policy_steps async_level max_async_level"
    ),
    ("staleness.max_concurrent", "in groups"): "max_concurrent_rollouts max_inflight",
    ("staleness.over_sampling", ""): "oversampling_factor",
    ("staleness.reuse", "uses of a group, at most"): "replay_ratio sample_reuse num_reuses",
    ("engines.slots", "requests that an engine runs at once"): (
        "max_num_seqs max_running_requests sglang_server_concurrency"
    ),
    ("engines.count", ""): "num_engines rollout_num_engines vllm_num_engines num_infer_gpus parallel.dp",
    (
        "learner.tensor_parallel",
        "with backend megatron it is learner.megatron.tensor_parallel; that of SGLang engines is in engines.sglang",
    ): "tensor_model_parallel_size tensor_parallel_size tp_size",
    ("learner.megatron.pipeline_parallel", ""): "pipeline_model_parallel_size pp_size",
    ("learner.megatron.context_parallel", ""): "context_parallel_size cp_size",
    ("learner.megatron.expert_parallel", ""): "expert_model_parallel_size ep_size",
    ("learner.lora.rank", ""): "lora_rank lora_r",
    ("learner.num_ranks", "GPUs of the learner, on all nodes"): (
        "world_size nproc_per_node num_gpus num_train_gpus n_gpus_per_node nnodes n_nodes"
    ),
    ("learner.groups_per_batch", "samples a step, divided by sampling.samples_per_group"): "orchestrator.batch_size",
    ("learner.objective.critic_learning_rate", ""): "critic.optim.lr",
    ("learner.objective.critic", "own: a model beside the policy, which starts as a copy of it"): "critic.model.path",
    ("engines.backend", "torch or sglang"): "rollout.name use_vllm vllm_mode vllm_server_host vllm_server_base_url",
    ("engines.sglang", "tp_size in it"): (
        "rollout.tensor_model_parallel_size rollout.tp_size parallel.tp vllm_tensor_parallel_size rollout_tp_size"
    ),
    ("engines.sglang", "mem_fraction_static in it"): (
        "gpu_memory_utilization vllm_gpu_memory_utilization sglang_mem_fraction_static"
    ),
    ("learner.megatron.tensor_parallel", ""): "megatron.tensor_model_parallel_size megatron.tp_size",
    ("learner.backend", "torch or megatron"): "strategy trainer.backend train_backend",
    ("learner.cpu_offload", "for parallel: fsdp"): "param_offload optimizer_offload grad_offload adam_offload",
    ("learner.parallel", "fsdp or ddp"): "fsdp deepspeed zero_stage",
    ("data.skip_long_prompts", "otherwise they are refused"): "filter_overlong_prompts",
    ("data.skip_long_prompts", "otherwise they are refused; no prompt is cut"): "truncation",
    ("run.seed", ""): "data.seed",
    ("reward.length_penalty", ""): "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor",
    ("learner.megatron.context_parallel", "with learner.backend: megatron"): "ulysses_sequence_parallel_size",
    ("learner.megatron.expert_tensor_parallel", ""): "expert_tensor_parallel_size",
    ("learner.compile", ""): "use_torch_compile use_liger_kernel",
    ("learner.rank_timeout_s", ""): "nccl_timeout ddp_timeout",
    ("learner.betas", "both in one list"): "adam_beta1 adam_beta2",
    ("learner.lora.alpha", ""): "lora_alpha",
    ("engines.sglang", "disable_cuda_graph in it"): "enforce_eager",
    ("engines.sglang", "attention_backend in it; a learner takes what its device has"): "attn_implementation",
    ("engines.sglang", "chunked_prefill_size in it"): "enable_chunked_prefill max_num_batched_tokens",
    ("learner.megatron.recompute", ""): "recompute_granularity",
    ("engines.placement", "colocate: who has not the turn sleeps"): "free_cache_engine colocate",
    ("episode.generate", "multi_turn, with kind: function"): "multi_turn multi_turn.enable",
    ("episode.tools", ""): "tool_config_path",
    ("episode.max_turns", ""): "max_assistant_turns",
    ("learner.max_tokens_per_micro_batch", "samples are always packed"): "log_prob_use_dynamic_bsz use_dynamic_bsz",
    ("learner.objective.dual_clip", ""): "clip_ratio_c",
    ("learner.objective.reduction", "token_mean, sequence_mean or constant"): "loss_agg_mode",
    ("learner.objective.kl_coef", "0: none"): "use_kl_loss",
    ("learner.objective.kl_in", "reward"): "use_kl_in_reward",
    ("learner.objective.kl_estimator", ""): "kl_loss_type kl_penalty",
    ("learner.objective.discount", ""): "gamma",
    ("learner.objective.old_logprobs", "recompute"): "recompute_logprob use_decoupled_loss",
    ("learner.objective.tis_clip", ""): "behav_imp_weight_cap",
    ("engines.count", "and learner.num_ranks; penstock plan divides devices between them"): "allocation_mode",
    ("weights.transport", ""): "weight_broadcast.type weight_update_mode",
    ("episode.generate", "file.py:function, with kind: function"): "env workflow",
    ("learner.objective", "gspo for sequences"): "importance_sampling_level",
    ("learner.objective.correction", ""): "rollout_correction vllm_importance_sampling_correction",
    ("filter.drop_zero_spread", ""): "filter_groups filter_groups.enable dynamic_sampling",
    ("filter.sample_function", "a function that turns them away"): "mask_truncated_completions",
    ("evaluation.datasets", "a list of blocks"): "val_files eval_dataset eval_prompt_data valid_dataset.path",
    ("evaluation.defaults.sampling", ""): "val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k",
    ("evaluation.defaults", ""): "val_kwargs val_kwargs.n num_generations_eval",
    ("evaluation.before_first", ""): "val_before_train eval_on_start",
    ("reward.function", "file.py:name"): "custom_reward_function.path custom_reward_function.name",
    ("reward.function", "reward_model, with its block"): "reward_model.enable",
    ("reward.remote.url", "with reward.function: remote"): "rm_url remote_rm_url",
    ("learner.lora", ""): "peft_config use_peft",
    ("learner.lora.target_modules", ""): "lora_target_modules",
    ("learner.objective.reference_every", "in batches"): "sync_ref_model ref_model_sync_steps",
    ("run.name", ""): "experiment_name trial_name run_name wandb.name",
    ("observability.trackers", "a list of blocks"): "report_to logger log_with use_wandb wandb",
    ("observability.trackers", "among the options of wandb"): "project_name wandb_project wandb_entity wandb.project",
    ("staleness.policy", "sync, one_step_off or fully_async"): (
        "rollout.mode async_training asynchronous partial_rollout"
    ),
    ("learner.max_tokens_per_micro_batch", "nothing is padded"): "use_remove_padding padding_free",
}
TERMS: Final = {term: known for known, terms in _TERMS.items() for term in terms.split()}
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
    "logging_steps": "the figures of every step are kept, in metrics.jsonl",
    "log_completions": "`penstock samples` shows them",
    "trust_remote_code": "code that comes with a model is never run",
    "push_to_hub": "a checkpoint is a folder that `hf upload` takes; `penstock convert RUN OUT` copies the model out",
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
