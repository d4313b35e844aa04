"""What is trained in the tests of the trainer: the same batches for the torch learner and for every layout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.backends.learners.megatron_options import MegatronOptions
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.base import Metric
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.samples import Completed, Group, Loss, Part, Prompt, Reward, Sample, SampleKey, VersionSpan
from penstock.messages.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    from penstock.backends.learners.options import ObjectiveOptions

VOCAB = 101
TEMPERATURE = 0.9
NUM_STEPS = 10
SEED = 3
MAX_TOKENS = 48
"""Of a micro-batch: a batch has several."""

TP2: dict[str, Any] = {"tensor_parallel": 2}
PP2: dict[str, Any] = {"pipeline_parallel": 2}
VIRTUAL: dict[str, Any] = {"pipeline_parallel": 2, "virtual_pipeline": 2}
OVERLAPS: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("qwen3", 1, {}),
    "data 2": ("qwen3", 2, OVERLAPS),
    "tensor 2": ("qwen3", 2, TP2),
    "pipeline 2, tied": ("qwen3 tied", 2, PP2),
    "virtual pipeline": ("qwen3", 2, VIRTUAL),
    "context 2": ("qwen3", 2, {"context_parallel": 2}),
    "expert 2": ("qwen3_moe", 2, {"expert_parallel": 2}),
    "tensor 2 pipeline 2": ("qwen3", 4, TP2 | PP2),
    "virtual pipeline data 2 with overlaps": ("qwen3", 4, VIRTUAL | OVERLAPS),
}
"""Family, ranks, and keys of ``learner.megatron``."""

HOOKS = Path(__file__).parents[1] / "backends" / "hook_examples.py"
MOVING: dict[str, Any] = {"num_updates": 2, "num_passes": 2}
OBJECTIVES: dict[str, tuple[ObjectiveOptions, dict[str, Any]]] = {
    "grpo, several steps": (objective("grpo"), MOVING),
    "grpo, KL to a reference": (objective("grpo", kl_coef=0.1), MOVING),
    "dapo": (objective("dapo", entropy_coef=0.01), {"num_updates": 2}),
    "interpolated": (objective("dapo", old_logprobs="interpolate"), MOVING),
    "recomputed, with TIS": (objective("dapo", old_logprobs="recompute", tis_clip=2.0), MOVING),
    "gspo": (objective("gspo", clip_low=0.2, clip_high=0.3), {"num_updates": 2}),
    "gmpo, KL to the engine's policy": (
        objective("gmpo", clip_low=0.2, clip_high=0.3, behaviour_kl_coef=0.1), {"num_updates": 2}
    ),
    "gdpo through the gate of sapo": (
        objective("gdpo", policy_loss="sapo", component_weights={"right": 1.0, "short": 0.5}), MOVING
    ),
    "maxrl": (objective("maxrl", constant_tokens=20), {"num_updates": 2}),
    "MIS by sequence": (
        objective("grpo", old_logprobs="recompute", correction="mis", kl_coef=0.1, entropy_coef=0.01), MOVING
    ),
    "functions of the user's": (
        objective(
            "grpo",
            old_logprobs="recompute",
            advantage_function=f"{HOOKS}:group_advantages",
            reduction_function=f"{HOOKS}:mean_over_samples",
            importance_function=f"{HOOKS}:truncated",
            postprocess_function=f"{HOOKS}:doubled_rewards",
        ),
        MOVING,
    ),
    "reinforce++, KL in the reward": (objective("reinforce_plus_plus", kl_coef=0.1), {"num_updates": 2}),
    "raw rewards": (objective("reinforce", kl_coef=0.1), {"num_updates": 2}),
    "dpo": (objective("dpo"), {}),
    "kto": (objective("kto"), {"num_updates": 2}),
    "a teacher's likeliest tokens": (objective("gkd"), {"num_updates": 2}),
    "a teacher's distribution": (objective("distill"), {"num_updates": 2}),
}  # fmt: skip


class Limit(NamedTuple):
    """Memory for that many inputs and no more."""

    max_inputs: int
    ranks: tuple[int, ...]
    """That have it; the others have plenty."""
    place: str
    """Where it ends: in the forward or in the backward pass."""
    folder: str
    """Of checkpoints."""


def learner_options(
    objective_options: ObjectiveOptions | None = None, megatron: dict[str, Any] | None = None, **keys: object
) -> LearnerOptions:
    """Clipping and weight decay are active."""
    return LearnerOptions(
        backend="megatron",
        objective=objective("grpo") if objective_options is None else objective_options,
        megatron=MegatronOptions(**(megatron or {})),
        learning_rate=1e-3,
        warmup_steps=1,
        weight_decay=0.1,
        max_tokens_per_micro_batch=MAX_TOKENS,
        **keys,  # type: ignore[arg-type]
    )


def make_batches(count: int, *, with_imitated: bool = False) -> list[tuple[Group, ...]]:
    """Groups of different sizes; with loss masks, several versions, teacher's log-probs and samples of two parts."""
    draw = random.Random(f"batches {count}")
    return [_batch(draw, version, with_imitated=with_imitated) for version in range(count)]


