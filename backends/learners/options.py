"""The ``learner:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

# msgspec reads the annotations:
from penstock.backends.learners.megatron_options import MegatronOptions
from penstock.backends.learners.objective_names import (
    Correction,
    CriticPlace,
    Estimator,
    KlEstimator,
    KlPlace,
    Level,
    MisMode,
    OldLogprobs,
    Pairing,
    PairLoss,
    PolicyLoss,
    Reduction,
)
from penstock.backends.learners.recording_options import DumpOptions, ProfileOptions
from penstock.messages.base import Options, OptionValue
from penstock.messages.option_keys import ObjectiveKey, RowsKey, TrainingHookKey

Unit = Annotated[float, Meta(ge=0, le=1)]
NonNegative = Annotated[float, Meta(ge=0)]
NamePattern = Annotated[str, Meta(min_length=1, max_length=200)]
NamePatterns = Annotated[tuple[NamePattern, ...], Meta(max_length=64)]
Positive = Annotated[float, Meta(gt=0)]


class MisOptions(Options, frozen=True, kw_only=True):
    """Masked importance sampling, for `correction: mis`: weights between engine and learner at a level, bounded; and
    which tokens or sequences are rejected."""

    level: Level = "token"
    """Of the weight: of each token, or one for a whole sequence: its product (`sequence`) or geometric mean."""
    mode: MisMode = "truncate"
    """`truncate` bounds the weight above, `clip` on both sides, `mask` makes it 0 outside the bounds."""
    upper: Positive = 2.0
    """Upper bound of the weight."""
    lower: NonNegative | None = None
    """null: 1 / upper. Without effect with `truncate`."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""
    reject_level: Level | None = None
    """Level of a second ratio that decides what is rejected; null: nothing is by ratio."""
    reject_upper: Positive = 2.0
    """What has a second ratio above is rejected."""
    reject_lower: NonNegative | None = None
    """null: 1 / reject_upper."""
    veto: Positive | None = None
    """A token with a ratio below rejects its whole sequence (1e-4, say); null: none does."""


