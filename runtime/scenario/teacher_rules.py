"""What goes together where a scenario has a teacher, or an objective that needs one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import ENGINES, are_modelled
from penstock.backends.learners.objectives.spec import loss_of
from penstock.backends.learners.spec import is_modelled
from penstock.backends.protocol import Capability
from penstock.runtime.scenario.objective import OBJECTIVE
from penstock.runtime.scenario.part_names import engine_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.engines.spec import EngineSpec, TeacherSpec
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]
TEACHER: Final = "teacher"
MADE_CONTEXT_TOKENS: Final = 512
DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


def teacher_rules(s: Scenario) -> Iterator[Broken]:
    """The rules that this scenario breaks."""
    teacher = s.teacher
    if teacher is None:
        if s.data.teacher_prompt_key is not None:
            yield ("data", "teacher_prompt_key"), "has no effect without a block teacher; add that, or remove the key"
        if s.learner.objective.opd_kl_coef and not is_modelled(s.learner) and s.run.only != "learner":
            yield (
                (*OBJECTIVE, "opd_kl_coef"),
                "the distance to a teacher is asked for, and there is none; add a block teacher: with its model, or "
                "set it to 0",
            )
        if loss_of(s.learner.objective).needs_teacher_top and not is_modelled(s.learner) and s.run.only != "learner":
            yield (
                (*OBJECTIVE, "policy_loss"),
                "the distance to a teacher's distribution is asked for, and there is no teacher; add a block teacher: "
                "with its model and top_logprobs",
            )
        return
    yield from _backend(s, teacher)
    if not _is_modelled(teacher):
        yield from _model(s, teacher)
        yield from _objective(s, teacher)
    yield from engine_keys((TEACHER,), teacher)
    yield from _spec(teacher).rules((TEACHER,), teacher)


def _backend(s: Scenario, teacher: TeacherOptions) -> Iterator[Broken]:
    if are_modelled(s.engines) != _is_modelled(teacher):
        wanted = " or ".join(ENGINES.having(lambda spec: _fits(spec, is_modelled=are_modelled(s.engines))))
        yield (
            (TEACHER, "backend"),
            f"a simulated teacher says nothing of real tokens, nor a real one of simulated ones; set it to {wanted}",
        )
    if not DEVICE.fullmatch(teacher.device):
        yield (TEACHER, "device"), f"must be auto, cpu, cuda or cuda:N; found '{teacher.device}'"


def _model(s: Scenario, teacher: TeacherOptions) -> Iterator[Broken]:
    model = teacher.model
    if (model.path is None) == (model.make is None):
        yield (
            (TEACHER, "model"),
            "exactly one of teacher.model.path (a checkpoint folder) and teacher.model.make (xs, s or m) is needed",
        )
    if model.make is not None and s.model.max_context > MADE_CONTEXT_TOKENS:
        yield (
            ("model", "max_context"),
            f"the models of teacher.model.make have room for {MADE_CONTEXT_TOKENS}; found {s.model.max_context}",
        )
    if model.warm_start is not None and model.make is None:
        yield (
            (TEACHER, "model", "warm_start"),
            "only a teacher that is made imitates demonstrations, and this one has a checkpoint; remove it",
        )
    if model.make is not None and teacher.addresses:
        yield (
            (TEACHER, "model", "make"),
            "a server that runs already has a model; name its folder under teacher.model.path",
        )


def _objective(s: Scenario, teacher: TeacherOptions) -> Iterator[Broken]:
    objective = s.learner.objective
    wants_top = loss_of(objective).needs_teacher_top
    if wants_top != bool(teacher.top_logprobs):
        yield (
            (TEACHER, "top_logprobs"),
            f"{objective.name} learns from the teacher's likeliest tokens; set it to how many, 64 say"
            if wants_top
            else f"has no effect with policy_loss: {objective.policy_loss}; remove it, or set learner.objective: gkd",
        )
    is_modelled = _is_modelled(teacher)
    if teacher.top_logprobs and not _spec(teacher).has_likeliest:
        yield (
            (TEACHER, "backend"),
            f"teachers of the backend {teacher.backend} do not name likeliest tokens; set it to "
            + " or ".join(ENGINES.having(lambda spec: _fits(spec, is_modelled=is_modelled) and _has_likeliest(spec))),
        )
    if not objective.opd_kl_coef and not wants_top and not loss_of(objective).is_function:
        yield (
            (TEACHER,),
            "has no effect with learner.objective.opd_kl_coef: 0; set that, or learner.objective: distill, or remove "
            "the block",
        )
    only = _spec(teacher).temperature
    if only is not None and s.sampling.temperature != only:
        others = " or ".join(ENGINES.having(_has_any_temperature))
        asked = f"{s.sampling.temperature:g}; set that to {only:g}"
        yield (
            (TEACHER, "backend"),
            f"teachers of the backend {teacher.backend} give log-probs of a prompt at temperature {only:g} only, and "
            f"student and teacher are compared at sampling.temperature, which is {asked}, or teacher.backend: {others}",
        )


def _spec(teacher: TeacherOptions) -> TeacherSpec:
    spec = ENGINES.spec(teacher.backend).teacher
    assert spec is not None, "its name was looked at before"
    return spec


def _has_likeliest(spec: EngineSpec) -> bool:
    return spec.teacher is not None and spec.teacher.has_likeliest


def _is_modelled(teacher: TeacherOptions) -> bool:
    return Capability.MODELLED in ENGINES.spec(teacher.backend).capabilities


def _has_any_temperature(spec: EngineSpec) -> bool:
    return _fits(spec, is_modelled=False) and spec.teacher is not None and spec.teacher.temperature is None


def _fits(spec: EngineSpec, *, is_modelled: bool) -> bool:
    return spec.teacher is not None and (Capability.MODELLED in spec.capabilities) == is_modelled
