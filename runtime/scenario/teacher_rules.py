"""What goes together where a scenario has a teacher, or an objective that needs one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import kinds
from penstock.backends.engines.sglang.server_options import ServerOptionError, check_server_options
from penstock.backends.engines.sglang.size import EngineSizeError, engine_size
from penstock.backends.learners.objectives.validity import is_user_objective, needs_teacher_top
from penstock.runtime.scenario.paths import OBJECTIVE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]
TEACHER: Final = "teacher"
MADE_CONTEXT_TOKENS: Final = 512
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


def teacher_rules(s: Scenario) -> Iterator[Broken]:
    """The rules that this scenario breaks."""
    teacher = s.teacher
    if teacher is None:
        if s.learner.objective.opd_kl_coef and s.learner.backend != "simulated" and s.run.only != "learner":
            yield (
                (*OBJECTIVE, "opd_kl_coef"),
                "the distance to a teacher is asked for, and there is none; add a block teacher: with its model, or "
                "set it to 0",
            )
        if needs_teacher_top(s.learner.objective) and s.learner.backend != "simulated" and s.run.only != "learner":
            yield (
                (*OBJECTIVE, "policy_loss"),
                "the distance to a teacher's distribution is asked for, and there is no teacher; add a block teacher: "
                "with its model and top_logprobs",
            )
        return
    yield from _backend(s, teacher)
    if teacher.backend != "simulated":
        yield from _model(s, teacher)
        yield from _objective(s, teacher)
    yield from _servers(teacher)


def _backend(s: Scenario, teacher: TeacherOptions) -> Iterator[Broken]:
    are_simulated = kinds(s.engines) == frozenset({"simulated"})
    if are_simulated != (teacher.backend == "simulated"):
        wanted = "simulated" if are_simulated else "torch or sglang"
        yield (
            (TEACHER, "backend"),
            f"a simulated teacher says nothing of real tokens, nor a real one of simulated ones; set it to {wanted}",
        )
    if not _DEVICE.fullmatch(teacher.device):
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
    wants_top = needs_teacher_top(objective)
    if wants_top != bool(teacher.top_logprobs):
        yield (
            (TEACHER, "top_logprobs"),
            f"{objective.name} learns from the teacher's likeliest tokens; set it to how many, 64 say"
            if wants_top
            else f"has no effect with policy_loss: {objective.policy_loss}; remove it, or set learner.objective: gkd",
        )
    if teacher.top_logprobs and teacher.backend == "sglang":
        yield (TEACHER, "backend"), "likeliest tokens come from an embedded teacher only; set it to torch"
    if not objective.opd_kl_coef and not wants_top and not is_user_objective(objective.name):
        yield (
            (TEACHER,),
            "has no effect with learner.objective.opd_kl_coef: 0; set that, or learner.objective: distill, or remove "
            "the block",
        )
    if teacher.backend == "sglang" and s.sampling.temperature != 1.0:
        yield (
            (TEACHER, "backend"),
            "an SGLang server gives log-probs of a prompt at temperature 1 only, and student and teacher are compared "
            f"at sampling.temperature, which is {s.sampling.temperature:g}; set that to 1, or teacher.backend: torch",
        )


def _servers(teacher: TeacherOptions) -> Iterator[Broken]:
    key = "sglang" if teacher.sglang else "addresses"
    if teacher.backend != "sglang" and (teacher.sglang or teacher.addresses):
        yield (TEACHER, key), f"has no effect with a {teacher.backend} teacher; set backend: sglang or remove it"
    if teacher.addresses and teacher.count != len(teacher.addresses):
        yield (
            (TEACHER, "count"),
            f"there are {len(teacher.addresses)} addresses; set it to {len(teacher.addresses)}, found {teacher.count}",
        )
    if teacher.addresses and teacher.sglang:
        yield (TEACHER, "sglang"), "servers that run already have their options; remove it, or the addresses"
    try:
        check_server_options(teacher.sglang)
        num_nodes = engine_size(teacher.sglang).node_counts[0]
    except ServerOptionError as error:
        yield (TEACHER, "sglang", error.key), error.text
    except EngineSizeError as error:
        yield (TEACHER, "sglang"), str(error)
    else:
        if num_nodes > 1:
            yield (TEACHER, "sglang"), "a teacher's server lies on one node; remove nnodes"
