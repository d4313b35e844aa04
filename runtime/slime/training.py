"""Flags about what is trained and how, that mean something together only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.data.problems import DataError
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.learners.training.freezing import wrong_pattern
from penstock.runtime.slime.script import Flag

if TYPE_CHECKING:
    from penstock.runtime.slime.mapping import Plain
    from penstock.runtime.slime.writer import Writer

ROWS_ELSEWHERE: Final = 100_000
"""Rows that are counted on where the file is on another machine."""
MEGATRON: Final = "Megatron's default"
MEGATRON_DROPOUT: Final = 0.1
OBJECTIVES: Final = {
    "grpo": "grpo",
    "gspo": "gspo",
    "cispo": "cispo",
    "ppo": "ppo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "on_policy_distillation": "distill",
}
_KEY: Final = "learner.objective"
OF_CRITIC: Final = ("critic-num-nodes", "critic-num-gpus-per-node")
"""Flags that give the critic GPUs of its own. Versions of slime without them put it where the policy is."""


def is_supervised(writer: Writer) -> bool:
    """Whether rows hold the responses."""
    return writer.value("loss-type") == "sft_loss"


def write_objective(writer: Writer) -> None:
    """``learner.objective``."""
    if is_supervised(writer):
        writer.set(f"{_KEY}.name", "sft")
        writer.take(f"{_KEY}.reduction", "sequence_mean")
        return
    flag, estimator = writer.flags.get("advantage-estimator"), writer.value("advantage-estimator") or "grpo"
    if writer.get(f"{_KEY}.name") is not None:  # a loss of the user's own
        _own_loss(writer, flag, estimator)
    elif estimator in OBJECTIVES:
        writer.set(f"{_KEY}.name", OBJECTIVES[estimator])
    elif flag is not None:
        known = ", ".join(OBJECTIVES.values())
        writer.leave(flag, f"there is no objective {estimator!r}; learner.objective has {known}", "other")
    if writer.get(f"{_KEY}.name") is None:
        writer.set(f"{_KEY}.name", "grpo")
    if "disable-rewards-normalization" in writer.flags:
        _raw(writer, estimator)
    _clip(writer)
    writer.take(f"{_KEY}.reduction", "sequence_mean")
    if writer.whole("sampling.samples_per_group", 1) == 1:
        writer.take(f"{_KEY}.normalize_std", False, "slime's for groups of one")
    _kl(writer)
    _correction(writer)
    if estimator == "ppo":
        _critic(writer)


def _own_loss(writer: Writer, flag: Flag | None, estimator: str) -> None:
    """Its advantages are those of the estimator all the same."""
    name = OBJECTIVES.get(estimator)
    if name in ("reinforce_plus_plus_baseline", "reinforce_plus_plus"):
        writer.set(f"{_KEY}.estimator", name)
    elif name not in ("grpo", "gspo", "cispo") and flag is not None:
        writer.leave(flag, "beside a loss of your own set learner.objective.estimator, and what it needs", "other")


def _raw(writer: Writer, estimator: str) -> None:
    """The others have no baseline of a group in any case."""
    if OBJECTIVES.get(estimator) not in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"):
        return
    writer.set(f"{_KEY}.estimator", "raw")
    if estimator != "reinforce_plus_plus_baseline" and writer.number("kl-coef", 0.0):
        writer.leave_named("kl-coef", f"is taken off raw rewards here; {estimator} of slime takes no notice of it")


def _clip(writer: Writer) -> None:
    writer.take(f"{_KEY}.clip_low", 0.2)
    low = writer.get(f"{_KEY}.clip_low")
    writer.take(f"{_KEY}.clip_high", low, "slime's, which is --eps-clip")


def _kl(writer: Writer) -> None:
    in_loss, in_reward = writer.number("kl-loss-coef", 0.0), writer.number("kl-coef", 0.0)
    if "use-kl-loss" in writer.flags and in_loss:
        writer.set(f"{_KEY}.kl_coef", in_loss)
        writer.set(f"{_KEY}.kl_in", "loss")
        is_k1 = writer.get(f"{_KEY}.kl_estimator") in (None, "k1")
        if is_k1 and not writer.get(f"{_KEY}.unbiased_kl"):
            writer.set(f"{_KEY}.kl_estimator", "k3")
            reason = "slime's k1 (its default) has an expected gradient of 0 in the loss; k3 was taken"
            writer.leave(writer.flags.get("kl-loss-type", writer.flags["kl-loss-coef"]), reason)
        return
    if "use-kl-loss" in writer.flags:
        writer.leave_named("use-kl-loss", "its weight, --kl-loss-coef, is 0", "same")
    if in_reward:
        writer.set(f"{_KEY}.kl_coef", in_reward)
        writer.set(f"{_KEY}.kl_in", "reward")
    writer.take(f"{_KEY}.kl_estimator", "k1")


def _correction(writer: Writer) -> None:
    source = "engine" if "use-rollout-logprobs" in writer.flags else "recompute"
    writer.take(f"{_KEY}.old_logprobs", source, unless=("use-rollout-logprobs",))
    if "use-tis" in writer.flags:
        writer.set(f"{_KEY}.correction", "tis")
        writer.set(f"{_KEY}.tis_clip", writer.number("tis-clip", 2.0))
    elif writer.get(f"{_KEY}.old_logprobs") == "recompute":
        writer.take(f"{_KEY}.correction", "none")
    if "use-opsm" in writer.flags:
        writer.set(f"{_KEY}.opsm_delta", writer.number("opsm-delta", 1e-4))


def _critic(writer: Writer) -> None:
    """Slime's critic has the options of the policy, unless a file says otherwise."""
    rate = writer.number("lr", 1e-6)
    writer.take(f"{_KEY}.critic_learning_rate", rate, "slime's, which is --lr (null: ten times that)")
    if warmup := writer.whole("learner.warmup_steps", 0):
        writer.take(f"{_KEY}.critic_warmup_steps", warmup, "slime's, which is that of the policy")


