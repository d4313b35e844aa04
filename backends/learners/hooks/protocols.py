"""What each hook is given, and what it gives back.

A hook is a function of the user's own, named ``file.py:function`` in the scenario beside the thing that it changes:

======================  ==================================================  ===========================================
protocol                key of the scenario                                 takes the place of
======================  ==================================================  ===========================================
RewardPostprocess       ``learner.objective.postprocess_function``          nothing: rewards, before advantages
AdvantageFunction       ``learner.objective.advantage_function``            ``estimator``
ObjectiveFunction       ``learner.objective.name``                          the whole loss
ReductionFunction       ``learner.objective.reduction_function``            ``reduction``
ImportanceFunction      ``learner.objective.importance_function``           ``correction``
ConversionFunction      ``learner.conversion_function``                     nothing: sequences, before they are trained
RolloutLogFunction      ``learner.rollout_log_function``                    nothing: adds figures of what was generated
StepLogFunction         ``learner.step_log_function``                       nothing: adds figures of what was trained
WeightNameFunction      ``weights.names_function``                          the names under which engines get weights
======================  ==================================================  ===========================================

Axis letters: ``S`` samples of the batch (of the optimizer step, for the reduction), ``N`` trained tokens, ``L`` tokens
of a sequence, ``T`` trained tokens of a sequence.

Invariants:

* Every hook of the learner but the two that log is called on every rank, with the same values, and has to return the
  same there: it is a function of what it is given. Ranks compare what came of it, and the run stops where they differ.
* What a hook is given is not its own: it changes none of it.
* What it returns is checked (type, shape, finite). What is wrong, and what it raises, ends the run with the hook's file
  and line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.messages.samples import Group, Sample


@dataclass(frozen=True, slots=True)
class Segments:
    """Which of ``N`` tokens, laid end to end, belong to which of ``count`` segments (samples, or groups of them); sums
    and means over them."""

    index: Tensor
    """Segment of each token, int64 ``[N]``, in any order."""
    count: int
    mask: Tensor | None = None
    """0 where a token is not counted ``[N]``; None: all are."""

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values [N]`` over the counted tokens of each segment ``[count]``."""
        counted = values if self.mask is None else values * self.mask
        return values.new_zeros(self.count).index_add(0, self.index, counted)

    def sizes(self, like: Tensor) -> Tensor:
        """Counted tokens of each segment ``[count]``, in the dtype of ``like [N]``."""
        return self.sums(like.new_ones(like.shape))

    def means(self, values: Tensor) -> Tensor:
        """Mean over the counted tokens of each segment ``[count]``; 0 for a segment without any."""
        return self.sums(values) / self.sizes(values).clamp(min=1)

    def spread(self, per_segment: Tensor) -> Tensor:
        """Of each token, the value of its segment: ``[count]`` → ``[N]``, masked tokens included."""
        return per_segment[self.index]


class GroupRewards(NamedTuple):
    """The rewards of one group, of its samples that have one."""

    rewards: tuple[float, ...]
    """Those of ``samples`` in their order, then those of ``group.counted``: samples that a filter has dropped, whose
    rewards count in the statistics of the group all the same."""
    samples: tuple[Sample, ...]
    """With outcome, tokens and the named components of the reward."""
    group: Group
    """With the prompt, its label and its metadata."""
    version: int
    """Version of the policy that is trained."""


class RewardPostprocess(Protocol):
    """From the rewards of a group to those that are trained on. Reports, filters and the ledger keep the raw ones."""

    def __call__(self, given: GroupRewards, /) -> Sequence[float]:
        """As many finite numbers as there are rewards, in their order."""
        ...


class AdvantageInput(NamedTuple):
    """The samples of a batch and their trained tokens, on the CPU, laid end to end in the order of the batch."""

    rewards: Tensor
    """float64 ``[S]``, after the post-processing."""
    group_ids: Tensor
    """int64 ``[S]``: samples belong together by the id, however many are left of a group."""
    samples: Segments
    """Sample of each token ``[N]``; sums, means and spreads over samples."""
    positions: Tensor
    """int64 ``[N]``: of each token among the response tokens of its sample."""
    rollout_logprobs: Tensor
    """float32 ``[N]``, as the engine reported them; NaN where nobody knows them, of recorded responses."""
    staleness: Tensor
    """int64 ``[N]``: versions between the one that made the token and the one that is trained; −1 for recorded ones."""
    kl: Tensor | None
    """float32 ``[N]``: estimate of the KL to the reference, with ``kl_in: reward``; else None."""
    values: Tensor | None
    """float32 ``[N]``: of the critic, before the first step of the batch; None without one."""
    groups: tuple[Group, ...]
    """Where rewards are from, with everything that is known of the samples. The ``S`` are, group by group, its samples
    and then those of ``group.counted``, of which no token is trained."""
    version: int


