"""The ``learner:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.messages.base import Options

Unit = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class ObjectiveOptions(Options, frozen=True, kw_only=True):
    """What is minimised: GRPO with clip-higher, truncated importance sampling and a k3 KL term."""

    name: Literal["grpo"] = "grpo"
    clip_low: Unit = 0.2
    clip_high: NonNegative = 0.28
    normalize_std: bool = True
    """Divide a group's advantages by its standard deviation."""
    kl_coef: NonNegative = 0.0
    """Weight of the k3 KL to the reference (the model as it was before the first step)."""
    tis_clip: Positive | None = 2.0
    """Upper bound of the truncated importance weight between learner and engine; null: none."""
    old_logprobs: Literal["engine", "recompute"] = "engine"
    """``engine``: the ratio is taken to the engine's log-probs, and no weight is needed. ``recompute``: to those of
    the policy that opened the step, with ``tis_clip`` correcting for the engine's."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    entropy_coef: float = 0.0


class WarmStartOptions(Options, frozen=True, kw_only=True):
    """Supervised steps before version 0."""

    path: str
    """Rows with a prompt and a response: as ``data.path``; ``lines:N`` gives noisy demonstrations of the task."""
    response_key: str = "response"
    num_steps: Annotated[int, Meta(ge=1)] = 250
    batch_size: Annotated[int, Meta(ge=1)] = 32
    learning_rate: Positive = 3e-3
    warmup_steps: Annotated[int, Meta(ge=0)] = 20


class SimulatedLearnerOptions(Options, frozen=True, kw_only=True):
    """The model of a simulated learner."""

    step_s: NonNegative = 1.0
    token_s: NonNegative = 0.0
    """Added per trained token."""
    publish_s: NonNegative = 0.5
    jitter_sigma: NonNegative = 0.0
    """Log-normal noise on a step's time."""


class LearnerOptions(Options, frozen=True, kw_only=True):
    """How batches are trained."""

    backend: Literal["torch", "simulated"] = "torch"
    groups_per_batch: Annotated[int, Meta(ge=1)] = 32
    objective: ObjectiveOptions = ObjectiveOptions()
    learning_rate: Positive = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, over the whole run; ``linear`` and ``cosine`` end at a tenth."""
    weight_decay: NonNegative = 0.0
    betas: tuple[Unit, Unit] = (0.9, 0.95)
    max_grad_norm: Positive = 1.0
    max_tokens_per_micro_batch: Annotated[int, Meta(ge=16)] = 1024
    device: str = "auto"
    num_threads: Annotated[int, Meta(ge=1)] = 1
    publish_every: Annotated[int, Meta(ge=1)] = 1
    """Batches between two publishes; at most ``staleness.max_staleness + 1``."""
    save_every: Annotated[int, Meta(ge=1)] = 20
    """Batches between two checkpoints. After the loss of the learner those since the last one are trained again."""
    keep_checkpoints: Annotated[int, Meta(ge=1)] = 2
    """Checkpoints that the run can be resumed from; older ones are removed, and the samples that they do not need."""
    warm_start: WarmStartOptions | None = None
    step_timeout_s: Positive = 3600.0
    """A step that lasts longer ends the learner; another one takes its place."""
    simulated: SimulatedLearnerOptions = SimulatedLearnerOptions()
