"""Rules about what decides which prompts are drawn and which groups and samples are trained."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from penstock.actors.prompt_source.policies import ROUTINGS
from penstock.backends.learners.objectives.spec import loss_of
from penstock.backends.learners.objectives.validity import compares_rewards
from penstock.backends.learners.spec import LEARNERS, is_modelled
from penstock.messages.option_keys import is_user_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

Broken = tuple["KeyPath", str]


def sampling_rules(s: Scenario) -> Iterator[Broken]:
    """What is dropped, what is kept, and what is drawn."""
    yield from _drops(s)
    kept_after, fails_after = s.filter.keep_when_insufficient, s.staleness.max_rejected_batches
    if kept_after is not None and kept_after >= fails_after:
        yield (
            ("filter", "keep_when_insufficient"),
            f"groups would be kept after {kept_after} batches' worth of rejections, and the run stops after "
            f"staleness.max_rejected_batches = {fails_after}; set it lower than that",
        )
    yield from _rows(s)
    if s.sampling.replay_kept is not None:
        yield from _replayed(s)


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


def _replayed(s: Scenario) -> Iterator[Broken]:
    key, sampling, objective = ("sampling", "replay_kept"), s.sampling, s.learner.objective
    if sampling.top_p == 1 and not sampling.top_k and not sampling.min_p:
        yield key, "nothing is cut off that could be replayed; set sampling.top_p, top_k or min_p, or remove this key"
    able = LEARNERS.having(lambda spec: spec.replays_kept)
    if s.learner.backend not in able:
        yield key, f"is for learner.backend: {' or '.join(able)}; found {s.learner.backend}, set it to null"
    if s.teacher is not None or objective.opd_kl_coef or loss_of(objective).needs_teacher_top:
        yield (
            key,
            "a teacher's log-probs are of the whole vocabulary and cannot be compared with those of what was kept; set "
            "it to null, or train without a teacher",
        )
    if s.learner.true_on_policy:
        yield (
            key,
            "engine and learner add up what was kept in their own ways, so the bits differ; set it to null, or "
            "learner.true_on_policy to false",
        )


def _rows(s: Scenario) -> Iterator[Broken]:
    routing = s.prompt_source.routing
    if not is_user_code(routing) and routing not in ROUTINGS:
        near = difflib.get_close_matches(routing, ROUTINGS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        reason = f"no routing is called '{routing}'; {hint}there are {', '.join(ROUTINGS)}, and file.py:Class"
        yield ("prompt_source", "routing"), reason
    if s.prompt_source.priority is None:
        return
    if s.data.stream:
        yield (
            ("prompt_source", "priority"),
            "every candidate would have to be read from the disk for each group; set data.stream to false, or remove "
            "the curriculum",
        )
    if any(source.weight is not None for source in s.data.sources):
        yield (
            ("prompt_source", "priority"),
            "a curriculum chooses among all rows, so the weights of data.sources would mean nothing; remove them, or "
            "the curriculum",
        )
