"""What the zygote imports, so that the processes that it forks need not.

A module that is missing here costs time in every process that needs it, and nothing else. None of them may start a
thread when it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES, are_modelled
from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.runtime.hosts.processes.boot import OBSERVING

if TYPE_CHECKING:
    from penstock.runtime.scenario import Scenario

EVERY_ACTOR: Final = ("penstock.runtime.hosts.processes.actor_process", *OBSERVING)
PREPARATION: Final = (
    "penstock.runtime.hosts.processes.prepare",
    "penstock.runtime.run.rows",
    "penstock.backends.checkpoint.make",
    "penstock.backends.engines.transport_preflight",
)
ROWS_AND_REWARDS: Final = (
    "penstock.backends.data.backend",
    "penstock.backends.evaluation.rewards",
    "penstock.backends.rewards",
)


def modules_of(scenario: Scenario, wiring: str) -> tuple[str, ...]:
    """The modules of this scenario's processes, those first that all need."""
    engines, learner = scenario.engines, scenario.learner
    found = [*EVERY_ACTOR, wiring]
    if not are_modelled(engines):
        found += ROWS_AND_REWARDS
    if not is_modelled(learner):
        found += PREPARATION
    for group in engine_groups(engines):
        found += ENGINES.spec(group.backend).modules
    if learner.num_ranks == 1:  # ranks are interpreters of their own
        found += LEARNERS.spec(learner.backend).modules
    return tuple(dict.fromkeys(found))
