"""What a judge on the run's own engines needs of the scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES, are_modelled, capabilities_of, engines_that
from penstock.backends.episodes.judge_endpoint.judge_sampling import question_of
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.rewards.service_options import JudgeOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def own_judge_rules(s: Scenario, path: KeyPath, judge: JudgeOptions) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it. ``path``: of the judge's block."""
    if judge.engine == "self":
        yield from _policy(s, path, judge)
    if judge.engine == "teacher" and not _teacher_answers(s):
        yield (
            (*path, "engine"),
            "there is no teacher on an SGLang server, and an embedded one only scores; add the block teacher with "
            "backend: sglang, or give a url",
        )


def _teacher_answers(s: Scenario) -> bool:
    spec = None if s.teacher is None else ENGINES.spec(s.teacher.backend).teacher
    return spec is not None and spec.answers_judges


def _policy(s: Scenario, path: KeyPath, judge: JudgeOptions) -> Iterator[tuple[KeyPath, str]]:
    if are_modelled(s.engines):
        return  # their rewards are made up as well, and nobody asks
    each = map(capabilities_of, engine_groups(s.engines))
    abilities = [can for can in each if Capability.FROM_ROWS not in can]
    are_embedded = [Capability.EMBEDDED in can for can in abilities]
    if not abilities or not all(Capability.ANSWERS_JUDGES in can for can in abilities):
        answering = " and ".join(engines_that(Capability.ANSWERS_JUDGES))
        yield (
            (*path, "engine"),
            f"engines of the backends {answering} answer a judge, and this scenario has none or others; set "
            "engines.backend to one of these, or give the url of another server",
        )
    elif s.engines.placement == "colocate" and not all(are_embedded):
        yield (
            (*path, "engine"),
            "a colocated server sleeps while the learner trains, and a judge's question is lost then; place "
            "them apart, take engines.backend: torch, or give the url of another server",
        )
    lora = s.learner.lora
    if lora is not None and lora.publish == "adapter" and not all(are_embedded):
        yield (
            (*path, "engine"),
            "a server answers a judge's question with the model without the adapters of learner.lora.publish: adapter; "
            "set that to merged, take engines.backend: torch, or give the url of another server",
        )
    if not any(are_embedded):
        return
    try:
        question = question_of(judge)
    except UserFault as error:
        yield (*path, "body"), f"an embedded engine does not serve what the judge asks for: {error}"
        return
    if question.max_tokens >= s.model.max_context:
        yield (
            (*path, "max_tokens"),
            f"{question.max_tokens} tokens of an answer leave no room for the question in model.max_context of "
            f"{s.model.max_context}; lower the one or raise the other",
        )
