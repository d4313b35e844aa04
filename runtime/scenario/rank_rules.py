"""What a learner over several processes cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.spec import ENGINES, ONE_GPU
from penstock.backends.learners.spec import is_modelled
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.rules import Broken
    from penstock.runtime.scenario.structure import Scenario


def rank_rules(s: Scenario) -> Iterator[Broken]:
    """See :mod:`penstock.runtime.scenario.rules`."""
    learner, key = s.learner, ("learner", "num_ranks")
    if learner.num_ranks == 1:
        return
    if is_modelled(learner):
        yield key, "a simulated learner is not divided; set learner.simulated.step_s to what that many ranks would take"
        return
    if learner.device not in ("auto", "cpu", "cuda"):
        yield (
            ("learner", "device"),
            f"{learner.device} is one device, and each of {learner.num_ranks} ranks needs one of its own; set it to "
            "cuda, auto or cpu",
        )
    if learner.rank_timeout_s > learner.step_timeout_s:
        yield (
            ("learner", "rank_timeout_s"),
            f"a rank that keeps the others waiting is to be noticed before the whole step is late; set it below "
            f"learner.step_timeout_s, which is {learner.step_timeout_s:g}",
        )
    if s.engines.placement == "colocate" and "cuda" in (s.engines.device, learner.device):
        yield from _colocated(s)


def _colocated(s: Scenario) -> Iterator[Broken]:
    """The ranks are put on the first of the engine's GPUs."""
    engines, num_ranks = s.engines, s.learner.num_ranks
    try:
        num_gpus = (ENGINES.spec(engines.backend).size(engines) or ONE_GPU).num_gpus
    except UserFault:
        return  # another rule's to say
    if num_gpus < num_ranks:
        yield (
            ("learner", "num_ranks"),
            f"colocated, the learner is put on the GPUs of the first engine, which has {num_gpus}, and each of "
            f"{num_ranks} ranks needs one of its own; set it to {num_gpus} or less, give the engine more GPUs, or take "
            "another engines.placement",
        )
