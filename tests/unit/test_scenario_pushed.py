"""Scenarios whose groups are pushed from outside: what they need, and what is refused beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.backends.learners.objectives.validity import compares_with_drawn
from penstock.messages.errors import UserFault
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import build_machine
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.recorded_rules import recorded_settings

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL = """\
run:
  name: example
data:
  source: pushed
model:
  make: xs
engines:
  backend: recorded
"""
UNKNOWN = (
    "learner.objective.old_logprobs=recompute",
    "learner.objective.correction=none",
    "learner.objective.allow_unbounded=true",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "example.yaml"
    path.write_text(MINIMAL)
    return path


def test_one_key_is_enough_and_nobody_else_is_told(file: Path) -> None:
    usual = ("data.path=lines:100", "data.source=null", "engines.backend=torch")
    for overrides, awaits in (((), True), (usual, False)):
        scenario = load_scenario(file, overrides)
        plan = RunPlan(scenario=scenario, run_id="x", run_folder="", model_folder="", num_rows=100)
        machine: Any = build_machine("prompt_source", plan)
        assert (machine.settings.awaits_pushes, machine.settings.chooses_rows) == (awaits, awaits)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("engines.backend=torch",), "data.source", "an engine of the backend recorded, and the run has none"),
        (("data.source=pulled",), "data.source", "must be file.py:Class, or pushed; found 'pulled'"),
        (("data.path=lines:9",), "data.path", "the rows are those of data.source"),
        (("staleness.on_stale=drop",), "staleness.on_stale", "set it to wait"),
        (("staleness.over_sampling=1.5",), "staleness.over_sampling", "set it to 1"),
        (("data.recorded.reward_key=r",), "data.recorded", "a pushed group says itself"),
        (("data.metadata_keys=[level]",), "data.metadata_keys", "brings its metadata"),
        (("data.num_epochs=2",), "data.num_epochs", "has no end"),
        (("data.source_options={a: 1}",), "data.source_options", "are for a class"),
        (("episode.kind=gateway",), "episode.kind", "set it to single"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(file: Path, overrides: tuple[str, ...], key: str, words: str) -> None:
    with pytest.raises(UserFault) as refused:
        load_scenario(file, overrides)
    assert f"{key}: " in str(refused.value)
    assert words in str(refused.value)


def test_log_probs_are_needed_unless_the_learner_computes_its_own(file: Path) -> None:
    for overrides, needs in (((), True), (UNKNOWN, False), (("learner.objective=rejection_sampling",), False)):
        scenario = load_scenario(file, overrides)
        settings = recorded_settings(scenario)
        assert settings is not None
        assert bool(settings.ratio_objective) == compares_with_drawn(scenario.learner.objective) == needs
