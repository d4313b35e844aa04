"""What the zygote imports, so that the processes that it forks need not.

A module that is missing here costs time in every process that needs it, and nothing else. None of them may start a
thread when it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.checkpoint.kept_model import is_kept
from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES, are_modelled
from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.messages.names import Role
from penstock.runtime.hosts.processes.boot import OBSERVING

if TYPE_CHECKING:
    from penstock.runtime.scenario import Scenario

EVERY_ACTOR: Final = ("penstock.runtime.hosts.processes.actor_process", *OBSERVING)
PREPARATION: Final = (
    "penstock.runtime.hosts.processes.prepare",
    "penstock.runtime.run.rows",
    "penstock.backends.checkpoint.kept_model",
    "penstock.backends.engines.transport_preflight",
)
MAKING: Final = ("penstock.backends.checkpoint.make",)
ROWS_AND_REWARDS: Final = (
    "penstock.backends.data.backend",
    "penstock.backends.evaluation.rewards",
    "penstock.backends.rewards",
)


EARLY: Final = frozenset((Role.PROMPT_SOURCE, Role.SCORER, Role.FILTER, Role.BUFFER, Role.WEIGHT_PUBLISHER))
"""Whose processes need neither torch nor transformers where rows are plain text."""
TORCH: Final = "torch.nn"
"""A step of its own among what comes later, so that nobody waits for it and the rest together."""


class Modules(NamedTuple):
    """What is imported, and who need not wait for all of it."""

    first: tuple[str, ...]
    later: tuple[str, ...] = ()
    early: frozenset[Role] = frozenset()
    prepares_early: bool = False


def modules_of(scenario: Scenario, wiring: str) -> Modules:
    """Of this scenario's processes."""
    engines, learner = scenario.engines, scenario.learner
    first, later = [*EVERY_ACTOR, wiring], list[str]()
    if not are_modelled(engines):
        first += ROWS_AND_REWARDS
    if not is_modelled(learner):
        first += PREPARATION
        later += [TORCH, *MAKING]
    for group in engine_groups(engines):
        later += ENGINES.spec(group.backend).modules
    if learner.num_ranks == 1:  # ranks are interpreters of their own
        later += LEARNERS.spec(learner.backend).modules
    is_plain = _is_plain(scenario)
    return Modules(
        tuple(dict.fromkeys(first)),
        tuple(dict.fromkeys(later)),
        EARLY if is_plain else frozenset(),
        prepares_early=is_plain and _has_model(scenario),
    )


def _is_plain(scenario: Scenario) -> bool:
    """Whether rows are strings of one file that nobody else's code looks at: chat templates bring transformers, and so
    do images."""
    data = scenario.data
    return (
        data.path is not None
        and not data.chat_template
        and scenario.episode.kind == "single"
        and not scenario.evaluation.datasets
        and scenario.reward_model is None
        and scenario.teacher is None
    )


def _has_model(scenario: Scenario) -> bool:
    """Whether no model has to be made, which takes torch."""
    make = scenario.model.make
    return make is None or is_kept(make, scenario.run.seed)
