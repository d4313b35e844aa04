"""Responses that rows hold: what a run makes of them, and how the blocks of a scenario have to fit for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.data.options import PUSHED, RecordedOptions
from penstock.backends.data.recorded_rows import RecordedSettings
from penstock.backends.engines.spec import all_can, capabilities_of, some_can
from penstock.backends.learners.objectives.spec import OBJECTIVES, loss_of
from penstock.backends.learners.objectives.validity import compares_rewards, compares_with_drawn
from penstock.backends.learners.spec import is_modelled
from penstock.backends.protocol import Capability
from penstock.runtime.scenario.objective import OBJECTIVE, OBJECTIVE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

_NEEDS_ENGINES = "engines.backend: recorded, or a block of that backend under engines.more"


def recorded_settings(scenario: Scenario) -> RecordedSettings | None:
    """What the readers of the dataset have to know; None where no engine answers from rows."""
    if not some_can(scenario.engines, Capability.FROM_ROWS):
        return None
    objective = scenario.learner.objective
    is_pushed = scenario.data.source == PUSHED
    needs_logprobs = compares_with_drawn(objective) if is_pushed else loss_of(objective).has_ratio
    return RecordedSettings(
        group_size=scenario.sampling.samples_per_group,
        max_response_tokens=scenario.sampling.max_response_tokens,
        are_all_recorded=all_can(scenario.engines, Capability.FROM_ROWS),
        imitates=OBJECTIVES.spec(objective.name).imitates,
        prefers_pairs=loss_of(objective).unit == "pair",
        ratio_objective=objective.name if needs_logprobs else "",
    )


def recorded_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    if is_modelled(s.learner):
        return
    objective, settings = s.learner.objective, recorded_settings(s)
    if settings is None:
        if OBJECTIVES.spec(objective.name).imitates:
            yield (
                OBJECTIVE_NAME,
                f"{objective.name} imitates responses that rows hold, and no engine gives them; set {_NEEDS_ENGINES}",
            )
        if s.data.recorded != RecordedOptions():
            yield ("data", "recorded"), f"has no effect without engines that answer from rows; set {_NEEDS_ENGINES}"
        return
    yield from _engines(s, settings)
    yield from _losses(s, settings)


def _engines(s: Scenario, settings: RecordedSettings) -> Iterator[tuple[KeyPath, str]]:
    recorded = s.data.recorded
    if s.data.source == PUSHED and recorded != RecordedOptions():
        yield ("data", "recorded"), "a pushed group says itself what it holds; remove it"
    if settings.are_all_recorded and recorded.path is not None:
        yield (
            ("data", "recorded", "path"),
            "names rows beside those that engines generate for, and no engine of the run generates; name them in "
            "data.path, and remove this one",
        )
    if settings.imitates and not settings.are_all_recorded:
        yield (
            OBJECTIVE_NAME,
            f"{s.learner.objective.name} imitates every sample, those too that the run's own engines generate; take "
            "only engines of the backend recorded, or the objective for what is generated and data.recorded.loss: sft "
            "for the rows",
        )
    if settings.are_all_recorded and s.episode.kind != "single":
        yield ("episode", "kind"), "responses of rows are given as they are, with no conversation; set it to single"
    if s.engines.placement == "colocate" and Capability.FROM_ROWS in capabilities_of(s.engines):
        yield ("engines", "placement"), "engines that answer from rows have no device to share; remove it"
    if recorded.logprobs_key is None and s.sampling.temperature != 1.0 and s.data.source != PUSHED:
        yield (
            ("sampling", "temperature"),
            "the likelihood of a given response is that at temperature 1, and a step has one temperature; set it to 1",
        )


def _losses(s: Scenario, settings: RecordedSettings) -> Iterator[tuple[KeyPath, str]]:
    recorded, objective = s.data.recorded, s.learner.objective
    may_imitate = recorded.loss == "sft" or recorded.loss_key is not None
    if settings.imitates and may_imitate:
        key = "loss" if recorded.loss_key is None else "loss_key"
        yield ("data", "recorded", key), f"has no effect with learner.objective: {objective.name}; remove it"
    if loss_of(objective).unit != "token" and may_imitate:
        yield (
            ("data", "recorded", "loss" if recorded.loss_key is None else "loss_key"),
            f"{objective.name} is a mean over responses and imitation one over tokens, which have no denominator in "
            f"common; remove it, or train the rows in a run of their own with learner.objective: sft",
        )
    if recorded.loss == "objective" and recorded.loss_key is None:
        if settings.ratio_objective and recorded.logprobs_key is None and s.data.source != PUSHED:
            yield (
                OBJECTIVE,
                f"{objective.name} compares the policy with whatever drew a response, and nobody knows the log-probs "
                "of those that the rows hold; name their column in data.recorded.logprobs_key, set data.recorded.loss: "
                "sft, or take an objective that needs none (sft, dpo, kto, rejection_sampling, reward_weighted)",
            )
        if settings.are_all_recorded and s.sampling.samples_per_group < 2 and compares_rewards(objective):
            yield (
                ("sampling", "samples_per_group"),
                f"{objective.name} compares the responses of a row; give at least 2 in each",
            )
