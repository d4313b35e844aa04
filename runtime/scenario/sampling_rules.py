"""Rules about what decides which prompts are drawn and which groups and samples are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.objectives.validity import compares_rewards
from penstock.backends.learners.spec import is_modelled
from penstock.backends.registry import is_user_code
from penstock.runtime.scenario.paths import (
    FILTER_HOOK,
    FILTER_SAMPLE_FUNCTION,
    PRIORITY_FUNCTION,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]


def sampling_functions(s: Scenario) -> dict[KeyPath, str | None]:
    """Functions of the user's by key; those that the scenario does not name are None."""
    return {
        FILTER_SAMPLE_FUNCTION: s.filter.sample_function,
        FILTER_HOOK: s.filter.all_samples_hook,
        PRIORITY_FUNCTION: s.prompt_source.priority,
    }


def sampling_rules(s: Scenario) -> Iterator[Broken]:
    """Functions, what is dropped, what is kept, and what is drawn."""
    for key, value in sampling_functions(s).items():
        if value is not None and not is_user_code(value):
            yield key, f"must be file.py:function; found '{value}'"
    yield from _drops(s)
    kept_after, fails_after = s.filter.keep_when_insufficient, s.staleness.max_rejected_batches
    if kept_after is not None and kept_after >= fails_after:
        yield (
            ("filter", "keep_when_insufficient"),
            f"groups would be kept after {kept_after} batches' worth of rejections, and the run stops after "
            f"staleness.max_rejected_batches = {fails_after}; set it lower than that",
        )
    yield from _rows(s)


def _drops(s: Scenario) -> Iterator[Broken]:
    if s.filter.drop_samples == "before_statistics":
        return
    if s.filter.sample_function is None:
        yield (
            ("filter", "drop_samples"),
            "has no effect without filter.sample_function, which says what is dropped; set it, or remove this key",
        )
    elif not is_modelled(s.learner) and not compares_rewards(s.learner.objective):
        yield (
            ("filter", "drop_samples"),
            f"{s.learner.objective.name} takes no mean over a group, so nothing can count in one; set it to "
            "before_statistics",
        )


def _rows(s: Scenario) -> Iterator[Broken]:
    if s.prompt_source.priority is None:
        return
    if s.data.stream:
        yield (
            PRIORITY_FUNCTION,
            "every candidate would have to be read from the disk for each group; set data.stream to false, or remove "
            "the curriculum",
        )
    if any(source.weight is not None for source in s.data.sources):
        yield (
            PRIORITY_FUNCTION,
            "a curriculum chooses among all rows, so the weights of data.sources would mean nothing; remove them, or "
            "the curriculum",
        )
