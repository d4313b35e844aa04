"""What a ``reward:`` block is refused with: the key, what is wrong, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.messages.errors import UserFault
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

BASE = """
run: {name: trial, num_steps: 4}
model: {make: xs}
learner: {groups_per_batch: 4}
data: {path: "lines:100", metadata_keys: [kind]}
reward: %s
"""

REFUSED = {
    "{function: maths}": "no reward function is called 'maths'; did you mean 'math'?",
    "{components: [{name: a, function: maths}]}": "no reward function is called 'maths'",
    "{components: [{name: a, function: math}, {name: a, function: f1}]}": "'a' is the name of an earlier one",
    "{components: [{name: a, function: chosen}]}": "is what reward.function_key chooses",
    "{functions: [{name: a, function: math}]}": "say in reward.function_key",
    "{function_key: kind}": "list the functions in reward.functions",
    "{function_key: other, functions: [{name: a, function: math}]}": "'other' is neither among data.metadata_keys",
    "{function_key: kind, functions: [{name: a, function: math}], components: [{name: b, function: f1}]}":
        "has no effect beside reward.components",
    "{function: math, per_group: true}": "'math' sees one sample",
    "{function: judge, per_group: true, judge: {url: 'http://x/v1'}}": "'judge' sees one sample",
    "{function: length_penalty, length_penalty: {max_tokens: 10, cache_tokens: 20}}": "20 are more than the 10",
    "{function: dapo, key: reward}": "what 'dapo' returns has score and acc, and no 'reward'",
    "{components: [{name: a, function: ifbench, key: score}]}": "what 'ifbench' returns has reward and followed",
    "{function: remote}": "needs the address that samples are posted to",
    "{function: remote, remote: {url: 'x:80'}}": "must begin with http:// or https://",
    "{function: remote, remote: {url: 'http://x', fields: [answer]}}": "there is no 'answer' of a sample",
    "{function: remote, per_group: true, remote: {url: 'http://x', batch_size: 2}}": "a request is one group",
    "{function: judge}": "needs exactly one of url and engine",
    "{function: judge, judge: {url: 'http://x/v1', engine: self}}": "needs exactly one of url and engine",
    "{function: judge, judge: {engine: self, max_tokens: 512}}": "leave no room for the question",
    "{function: judge, judge: {engine: self, max_tokens: 9, body: {penalty: 2}}}": "unknown field `penalty`",
    "{function: judge, judge: {engine: self, max_tokens: 9, temperature: 11}}": "Expected `float` <= 10.0",
    "{function: judge, judge: {engine: teacher}}": "there is no teacher on an SGLang server",
    "{function: judge, judge: {url: 'http://x/v1', score: '('}}": "is no regular expression",
    "{function: judge, judge: {url: 'http://x/v1', score: 'a'}}": "must have one group",
    "{function: judge, judge: {url: 'http://x/v1', score: '(a)', verdicts: {a: 1}}}": "remove one",
    "{function: judge, judge: {url: 'http://x/v1', verdicts: {}}}": "names no word",
    "{function: judge, judge: {url: 'http://x/v1', lowest: 1}}": "must be more than lowest",
    "{components: [{name: a, function: remote}]}": "needs the address that samples are posted to",
    "{components: [{function: math}]}": "name",
    "{length_penalty: {max_tokens: 10}}": "has no effect, as no reward asks it; set reward.function: length_penalty",
    "{function: math, judge: {url: 'http://x/v1'}}": "has no effect, as no reward asks it",
    "{components: [{name: a, function: math, judge: {url: 'http://x/v1'}}]}": "has no effect with function: math",
    "{judge: {api_key: x}}": "api_key",
    "{remote: {batch_size: 0}}": "batch_size",
}  # fmt: skip


@pytest.mark.parametrize("reward", REFUSED)
def test_a_block_that_cannot_work_is_refused_with_what_to_do(tmp_path: Path, reward: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(BASE % reward)
    with pytest.raises(UserFault) as caught:
        load_scenario(file)
    assert REFUSED[reward] in str(caught.value)
    assert "reward" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        "{path: arithmetic, metadata_keys: [kind]}",
        "{path: arithmetic, metadata: {kind: math}}",
        "{sources: [{name: a, path: arithmetic, metadata: {kind: math}}, {name: b, path: 'lines:10'}]}",
    ],
)
def test_rows_or_their_source_name_the_reward_and_the_episodes_function(tmp_path: Path, data: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(BASE % "{function: math, function_key: kind, functions: [{name: math, function: math}]}")
    episode = "{kind: function, generate: mine.py:a, function_key: kind, functions: [{name: b, generate: mine.py:b}]}"
    (tmp_path / "mine.py").write_text("")
    assert load_scenario(file, [f"data={data}", f"episode={episode}"]).reward.function_key == "kind"


def test_a_dataset_of_an_evaluation_may_be_who_asks_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(BASE % "{function: lines, length_penalty: {max_tokens: 10}}")
    asks = "evaluation={every: 2, datasets: [{name: a, path: 'lines:4', reward: {function: length_penalty}}]}"
    assert load_scenario(file, [asks]).reward.length_penalty.max_tokens == 10


def test_files_of_components_are_looked_for_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(response): return 1")
    (tmp_path / "ask.txt").write_text("{{response}}")
    file = tmp_path / "scenario.yaml"
    file.write_text(
        BASE % "{components: [{name: a, function: 'mine.py:score'}, "
        "{name: b, function: judge, judge: {url: 'http://x/v1', template: ask.txt}}]}"
    )
    first, second = load_scenario(file).reward.components
    assert first.function == f"{tmp_path / 'mine.py'}:score"
    assert second.judge is not None
    assert second.judge.template == str(tmp_path / "ask.txt")


def own_judge(engines: str) -> str:
    judge = "reward: {function: judge, judge: {engine: self, max_tokens: 9, body: {top_p: 0.9, stop: x}}}"
    staleness = "staleness: {policy: sync, max_staleness: 0}" if "colocate" in engines else ""
    learner = "{groups_per_batch: 4, backend: simulated}" if "simulated" in engines else "{groups_per_batch: 4}"
    base = (BASE % "{}").replace("{groups_per_batch: 4}", learner)
    return base.replace("reward: {}", f"{judge}\nengines: {engines}\n{staleness}")


@pytest.mark.parametrize("engines", ["{}", "{backend: sglang}", "{placement: colocate}", "{backend: simulated}"])
def test_engines_that_answer_can_be_the_judge(tmp_path: Path, engines: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(own_judge(engines))
    judge = load_scenario(file).reward.judge
    assert judge.engine == "self"


def test_a_server_with_adapters_of_the_policy_is_no_judge(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    lora = "groups_per_batch: 4, lora: {publish: adapter}"
    file.write_text(own_judge("{backend: sglang}").replace("groups_per_batch: 4", lora))
    with pytest.raises(UserFault, match=r"with the model without the adapters of learner\.lora\.publish: adapter"):
        load_scenario(file)
    file.write_text(own_judge("{}").replace("groups_per_batch: 4", lora))
    assert load_scenario(file).reward.judge.engine == "self"


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ("{backend: recorded}", "engines of the backends torch and sglang answer a judge"),
        ("{backend: sglang, placement: colocate}", "a judge's question is lost then"),
    ],
)
def test_engines_that_do_not_answer_are_no_judge(tmp_path: Path, engines: str, message: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(own_judge(engines))
    with pytest.raises(UserFault) as caught:
        load_scenario(file)
    assert message in str(caught.value)
    assert "reward.judge.engine" in str(caught.value)
