"""What an objective is given and what it gives: the interface of built-in and user objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.backends.learners.hooks.protocols import Segments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from penstock.backends.learners.options import ObjectiveOptions


class Judged(NamedTuple):
    """What KTO is told of the responses of a step."""

    is_desirable: Tensor
    """``[S]``"""
    reference_point: Tensor
    """``z0``: the KL to the reference in nats a response, a float64 scalar without gradient."""


class PolicyTokens(NamedTuple):
    """Trained tokens, laid end to end; float32 ``[N]`` on the learner's device where nothing else is said."""

    logprobs: Tensor
    """Of the policy that is trained, with gradient."""
    entropy: Tensor
    """With gradient where ``entropy_coef`` is not 0, and for user objectives."""
    rollout_logprobs: Tensor
    """As the engine reported them; NaN where nobody knows them, of recorded responses."""
    reference_logprobs: Tensor | None
    """Of the frozen reference; None where ``kl_coef`` is 0."""
    advantages: Tensor
    weights: Tensor
    """Of the reduction, over the whole step: the loss is ``Σ weight · value``."""
    figure_weights: Tensor
    """Those of the figures, which are means over the tokens where ``weights`` make no mean (constant denominator)."""
    staleness: Tensor
    """Policy versions between the one that made the token and the one that is trained, int64; −1 where none of this run
    has made it, of recorded responses."""
    samples: Segments
    """Which tokens belong to which sample of the step."""
    opening_logprobs: Tensor | None = None
    """Of the policy that the batch began with; None where that is the one that is trained, in the only step of a batch,
    and where ``old_logprobs: engine`` needs none."""
    teacher_logprobs: Tensor | None = None
    """Of the scenario's teacher; None where there is none. NaN for tokens that it was not asked about."""
    teacher_top: Tensor | None = None
    """Log-probs of what the teacher finds likeliest in the place of each token ``[N, k]``; None: it was not asked."""
    student_top: Tensor | None = None
    """Of these same tokens under the policy that is trained, with gradient ``[N, k]``; None for functions of yours."""
    pairs: Tensor | None = None
    """Better and worse sample of each pair of the step, int64 ``[B, 2]``; None where the loss is not one of pairs."""
    judged: Judged | None = None
    """None where the loss is not KTO's."""
    knows_rollout: bool = True
    """Whether ``rollout_logprobs`` are known of all tokens of the batch."""
    is_of_one_version: Tensor | None = None
    """True ``[N]`` where the same weights made the whole sample of a token; None: that of all."""
    imitated: Tensor | None = None
    """True ``[N]`` where a token is imitated, whatever the objective is; None where none of the step is. A function is
    called with the others alone."""
    places: Tensor | None = None
    """Of each token among those of the batch, int64."""

    def only(self, which: Tensor) -> PolicyTokens:
        """The tokens of which this is true ``[N]``; what belongs to the step stays as it is."""
        index = self.samples.index[which]
        mask = None if self.samples.mask is None else self.samples.mask[which]

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[which]

        return self._replace(
            logprobs=self.logprobs[which],
            entropy=self.entropy[which],
            rollout_logprobs=self.rollout_logprobs[which],
            reference_logprobs=some(self.reference_logprobs),
            advantages=self.advantages[which],
            weights=self.weights[which],
            figure_weights=self.figure_weights[which],
            staleness=self.staleness[which],
            samples=Segments(index, self.samples.count, mask),
            opening_logprobs=some(self.opening_logprobs),
            teacher_logprobs=some(self.teacher_logprobs),
            teacher_top=some(self.teacher_top),
            student_top=some(self.student_top),
            is_of_one_version=some(self.is_of_one_version),
            imitated=None,
            places=some(self.places),
        )


class ObjectiveTerms(NamedTuple):
    """What these tokens add to the step."""

    loss: Tensor
    """Scalar, with gradient; float64 where many tokens were summed."""
    figures: Mapping[str, Tensor]
    """Detached scalars by metric name."""
    per_token: Tensor | None = None
    """What each token adds to the loss, without gradient ``[N]``; None where that is no sum over tokens."""


class ObjectiveFunction(Protocol):
    """The loss of some tokens.

    A function of the user's own, named ``file.py:function``, is called once a step with every trained token of it,
    whatever the micro-batches are. It may use any key of the options as it likes; ``estimator``, ``whiten`` and
    ``reduction`` have been applied to advantages and weights, and ``kl_coef`` above 0 has made the reference available.
    Its gradient with respect to ``logprobs`` and ``entropy`` is what is trained on.
    """

    def __call__(self, tokens: PolicyTokens, options: ObjectiveOptions, /) -> ObjectiveTerms: ...
