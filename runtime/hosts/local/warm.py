"""What the zygote imports, so that the processes that it forks need not.

A module that is missing here costs time in every process that needs it, and nothing else. None of them may start a
thread when it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import engine_groups
from penstock.runtime.hosts.ray.boot import OBSERVING

if TYPE_CHECKING:
    from penstock.runtime.scenario import Scenario

EVERY_ACTOR: Final = ("penstock.runtime.hosts.ray.process", *OBSERVING)
PREPARATION: Final = (
    "penstock.runtime.hosts.ray.prepare",
    "penstock.runtime.rows",
    "penstock.backends.models.make",
    "penstock.backends.weights.preflight",
)
SIMULATED: Final = ("penstock.backends.simulated",)
ROWS_AND_REWARDS: Final = (
    "penstock.backends.data.backend",
    "penstock.backends.evaluation.rewards",
    "penstock.backends.rewards",
)
TORCH_ENGINE: Final = (
    "penstock.backends.engines.torch",
    "penstock.backends.episodes",
    "penstock.backends.weights.transports",
)
TORCH_LEARNER: Final = (
    "penstock.backends.data.demonstrations",
    "penstock.backends.hooks.weight_names",
    "penstock.backends.learners.torch.factory",
    "penstock.backends.weights.transports",
)


def modules_of(scenario: Scenario, wiring: str) -> tuple[str, ...]:
    """The modules of this scenario's processes, those first that all need."""
    engines = {group.backend for group in engine_groups(scenario.engines)}
    learner = scenario.learner
    found = [*EVERY_ACTOR, wiring]
    if "simulated" in (*engines, learner.backend):
        found += SIMULATED
    if "simulated" not in engines:
        found += ROWS_AND_REWARDS
    if learner.backend != "simulated":
        found += PREPARATION
    if "torch" in engines:
        found += TORCH_ENGINE
    if learner.backend == "torch" and learner.num_ranks == 1:  # ranks are interpreters of their own
        found += TORCH_LEARNER
    return tuple(found)
