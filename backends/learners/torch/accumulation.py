"""The gradients of one optimizer step: those of the whole step, whatever its micro-batches and ranks are.

Invariants:

* The weights of the reduction are fixed over the whole step before it is split, so what micro-batches and ranks add up
  to is the loss of the step, and its gradient.
* What couples tokens of several micro-batches is computed over all tokens of the step at once, in the order of the
  batch, on every rank alike.
* A batch is opened with the very micro-batches of the first pass, so a policy that has not moved yet is at a distance
  of exactly 0 from what opened it. Each rank asks about its own; all know all of it afterwards, with the same bits.
* After it every rank has the figures of the whole step.
* Where policy and critic lie on different ranks (:mod:`.roles`), each rank runs what it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.objectives.asked import asks_policy, couples_tokens
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.spec import loss_of
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.torch.collectives import Collectives
from penstock.backends.learners.torch.parallel import data_workers
from penstock.backends.learners.torch.rounds import ADVICE, Rounds, laid_out, padding_micro_batch
from penstock.backends.learners.training.batch_trainer import Added
from penstock.backends.learners.training.coupling import logprob_gradients, places_in
from penstock.backends.learners.training.exactness import LARGEST_DIFFERENCE, require_equal
from penstock.backends.learners.training.micro_batch_size import MicroBatchSize
from penstock.backends.learners.training.mismatched import reference_point
from penstock.backends.learners.training.step import BatchTokens, Predictions, Scores, StepTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.packing import Division
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.critic import Critic
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.torch.rounds import MicroBatch
    from penstock.backends.learners.training.batch_trainer import UpdateWork
    from penstock.backends.learners.training.loss_scale import LossScale
    from penstock.backends.learners.training.roles import Roles
    from penstock.backends.learners.training.token_records import TokenRecorder


class Accumulation:
    """Runs the models of one rank forward and backward."""

    def __init__(
        self,
        policy: PackedModel,
        reference: PackedModel | None,
        critic: Critic | None,
        options: LearnerOptions,
        *,
        temperature: float,
        check_stop: Callable[[], None],
        scale: LossScale,
        roles: Roles,
        recorder: TokenRecorder | None,
    ) -> None:
        """Arguments as for :class:`.PolicyTrainer`; ``recorder`` is told what the loss is computed from."""
        objective = options.objective
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._options = options
        self._temperature = temperature
        self._scale = scale
        workers = self._workers = data_workers(roles.own, options)
        self._roles = roles
        opened = open_objective(objective, num_steps=options.num_updates * options.num_passes)
        self._objective = opened if recorder is None else recorder.around(opened)
        self._trains_entropy = objective.entropy_coef != 0.0 or loss_of(objective).is_function
        own_reference = [] if reference is None or reference.model is policy.model else [reference.model]
        of_policy = [policy.model, *own_reference] if roles.has_policy else []
        roots = [*of_policy, *([] if critic is None else critic.roots)]
        can_recover = options.tensor_parallel == 1
        self._rounds = Rounds(workers, Collectives(roots if can_recover else ()), check_stop, can_recover=can_recover)
        self.size = MicroBatchSize(options.max_tokens_per_micro_batch, is_speaker=workers.is_first, advice=ADVICE)
        """Of the micro-batches."""

    def add(self, work: UpdateWork, pairs: Update | None) -> Added:
        """See :meth:`.BatchTrainer._added`."""
        known = work.known or self._opened(work)
        if self._roles.are_apart:
            totals, equal = self._roles.together(lambda: self._gradients(work, known, pairs))
            totals = self._roles.all_figures(totals)
        else:
            totals, equal = self._gradients(work, known, pairs)
        return Added(known, totals | equal)

    def _gradients(
        self, work: UpdateWork, known: BatchTokens, pairs: Update | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Add those of what this rank holds; the figures of its loss, and those that are the same on every rank."""
        figures: Sequence[Mapping[str, Tensor]] = ()
        equal: dict[str, float] = {}
        update = work.update
        division = self.division(update)
        parts = division.ranks[self._workers.rank]
        batches, spare = laid_out(parts, update.sequences[0]), padding_micro_batch(update.sequences[0])
        point = None if pairs is None else self._reference_point(pairs, spare)
        own = StepTokens(known, update, parts, is_only_step=work.is_only, reference_point=point)
        if not (work.trains_policy and self._roles.has_policy):
            if self._critic is not None:
                figures = self._add_values(self._critic, own, batches, spare)
        elif len(division.in_order) > 1 and couples_tokens(self._options.objective):
            whole = StepTokens(known, update, [update.sequences], is_only_step=work.is_only, reference_point=point)
            places = places_in(update, parts).to(self._policy.device)
            figures, logprobs = self._add_coupled(whole, own, batches, spare, places, update.num_tokens)
            equal = self._compared(work, logprobs)
        else:
            figures, found = self._add_apart(own, batches, spare)
            if self._options.true_on_policy:
                places = places_in(update, parts).to(self._policy.device)
                equal = self._compared(work, self._exchanged(found, places, update.num_tokens))
        return self._workers.totals(figures), equal

    def _compared(self, work: UpdateWork, logprobs: Tensor) -> dict[str, float]:
        """Where it is promised, see that the learner has found the very log-probs that the engine reported.

        Raises:
            InexactError: on every rank.
        """
        if not self._options.true_on_policy:
            return {}
        return {LARGEST_DIFFERENCE: require_equal(work.batch, logprobs.detach().cpu().numpy(), step=work.version + 1)}

    def division(self, update: Update) -> Division:
        """Its micro-batches, at the size that they have now."""
        return self._policy.divided(
            update.sequences, num_ranks=self._workers.num_ranks, max_tokens=self.size.max_tokens
        )

    def _opened(self, work: UpdateWork) -> BatchTokens:
        """What is known of a batch before its first optimizer step."""
        objective = self._options.objective
        names = ["logprobs"] if asks_policy(self._options) else []
        names += ["reference"] if names and needs_reference(objective) else []
        names += ["values"] if objective.critic != "none" else []
        said: dict[str, Tensor] = {}
        if names:
            said = self._roles.together(lambda: self._predictions(work))
            dtype = torch.promote_types(self._policy.dtype, torch.float32)
            said = self._roles.all_said(said, names, work.batch.num_trained_tokens, dtype)
        return BatchTokens(work.batch, objective, Predictions(**said), version=work.version, device=self._policy.device)

    @torch.no_grad()
    def _predictions(self, work: UpdateWork) -> dict[str, Tensor]:
        """What the models of this rank say about the tokens of a batch, as far as anything depends on it."""
        critic, with_policy = self._critic, self._roles.has_policy and asks_policy(self._options)
        if critic is None and not with_policy:
            return {}

        def ask(batch: MicroBatch) -> dict[str, Tensor]:
            said: dict[str, Tensor] = {}
            hidden = None
            if with_policy or (critic is not None and critic.is_shared):
                scores = self._scores(batch, with_reference=with_policy)
                hidden = scores.hidden
                if with_policy:
                    said["logprobs"] = scores.logprobs
                if scores.reference is not None:
                    said["reference"] = scores.reference
            if critic is not None:
                said["values"] = critic.values(batch.packed, hidden)[: batch.num_tokens]
            return said

        spare = work.batch.sequences[0]
        parts = [part for update in work.first_pass for part in self.division(update).ranks[self._workers.rank]]
        batches = laid_out(parts, spare)
        found = self._rounds.run("opening", batches, padding_micro_batch(spare), ask)
        places = torch.cat([batch.places for batch in batches]).to(self._policy.device)
        count = work.batch.num_trained_tokens
        return {name: self._exchanged([said[name] for said in found], places, count) for name in found[0]}

    def _add_apart(
        self, own: StepTokens, batches: Sequence[MicroBatch], spare: MicroBatch
    ) -> tuple[Sequence[Mapping[str, Tensor]], list[Tensor]]:
        """Loss and gradient micro-batch by micro-batch, for a loss that is a sum over tokens (or one micro-batch);
        figures, and the log-probs of this rank's tokens, of each of them."""

        def work(batch: MicroBatch) -> tuple[dict[str, Tensor], Tensor]:
            scores = self._scores(batch, with_reference=own.asks_reference)
            terms = self._objective(own.tokens(batch.part, scores), self._options.objective)
            figures = {**terms.figures, **self._backward(terms.loss, batch, own, scores.hidden)}
            return figures, scores.logprobs.detach()

        found = self._rounds.run(f"apart {own.asks_reference}", batches, spare, work)
        return [figures for figures, _ in found], [logprobs for _, logprobs in found]

    def _add_coupled(
        self,
        whole: StepTokens,
        own: StepTokens,
        batches: Sequence[MicroBatch],
        spare: MicroBatch,
        places: Tensor,
        count: int,
    ) -> tuple[Sequence[Mapping[str, Tensor]], Tensor]:
        """Where the loss of a token depends on log-probs of others; see :mod:`.coupling`. Figures, and the log-probs of
        all tokens."""
        scores = self._all_scores(batches, spare, places, count, with_reference=own.asks_reference)
        gradients = logprob_gradients(
            self._objective, self._options.objective, whole, scores, places, workers=self._workers
        )

        def work(batch: MicroBatch) -> dict[str, Tensor]:
            again = self._scores(batch, with_reference=False)
            surrogate = gradients.surrogate(batch.part, again.logprobs, again.entropy)
            return self._backward(surrogate, batch, own, again.hidden)

        values = self._rounds.run("coupled", batches, spare, work)
        # Every rank has found those of the whole step, and they will be added up.
        return ([gradients.figures, *values] if self._workers.is_first else values), scores.logprobs

    def _add_values(
        self, critic: Critic, own: StepTokens, batches: Sequence[MicroBatch], spare: MicroBatch
    ) -> Sequence[Mapping[str, Tensor]]:
        """The critic alone; with a shared trunk its head alone, as the trunk is the policy's."""

        def work(batch: MicroBatch) -> dict[str, Tensor]:
            hidden = None
            if critic.is_shared:
                with torch.no_grad():
                    hidden = self._scores(batch, with_reference=False).hidden
            terms = critic.terms(batch.packed, hidden, own.value_targets(batch.part))
            torch.autograd.backward(self._scale.value * terms.loss)
            return terms.figures

        return self._rounds.run("values", batches, spare, work)

    def _reference_point(self, pairs: Update, spare: MicroBatch) -> Tensor:
        """See :mod:`.mismatched`; the same on every rank."""
        parts = self.division(pairs).ranks[self._workers.rank]
        batches, places = laid_out(parts, pairs.sequences[0]), places_in(pairs, parts).to(self._policy.device)
        scores = self._all_scores(batches, spare, places, pairs.num_tokens, with_reference=True)
        return reference_point(pairs, scores)

    @torch.no_grad()
    def _all_scores(
        self, batches: Sequence[MicroBatch], spare: MicroBatch, places: Tensor, count: int, *, with_reference: bool
    ) -> Scores:
        """Of all ``count`` tokens of these micro-batches, on every rank, in the order of the places."""

        def work(batch: MicroBatch) -> Scores:
            return self._scores(batch, with_reference=with_reference)._replace(hidden=None)

        found = self._rounds.run(f"scores {with_reference}", batches, spare, work)
        references = [scores.reference for scores in found if scores.reference is not None]
        return Scores(
            logprobs=self._exchanged([scores.logprobs for scores in found], places, count),
            entropy=self._exchanged([scores.entropy for scores in found], places, count),
            reference=self._exchanged(references, places, count) if references else None,
            hidden=None,
        )

    def _exchanged(self, values: Sequence[Tensor], places: Tensor, count: int) -> Tensor:
        """``[count]`` with the values of each rank, end to end, at its places: each comes from one rank, and zeros from
        the others, so all have the same bits."""
        own = torch.cat(list(values))
        return self._workers.sum_(own.new_zeros(count).index_copy(0, places, own))

    def _scores(self, batch: MicroBatch, *, with_reference: bool) -> Scores:
        """What the models say about the trained tokens of a micro-batch, about none if it stands in for nothing."""
        found = self._policy.scores(
            batch.packed,
            temperature=self._temperature,
            entropy_gradient=self._trains_entropy,
            wants_hidden=self._critic is not None and self._critic.is_shared,
        )
        reference = None
        if with_reference and self._reference is not None:
            with torch.no_grad():
                reference = self._reference.logprobs(batch.packed, temperature=self._temperature)
        scores = Scores(found.logprobs, found.entropy, reference, found.hidden, found.top)
        return scores.first(batch.num_tokens)

    def _backward(self, loss: Tensor, batch: MicroBatch, own: StepTokens, hidden: Tensor | None) -> dict[str, Tensor]:
        """Send the loss of the policy back through it, and that of the values; the figures of these."""
        critic = self._critic
        if critic is None or not critic.is_shared:
            torch.autograd.backward(self._scale.value * loss)
        if critic is None:
            return {}
        terms = critic.terms(batch.packed, hidden, own.value_targets(batch.part))
        if critic.is_shared:
            torch.autograd.backward(self._scale.value * (loss + self._options.objective.value_coef * terms.loss))
        else:
            torch.autograd.backward(self._scale.value * terms.loss)
        return terms.figures
