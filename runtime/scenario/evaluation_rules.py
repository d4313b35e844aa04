"""How the ``evaluation:`` block has to fit the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.data.media import media_columns
from penstock.backends.engines.spec import all_can
from penstock.backends.evaluation.options import EvaluationOptions
from penstock.backends.evaluation.sets import RunSettings, evaluation_sets
from penstock.backends.learners.checkpoints.names import version_of
from penstock.backends.protocol import Capability
from penstock.backends.rewards.functions_asked import asked_functions
from penstock.runtime.scenario.media_rules import media_rules
from penstock.runtime.scenario.own_judge_rules import own_judge_rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.evaluation.options import EvaluationSettings
    from penstock.backends.evaluation.sets import EvaluationSet
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

BLOCK: KeyPath = ("evaluation",)
DATASETS: KeyPath = (*BLOCK, "datasets")
DEFAULTS: KeyPath = (*BLOCK, "defaults")


def sets_of(scenario: Scenario) -> tuple[EvaluationSet, ...]:
    """The datasets of the scenario's evaluation, each with everything that holds for it."""
    return evaluation_sets(scenario.evaluation, RunSettings(scenario.data, scenario.sampling, scenario.reward))


def evaluated_version(scenario: Scenario) -> int:
    """The version of the checkpoint that a run evaluates which trains nothing; 0 for any other model, and where the run
    counts versions itself."""
    path = scenario.model.path
    if scenario.run.only != "evaluate" or path is None:
        return 0
    return version_of(Path(path).name) or 0


def evaluation_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The key to change, and what is wrong with it."""
    evaluation = s.evaluation
    if s.run.only == "evaluate" and not evaluation.datasets:
        yield DATASETS, "a run with only: evaluate evaluates these, and there are none; name a dataset"
    if not evaluation.datasets:
        for key in evaluation.__struct_fields__:
            if getattr(evaluation, key) != getattr(EvaluationOptions(), key):
                yield (*BLOCK, key), "has no effect without evaluation.datasets; name a dataset there, or remove it"
        return
    if all_can(s.engines, Capability.FROM_ROWS):
        yield (
            DATASETS,
            "engines of the backend recorded answer with what rows hold and generate nothing, so there is nothing to "
            "evaluate; add engines that generate, or remove the block",
        )
    if s.run.only in ("learner", "rollout") and any((evaluation.every, evaluation.before_first, evaluation.at_end)):
        yield (
            DATASETS,
            f"a run with only: {s.run.only} does not evaluate; set evaluation.datasets=[] for it, or evaluate its "
            "model with: penstock evaluate",
        )
    names = [dataset.name for dataset in evaluation.datasets]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (*DATASETS, index, "name"), f"'{name}' is the name of an earlier dataset as well; choose another"
    for index, each in enumerate(sets_of(s)):
        yield from _set_rules(s, index, each)


def _set_rules(s: Scenario, index: int, each: EvaluationSet) -> Iterator[tuple[KeyPath, str]]:
    dataset, n = s.evaluation.datasets[index], each.samples_per_prompt

    def key_of(*key: str) -> KeyPath:
        """Where the value was said: by the dataset, by the defaults, or (as the dataset may) by the run."""
        said = _is_given(dataset, key) or not _is_given(s.evaluation.defaults, key)
        return (*DATASETS, index, *key) if said else (*DEFAULTS, *key)

    if each.k and each.k[-1] > n:
        yield (
            key_of("k"),
            f"pass@{each.k[-1]} needs at least {each.k[-1]} answers to a prompt, and samples_per_prompt is {n}; raise "
            "that, or lower k",
        )
    if n > 1 and each.sampling.temperature == 0:
        yield (
            key_of("samples_per_prompt"),
            f"at temperature 0 the {n} answers to a prompt are all the same; set it to 1, or the dataset's "
            "sampling.temperature above 0",
        )
    if not each.data.chat_template:
        for key in ("system_prompt", "tools_key", "template_arguments"):
            if _is_given(dataset, (key,)) and getattr(each.data, key):
                yield key_of(key), "is for the chat template; set chat_template: true for the dataset, or remove it"
    if media_columns(each.data.multimodal_keys):
        yield from _media(s, each, key_of("multimodal_keys"))
    yield from _lengths(s, each, key_of("sampling", "max_response_tokens"), key_of("max_prompt_tokens"))
    if each.reward != s.reward:
        for function in asked_functions(each.reward).every():
            if function.judge is not None:
                yield from own_judge_rules(s, key_of("reward", "judge"), function.judge)


def _media(s: Scenario, each: EvaluationSet, key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if not each.data.chat_template:
        yield key, "where images, videos and sounds stand is the chat template's to say; set chat_template: true"
    yield from media_rules(s, key, each.data.multimodal_keys)


def _lengths(
    s: Scenario, each: EvaluationSet, response_key: KeyPath, prompt_key: KeyPath
) -> Iterator[tuple[KeyPath, str]]:
    context = s.model.max_context
    for key, what, other, num_tokens in (
        (response_key, "response", "a prompt", each.sampling.max_response_tokens),
        (prompt_key, "prompt", "a response", each.data.max_prompt_tokens or 0),
    ):
        if num_tokens >= context:
            yield (
                key,
                f"{num_tokens} {what} tokens leave no room for {other} in model.max_context of {context}; lower the "
                "one or raise the other",
            )


def _is_given(settings: EvaluationSettings, key: tuple[str, ...]) -> bool:
    value: object = settings
    for part in key:
        value = getattr(value, part, None)
    return value is not None
