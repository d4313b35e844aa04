"""The gradients of one optimizer step: those of the whole step, whatever its micro-batches and ranks are.

Invariants:

* The weights of the reduction are fixed over the whole step before it is split, so what micro-batches and ranks add up
  to is the loss of the step, and its gradient.
* What couples tokens of several micro-batches is computed over all tokens of the step at once, in the order of the
  batch, on every rank alike.
* After it every rank has the figures of the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.backends.learners.objectives.objective import couples_tokens
from penstock.backends.learners.torch.micro_batch import laid_out, padding_micro_batch
from penstock.backends.learners.training.coupling import logprob_gradients, places_in, scattered, summed_over, sums
from penstock.backends.learners.training.mismatched import reference_point
from penstock.backends.learners.training.step import Scores, StepTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.division import Division
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.objectives.protocol import ObjectiveFunction
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.micro_batch import MicroBatch
    from penstock.backends.learners.torch.models import Models
    from penstock.backends.learners.torch.rounds import Rounds
    from penstock.backends.learners.training.step import BatchTokens
    from penstock.backends.learners.worker_group.workers import WorkerGroup


class Step(NamedTuple):
    """One optimizer step before it is run."""

    known: BatchTokens
    update: Update
    division: Division
    is_only: bool
    """Whether the policy that is trained is the one that opened the batch."""
    mismatched: tuple[Update, Division] | None = None
    """What the reference point of KTO is found from; None where there is none."""


class Accumulation:
    """Runs the models of one rank forward and backward."""

    def __init__(
        self,
        models: Models,
        objective: ObjectiveFunction,
        options: LearnerOptions,
        rounds: Rounds,
        workers: WorkerGroup,
    ) -> None:
        self._models = models
        self._objective = objective
        self._options = options
        self._rounds = rounds
        self._workers = workers

    def add(self, step: Step, *, trains_policy: bool) -> dict[str, float]:
        """Add the gradients of a step; the sums over its tokens.

        Raises:
            OutOfMemoryError: a micro-batch was too large; some gradients have been added.
        """
        parts = step.division.ranks[self._workers.rank]
        batches, spare = laid_out(parts, step.update.sequences[0]), padding_micro_batch(step.update.sequences[0])
        point = self._reference_point(step, spare)
        own = StepTokens(step.known, step.update, parts, is_only_step=step.is_only, reference_point=point)
        if not trains_policy:
            totals = self._add_values(own, batches, spare)
        elif len(step.division.in_order) > 1 and couples_tokens(self._options.objective):
            whole = StepTokens(
                step.known, step.update, [step.update.sequences], is_only_step=step.is_only, reference_point=point
            )
            totals = self._add_coupled(step, whole, own, batches, spare)
        else:
            totals = self._add_apart(own, batches, spare)
        return summed_over(self._workers, totals)

    def _add_apart(self, own: StepTokens, batches: Sequence[MicroBatch], spare: MicroBatch) -> dict[str, Tensor]:
        """Loss and gradient micro-batch by micro-batch, for a loss that is a sum over tokens (or one micro-batch)."""

        def work(batch: MicroBatch) -> dict[str, Tensor]:
            scores = self._models.scores(batch, with_reference=own.asks_reference)
            terms = self._objective(own.tokens(batch.part, scores), self._options.objective)
            return {**terms.figures, **self._backward(terms.loss, batch, own, scores.hidden)}

        return sums(self._rounds.run(f"apart {own.asks_reference}", batches, spare, work))

    def _add_coupled(
        self, step: Step, whole: StepTokens, own: StepTokens, batches: Sequence[MicroBatch], spare: MicroBatch
    ) -> dict[str, Tensor]:
        """Where the loss of a token depends on log-probs of others; see :mod:`.coupling`."""
        places = places_in(step.update, step.division.ranks[self._workers.rank]).to(self._models.policy.device)
        asks, count = own.asks_reference, step.update.num_tokens
        scores = self._all_scores(batches, spare, places, num_tokens=count, with_reference=asks)
        gradients = logprob_gradients(
            self._objective, self._options.objective, whole, scores, places, workers=self._workers
        )

        def work(batch: MicroBatch) -> dict[str, Tensor]:
            again = self._models.scores(batch, with_reference=False)
            surrogate = gradients.surrogate(batch.part, again.logprobs, again.entropy)
            return self._backward(surrogate, batch, own, again.hidden)

        values = sums(self._rounds.run("coupled", batches, spare, work))
        # Every rank has found those of the whole step, and they will be added up.
        return {**gradients.figures, **values} if self._workers.is_first else values

    def _add_values(self, own: StepTokens, batches: Sequence[MicroBatch], spare: MicroBatch) -> dict[str, Tensor]:
        """The critic alone; with a shared trunk its head alone, as the trunk is the policy's."""
        critic = self._models.critic
        assert critic is not None, "critic_only_steps"

        def work(batch: MicroBatch) -> dict[str, Tensor]:
            hidden = None
            if critic.is_shared:
                with torch.no_grad():
                    hidden = self._models.scores(batch, with_reference=False).hidden
            terms = critic.terms(batch.packed, hidden, own.value_targets(batch.part))
            torch.autograd.backward(terms.loss)
            return terms.figures

        return sums(self._rounds.run("values", batches, spare, work))

    def _reference_point(self, step: Step, spare: MicroBatch) -> Tensor | None:
        """See :mod:`.mismatched`; the same on every rank."""
        if step.mismatched is None:
            return None
        pairs, division = step.mismatched
        parts = division.ranks[self._workers.rank]
        batches, places = laid_out(parts, pairs.sequences[0]), places_in(pairs, parts).to(self._models.policy.device)
        scores = self._all_scores(batches, spare, places, num_tokens=pairs.num_tokens, with_reference=True)
        return reference_point(pairs, scores)

    @torch.no_grad()
    def _all_scores(
        self,
        batches: Sequence[MicroBatch],
        spare: MicroBatch,
        places: Tensor,
        *,
        num_tokens: int,
        with_reference: bool,
    ) -> Scores:
        """Of all tokens of these micro-batches, on every rank, in the order of the places."""

        def work(batch: MicroBatch) -> Scores:
            return self._models.scores(batch, with_reference=with_reference)._replace(hidden=None)

        def exchanged(values: Sequence[Tensor]) -> Tensor:
            return self._workers.sum_(scattered(torch.cat(list(values)), places, num_tokens))

        found = self._rounds.run(f"scores {with_reference}", batches, spare, work)
        references = [scores.reference for scores in found if scores.reference is not None]
        return Scores(
            logprobs=exchanged([scores.logprobs for scores in found]),
            entropy=exchanged([scores.entropy for scores in found]),
            reference=exchanged(references) if references else None,
            hidden=None,
        )

    def _backward(self, loss: Tensor, batch: MicroBatch, own: StepTokens, hidden: Tensor | None) -> dict[str, Tensor]:
        """Send the loss of the policy back through it, and that of the values; the figures of these."""
        critic = self._models.critic
        if critic is None or not critic.is_shared:
            torch.autograd.backward(loss)
        if critic is None:
            return {}
        terms = critic.terms(batch.packed, hidden, own.value_targets(batch.part))
        if critic.is_shared:
            torch.autograd.backward(loss + self._options.objective.value_coef * terms.loss)
        else:
            torch.autograd.backward(terms.loss)
        return terms.figures
