"""How long a learner of another size takes: an assumption, which is printed with every plan.

A learner of ``r`` ranks takes ``step_s + token_s(r) · tokens`` for a step, with

    token_s(r) = token_s · r₀ / r · efficiency ^ −log₂(r / r₀)

where ``r₀`` is the size of the learner that the model was fitted to. ``step_s``, publishing and checkpoints stay as
they are (Amdahl's law, with the part that does not grow with the tokens as the one that is not divided).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions
    from penstock.runtime.prediction.models import Models
    from penstock.runtime.scenario import Scenario


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
        self.base_ranks = real.learner.num_ranks if models is None else _recorded_ranks(models, real)
        self._token_s = modelled.learner.simulated.token_s
        self._efficiency = efficiency

    @property
    def is_known(self) -> bool:
        """Whether the models say what more ranks would shorten."""
        return self._token_s > 0

    def token_s(self, ranks: int) -> float:
        """Of a trained token with so many ranks."""
        times = ranks / self.base_ranks
        return self._token_s / times * math.pow(self._efficiency, -math.log2(times))

    def least_ranks(self, real: Scenario) -> int:
        """Of a learner that holds the model at all."""
        return rank_unit(real.learner) if self.is_known else self.base_ranks

    def ranks_up_to(self, num_devices: int, real: Scenario) -> range:
        """Sizes of the learner to be tried, none beyond the devices."""
        if not self.is_known:
            return range(self.base_ranks, min(self.base_ranks, num_devices) + 1)
        unit = rank_unit(real.learner)
        return range(unit, num_devices + 1, unit)

    def text(self) -> str:
        """What is assumed, for people."""
        if not self.is_known:
            return f"the learner has {counted(self.base_ranks, 'device')}, as in what its model was made of"
        lost = "" if self._efficiency == 1 else f", {100 * self._efficiency:g} % of it kept with each doubling"
        return (
            f"learner: the time per token is divided by the ranks (fitted with {self.base_ranks}{lost}); its fixed "
            "time, publishing and checkpoints stay as they are"
        )


def rank_unit(learner: LearnerOptions) -> int:
    """Ranks that hold one copy of the model together: their number divides that of all."""
    if not LEARNERS.spec(learner.backend).has_layout:
        return LEARNERS.spec(learner.backend).together(learner)
    megatron = learner.megatron
    return megatron.tensor_parallel * megatron.pipeline_parallel * megatron.context_parallel


def _recorded_ranks(models: Models, real: Scenario) -> int:
    sizes = {run.learner_ranks for run in models.runs}
    if len(sizes) > 1:
        raise UserFault(
            f"--models: fitted to learners of {', '.join(map(str, sorted(sizes)))} ranks together: its time per token "
            "is of none of them; calibrate on runs of one size"
        )
    return sizes.pop() if sizes else 1 if is_modelled(real.learner) else real.learner.num_ranks
