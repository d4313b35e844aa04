"""Opens the simulated backend of each role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.backends.engines.spec import some_can
from penstock.backends.protocol import Capability
from penstock.backends.simulated.engine import SimulatedEngine
from penstock.backends.simulated.learner import SimulatedLearner
from penstock.backends.simulated.rewards import JudgingModel, SimulatedJudge, SimulatedPrompts, SimulatedScorer
from penstock.backends.simulated.teacher import SimulatedTeacher
from penstock.messages.names import Role

if TYPE_CHECKING:
    from penstock.backends.data.row_chooser import ChoosingSettings
    from penstock.backends.engines.options import EnginesOptions
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.protocol import Backend, Timers

PROMPT_LATENCY_S: Final = 0.001


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
    teacher: TeacherOptions | None = None,
    index: int = 0,
    own_retries: tuple[int, ...] = (),
    choosing: ChoosingSettings | None = None,
) -> Backend[Any]:
    """What carries out the commands of this role on the given clock, not started yet.

    Args:
        role: of an actor that has a backend.
        engines: with the model of an engine's latencies.
        learner: with the model of a learner's.
        max_response_tokens: of a response.
        seed: of the run.
        epoch: incarnation of the actor.
        timers: the clock.
        teacher: with the model of a teacher's latencies; for a teacher only.
        index: of a teacher among its like.
        own_retries: that about half of the rows ask for; for the PromptSource only.
        choosing: how rows are chosen, where they are; for the PromptSource only.
        judging: how rewards and verdicts come about; half of the samples get the reward 1 when it is left out.
    """
    judging = judging or JudgingModel()
    match role:
        case Role.ENGINE_WORKER:
            return SimulatedEngine(engines, max_response_tokens=max_response_tokens, timers=timers, seed=seed)
        case Role.TEACHER:
            assert teacher is not None, "a scenario without teachers has no actor of this role"
            return SimulatedTeacher(teacher, seed=seed, index=index, epoch=epoch, timers=timers)
        case Role.LEARNER:
            most = learner.max_tokens_per_micro_batch
            model = learner.simulated
            return SimulatedLearner(model, seed=seed, epoch=epoch, timers=timers, max_tokens_per_micro_batch=most)
        case Role.PROMPT_SOURCE:
            are_mixed = some_can(engines, Capability.FROM_ROWS)
            return SimulatedPrompts(
                seed=seed,
                prompt_tokens=engines.simulated.prompt_tokens,
                latency_s=PROMPT_LATENCY_S,
                timers=timers,
                are_mixed=are_mixed,
                own_retries=own_retries,
                choosing=choosing,
            )
        case Role.SCORER:
            return SimulatedScorer(judging, seed=seed, timers=timers)
        case Role.FILTER:
            return SimulatedJudge(judging, seed=seed, timers=timers)
        case _:
            raise ValueError(f"a {role} has no backend")
