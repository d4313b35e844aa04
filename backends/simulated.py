"""Simulated backends for every role that has one, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backends.engines.simulated import SimulatedEngine
from penstock.backends.learners.simulated import SimulatedLearner
from penstock.backends.rewards.simulated import JudgingModel, SimulatedJudge, SimulatedPrompts, SimulatedScorer
from penstock.messages.names import Role

if TYPE_CHECKING:
    from penstock.backends.engines.options import EnginesOptions
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.protocol import Backend
    from penstock.backends.timers import Timers

PROMPT_TOKENS = 64
"""Of a simulated prompt."""


def open_simulated(
    role: Role,
    *,
    engines: EnginesOptions,
    learner: LearnerOptions,
    max_response_tokens: int,
    seed: int,
    epoch: int,
    timers: Timers,
    judging: JudgingModel | None = None,
) -> Backend[Any]:
    """The simulated backend of a role.

    Raises:
        ValueError: the role has no backend.
    """
    model = judging or JudgingModel()
    match role:
        case Role.ENGINE_WORKER:
            return SimulatedEngine(engines, max_response_tokens=max_response_tokens, timers=timers)
        case Role.LEARNER:
            return SimulatedLearner(learner.simulated, seed=seed, epoch=epoch, timers=timers)
        case Role.PROMPT_SOURCE:
            return SimulatedPrompts(seed=seed, prompt_tokens=PROMPT_TOKENS, latency_s=0.0, timers=timers)
        case Role.SCORER:
            return SimulatedScorer(model, seed=seed, timers=timers)
        case Role.FILTER:
            return SimulatedJudge(model, seed=seed, timers=timers)
        case _:
            raise ValueError(f"{role} has no backend")
