"""The ``evaluation:`` block: what a dataset leaves out, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backends.checkpoint.make import make_model
from penstock.backends.evaluation.options import EvaluationOptions
from penstock.backends.evaluation.rewards import open_evaluation_rewards
from penstock.backends.evaluation.rows import load_evaluation_rows
from penstock.backends.rewards import open_rewards
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.functions import check_user_code
from penstock.runtime.preflight.rows import check_data
from penstock.runtime.run.modelled_rows import num_evaluation_prompts
from penstock.runtime.scenario import dump_scenario, load_scenario
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.protocol import Backend
    from penstock.backends.rewards.options import RewardOptions
    from penstock.messages.commands import Score, ScoreGroup
    from penstock.runtime.scenario import Scenario

HEAD = """\
run: {name: example}
data: {path: "lines:8", label_key: answer, metadata_keys: [level]}
model: {make: xs}
sampling: {temperature: 0.9, top_p: 0.8}
"""


def loaded(folder: Path, text: str, *overrides: str) -> Scenario:
    file = folder / "example.yaml"
    file.write_text(HEAD + text)
    return load_scenario(file, overrides)


def test_a_scenario_without_the_block_evaluates_nothing(tmp_path: Path) -> None:
    assert loaded(tmp_path, "").evaluation == EvaluationOptions()
    assert sets_of(loaded(tmp_path, "")) == ()


def test_a_dataset_says_it_or_the_defaults_do_or_the_run(tmp_path: Path) -> None:
    scenario = loaded(
        tmp_path,
        """
evaluation:
  defaults: {samples_per_prompt: 4, label_key: "", sampling: {temperature: 0.5, min_p: 0.1}, reward: {function: dapo}}
  datasets:
    - {name: a, path: a.jsonl}
    - {name: b, path: b.jsonl, samples_per_prompt: 2, label_key: gold, sampling: {temperature: 1.0}, k: [2, 1]}
    - {name: c, path: c.jsonl, metadata_keys: [], reward: {function: grade.py:grade}, pass_reward: 0.5}
""",
    )
    a, b, c = sets_of(scenario)
    assert (a.samples_per_prompt, a.k, a.pass_reward) == (4, (1, 4), 1.0)
    assert (a.sampling.temperature, a.sampling.min_p, a.sampling.top_p) == (0.5, 0.1, 0.8)
    assert (a.data.path, a.data.label_key, a.data.metadata_keys) == (str(tmp_path / "a.jsonl"), None, ("level",))
    assert a.reward.function == "dapo"
    assert (b.samples_per_prompt, b.k, b.data.label_key, b.sampling.temperature) == (2, (1, 2), "gold", 1.0)
    assert (c.data.metadata_keys, c.pass_reward) == ((), 0.5)
    assert c.reward.function == f"{tmp_path}/grade.py:grade"
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump_scenario(scenario))
    assert load_scenario(dumped) == scenario


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("{every: 5}", "evaluation.every: has no effect without evaluation.datasets"),
        ("{datasets: [{name: a}]}", "evaluation.datasets[0].path: missing"),
        ("{datasets: [{naem: a, path: 'lines:4'}]}", "naem: no such key; did you mean 'name'?"),
        ("{datasets: [{name: a b, path: 'lines:4'}]}", "evaluation.datasets[0].name: must be"),
        ("{datasets: {name: a, path: 'lines:4'}}", "evaluation.datasets: must be a list"),
        ("{every: 0, datasets: [{name: a, path: 'lines:4'}]}", "evaluation.every: must be a whole number, at least 1"),
        ("{datasets: [{name: a, path: 'x@[4:2]'}]}", "evaluation.datasets[0].path: "),
        (
            "{datasets: [{name: a, path: 'lines:4'}, {name: a, path: 'lines:5'}]}",
            "evaluation.datasets[1].name: 'a' is the name of an earlier dataset as well",
        ),
        (
            "{datasets: [{name: a, path: 'lines:4', k: [8]}]}",
            "evaluation.datasets[0].k: pass@8 needs at least 8 answers to a prompt, and samples_per_prompt is 1",
        ),
        (
            "{defaults: {k: [8]}, datasets: [{name: a, path: 'lines:4'}]}",
            "evaluation.defaults.k: pass@8 needs",
        ),
        (
            "{defaults: {sampling: {temperature: 0}}, datasets: [{name: a, path: 'lines:4', samples_per_prompt: 2}]}",
            "evaluation.datasets[0].samples_per_prompt: at temperature 0 the 2 answers to a prompt are all the same",
        ),
        (
            "{datasets: [{name: a, path: 'lines:4', sampling: {max_response_tokens: 512}}]}",
            "evaluation.datasets[0].sampling.max_response_tokens: 512 response tokens leave no room for a prompt",
        ),
        (
            "{datasets: [{name: a, path: 'lines:4', reward: {function: maths}}]}",
            "no reward function is called 'maths'; did you mean 'math'?",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_the_key(tmp_path: Path, block: str, said: str) -> None:
    with pytest.raises(UserFault) as caught:
        loaded(tmp_path, f"evaluation: {block}\n")
    assert said in str(caught.value)


def test_parts_of_a_run_that_evaluate_nothing_say_so(tmp_path: Path) -> None:
    block = "evaluation: {every: 5, datasets: [{name: a, path: 'lines:4'}]}\n"
    with pytest.raises(UserFault, match="a run with only: rollout does not evaluate"):
        loaded(tmp_path, block, "run.only=rollout")
    with pytest.raises(UserFault, match=r"evaluation.datasets: a run with only: evaluate evaluates these"):
        loaded(tmp_path, "", "run.only=evaluate")


def test_engines_that_answer_from_rows_have_nothing_to_evaluate(tmp_path: Path) -> None:
    block = "engines: {backend: recorded}\nevaluation: {datasets: [{name: a, path: 'lines:4'}]}\n"
    with pytest.raises(UserFault, match="answer with what rows hold and generate nothing"):
        loaded(tmp_path, block, "learner.objective=sft", "filter.drop_zero_spread=false", "sampling.temperature=1.0")


def test_rows_and_functions_are_looked_at_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text('{"prompt": "1", "answer": "2", "level": 1}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1", "answer": "2", "level": 1}\n{"prompt": "1", "level": 1}\n')
    block = "evaluation: {datasets: [{name: a, path: good.jsonl}, {name: b, path: bad.jsonl}]}\n"
    scenario = loaded(tmp_path, block, "data.path=" + str(tmp_path / "good.jsonl"))
    with pytest.raises(UserFault, match=r"evaluation.datasets\[1\].path: .*bad.jsonl:2: 'answer' is missing"):
        check_data(scenario)
    block = "evaluation: {datasets: [{name: a, path: good.jsonl, reward: {function: nowhere.py:score}}]}\n"
    with pytest.raises(UserFault, match=r"evaluation.datasets\[0\].reward.function: "):
        check_user_code(loaded(tmp_path, block))


def test_prompts_know_their_dataset_and_no_more_of_them_are_there_than_was_said(tmp_path: Path) -> None:
    make_model("xs", tmp_path / "xs", 0)
    block = "evaluation: {datasets: [{name: a, path: 'lines:4'}, {name: b, path: 'lines:9', max_prompts: 2}]}\n"
    scenario = loaded(tmp_path, block, "data.label_key=label", "data.metadata_keys=[]")
    a, b = load_evaluation_rows(sets_of(scenario), tmp_path / "xs", seed=0, max_context=512)
    assert (a.num_prompts, b.num_prompts) == (4, 2)
    assert (a.prompt(3).dataset, a.prompt(3).row, b.prompt(1).dataset) == (0, 3, 1)
    with pytest.raises(IndexError, match="prompt 2 of 2 of the dataset b"):
        b.prompt(2)


def test_a_simulation_has_to_be_told_how_many_prompts_there_are(tmp_path: Path) -> None:
    block = "evaluation: {datasets: [{name: a, path: 'lines:4'}, {name: b, path: b.jsonl, max_prompts: 2}]}\n"
    assert num_evaluation_prompts(loaded(tmp_path, block)) == (4, 2)
    with pytest.raises(UserFault, match="how many prompts b has"):
        num_evaluation_prompts(loaded(tmp_path, "evaluation: {datasets: [{name: b, path: b.jsonl}]}\n"))


def test_datasets_that_say_the_same_share_their_reward_functions(tmp_path: Path) -> None:
    block = """
