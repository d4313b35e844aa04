"""The functions of docs/from_slime.md: slime's runs by its documentation's signature, ours passes its contract, and
both say the same of the same samples; every flag that names one is converted."""

from __future__ import annotations

import ast
import asyncio
import re
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from penstock.backends.learners.hooks.protocols import GroupRewards
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.processes.user_code import load_object
from penstock.runtime.contracts.cases import cases, texts
from penstock.runtime.contracts.kinds import KINDS, check_function
from penstock.runtime.scenario import load_scenario
from penstock.runtime.slime.convert import to_scenario
from penstock.runtime.slime.mapping import FUNCTIONS, TO_BE_WRITTEN_ANEW
from penstock.runtime.slime.script import read_script

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs" / "from_slime.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
OURS = re.compile(r"# here, as (\w+): (\w+)\n")


class Status(StrEnum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


class Sample(SimpleNamespace):
    """What slime's functions are given, as far as those of the page look at it."""

    Status = Status

    def get_reward_value(self, args: object) -> float:
        return float(self.reward)


def blocks() -> list[str]:
    return BLOCK.findall(PAGE.read_text())


def changed() -> dict[str, tuple[str, str]]:
    """Name → kind and text, of each function after the change."""
    found: dict[str, tuple[str, str]] = {}
    for text in blocks():
        if match := OURS.match(text):
            found[match[2]] = (match[1], text)
    return found


def slimes(name: str) -> Callable[..., Any]:
    """One of slime's functions on the page."""
    text = next(text for text in blocks() if re.search(rf"def {name}\(", text) and "# slime" in text)
    output = type("DynamicFilterOutput", (SimpleNamespace,), {})
    names: dict[str, Any] = {"Sample": Sample, "DynamicFilterOutput": output, "torch": torch}
    exec(compile(text, str(PAGE), "exec"), names)
    return cast("Callable[..., Any]", names[name])


def ours(name: str, folder: Path) -> Callable[..., Any]:
    """The changed function, as a scenario would load it."""
    return cast("Callable[..., Any]", load_object(written(name, folder)))


def written(name: str, folder: Path) -> str:
    path = folder / f"{name}.py"
    path.write_text(changed()[name][1])
    return f"{path}:{name}"


def test_the_page_has_a_pair_for_every_kind_of_function() -> None:
    kinds = {kind for kind, _ in changed().values()}
    without_pair = {"routing", "step_log", "weight_names", "tracker"}  # slime has no such place
    assert kinds | without_pair == set(KINDS)
    for text in blocks():
        ast.parse(text)
    assert len(changed()) == sum("# slime" in text for text in blocks())


@pytest.mark.parametrize("name", sorted(changed()))
def test_a_function_of_slime_runs_after_the_change_that_the_page_describes(name: str, tmp_path: Path) -> None:
    found = check_function(written(name, tmp_path), changed()[name][0], timeout_s=20.0)
    assert [finding for finding in found if finding.state == "failed"] == []


def test_every_function_flag_of_slime_is_on_the_page_and_converted(tmp_path: Path) -> None:
    page = PAGE.read_text()
    flags = {*FUNCTIONS, "rollout-function-path", "dynamic-sampling-filter-path"}
    assert all(f"--{flag}" in page for flag in flags)
    for flag, key in FUNCTIONS.items():
        script = tmp_path / "run.sh"
        evaluates = "--eval-interval 5 --eval-prompt-data e /e.jsonl"
        given = f"--hf-checkpoint /m --prompt-data /d {evaluates} --{flag} my.functions.one"
        script.write_text(f"python3 train.py {given}\n")
        converted = to_scenario(read_script(script), "mine")
        if flag in TO_BE_WRITTEN_ANEW:
            assert any(left.flag == flag and key in left.reason for left in converted.left)
        else:
            assert f"{key.rsplit('.', 1)[1]}: my/functions.py:one" in converted.text, flag


def test_a_script_with_functions_of_all_kinds_becomes_a_scenario_that_loads(tmp_path: Path) -> None:
    flags = " ".join(f"--{flag} my.functions.{flag.replace('-', '_')}" for flag in FUNCTIONS)
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --num-rollout 10 --rollout-batch-size 8 "
        f"--n-samples-per-prompt 8 --rollout-max-response-len 512 {flags}\n".replace(
            "--custom-tis-function-path my.functions.custom_tis_function_path",
            "",  # has no effect on a loss of one's own
        )
    )
    path = tmp_path / "mine.yaml"
    path.write_text(to_scenario(read_script(script), "mine").text)
    scenario = load_scenario(path, [])
    assert scenario.episode.kind == "function"
    assert scenario.filter.drop_samples == "after_statistics"
    assert str(scenario.learner.objective.name).endswith("my/functions.py:custom_loss_function_path")
    assert str(scenario.learner.objective.reduction_function).endswith(":custom_pg_loss_reducer_function_path")


