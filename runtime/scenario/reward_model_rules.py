"""What goes together where a scenario has a reward model, or a reward that asks one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.spec import ENGINES, are_modelled
from penstock.backends.rewards.functions_asked import REWARD_MODEL, asked_functions
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.part_names import engine_keys
from penstock.runtime.scenario.teacher_rules import DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]
BLOCK: Final = "reward_model"


def reward_model_rules(s: Scenario) -> Iterator[Broken]:
    """The rules that this scenario breaks."""
    blocks = (s.reward, *(each.reward for each in sets_of(s)))
    is_asked = any(each.function == REWARD_MODEL for block in blocks for each in asked_functions(block).every())
    model = s.reward_model
    if model is None:
        if is_asked and not are_modelled(s.engines) and s.run.only != "learner":
            yield (
                ("reward", "function"),
                "the score of a reward model is asked for, and there is none; add a block reward_model: with its path",
            )
        return
    if are_modelled(s.engines):
        yield (BLOCK,), "says nothing of simulated samples, whose rewards are made up; remove it"
        return
    if not is_asked:
        yield (
            (BLOCK,),
            "has no effect, as no reward asks it; set reward.function: reward_model, or add a component with that "
            "function, or remove it",
        )
    if not DEVICE.fullmatch(model.device):
        yield (BLOCK, "device"), f"must be auto, cpu, cuda or cuda:N; found '{model.device}'"
    yield from engine_keys((BLOCK,), model)
    spec = ENGINES.spec(model.backend).reward_model
    assert spec is not None, "its name was looked at before"
    yield from spec.rules((BLOCK,), model)