class ObjectiveOptions(Options, frozen=True, kw_only=True):
    """What is minimised. One word is enough: `learner.objective: dapo`. The page docs/objectives.md has what each name
    stands for, and the formulas. The defaults below are those of `dapo`; another name brings its own, and any key can
    be set over them."""

    name: ObjectiveKey = "dapo"
    """One of those in docs/objectives.md, or a function of your own as file.py:function."""
    clip_low: Unit = 0.2
    """The ratio of the policies is held above 1 less this. (With DPPO: the threshold for tokens that get rarer;
    with GMPO the logarithm of the ratio is held above minus this.)"""
    clip_high: NonNegative = 0.28
    """The ratio of the policies is held below 1 plus this. (With DPPO: the threshold for tokens that get likelier;
    with GMPO the logarithm of the ratio is held below this.)"""
    normalize_std: bool = True
    """Divide a group's advantages by its standard deviation."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the reference (the model as it was before the first step)."""
    reference_every: Annotated[int, Meta(ge=1)] | None = None
    """Batches after which the reference becomes the policy as it is then, again and again; null: it never changes."""
    tis_clip: Positive | None = 2.0
    """Upper bound of the truncated importance weight between learner and engine; null: none."""
    old_logprobs: OldLogprobs = "engine"
    """`engine`: the ratio is taken to the engine's log-probs, and nothing is corrected. `recompute`: to those of the
    policy that opened the step, with `correction` for the difference to the engine's (decoupled PPO). `interpolate`:
    to a policy between the two by the age of each token (A-3PO), corrected likewise."""
    reduction: Reduction = "token_mean"
    """How tokens become one loss: the mean over all tokens, the mean over samples of each one's mean, or a sum over a
    constant number of tokens."""
    opd_kl_coef: NonNegative = 0.0
    """Weight of the reverse KL to the `teacher:` of the scenario, which is taken off the advantage of each token."""
    distill_beta: Unit = 0.5
    """β of the divergence from the teacher under `policy_loss: divergence`: 0 is the forward KL (teacher to student), 1
    the reverse KL, and what is between the generalised Jensen–Shannon divergence."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is made larger."""
    behaviour_kl_coef: NonNegative = 0.0
    """Weight of the squared difference between the log-probs of the policy and those of the engine that drew the
    tokens: a KL to the behaviour policy."""
    estimator: Estimator = "grpo"
    """How rewards become advantages; `teacher`: not at all, the teacher alone is learnt from."""
    component_weights: dict[str, float] | None = None
    """For `estimator: gdpo`: what each named component of the reward weighs. null: as in reward.components."""
    postprocess_function: TrainingHookKey | None = None
    """A function of yours that is given the rewards of each group and returns those that are trained on, as
    file.py:function (docs/hooks.md)."""
    advantage_function: TrainingHookKey | None = None
    """A function of yours in place of the estimator (docs/hooks.md)."""
    reduction_function: TrainingHookKey | None = None
    """A function of yours in place of the reduction (docs/hooks.md)."""
    importance_function: TrainingHookKey | None = None
    """A function of yours in place of the correction (docs/hooks.md)."""
    whiten: bool = False
    """Advantages of the whole batch to mean 0 and standard deviation 1."""
    discount: Unit = 1.0
    """γ of REINFORCE++ and of GAE."""
    policy_loss: PolicyLoss = "ppo"
    """The loss of a token from its ratio and its advantage."""
    tau_pos: Positive = 1.0
    """τ of SAPO for tokens with a positive advantage: the larger, the sooner the gate closes."""
    tau_neg: Positive = 1.05
    """τ of SAPO for the others."""
    max_ratio: Annotated[float, Meta(gt=1)] | None = 20.0
    """Largest ratio of the policies that a token is weighed by under DPPO; null: none, as in the paper."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """With a negative advantage the loss is at most this times the advantage; null: no such bound."""
    kl_estimator: KlEstimator = "k3"
    """How the KL is estimated from one token's log-probs. `k1` is its plain sample, `k2` half its square, `k3` never
    negative and of low variance; `low_var_kl` is `k3` bounded to ±10. docs/objectives.md has the formulas."""
    kl_in: KlPlace = "loss"
    """Where the KL is: added to the loss, or taken off the rewards."""
    unbiased_kl: bool = False
    """Weight the KL in the loss by the ratio of the policies, with its gradient."""
    allow_unbounded: bool = False
    """Train tokens of older policies without any bound or weight for their distance, which is refused otherwise."""
    correction: Correction = "tis"
    """Of the difference between the engine's log-probs and the learner's; `old_logprobs: engine` leaves none."""
    tis_clip_low: NonNegative = 0.0
    """Lower bound of the truncated importance weight."""
    icepop_low: NonNegative = 0.5
    """A token with a ratio below has no loss under `correction: icepop`."""
    icepop_high: Positive = 2.0
    """A token with a ratio above has no loss under `correction: icepop`."""
    mis: MisOptions = MisOptions()
    """Of `correction: mis`."""
    opsm_delta: NonNegative | None = None
    """Bad samples that the policy has left by more than this many nats a token, from what the engine reported on, have
    no loss (OPSM); null: off. The page docs/objectives.md has values."""
    constant_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The constant of `reduction: constant`; null: sampling.max_response_tokens."""
    critic: CriticPlace = "none"
    """What predicts the reward of each prefix, for `estimator: gae`. `own`: a model beside the policy, which starts as
    a copy of it with a scalar head; `shared`: such a head on the policy itself, which learns to predict as well."""
    gae_lambda: Unit = 1.0
    """λ of GAE."""
    gae_length_alpha: Positive | None = None
    """α of VAPO: a sample with l trained tokens has a λ of 1 − 1 / (α l), at least 0, instead of gae_lambda; null: all
    have that."""
    critic_lambda: Unit | None = None
    """λ of the returns that the critic learns; null: the policy's."""
    value_clip: Positive | None = 0.2
    """How far a value may move in one batch before its loss stops pulling it on; null: any way."""
    value_coef: Positive = 0.1
    """Weight of the values' loss beside the policy's with `critic: shared`."""
    critic_learning_rate: Positive | None = None
    """Of the critic (`shared`: of its head); null: ten times learner.learning_rate. It follows learner.lr_schedule."""
    critic_warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Batches over which the critic's learning rate rises."""
    critic_only_steps: Annotated[int, Meta(ge=0)] = 0
    """Batches at the start of the run that train the critic alone."""
    min_reward: float | None = None
    """What a response must earn to be imitated, with the estimators `best_of_group` (null: any) and `threshold`; and to
    be desirable, for KTO."""
    reward_scale: Positive = 1.0
    """β of `estimator: exponential`: a reward that is so much above the mean of its group weighs e times as much."""
    max_weight: Positive = 20.0
    """Largest weight that `estimator: exponential` gives."""
    dpo_beta: Positive = 0.1
    """β of DPO and of KTO, τ of IPO: how strongly the reference holds the policy."""
    dpo_loss: PairLoss = "sigmoid"
    """Of the margin of a pair: `sigmoid`, DPO's own; `ipo`, the squared distance from 1 / (2 τ)."""
    dpo_normalize_length: bool = False
    """Compare the responses of a pair by the means of their tokens' log-probs, not by the sums."""
    dpo_label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    """ε of DPO: share of pairs that are taken to be the wrong way round."""
    dpo_pairs: Pairing = "best_worst"
    """Of a group, for DPO: its best and its worst response, or every two with different rewards."""
    desirable_weight: Positive = 1.0
    """λ of responses with a reward of `min_reward` or more, for KTO."""
    undesirable_weight: Positive = 1.0
    """λ of the others."""
    sft_coef: Positive = 1.0
    """Weight of the loss of samples that are imitated beside those of the objective (`data.recorded.loss: sft`)."""
    options: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Of an objective that another package brings, as that says (docs/extending.md)."""


class WarmStartOptions(Options, frozen=True, kw_only=True):
    """Supervised steps before version 0. Small ones on a CPU are kept for later runs (docs/learner.md)."""

    path: RowsKey
    """Rows with a prompt and a response: as ``data.path``; ``lines:N`` gives noisy demonstrations of the task."""
    response_key: str = "response"
    """Column with the response to imitate."""
    num_steps: Annotated[int, Meta(ge=1)] = 250
    """Optimizer steps, each on one batch."""
    batch_size: Annotated[int, Meta(ge=1)] = 32
    """Rows of one step."""
    learning_rate: Positive = 3e-3
    """Of these steps, after their warm-up; they have an optimizer of their own."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 20
    """Steps over which it rises from 0."""