def _batch(draw: random.Random, version: int, *, with_imitated: bool) -> tuple[Group, ...]:
    groups: list[Group] = []
    for group_id, size in enumerate((3, 4, 2)):
        is_imitated = with_imitated and group_id == 1
        samples = tuple(
            Sample(
                key=SampleKey(group_id, index),
                parts=(_part(draw, version), *([_part(draw, version, context=True)] if index == 1 else [])),
                outcome=Completed(reward=None if is_imitated else _reward(draw)),
                loss=Loss.SUPERVISED if is_imitated else Loss.OBJECTIVE,
            )
            for index in range(size)
        )
        prompt = Prompt(row=0, epoch=0, tokens=_tokens(draw, 3 + 2 * group_id))
        groups.append(Group(group_id=group_id, prompt=prompt, samples=samples))
    return tuple(groups)


def with_kept(batches: list[tuple[Group, ...]]) -> list[tuple[Group, ...]]:
    """The same, where three of four tokens were drawn from a few."""
    replace = msgspec.structs.replace

    def recorded(part: Part) -> Part:
        draw = random.Random(f"kept of {part.tokens!r}")
        sets = [
            {token, *(draw.randrange(VOCAB) for _ in range(draw.randint(0, 5)))} if draw.randint(0, 3) else set[int]()
            for token in tokens_view(part.tokens)
        ]
        counts = b"".join(len(own).to_bytes(2, "little") for own in sets)
        return replace(part, kept=KeptTokens(counts, pack_tokens(token for own in sets for token in sorted(own))))

    def sample_of(sample: Sample) -> Sample:
        return replace(sample, parts=tuple(map(recorded, sample.parts)))

    return [tuple(replace(g, samples=tuple(map(sample_of, g.samples))) for g in groups) for groups in batches]


def _reward(draw: random.Random) -> Reward:
    value = draw.random()
    components = random.Random(f"components of {value}")
    return Reward(value=value, components=tuple(Metric(name, components.random()) for name in ("short", "right")))


def _likeliest(draw: random.Random, num_tokens: int) -> TopLogprobs:
    return TopLogprobs(3, _tokens(draw, 3 * num_tokens), _logprobs(draw, 3 * num_tokens))


def _part(draw: random.Random, version: int, *, context: bool = False) -> Part:
    num_tokens = draw.randint(2, 20)
    num_old = draw.randint(0, num_tokens)
    return Part(
        tokens=_tokens(draw, num_tokens),
        logprobs=_logprobs(draw, num_tokens),
        spans=(VersionSpan(max(0, version - 1), num_old), VersionSpan(version, num_tokens - num_old)),
        loss_mask=bytes(draw.randint(0, 3) and 1 for _ in range(num_tokens)) if draw.randint(0, 1) else b"",
        context_tokens=_tokens(draw, 5) if context else b"",
        teacher_logprobs=_logprobs(draw, num_tokens),
        teacher_top=_likeliest(random.Random(f"likeliest of {num_tokens}, {num_old}"), num_tokens),
    )


def _tokens(draw: random.Random, count: int) -> bytes:
    return pack_tokens(draw.randrange(VOCAB) for _ in range(count))


def _logprobs(draw: random.Random, count: int) -> bytes:
    return pack_floats(draw.uniform(-5.2, -4.0) for _ in range(count))
