"""The optimizer steps of a batch by megatron-core; see :mod:`.batch_trainer`.

Invariants:

* Loss, gradient and figures are those of the whole batch, whatever its micro-batches and the layout are: the weights of
  the reduction are fixed over a whole step before it is split, and megatron-core adds up and divides nothing.
* The ranks of one data-parallel replica run the same micro-batches; replicas have equally many.
* What couples tokens of several micro-batches is computed over all tokens of the step at once, in the order of the
  batch, on every rank alike (:mod:`~penstock.backends.learners.training.coupling`).
* A batch is opened with the very micro-batches of the first pass, so a policy that has not moved yet is at a distance
  of exactly 0 from what opened it.
* After each step every rank has the figures of the whole step, the same bits.
* What overflows float16 is not applied, counted, and halves the loss scale, on every rank alike
  (:mod:`~penstock.backends.learners.training.loss_scale`).
* Where policy and critic lie on different ranks (:mod:`.roles`), each rank runs what it has.

What happens where memory does not suffice is said in :mod:`.out_of_memory`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.batch.packing import divide_over_ranks
from penstock.backends.learners.learning_rate import policy_learning_rate
from penstock.backends.learners.megatron.critic import OwnCritic, SharedCritic
from penstock.backends.learners.megatron.layout.source_ranks import SourceRanks
from penstock.backends.learners.megatron.out_of_memory import can_try_anew, ended, known_size
from penstock.backends.learners.megatron.schedule.micro_batches import check_length, laid_out
from penstock.backends.learners.megatron.schedule.router_replay import replay_fraction
from penstock.backends.learners.megatron.schedule.schedule import MicroBatchRunner
from penstock.backends.learners.megatron.speed import speed_of
from penstock.backends.learners.objectives.asked import asks_policy, couples_tokens
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.training.batch_trainer import Added, BatchTrainer
from penstock.backends.learners.training.coupling import logprob_gradients, places_in
from penstock.backends.learners.training.mismatched import reference_point
from penstock.backends.learners.training.roles import side_by_side
from penstock.backends.learners.training.step import BatchTokens, Predictions, Scores, StepTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.batch.packing import Division
    from penstock.backends.learners.batch.sequences import TrainBatch, TrainSequence
    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.megatron.critic import MegatronCritic
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.megatron.schedule.micro_batches import MicroBatches
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.training.batch_trainer import StepResult, UpdateWork
    from penstock.backends.learners.training.loss_scale import LossScale
    from penstock.backends.learners.training.roles import Roles
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.messages.samples import Group

Parts = list[list["TrainSequence"]]


class MegatronTrainer(BatchTrainer):
    """Trains a model with the objectives of the scenario."""

    def __init__(
        self,
        trainable: TrainableModel | None,
        reference: ParallelModel | None,
        options: LearnerOptions,
        *,
        temperature: float,
        num_steps: int,
        check_stop: Callable[[], None],
        seed: int,
        workers: WorkerGroup,
        critic: MegatronCritic | None = None,
        roles: Roles | None = None,
        folder: Path | None = None,
        run_folder: Path | None = None,
        quantizes: bool = False,
    ) -> None:
        """
        Args:
            trainable: the policy, with its optimizer; None where other ranks have it.
            reference: the policy that the KL term pulls to; None where nothing asks for it.
            options: the ``learner:`` block.
            temperature: of the sampling, so that log-probs are of the distribution that was sampled from.
            num_steps: of the whole run, for the schedule.
            check_stop: called before each micro-batch; raises to end the step.
            seed: of the order in which a batch is gone through, where it is divided.
            workers: all ranks; each has such a trainer, and they are called alike.
            critic: as the objective has one, unless other ranks have it.
            roles: which of the ranks hold what; None: all hold whatever there is.
            folder: of the run's checkpoints, where what is known of memory lies; None: it is not kept.
            run_folder: for dumps and profiles of steps.
            quantizes: engines get the weights in FP8.

        Raises:
            UserFault: the objective makes no sense.
            UserCodeError: its function cannot be loaded.
        """
        model = self._model = _held(trainable, critic)
        super().__init__(
            options,
            num_steps=num_steps,
            seed=seed,
            dtype=model.precision,
            speed=speed_of(
                model.architecture, options, precision=model.precision, device=workers.device,
                num_ranks=workers.num_ranks,
            ),
            workers=workers,
            run_folder=run_folder,
            quantizes=quantizes,
        )  # fmt: skip
        self._roles = roles or side_by_side(workers, has_critic=critic is not None)
        self._trainable, self._critic, self.scale = trainable, critic, _scale_of(trainable, critic)
        self._sources = SourceRanks(self._roles.own, model.layout)
        objective = open_objective(options.objective, num_steps=options.num_updates * options.num_passes)
        self._objective = objective if self._recorder is None else self._recorder.around(objective)
        self._reference = None if reference is None else MicroBatchRunner(
            reference, reference.chunks, device=workers.device, temperature=temperature, check_stop=check_stop
        )  # fmt: skip
        self._size_micro_batches(folder)

    def _size_micro_batches(self, folder: Path | None) -> None:
        self._folder = folder
        self._size = known_size(self._options, folder, is_speaker=self._roles.own.is_first)
        if not can_try_anew(self._model.layout, self._options.megatron):
            return
        policy = None if self._trainable is None else self._trainable.runner
        own = self._critic.runner if isinstance(self._critic, OwnCritic) else None
        for runner in (policy, self._reference, own):
            if runner is not None:
                runner.agree = self._roles.own.agree

    def train(
        self, groups: Sequence[Group], *, version: int, min_token_version: int, mask_old_tokens: bool = False
    ) -> StepResult:
        """See :class:`.BatchTrainer`."""
        try:
            return super().train(
                groups, version=version, min_token_version=min_token_version, mask_old_tokens=mask_old_tokens
            )
        except torch.OutOfMemoryError as error:
            raise ended(self._size, self._options, self._folder, can_be_finer=self._can_be_finer) from error

    def check_length(self, sequence: TrainSequence, what: str, /) -> None:
        """See :class:`.BatchTrainer`."""
        check_length(sequence, what, self._model.architecture)

    def _added(self, work: UpdateWork, pairs: Update | None, /) -> Added:
        """See :class:`.BatchTrainer`."""
        known = self._open(work.batch, work.first_pass, version=work.version) if work.known is None else work.known
        totals = self._roles.together(lambda: self._gradients(work, known, pairs))
        return Added(known, self._roles.all_figures(totals))

    def forget_gradients(self) -> None:
        """See :class:`.BatchTrainer`."""
        if self._trainable is not None:
            self._trainable.forget_gradients()
        if isinstance(self._critic, SharedCritic):
            self._critic.forget_gradients()

    def _gradients(self, work: UpdateWork, known: BatchTokens, pairs: Update | None) -> dict[str, float]:
        """Add those of what this rank holds; sums over the tokens of all ranks that hold it."""
        parts, num_parts = self._parts(work.update)
        batches = self._laid_out(parts, work.update.sequences[0])
        point = None if pairs is None else self._reference_point(pairs)
        own = StepTokens(known, work.update, parts, is_only_step=work.is_only, reference_point=point)
        if self._trainable is None or not work.trains_policy:
            # With ``critic_only_steps`` the ranks of the policy alone have nothing to do.
            return {} if self._critic is None else self._sources.totals(self._critic.add_gradients(own, batches))
        if num_parts > 1 and couples_tokens(self._options.objective):
            whole = StepTokens(
                known, work.update, [work.update.sequences], is_only_step=work.is_only, reference_point=point
            )
            totals = self._add_coupled(whole, own, batches, places_in(work.update, parts), work.update)
        else:
            totals = self._add_apart(own, batches)
        if isinstance(self._critic, OwnCritic):
            totals |= self._sources.totals(self._critic.add_gradients(own, batches))
        return {**totals, **self._further_figures(work.update)}

    def change(self, totals: Mapping[str, float], *, step: int, name: str) -> dict[str, float]:
        """See :class:`.BatchTrainer`."""
        norms: dict[str, float] = {}
        if self._critic is not None:
            loss = totals["train/value_loss"]
            norms["train/critic-grad_norm"] = self._critic.change(step, loss=loss, name=name)
        if self._trainable is not None and "train/loss" in totals:
            rate = policy_learning_rate(step, self._options, num_steps=self._num_steps)
            norms["train/grad_norm"] = self._trainable.change(rate, loss=totals["train/loss"], name=name)
            if (further := self._trainable.further_norm) is not None:
                norms["train/mtp_grad_norm"] = further
        figures = self._roles.all_figures(norms)
        return self.scale.followed(figures, name=name) if self.scale.is_dynamic else figures

    def _add_apart(self, own: StepTokens, batches: MicroBatches) -> dict[str, float]:
        """For a loss that is a sum over tokens (or one micro-batch)."""
        references = self._of_reference(batches) if own.asks_reference else []
        found: list[Mapping[str, Tensor]] = []

        def loss(number: int, scores: VocabularyScores) -> Tensor:
            said = batches.own(number, scores)
            reference = references[number] if references else None
            tokens = own.tokens(batches.parts[number], Scores(said.logprobs, said.entropy, reference, None, said.top))
            terms = self._objective(tokens, self._options.objective)
            found.append(terms.figures)
            return self._with_values(terms.loss, number, said, own, batches, found)

        self._policy.add_gradients(batches.sequences, loss)
        return self._sources.totals(found)

    def _add_coupled(
        self, whole: StepTokens, own: StepTokens, batches: MicroBatches, places: Tensor, update: Update
    ) -> dict[str, float]:
        """Where the loss of a token depends on log-probs of others; see :mod:`.coupling`."""
        scores = self._all_scores(batches, places, update.num_tokens, with_reference=own.asks_reference)
        own_places = places.to(self._workers.device)
        gradients = logprob_gradients(
            self._objective, self._options.objective, whole, scores, own_places, workers=self._roles.own
        )
        of_values: list[Mapping[str, Tensor]] = []

        def loss(number: int, scores: VocabularyScores) -> Tensor:
            again = batches.own(number, scores)
            surrogate = gradients.surrogate(batches.parts[number], again.logprobs, again.entropy)
            return self._with_values(surrogate, number, again, own, batches, of_values)

        self._policy.add_gradients(batches.sequences, loss)
        figures = self._sources.whole(gradients.figures)
        return figures | self._sources.totals(of_values) if isinstance(self._critic, SharedCritic) else figures

    def _with_values(
        self,
        loss: Tensor,
        number: int,
        said: VocabularyScores,
        own: StepTokens,
        batches: MicroBatches,
        found: list[Mapping[str, Tensor]],
    ) -> Tensor:
        """The loss of a micro-batch and, with the policy's trunk, that of its values beside it."""
        if not isinstance(self._critic, SharedCritic):
            return loss
        assert said.values is not None, "the head was attached"
        terms = self._critic.terms(said.values, own, batches.parts[number])
        found.append(terms.figures)
        return loss + self._options.objective.value_coef * terms.loss

    def _further_figures(self, update: Update) -> dict[str, float]:
        """The same on every rank."""
        figures = dict(self._policy.runner.further_figures)
        experts = self._model.architecture.experts
        if self._options.megatron.router_replay and experts is not None:
            figures["train/router_replay_fraction"] = replay_fraction(update.sequences, experts)
        return figures

    def _open(self, batch: TrainBatch, first_pass: Sequence[Update], *, version: int) -> BatchTokens:
        objective, count = self._options.objective, batch.num_trained_tokens
        names = ["logprobs"] if asks_policy(self._options) else []
        names += ["reference"] if names and needs_reference(objective) else []
        names += ["values"] if objective.critic != "none" else []
        said: dict[str, Tensor] = {}
        if names:
            parts: Parts = []
            for update in first_pass:  # each filled up as it will be when it is trained
                own, _ = self._parts(update)
                parts += [*own, *([] for _ in range(-len(own) % self._multiple))]
            batches = self._laid_out(parts, batch.sequences[0])
            said = self._roles.together(lambda: self._predictions(batches, count))
            said = self._roles.all_said(said, names, count, torch.float32)
        return BatchTokens(batch, objective, Predictions(**said), version=version, device=self._workers.device)

    def _predictions(self, batches: MicroBatches, count: int) -> dict[str, Tensor]:
        """What is held here says about ``count`` tokens, on every rank that holds the same."""
        said: dict[str, Tensor] = {}
        if self._trainable is not None and asks_policy(self._options):
            scores = self._all_scores(batches, batches.places, count, with_reference=True)
            said["logprobs"] = scores.logprobs
            if scores.reference is not None:
                said["reference"] = scores.reference
        values: list[Tensor] = []
        match self._critic:
            case None:
                return said
            case OwnCritic():
                values = self._critic.values(batches)
            case SharedCritic():
                for number, found in enumerate(self._policy.runner.scores(batches.sequences)):
                    own = batches.own(number, found).values
                    assert own is not None, "the head was attached"
                    values.append(own)
        return said | {"values": self._sources.broadcast(values, batches.places, count)}

    def _all_scores(self, batches: MicroBatches, places: Tensor, count: int, *, with_reference: bool) -> Scores:
        """Of ``count`` tokens, on every rank, without gradient."""
        found = self._policy.runner.scores(batches.sequences)
        said = [batches.own(number, scores) for number, scores in enumerate(found)]
        reference = None
        if with_reference and self._reference is not None:
            reference = self._sources.broadcast(self._of_reference(batches), places, count)
        return Scores(
            logprobs=self._sources.broadcast([scores.logprobs for scores in said], places, count),
            entropy=self._sources.broadcast([scores.entropy for scores in said], places, count),
            reference=reference,
            hidden=None,
        )

    def _reference_point(self, pairs: Update) -> Tensor:
        """See :mod:`.mismatched`; the same on every rank."""
        parts, _ = self._parts(pairs)
        batches = self._laid_out(parts, pairs.sequences[0])
        scores = self._all_scores(batches, places_in(pairs, parts), pairs.num_tokens, with_reference=True)
        return reference_point(pairs, scores)

    def _of_reference(self, batches: MicroBatches) -> list[Tensor]:
        """Log-probs by micro-batch, on the last stage; empty where there is no reference."""
        if self._reference is None:
            return []
        found = self._reference.scores(batches.sequences)
        return [batches.own(number, scores).logprobs for number, scores in enumerate(found)]

    def _parts(self, update: Update) -> tuple[Parts, int]:
        """The micro-batches of this replica, and the number of those of all that are not empty."""
        division = self._division(update)
        return division.ranks[self._sources.replica], len(division.in_order)

    def _division(self, update: Update, /) -> Division:
        model = self._model
        return divide_over_ranks(
            update.sequences,
            num_ranks=model.layout.data,
            max_tokens=self._size.max_tokens,
            hidden_size=model.architecture.hidden_size,
        )

    def _laid_out(self, parts: Sequence[Sequence[TrainSequence]], spare: TrainSequence) -> MicroBatches:
        return laid_out(parts, spare, multiple=self._multiple)

    @property
    def _multiple(self) -> int:
        return self._model.layout.micro_batch_multiple

    @property
    def _policy(self) -> TrainableModel:
        assert self._trainable is not None, "asked where the policy is"
        return self._trainable


def _held(policy: TrainableModel | None, critic: MegatronCritic | None) -> ParallelModel:
    """What this rank has a share of; of policy and critic, which lie alike, the policy."""
    if policy is not None:
        return policy.model
    assert isinstance(critic, OwnCritic), "a rank without a policy has a critic"
    return critic.model


def _scale_of(policy: TrainableModel | None, critic: MegatronCritic | None) -> LossScale:
    """One for all optimizers of this rank; those of other ranks see the same norms."""
    if policy is not None:
        return policy.scale
    assert isinstance(critic, OwnCritic), "a rank without a policy has a critic"
    return critic.trainable.scale