def write_learner(writer: Writer) -> None:
    """``learner``, but for the objective; and how long the run is."""
    writer.set("learner.backend", "megatron")
    _ranks(writer)
    groups, samples = writer.get("learner.groups_per_batch"), writer.whole("sampling.samples_per_group", 1)
    size = writer.count("global-batch-size", 0)
    if isinstance(groups, int) and size and writer.get("learner.num_updates") is None:
        updates, rest = divmod(groups * samples, size)
        if rest or not updates:
            reason = f"{groups} prompts × {samples} samples is no multiple of it; learner.num_updates stays 1"
            writer.leave(writer.flags["global-batch-size"], reason, "other")
        else:
            writer.set("learner.num_updates", updates)
    context = writer.whole("learner.megatron.context_parallel", 1)
    if tokens := writer.count("max-tokens-per-gpu", 0):
        writer.set("learner.max_tokens_per_micro_batch", tokens * context)
    elif limit := writer.whole("model.max_context", 0):
        writer.take("learner.max_tokens_per_micro_batch", limit, "the longest sample, as slime takes them one by one")
    writer.take("learner.weight_decay", 0.01, MEGATRON)
    betas: list[Plain] = [writer.number("adam-beta1", 0.9), writer.number("adam-beta2", 0.999)]
    writer.take("learner.betas", betas, MEGATRON, unless=("adam-beta1", "adam-beta2"))
    for name in ("attention-dropout", "hidden-dropout"):
        if writer.number(name, MEGATRON_DROPOUT):
            flag = writer.flags.get(name, Flag(name, (), 0))
            writer.leave(flag, f"nothing is dropped out here; {MEGATRON} is {MEGATRON_DROPOUT}")
    if "optimizer-cpu-offload" in writer.flags:
        writer.set("learner.megatron.optimizer.optimizer_cpu_offload", True)
        fraction = writer.number("optimizer-offload-fraction", 1.0)
        writer.set("learner.megatron.optimizer.optimizer_offload_fraction", fraction)
    _frozen(writer)
    if minutes := writer.number("distributed-timeout-minutes", 0.0):
        writer.set("learner.rank_timeout_s", 60.0 * minutes)
    _num_steps(writer)
    _schedule(writer)


def _ranks(writer: Writer) -> None:
    """``num_ranks`` counts those of the critic too, where it is given GPUs of its own."""
    nodes, gpus = writer.count("actor-num-nodes", 1), writer.count("actor-num-gpus-per-node", 8)
    given = [flag for name in OF_CRITIC if (flag := writer.flags.get(name)) is not None]
    num_critics = 0
    if given and writer.value("advantage-estimator") == "ppo":
        num_critics = writer.count("critic-num-nodes", nodes) * writer.count("critic-num-gpus-per-node", gpus)
        writer.set("learner.critic_ranks", num_critics)
    else:
        for flag in given:
            writer.leave(flag, "there is no critic: that is for --advantage-estimator ppo", "same")
    writer.set("learner.num_ranks", nodes * gpus + num_critics)


