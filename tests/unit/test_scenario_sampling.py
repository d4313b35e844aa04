"""Scenarios that say how prompts are drawn and what is trained: what is refused, and with which words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.backends.evaluation.sets import RunSettings, evaluation_sets
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.functions import check_user_code
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import build_machine
from penstock.runtime.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL = """\
run:
  name: example
data:
  path: lines:100
model:
  make: xs
"""
MINE = "def sift(reward):\n    return True\n\ndef look(group):\n    pass\n\ndef prefer(prompt):\n    return 1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    path = tmp_path / "example.yaml"
    path.write_text(MINIMAL)
    return path


def settings_of(name: str, plan: RunPlan) -> Any:  # noqa: ANN401 - each actor has its own
    machine: Any = build_machine(name, plan)
    return machine.settings


def everything(file: Path, *more: str) -> Scenario:
    folder = file.parent
    return load_scenario(
        file,
        (
            f"filter.sample_function={folder}/mine.py:sift",
            "filter.drop_samples=after_statistics",
            f"filter.all_samples_hook={folder}/mine.py:look",
            "filter.keep_when_insufficient=3",
            f"prompt_source.priority={folder}/mine.py:prefer",
            "prompt_source.replay={fraction: 0.2, below_reward: 0.3}",
            "staleness.mask_old_tokens=true",
            *more,
        ),
    )


def test_a_scenario_may_have_all_of_it_and_every_actor_is_told(file: Path) -> None:
    scenario = everything(file)
    check_user_code(scenario)
    plan = RunPlan(scenario=scenario, run_id="x", run_folder="", model_folder="", num_rows=100)
    told = settings_of("filter", plan)
    assert told.options == scenario.filter
    assert None not in (told.options.sample_function, told.options.all_samples_hook)
    assert (told.options.drop_samples, told.options.keep_when_insufficient) == ("after_statistics", 3)
    assert told.judge_timeout_s > 60 + 5 * scenario.sampling.samples_per_group - 1
    buffer = settings_of("buffer", plan)
    assert (buffer.keep_after_batches, buffer.mask_old_tokens, buffer.chooses_rows) == (3, True, True)
    assert settings_of("prompt_source", plan).chooses_rows


def test_what_is_drawn_from_is_recorded_for_training_and_not_for_evaluations(file: Path) -> None:
    data = "evaluation.datasets=[{name: one, path: 'lines:3'}]"
    scenario = load_scenario(file, ("sampling.top_p=0.9", "sampling.replay_kept=64", data, "evaluation.every=1"))
    run = RunSettings(scenario.data, scenario.sampling, scenario.reward)
    [one] = evaluation_sets(scenario.evaluation, run)
    assert (scenario.sampling.replay_kept, one.sampling.top_p, one.sampling.replay_kept) == (64, 0.9, None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("sampling.top_p=1",), "sampling.replay_kept: nothing is cut off that could be replayed"),
        (("learner.objective={name: grpo, opd_kl_coef: 0.1}", "teacher={model: {path: x}}"), "a teacher's log-probs"),
        (("learner.true_on_policy=true", "staleness.policy=sync"), "so the bits differ"),
        (("engines.backend=simulated", "learner.backend=simulated"), "sampling.replay_kept: is for learner.backend"),
        (("engines.more=[{backend: recorded}]",), "recorded engines cannot say which tokens they drew from"),
        (("sampling.replay_kept=5000",), "4096"),
        (
            ("engines.backend=sglang", "engines.sglang={speculative_algorithm: NGRAM}"),
            "nor SGLang's with a draft",
        ),
    ],
)
def test_replay_is_refused_where_it_would_not_be_heeded(file: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserFault, match=words):
        load_scenario(file, ("sampling.top_p=0.9", "sampling.replay_kept=64", *overrides))


def test_without_any_of_it_nothing_is_different(file: Path) -> None:
    plan = RunPlan(scenario=load_scenario(file), run_id="x", run_folder="", model_folder="", num_rows=100)
    told = settings_of("filter", plan)
    options = told.options
    assert [options.sample_function, options.all_samples_hook, options.keep_when_insufficient] == [None] * 3
    buffer = settings_of("buffer", plan)
    assert (buffer.keep_after_batches, buffer.mask_old_tokens, buffer.chooses_rows) == (None, False, False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("filter.sample_function=sift",), "filter.sample_function: must be file.py:function; found 'sift'"),
        (("filter.all_samples_hook=look",), "filter.all_samples_hook: must be file.py:function; found 'look'"),
        (("prompt_source.priority=easy",), "prompt_source.priority: must be file.py:function; found 'easy'"),
        (("filter.drop_samples=after_statistics",), "has no effect without filter.sample_function"),
        (("filter.keep_when_insufficient=20",), "staleness.max_rejected_batches = 20; set it lower"),
        (("filter.keep_when_insufficient=0",), "filter.keep_when_insufficient"),
        (("prompt_source.replay={fraction: 1.5, below_reward: 0}",), "fraction"),
        (("prompt_source.replay={fraction: 0.5}",), "below_reward"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(file: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserFault) as caught:
        load_scenario(file, overrides)
    assert words in str(caught.value)


def test_nothing_counts_in_a_mean_that_is_not_taken(file: Path) -> None:
    with pytest.raises(UserFault, match="takes no mean over a group"):
        everything(file, "learner.objective=reinforce_plus_plus")


def test_a_curriculum_and_a_stream_or_weights_exclude_each_other(file: Path) -> None:
    (file.parent / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    with pytest.raises(UserFault, match="every candidate would have to be read"):
        everything(file, f"data.path={file.parent}/rows.jsonl", "data.stream=true")
    sources = f"data.sources=[{{path: {file.parent}/rows.jsonl, weight: 2}}, {{path: 'lines:5', weight: 1}}]"
    with pytest.raises(UserFault, match=r"the weights of data\.sources would mean nothing"):
        everything(file, "data.path=null", sources)


def test_a_function_that_is_not_there_is_told_before_the_run(file: Path) -> None:
    scenario = load_scenario(file, (f"filter.all_samples_hook={file.parent}/mine.py:lok",))
    with pytest.raises(UserFault, match=r"filter\.all_samples_hook.*lok"):
        check_user_code(scenario)