evaluation:
  datasets:
    - {name: a, path: "lines:4"}
    - {name: b, path: "lines:4", reward: {function: random}}
    - {name: c, path: "lines:4", reward: {function: random}, samples_per_prompt: 2}
"""
    scenario = loaded(tmp_path, block, "reward.function=lines")
    opened: list[str] = []

    def opening(options: RewardOptions, _max_tokens: int) -> Backend[Score | ScoreGroup]:
        opened.append(options.function)
        return open_rewards(options, tmp_path)

    open_evaluation_rewards(scenario.reward, scenario.sampling.max_response_tokens, sets_of(scenario), opening)
    assert opened == ["lines", "random"]


def test_a_dataset_of_a_run_with_several_sources_is_one_file_read_at_once(tmp_path: Path) -> None:
    text = """
evaluation: {datasets: [{name: a, path: a.jsonl, chat_template: true, system_prompt: be brief}]}
"""
    file = tmp_path / "several.yaml"
    several = (
        "data: {label_key: answer, system_prompt: think, chat_template: true, stream: true, "
        "sources: [{path: x.jsonl}, {path: y.jsonl}]}"
    )
    file.write_text("run: {name: example}\nmodel: {make: xs}\n" + several + text)
    [each] = sets_of(load_scenario(file))
    assert (each.data.path, each.data.sources, each.data.stream) == (str(tmp_path / "a.jsonl"), (), False)
    assert (each.data.system_prompt, each.data.label_key) == ("be brief", "answer")


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("system_prompt: be brief", "system_prompt: is for the chat template"),
        ("multimodal_keys: {image: images}", "multimodal_keys: where images, videos and sounds stand"),
        (
            "chat_template: true, multimodal_keys: {image: images}",
            "make: takes text only, and rows have images; set it to vlm_xs",
        ),
    ],
)
def test_what_a_dataset_asks_of_template_and_engines_is_checked(tmp_path: Path, dataset: str, said: str) -> None:
    with pytest.raises(UserFault) as caught:
        loaded(tmp_path, f"evaluation: {{datasets: [{{name: a, path: a.jsonl, {dataset}}}]}}\n")
    assert said in str(caught.value)