def _frozen(writer: Writer) -> None:
    """Megatron's names are looked for here as well, so the patterns stay as they are."""
    for name, key in (("freeze-params-name-list", "freeze"), ("only-train-params-name-list", "train_only")):
        flag = writer.flags.get(name)
        if flag is None:
            continue
        if reasons := [reason for pattern in flag.values if (reason := wrong_pattern(pattern))]:
            writer.leave(flag, f"would be learner.{key}; {reasons[0]}", "other")
            continue
        writer.set(f"learner.{key}", list(flag.values))
        if writer.get(f"{_KEY}.critic") == "own" or writer.value("advantage-estimator") == "ppo":
            writer.leave(flag, "learner." + key + " is about the policy; a critic of its own is trained whole")
        if writer.whole("learner.megatron.pipeline_parallel", 1) > 1 and any("layers" in text for text in flag.values):
            writer.leave(flag, "layers are counted over the whole model, and in slime within each pipeline stage")


def _num_steps(writer: Writer) -> None:
    """``--num-epoch`` counts only where ``--num-rollout`` does not say it."""
    flag, epochs = writer.flags.get("num-epoch"), writer.count("num-epoch", 0)
    if flag is None:
        return
    if "num-rollout" in writer.flags:
        writer.leave(flag, "not needed: --num-rollout says how long the run is", "same")
        return
    groups = writer.whole("learner.groups_per_batch", 1)
    path = str(writer.get("data.path") or "")
    rows = count_rows(path, str(writer.get("data.prompt_key") or "input"))
    writer.set("run.num_steps", max(1, epochs * (ROWS_ELSEWHERE if rows is None else rows) // groups))
    if rows is None:
        reason = (
            f"{path or 'the rows'} is not here: {ROWS_ELSEWHERE:,} rows were counted on; set run.num_steps to "
            f"{epochs} × rows // {groups}"
        )
        writer.leave(flag, reason)


def count_rows(path: str, prompt_key: str) -> int | None:
    """Rows of a dataset with its slice; None where it is not on this machine, or cannot be read."""
    try:
        spec = parse_source(path)
        if not Path(spec.path).is_file():
            return None
        return sum(1 for _ in read_rows(spec, [prompt_key], seed=0))
    except DataError:
        return None


def _schedule(writer: Writer) -> None:
    """Megatron counts optimizer steps, and the schedule here batches, of ``learner.num_updates`` steps each."""
    steps, updates = writer.get("run.num_steps"), writer.whole("learner.num_updates", 1)
    decay_steps = writer.count("lr-decay-iters", 0) / updates or (steps if isinstance(steps, int) else 0)
    if "lr-warmup-fraction" in writer.flags and decay_steps:
        writer.set("learner.warmup_steps", round(writer.number("lr-warmup-fraction", 0.0) * decay_steps))
    elif "lr-warmup-fraction" in writer.flags:
        writer.leave_named("lr-warmup-fraction", "the run has no length that it would be a part of", "other")
    elif warmup := writer.count("lr-warmup-iters", 0):
        writer.set("learner.warmup_steps", math.ceil(warmup / updates))
    decay = writer.value("lr-decay-style") or "linear"
    if decay in ("constant", "linear", "cosine"):
        writer.take("learner.lr_schedule", decay, MEGATRON, unless=("lr-decay-style",))
    else:
        reason = f"there is no schedule {decay!r}: constant, linear, cosine"
        writer.leave(writer.flags["lr-decay-style"], reason, "other")
        return
    if decay == "constant":
        writer.leave_named("min-lr", "the learning rate is constant", "same")
    else:
        rate = writer.number("lr", 1e-6)
        ratio = min(1.0, round(writer.number("min-lr", 0.0) / rate, 12)) if rate > 0 else 0.0
        writer.take("learner.min_learning_rate_ratio", ratio, f"{MEGATRON} (--min-lr 0)", unless=("min-lr",))
        if isinstance(steps, int) and decay_steps != steps:
            writer.leave_named("lr-decay-iters", f"the schedule lasts for the whole run, {steps} batches")
