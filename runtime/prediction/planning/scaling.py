"""How long a learner of another size takes, and one whose critic has ranks of its own: assumptions, which are printed
with every plan.

A learner of ``r`` ranks takes ``step_s + micro_batch_s · rounds + token_s(r) · tokens · imbalance`` for a step, where
rounds and imbalance are those of the batch as it is packed for so many ranks, with

    token_s(r) = token_s · r₀ / r · efficiency ^ −log₂(r / r₀)

where ``r₀`` is the size of the learner that the model was fitted to. ``step_s``, publishing and checkpoints stay as
they are (Amdahl's law, with the part that does not grow with the tokens as the one that is not divided).

With a critic, each token is work of the policy and work of the critic, in two phases (:func:`phases_of`): before the
first optimizer step values are found, and log-probs where they are asked; then come the gradients of both. On the same
ranks all of it is done one after the other. On ranks of their own both parts work at once, each at the speed of its own
number of ranks, and a phase takes as long as the slower of them: the policy waits for the values, and each optimizer
step for both. What goes by for each part whatever its tokens are (its optimizer) goes by at once too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from penstock.backends.learners.objectives.asked import asks_policy, couples_tokens
from penstock.backends.learners.objectives.validity import needs_reference
from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.learners.options import LearnerOptions, SimulatedLearnerOptions
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.scenario import Scenario

WITH_GRADIENT: Final = 3.0
"""Work of a forward and a backward pass, where that of a forward pass is 1."""
LEAST_OFFLOADED: Final = 2
"""Ranks of a part that keeps its shares in the memory of the host: one alone has none."""


class Phase(NamedTuple):
    """Of a step, between two moments at which policy and critic wait for each other: work, in forward passes."""

    policy: float
    critic: float


class LearnerScaling:
    """Of one scenario and its models."""

    def __init__(self, real: Scenario, modelled: Scenario, models: Models | None, efficiency: float) -> None:
        """
        Args:
            real: as it would be run.
            modelled: with the models applied.
            models: None: the scenario's own, which are those of a learner of its own size.
            efficiency: of twice as many ranks, in (0, 1].

        Raises:
            UserFault: the models were fitted to learners of several sizes.
        """
        self._learner, self._efficiency = real.learner, efficiency
        self.base_ranks, self.base_critic = _own(real.learner) if models is None else _recorded(models, real.learner)
        self._phases = phases_of(real.learner)
        model = modelled.learner.simulated
        self._step_s = model.step_s / self._fixed(self.base_critic)
        self._micro_batch_s = model.micro_batch_s / self._fixed(self.base_critic)
        self._packs = model.packs
        self._token_s = model.token_s / self._work(self.base_ranks, self.base_critic)

    @property
    def is_known(self) -> bool:
        """Whether the models say what more ranks would shorten."""
        return self._token_s > 0 or self._micro_batch_s > 0

    @property
    def can_part(self) -> bool:
        """Whether a critic may have ranks of its own."""
        return self._learner.objective.critic == "own" and LEARNERS.spec(self._learner.backend).parts_critic

    def sized(self, model: SimulatedLearnerOptions, ranks: int, critic_ranks: int) -> SimulatedLearnerOptions:
        """The model with so many ranks in all, and so many of them the critic's alone."""
        return replace(
            model,
            step_s=self.step_s(critic_ranks),
            token_s=self.token_s(ranks, critic_ranks),
            micro_batch_s=self._micro_batch_s * self._fixed(critic_ranks),
            num_ranks=data_ranks(self._learner, ranks, critic_ranks) if self._packs else 1,
        )

    def step_s(self, critic_ranks: int) -> float:
        """Of a step, whatever its tokens are."""
        return self._step_s * self._fixed(critic_ranks)

    def token_s(self, ranks: int, critic_ranks: int) -> float:
        """Of a trained token with so many ranks in all, and so many of them the critic's alone."""
        return self._token_s * self._work(ranks, critic_ranks)

    def least_ranks(self) -> int:
        """Of a learner that holds the model at all."""
        return rank_unit(self._learner) if self.is_known else self.base_ranks

    def ranks_up_to(self, num_devices: int) -> range:
        """Sizes of the learner to be tried, none beyond the devices."""
        if not self.is_known:
            return range(self.base_ranks, min(self.base_ranks, num_devices) + 1)
        unit = rank_unit(self._learner)
        return range(unit, num_devices + 1, unit)

    def critics_of(self, ranks: int) -> list[int]:
        """Ranks of the critic alone, the quickest first; 0, all ranks for both, is among them."""
        if not self.can_part:
            return [0]
        if not self.is_known:
            return [self.base_critic]
        unit = rank_unit(self._learner) * (self._learner.shard_size or 1)
        least = max(unit, LEAST_OFFLOADED * self._learner.cpu_offload)
        counts = range(unit, ranks, unit) if ranks % unit == 0 else ()
        apart = [count for count in counts if least <= count <= ranks - least]
        return sorted((0, *apart), key=lambda count: self.token_s(ranks, count))

    def texts(self) -> list[str]:
        """What is assumed, for people."""
        if not self.is_known:
            return [f"the learner has {counted(self.base_ranks, 'device')}, as in what its model was made of"]
        lost = "" if self._efficiency == 1 else f", {100 * self._efficiency:g} % of it kept with each doubling"
        of_critic = f", {self.base_critic} of them the critic's" if self.base_critic else ""
        found = [
            f"learner: the time per token is divided by the ranks (fitted with {self.base_ranks}{of_critic}{lost}); "
            "its fixed time, publishing and checkpoints stay as they are"
        ]
        if self._packs:
            found.append("micro-batches: packed and divided over the ranks as a learner does; the largest share counts")
        if self.can_part:
            opening, gradients = self._phases
            found.append(
                f"critic: a pass of it takes as long as one of the policy, which has {opening.policy:g} before a step "
                f"and {gradients.policy:g} in it (one with gradients counts {WITH_GRADIENT:g}), and the critic "
                f"{opening.critic:g} and {gradients.critic:g}; on ranks of its own these go on beside the policy's, "
                "and the slower of both sets the time"
            )
        return found

    def _slowness(self, ranks: int) -> float:
        """Time of a token with so many ranks, by that with as many as the model was fitted to."""
        times = ranks / self.base_ranks
        return math.pow(self._efficiency, -math.log2(times)) / times

    def _work(self, ranks: int, critic_ranks: int) -> float:
        """Time of a token, by that of one with all that is held on as many ranks as the model was fitted to."""
        if not critic_ranks:
            return self._slowness(ranks)
        policy, critic = self._slowness(ranks - critic_ranks), self._slowness(critic_ranks)
        together = sum(map(sum, self._phases))
        return sum(max(phase.policy * policy, phase.critic * critic) for phase in self._phases) / together

    def _fixed(self, critic_ranks: int) -> float:
        """Likewise what goes by whatever the tokens are: it goes with the optimizer steps."""
        gradients = self._phases[-1]
        return max(gradients) / sum(gradients) if critic_ranks else 1.0