def samples() -> list[Sample]:
    return [
        Sample(response=text, label="42", reward=index % 3 / 2, status=list(Status)[index % 2], remove_sample=False)
        for index, (_, text) in enumerate(texts())
    ]


def test_rewards_are_the_same_before_and_after_the_change(tmp_path: Path) -> None:
    before, after = slimes("custom_rm"), ours("score", tmp_path)
    for sample in samples():
        assert asyncio.run(after(response=sample.response, label=sample.label)) == asyncio.run(before(None, sample))
    group = samples()
    scored = asyncio.run(ours("score_group", tmp_path)(responses=[sample.response for sample in group]))
    assert scored == asyncio.run(slimes("batched_custom_rm")(None, group))


def test_filters_are_the_same_before_and_after_the_change(tmp_path: Path) -> None:
    before, after = slimes("keep_varied"), ours("keep_varied", tmp_path)
    for rewards in ([1.0, 1.0], [0.0, 1.0, 0.5], [0.5]):
        output = before(None, [Sample(reward=reward) for reward in rewards])
        keep, cause = after(rewards=rewards)
        assert (keep, None if keep else cause) == (output.keep, output.reason)
    group = samples()
    slimes("drop_cut_off")(None, [group])
    kept = [ours("keep_whole", tmp_path)(outcome=str(sample.status))[0] for sample in group]
    assert kept == [not sample.remove_sample for sample in group]


def test_processed_rewards_are_the_same_before_and_after_the_change(tmp_path: Path) -> None:
    (case,) = [case for case in cases() if case.name == "two groups of four"]
    flat = [sample for group in case.groups for sample in group.samples]
    arguments = SimpleNamespace(n_samples_per_prompt=4)
    _, before = slimes("center")(arguments, [Sample(reward=sample.reward) for sample in flat])
    after = [
        value
        for group in case.groups
        for value in ours("center", tmp_path)(
            GroupRewards(tuple(sample.reward or 0.0 for sample in group.samples), group.samples, group, 1)
        )
    ]
    assert after == pytest.approx(before)


def test_losses_under_a_reducer_and_importance_weights_are_the_same_before_and_after_the_change(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    lengths = [3, 5, 1]
    per_token = torch.randn(sum(lengths), generator=draw)
    reduce = slimes("get_pg_loss_reducer")([9, 9, 9], lengths, [torch.ones(length) for length in lengths])
    given: Any = SimpleNamespace(tokens_per_sample=torch.tensor(lengths).float())
    weights = ours("over_a_constant", tmp_path)(given, None)
    torch.testing.assert_close((weights.repeat_interleave(torch.tensor(lengths)) * per_token).sum(), reduce(per_token))
    trained, rolled = torch.randn(9, generator=draw), torch.randn(9, generator=draw)
    masked, _, _ = slimes("tis")(
        SimpleNamespace(tis_clip=2.0),
        pg_loss=per_token,
        train_log_probs=torch.split(trained, lengths),
        rollout_log_probs=torch.split(rolled, lengths),
        loss_masks=None,
    )
    options = objective("grpo", old_logprobs="recompute", tis_clip=2.0)
    found = ours("tis", tmp_path)(SimpleNamespace(old_logprobs=trained, rollout_logprobs=rolled), options)
    torch.testing.assert_close(per_token * found.weights, masked)
