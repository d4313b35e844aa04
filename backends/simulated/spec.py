"""Modelled engines, learner and teachers as the house knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import EngineContext, EngineSpec, TeacherContext, TeacherSpec
from penstock.backends.learners.spec import LearnerContext, LearnerSpec
from penstock.backends.protocol import Capability

if TYPE_CHECKING:
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import EngineCommand, LearnerCommand, TeacherCommand


def _open_engine(context: EngineContext) -> Backend[EngineCommand]:
    from penstock.backends.simulated.engine import SimulatedEngine

    assert context.timers is not None, "simulated parts need a clock"
    limit = context.sampling.max_response_tokens
    return SimulatedEngine(context.options, max_response_tokens=limit, timers=context.timers, seed=context.seed)


def _open_learner(context: LearnerContext) -> Backend[LearnerCommand]:
    from penstock.backends.simulated.learner import SimulatedLearner

    assert context.timers is not None, "simulated parts need a clock"
    plan = context.plan
    return SimulatedLearner(
        plan.options.simulated,
        seed=plan.seed,
        epoch=plan.epoch,
        timers=context.timers,
        max_tokens_per_micro_batch=plan.options.max_tokens_per_micro_batch,
    )


def _open_teacher(context: TeacherContext) -> Backend[TeacherCommand]:
    from penstock.backends.simulated.teacher import SimulatedTeacher

    assert context.timers is not None, "simulated parts need a clock"
    return SimulatedTeacher(
        context.options, seed=context.seed, index=context.index, epoch=context.epoch, timers=context.timers
    )


SIMULATED_ENGINE: Final = EngineSpec(
    open=_open_engine,
    capabilities=frozenset(
        {
            Capability.SEEDED_SAMPLING,
            Capability.IN_FLIGHT,
            Capability.INTERRUPT,
            Capability.STAGED_WEIGHTS,
            Capability.CANARY,
            Capability.HOLDS_WEIGHTS,
            Capability.EXACT,
            Capability.MODELLED,
        }
    ),
    size=lambda options: None,
    modules=("penstock.backends.simulated.opening",),
    teacher=TeacherSpec(open=_open_teacher, has_likeliest=True),
)
SIMULATED_LEARNER: Final = LearnerSpec(
    open=_open_learner, is_modelled=True, modules=("penstock.backends.simulated.opening",)
)