def phases_of(learner: LearnerOptions) -> Sequence[Phase]:
    """Of a step with a critic of its own or without one: what is asked before the first optimizer step, and all
    gradients. What one model computes in a token is taken to be what the other does; the output head that the critic
    has not is left in."""
    objective, has_critic = learner.objective, learner.objective.critic == "own"
    opening = float(asks_policy(learner))
    reference = float(needs_reference(objective))
    again = reference * (1 - opening) + couples_tokens(objective)
    return (
        Phase(opening * (1 + reference), float(has_critic)),
        Phase(learner.num_passes * (WITH_GRADIENT + again), learner.num_passes * WITH_GRADIENT * has_critic),
    )


def data_ranks(learner: LearnerOptions, ranks: int, critic_ranks: int) -> int:
    """Copies of the policy among so many ranks, which divide the sequences."""
    return max(1, (ranks - critic_ranks) // rank_unit(learner))


def rank_unit(learner: LearnerOptions) -> int:
    """Ranks that hold one copy of the model together: their number divides that of all."""
    if not LEARNERS.spec(learner.backend).has_layout:
        return LEARNERS.spec(learner.backend).together(learner)
    megatron = learner.megatron
    return megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel


def _own(learner: LearnerOptions) -> tuple[int, int]:
    """Ranks, and those of the critic alone."""
    return learner.num_ranks, learner.critic_ranks


def _recorded(models: Models, learner: LearnerOptions) -> tuple[int, int]:
    """Likewise, of the learners that the models were fitted to."""
    sizes = {(run.learner_ranks, run.critic_ranks) for run in models.runs}
    if len(sizes) > 1:
        told = ", ".join(f"{ranks} ({critic} critic)" if critic else f"{ranks}" for ranks, critic in sorted(sizes))
        raise UserFault(
            f"--models: fitted to learners of {told} ranks together: its time per token is of none of them; calibrate "
            "on runs of one size"
        )
    return sizes.pop() if sizes else (1, 0) if is_modelled(learner) else _own(learner)