class LoraOptions(Options, frozen=True, kw_only=True):
    """Train low-rank adapters beside the model's matrices, which stay as they are. Weights are saved, and published
    unless `publish` says otherwise, with the adapters added in; the KL term's reference is the model without them."""

    rank: Annotated[int, Meta(ge=1)] = 16
    """Columns of an adapter's first matrix: the larger, the more it can learn, and the more memory it takes."""
    alpha: Positive = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    target_modules: Literal["auto"] | tuple[str, ...] = "auto"
    """`auto`: every matrix between the embedding and the output head; or the last parts of their names, such as
    [q_proj, v_proj]."""
    publish: Literal["merged", "adapter"] = "merged"
    """What engines get of each version: the model with the adapters added in, or the adapters alone (`adapter`), a few
    per cent of the bytes, which they compute beside the model that they got once (docs/learner.md)."""


class SimulatedLearnerOptions(Options, frozen=True, kw_only=True):
    """The model of a simulated learner."""

    step_s: NonNegative = 1.0
    """Of one batch, whatever its size."""
    token_s: NonNegative = 0.0
    """Added per trained token of the batch, where ranks have equal shares; the largest share of each round counts."""
    micro_batch_s: NonNegative = 0.0
    """Added per round of micro-batches, which are packed as real learners do, by
    `learner.max_tokens_per_micro_batch`."""
    num_ranks: Annotated[int, Meta(ge=1)] = 1
    """Ranks that the sequences of a step are divided over."""
    publish_s: NonNegative = 0.5
    """To export new weights."""
    publish_byte_s: NonNegative = 0.0
    """Added for every byte of them."""
    size_bytes: Annotated[int, Meta(ge=0)] = 0
    """Of the weights of one version."""
    digest_s: NonNegative = 0.0
    """From then on until engines can be told of them. Meanwhile it trains on; without `engines.placement: colocate`."""
    snapshot_s: NonNegative = 0.0
    """To copy the state for a checkpoint, before the next step."""
    checkpoint_s: NonNegative | None = None
    """From then on until the checkpoint is written; null: as `publish_s`. Meanwhile it trains on, up to the next
    version that is to be saved."""
    start_s: NonNegative = 0.0
    """From the start of its process until it is ready, of a replacement too."""
    jitter_sigma: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Log-normal noise on a step's time."""
    sleep_s: NonNegative = 0.2
    """To give device memory up, with ``engines.placement: colocate``."""
    wake_s: NonNegative = 0.5
    """To take it again."""
    cores: NonNegative = 0.0
    """That it wants while it works. It counts with ``runtime.simulated_cores``."""

    @property
    def packs(self) -> bool:
        """Whether a step's time depends on how its batch is packed."""
        return self.micro_batch_s > 0 or self.num_ranks > 1


