"""What the metrics of each system are called, and what they mean: the same figures of a step for all of them.

Names are those of the public code of verl (January 2026), TRL, slime, NeMo-RL and prime-rl (July and August 2026);
where versions differ, all names stand in a row. A ``*`` in a name stands for what the user or the run has chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.errors import UserFault
from penstock.runtime.prediction.imports.read import TOO_LARGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.runtime.prediction.imports.read import Log

Names = tuple[str, ...]


class Dialect(NamedTuple):
    """One system. Of the names of a figure the first that a step has counts; those of ``training_s`` and ``besides_s``
    are added up."""

    marks: Names
    """Names that say by themselves that a log is of this system."""
    step_s: Names
    training_s: Names
    mean_tokens: Names
    max_tokens: Names
    generation_s: Names = ()
    """Of a whole batch, from its first prompt to its last token."""
    waited_s: Names = ()
    """For the next batch, by a learner that trains while others generate."""
    sample_s: Names = ()
    """Of one response, as a mean."""
    publish_s: Names = ()
    checkpoint_s: Names = ()
    besides_s: Names = ()
    """Within the step, and none of the rest: validation, profiles."""
    reward_s: Names = ()
    prompt_tokens: Names = ()
    total_tokens: Names = ()
    """Prompts and responses of the batch together."""
    sequence_tokens: Names = ()
    """Prompt and response of a sample, as a mean."""
    num_samples: Names = ()
    samples_per_s: Names = ()
    truncated: Names = ()
    reward: Names = ()
    zero_spread: Names = ()
    overlap_marks: Names = ()
    """Names that only a run has in which generation and training overlap; its generation_s is a wait."""
    overlap_policy: str = "one_step_off"


DIALECTS: Final[dict[str, Dialect]] = {
    "verl": Dialect(
        marks=("timing_s/gen", "timing_s/update_actor", "response_length/mean", "perf/total_num_tokens"),
        step_s=("timing_s/step", "perf/time_per_step"),
        training_s=(
            "timing_s/old_log_prob", "timing_s/ref", "timing_s/ref_policy", "timing_s/values", "timing_s/adv",
            "timing_s/update_critic", "timing_s/update_actor",
        ),
        generation_s=("timing_s/gen",),
        waited_s=("timing_s/gen",),
        sample_s=("fully_async/processing_time/avg", "timing_s/agent_loop/generate_sequences/mean"),
        publish_s=("timing_s/update_weights", "timing_s/sync_rollout_weights", "timing_s/param_sync"),
        checkpoint_s=("timing_s/save_checkpoint",),
        besides_s=("timing_s/testing", "timing_s/start_profile", "timing_s/stop_profile", "timing_s/gen_max"),
        reward_s=("timing_s/reward",),
        mean_tokens=("response_length/mean",),
        max_tokens=("response_length/max",),
        prompt_tokens=("prompt_length/mean",),
        total_tokens=("perf/total_num_tokens",),
        truncated=("response_length/clip_ratio",),
        reward=("critic/score/mean", "critic/rewards/mean"),
        overlap_marks=(
            "fully_async/processing_time/avg", "fully_async/count/current_param_version",
            "timing_s/sync_rollout_weights", "timing_s/param_sync",
        ),
    ),
    "trl": Dialect(
        marks=("completions/mean_length", "train/completions/mean_length", "frac_reward_zero_std"),
        step_s=("step_time", "train/step_time"),
        training_s=("profiling/Time taken: *.compute_loss",),
        generation_s=(
            "profiling/Time taken: *.vLLM.generate", "profiling/Time taken: *.transformers.generate_batch",
            "profiling/Time taken: *.transformers.generate",
        ),
        publish_s=("profiling/Time taken: *.sync_weights", "profiling/Time taken: *._move_model_to_vllm"),
        mean_tokens=("completions/mean_length", "train/completions/mean_length"),
        max_tokens=("completions/max_length", "train/completions/max_length"),
        truncated=("completions/clipped_ratio", "train/completions/clipped_ratio"),
        reward=("reward", "train/reward"),
        zero_spread=("frac_reward_zero_std", "train/frac_reward_zero_std"),
    ),
    "slime": Dialect(
        marks=("perf/rollout_time", "perf/train_wait_time", "perf/actor_train_time", "rollout/response_len/mean"),
        step_s=("perf/step_time",),
        training_s=("perf/train_time",),
        generation_s=("perf/rollout_time",),
        publish_s=("perf/update_weights_time",),
        checkpoint_s=("perf/save_model_time",),
        mean_tokens=("rollout/response_len/mean", "rollout/response_lengths"),
        max_tokens=("rollout/response_len/max",),
        sequence_tokens=("rollout/total_lengths",),
        truncated=("rollout/truncated_ratio", "rollout/truncated"),
        reward=("rollout/raw_reward", "rollout/rewards"),
    ),
    "nemo-rl": Dialect(
        marks=("timing/train/total_step_time", "timing/train/policy_training", "train/mean_gen_tokens_per_sample"),
        step_s=("timing/train/total_step_time",),
        training_s=(
            "timing/train/logprob_inference_prep", "timing/train/policy_and_reference_logprobs",
            "timing/train/advantage_calculation", "timing/train/training_prep", "timing/train/policy_training",
        ),
        generation_s=("timing/train/generation",),
        waited_s=("timing/train/exposed_generation",),
        publish_s=("timing/train/weight_sync", "timing/train/prepare_for_generation/total"),
        checkpoint_s=("timing/train/checkpointing",),
        besides_s=("timing/train/idle/validation",),
        reward_s=("timing/train/reward_calculation",),
        mean_tokens=("train/mean_gen_tokens_per_sample",),
        max_tokens=("train/max_gen_tokens_per_sample",),
        prompt_tokens=("train/mean_prompt_length",),
        total_tokens=("train/total_num_tokens",),
        sequence_tokens=("train/mean_total_tokens_per_sample",),
        samples_per_s=("performance/samples_per_sec",),
        truncated=("train/truncation_rate",),
        reward=("train/reward",),
        overlap_marks=("timing/train/exposed_generation",),
    ),
    "prime-rl": Dialect(
        marks=("time/wait_for_batch", "time/forward_backward", "time/wait_for_policy", "progress/rollouts"),
        step_s=("time/step",),
        training_s=("time/load_data", "time/forward_backward"),
        waited_s=("time/wait_for_batch",),
        sample_s=(
            "train/agg/effective/*/timing/agent/model/mean", "train/agg/effective/*/timing/agent/mean",
            "train/agg/effective/*/timing/total/mean",
        ),
        publish_s=("time/broadcast_weights",),
        checkpoint_s=("time/save_ckpt",),
        mean_tokens=("train/agg/effective/num_output_tokens/mean",),
        max_tokens=("train/agg/effective/num_output_tokens/max",),
        prompt_tokens=("train/agg/effective/num_input_tokens/mean",),
        num_samples=("progress/rollouts",),
        truncated=("train/agg/effective/*/is_truncated/mean",),
        reward=("train/agg/effective/*/reward/mean",),
        overlap_marks=("time/wait_for_batch", "off_policy/mean"),
        overlap_policy="fully_async",
    ),
}  # fmt: skip
MOST_TOKENS: Final = 1e7
"""Of one response, or of a prompt."""
MOST_SAMPLES: Final = 1e7
"""Of a step."""
ALIASES: Final = {"miles": "slime", "nemo_rl": "nemo-rl", "nemo": "nemo-rl", "prime_rl": "prime-rl"}


class Step(NamedTuple):
    """What a system has logged of one step; None where it says nothing. Times are in seconds, lengths in tokens."""

    number: int
    step_s: float
    training_s: float | None
    generation_s: float | None
    waited_s: float | None
    sample_s: float | None
    publish_s: float | None
    checkpoint_s: float | None
    besides_s: float
    reward_s: float | None
    mean_tokens: float
    max_tokens: float | None
    prompt_tokens: float | None
    num_samples: float | None
    truncated: float | None
    reward: float | None
    zero_spread: float | None


def dialect_of(log: Log, forced: str | None) -> str:
    """The system that wrote a log.

    Raises:
        UserFault: none is known by these names, or more than one; or there is none that is called so.
    """
    if forced is not None:
        name = ALIASES.get(forced, forced)
        if name not in DIALECTS:
            raise UserFault(f"--from-format {forced}: there are {', '.join(DIALECTS)} (miles is read as slime)")
        return name
    names = {name for values in log.steps.values() for name in values}
    found = {name: sum(mark in names for mark in each.marks) for name, each in DIALECTS.items()}
    best = max(found, key=lambda name: found[name])
    if not found[best]:
        raise UserFault(
            f"the log has no metric by which a system is known; there are {', '.join(DIALECTS)}: does it have, say, "
            + " or ".join(each.marks[0] for each in DIALECTS.values())
            + "?"
        )
    if sorted(found.values())[-2] == found[best]:
        same = ", ".join(name for name, count in found.items() if count == found[best])
        raise UserFault(f"the log could be of {same}; say which with --from-format")
    return best


def is_overlapped(log: Log, dialect: Dialect) -> bool:
    """Whether a name says that the run generated while it trained."""
    return any(mark in values for values in log.steps.values() for mark in dialect.overlap_marks)


def steps_of(log: Log, dialect: Dialect) -> list[Step]:
    """Every step that says how long it took and how long its responses were, in order. Times and counts below 0, and
    counts that nobody has, are taken as not said."""
    overlapped = is_overlapped(log, dialect)
    found = (_step(number, log.steps[number], dialect, overlapped=overlapped) for number in sorted(log.steps))
    return [step for step in found if step is not None]


def _step(number: int, values: Mapping[str, float], dialect: Dialect, *, overlapped: bool) -> Step | None:
    step_s, mean_tokens = _first(values, dialect.step_s), _first(values, dialect.mean_tokens)
    if step_s is None or mean_tokens is None or step_s <= 0 or not 0 < mean_tokens <= MOST_TOKENS:
        return None
    return Step(
        number=number,
        step_s=step_s,
        training_s=_sum(values, dialect.training_s),
        generation_s=None if overlapped else _first(values, dialect.generation_s),
        waited_s=_first(values, dialect.waited_s) if overlapped else None,
        sample_s=_first(values, dialect.sample_s),
        publish_s=_first(values, dialect.publish_s),
        checkpoint_s=_first(values, dialect.checkpoint_s),
        besides_s=_sum(values, dialect.besides_s) or 0.0,
        reward_s=_first(values, dialect.reward_s),
        mean_tokens=mean_tokens,
        max_tokens=_at_most(MOST_TOKENS, _first(values, dialect.max_tokens)),
        prompt_tokens=_at_most(MOST_TOKENS, _prompt_tokens(values, dialect, mean_tokens)),
        num_samples=_at_most(MOST_SAMPLES, _num_samples(values, dialect, step_s, mean_tokens)),
        truncated=_at_most(1.0, _first(values, dialect.truncated)),
        reward=_first(values, dialect.reward, least=-TOO_LARGE),
        zero_spread=_first(values, dialect.zero_spread),
    )


def _prompt_tokens(values: Mapping[str, float], dialect: Dialect, mean_tokens: float) -> float | None:
    prompt, sequence = _first(values, dialect.prompt_tokens), _first(values, dialect.sequence_tokens)
    if prompt is None and sequence is not None and sequence > mean_tokens:
        return sequence - mean_tokens
    return prompt


def _num_samples(values: Mapping[str, float], dialect: Dialect, step_s: float, mean_tokens: float) -> float | None:
    if (number := _first(values, dialect.num_samples)) is not None:
        return number
    total = _first(values, dialect.total_tokens)
    sequence, prompt = _first(values, dialect.sequence_tokens), _first(values, dialect.prompt_tokens)
    if sequence is None and prompt is not None:
        sequence = prompt + mean_tokens
    if total is not None and sequence:
        return total / sequence
    rate = _first(values, dialect.samples_per_s)
    return None if rate is None else rate * step_s


def _at_most(most: float, value: float | None) -> float | None:
    """None for a count that is none."""
    return None if value is None or value > most else value


def _first(values: Mapping[str, float], names: Names, least: float = 0.0) -> float | None:
    return next((value for name in names if (value := _value(values, name)) is not None and value >= least), None)


def _sum(values: Mapping[str, float], names: Names) -> float | None:
    found = [value for name in names if (value := _value(values, name)) is not None and value >= 0]
    return sum(found) if found else None


def _value(values: Mapping[str, float], name: str) -> float | None:
    before, star, after = name.partition("*")
    if not star:
        return values.get(name)
    fitting = [key for key in values if key.startswith(before) and key.endswith(after)]
    return values[min(fitting, key=lambda key: (len(key), key))] if fitting else None
