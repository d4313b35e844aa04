"""What a judge on the run's own engines needs of the scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.judging.drawing import question_of
from penstock.backends.engines.options import kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.rewards.service_options import JudgeOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

ANSWERING: Final = frozenset({"torch", "sglang"})
"""Backends of engines that a judge can ask."""


def own_judge_rules(s: Scenario, path: KeyPath, judge: JudgeOptions) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it. ``path``: of the judge's block."""
    if judge.engine == "self":
        yield from _policy(s, path, judge)
    if judge.engine == "teacher" and (s.teacher is None or s.teacher.backend != "sglang"):
        yield (
            (*path, "engine"),
            "there is no teacher on an SGLang server, and an embedded one only scores; add the block teacher with "
            "backend: sglang, or give a url",
        )


def _policy(s: Scenario, path: KeyPath, judge: JudgeOptions) -> Iterator[tuple[KeyPath, str]]:
    if kinds(s.engines) == frozenset({"simulated"}):
        return  # their rewards are made up as well, and nobody asks
    answering = kinds(s.engines) - {"recorded"}
    if not answering or not answering <= ANSWERING:
        yield (
            (*path, "engine"),
            "engines of the backends torch and sglang answer a judge, and this scenario has none or others; set "
            "engines.backend to one of the two, or give the url of another server",
        )
    elif s.engines.placement == "colocate" and "sglang" in answering:
        yield (
            (*path, "engine"),
            "a colocated SGLang server sleeps while the learner trains, and a judge's question is lost then; place "
            "them apart, take engines.backend: torch, or give the url of another server",
        )
    if "torch" not in answering:
        return
    try:
        question = question_of(judge)
    except ValueError as error:
        yield (*path, "body"), f"an engine of the backend torch does not serve what the judge asks for: {error}"
        return
    if question.max_tokens >= s.model.max_context:
        yield (
            (*path, "max_tokens"),
            f"{question.max_tokens} tokens of an answer leave no room for the question in model.max_context of "
            f"{s.model.max_context}; lower the one or raise the other",
        )