class AdvantageFunction(Protocol):
    """From rewards to advantages."""

    def __call__(self, given: AdvantageInput, options: ObjectiveOptions, /) -> Tensor:
        """A finite number for each token ``[N]``; ``given.samples.spread`` makes it of one for each sample. What a
        teacher takes off, and whitening, come after it. With a critic it is return − value, as that of ``gae`` is: the
        critic learns to predict the sum of both."""
        ...


class ReductionInput(NamedTuple):
    """The samples of one optimizer step, on the CPU."""

    tokens_per_sample: Tensor
    """float32 ``[S]``: trained tokens of each, 0 where none is left."""
    group_ids: Tensor
    """int64 ``[S]``"""
    rewards: Tensor
    """float64 ``[S]``, after the post-processing."""
    version: int


class ReductionFunction(Protocol):
    """How the losses of tokens become one number."""

    def __call__(self, given: ReductionInput, options: ObjectiveOptions, /) -> Tensor:
        """The weight of each token of a sample ``[S]``, finite and not negative: the loss is ``Σ weight · loss of the
        token``."""
        ...


class ImportanceInput(NamedTuple):
    """All trained tokens of one optimizer step, laid end to end, on the learner's device; nothing has a gradient."""

    logprobs: Tensor
    """float32 ``[N]``: of the policy that is trained."""
    old_logprobs: Tensor
    """float32 ``[N]``: of the proximal policy, as ``old_logprobs`` says."""
    rollout_logprobs: Tensor
    """float32 ``[N]``: as the engine reported them."""
    advantages: Tensor
    """float32 ``[N]``"""
    staleness: Tensor
    """int64 ``[N]``"""
    samples: Segments


class ImportanceWeights(NamedTuple):
    """What an importance function returns when it has figures too."""

    weights: Tensor
    """``[N]``"""
    figures: Mapping[str, Tensor]
    """A value for each token ``[N]`` by metric name; the mean over the tokens is reported."""


class ImportanceFunction(Protocol):
    """Weights between engine and learner."""

    def __call__(self, given: ImportanceInput, options: ObjectiveOptions, /) -> Tensor | ImportanceWeights:
        """The factor of each token's loss ``[N]``, finite and not negative; no gradient flows through it."""
        ...


class ConversionInput(NamedTuple):
    """One sequence as it would be trained."""

    sequence: TrainSequence
    part: int
    """Which part of the sample it is, counted from 0."""
    sample: Sample
    group: Group
    version: int


class ConversionFunction(Protocol):
    """From a sample to what is trained of it, sequence by sequence."""

    def __call__(self, given: ConversionInput, /) -> TrainSequence | None:
        """The sequence as it is to be trained, made with ``_replace``; None: nothing of it is.

        It may train fewer tokens (``trained`` with all arrays ``[T]``), change the context or log-probs, or have the
        sequence imitated (``is_imitated``). It trains no token that the given sequence does not: that one has all that
        the model made and that is recent enough. Tokens that it leaves out count as masked.
        """
        ...


class RolloutLog(NamedTuple):
    """A batch before it is trained."""

    version: int
    """Policy version that training on it will make."""
    groups: tuple[Group, ...]
    figures: Mapping[str, float]
    """Figures that are reported of it already."""


class RolloutLogFunction(Protocol):
    """Figures of what was generated; called on the first rank, once a batch."""

    def __call__(self, given: RolloutLog, /) -> Mapping[str, float] | None:
        """Finite numbers by metric name, under names that ``figures`` does not have; None: none."""
        ...


class StepLog(NamedTuple):
    """A batch after it was trained."""

    version: int
    """Policy version that the step made."""
    groups: tuple[Group, ...]
    figures: Mapping[str, float]
    """All that is reported of it."""
    step_time_s: float


class StepLogFunction(Protocol):
    """Figures of what was trained; called on the first rank, once a batch."""

    def __call__(self, given: StepLog, /) -> Mapping[str, float] | None:
        """As :class:`RolloutLogFunction`."""
        ...


class WeightNameFunction(Protocol):
    """The name under which engines get a weight."""

    def __call__(self, name: str, /) -> str:
        """A function of the name alone; no two weights may have one name."""
        ...