class LearnerOptions(Options, frozen=True, kw_only=True):
    """How batches are trained."""

    backend: str = "torch"
    """``torch``: any size that fits into one GPU, or over several with `parallel`; ``megatron``: megatron-core, for
    models that need tensor, pipeline or expert parallelism; ``simulated``: trains nothing, for the virtual clock."""
    groups_per_batch: Annotated[int, Meta(ge=1)] = 32
    """Groups of one step: times sampling.samples_per_group it is the batch size in samples."""
    num_updates: Annotated[int, Meta(ge=1)] = 1
    """Optimizer steps that a batch is divided into, each with about as many tokens: by whole groups, or by samples with
    the estimators `gae`, `raw` and `reinforce_plus_plus`, which compare nothing within a group. Versions count
    batches."""
    num_passes: Annotated[int, Meta(ge=1)] = 1
    """How often each batch is gone through, divided anew each time."""
    objective: ObjectiveOptions = ObjectiveOptions()
    """What is minimised; a word such as `dapo`, or a block."""
    true_on_policy: bool = False
    """Engine and learner compute the log-prob of every trained token with the same bits, and each step asserts it: a
    run in which one differs stops, and names the token. For `staleness.policy: sync`, one update a batch, and embedded
    engines on a CPU in float32, or SGLang servers that infer deterministically (docs/learner.md)."""
    learning_rate: Positive = 1e-6
    """Of AdamW, after the warm-up. 1e-6 for whole models of billions of parameters, 1e-5 with `lora`."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """Batches over which the learning rate rises from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, over the whole run; ``linear`` and ``cosine`` fall to min_learning_rate_ratio."""
    min_learning_rate_ratio: Unit = 0.1
    """Of the learning rate in the last batch to learning_rate; without effect with ``constant``."""
    weight_decay: NonNegative = 0.0
    """Of AdamW, decoupled; not of vectors such as norms and biases."""
    betas: tuple[Unit, Unit] = (0.9, 0.95)
    """Of AdamW: how slowly the means of gradients and of their squares forget."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm where it is larger. Clipped in every step, the learning rate is too
    high."""
    max_tokens_per_micro_batch: Annotated[int, Meta(ge=16)] = 1024
    """Inputs that go through the model at once. A GPU that runs out of memory halves it for the rest of the run, and
    says so; the result is the same."""
    parallel: Literal["fsdp", "ddp"] = "fsdp"
    """How several ranks divide the model: each has a share of every weight and of what the optimizer keeps of it
    (`fsdp`), or all of them (`ddp`)."""
    shard_size: Annotated[int, Meta(ge=2)] | None = None
    """With `fsdp`, ranks that share out one copy of the weights among them; a divisor of `num_ranks`. The others have
    copies of the same shares, so that weights are gathered within a node, say, and gradients alone cross it, once a
    step. null: all ranks share one copy."""
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    """With `fsdp`, neighbouring ranks that compute with each matrix together, by the plan that transformers ships with
    the architecture; a divisor of `num_ranks`, and of the attention and key-value heads. The ranks of one place in each
    such group share the weights out among them, `shard_size` of them or all. (`megatron.tensor_parallel` is that of
    backend `megatron`.)"""
    compile: bool | None = None
    """Compile the blocks of the model and its log-probs with torch.compile, which takes some seconds at the start and
    makes steps faster and smaller. null: on GPUs, in 16 bits, for dense models of 100 million weights or more."""
    activation_checkpointing: bool = False
    """Keep only what goes into each block of the model, and compute the rest again in the backward pass."""
    cpu_offload: bool = False
    """Keep weights, gradients and what the optimizer keeps in the memory of the host, for `parallel: fsdp` on GPUs."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where Ray assigns one."""
    num_threads: Annotated[int, Meta(ge=1)] = 1
    """Of each rank, on a CPU."""
    num_ranks: Annotated[int, Meta(ge=1)] = 1
    """Processes that train together; on GPUs each has one of its own, on one node or, where none has so many, equally
    many on each of several. With 1 the torch learner trains in its own process."""
    critic_ranks: Annotated[int, Meta(ge=0)] = 0
    """Of `num_ranks`, how many hold the critic alone: the last ones. The others hold the policy alone, so both are
    computed at the same time, and neither takes memory of the other (docs/objectives.md). For `critic: own`. With
    backend `megatron` its block divides both parts. 0: every rank holds both."""
    rank_timeout_s: Positive = 600.0
    """How long a rank may keep the others waiting (at the start five minutes at least). Then all of them are ended, and
    the learner is started again from its last checkpoint."""
    optimizer: Literal["resume", "fresh"] = "resume"
    """What becomes of a checkpoint whose optimizer state cannot be gone on with, with backend `megatron`: one that the
    torch learner wrote, or from before a change of `megatron.distributed_optimizer`. `resume` refuses it; `fresh` keeps
    its weights and begins with an optimizer that has seen nothing. A state that can be gone on with always is."""
    save_every: Annotated[int, Meta(ge=1)] = 20
    """Batches between two checkpoints. After the loss of the learner those since the last one are trained again."""
    keep_checkpoints: Annotated[int, Meta(ge=1)] = 2
    """Checkpoints that the run can be resumed from; older ones are removed, and the samples that they do not need."""
    conversion_function: TrainingHookKey | None = None
    """A function of yours that is given each sequence as it would be trained, and returns it as it is to be, as
    file.py:function (docs/hooks.md)."""
    rollout_log_function: TrainingHookKey | None = None
    """A function of yours that adds figures of each batch before it is trained (docs/hooks.md)."""
    step_log_function: TrainingHookKey | None = None
    """A function of yours that adds figures of each batch after it was trained (docs/hooks.md)."""
    warm_start: WarmStartOptions | None = None
    """Supervised steps before the run, for a model that earns nothing yet. null: none."""
    lora: LoraOptions | None = None
    """null: all weights are trained. A warm start always trains all of them; the adapters come after it."""
    freeze: NamePatterns = ()
    """Weights that are not trained, not even by a warm start: regular expressions, each looked for anywhere in the
    names that weights have in the checkpoint (`embed_tokens`, `layers\\.[01]\\.`, `visual\\.` for a vision tower) or in
    the learner's own model (Megatron's `linear_qkv`)."""
    train_only: NamePatterns = ()
    """In place of `freeze`: the weights that are trained, and no other."""
    peak_tflops: Positive | None = None
    """Of one device in model.dtype, in 10¹² operations a second, for ``perf/mfu``; null: that of the data sheet, where
    the device is in our table (bfloat16 on NVIDIA GPUs), and no MFU where it is not."""
    step_timeout_s: Positive = 3600.0
    """A step that lasts longer ends the learner; another one takes its place."""
    dump: DumpOptions | None = None
    """null: no step is written down."""
    profile: ProfileOptions | None = None
    """null: no step is profiled."""
    megatron: MegatronOptions = MegatronOptions()
    """Of the backend `megatron`."""
    options: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Of a learner that another package brings, as that says (docs/extending.md)."""
    simulated: SimulatedLearnerOptions = SimulatedLearnerOptions()
    """How long things take under the backend `simulated`."""
