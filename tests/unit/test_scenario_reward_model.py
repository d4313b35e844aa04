"""What a scenario with a reward model has to say, where the model is placed, and what its actor does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.actors.engine_worker.reward_model import RewardModel
from penstock.messages.commands import OpenEngine
from penstock.messages.errors import UserFault
from penstock.messages.local import EngineOpened, ScoringMoved, Started
from penstock.messages.names import LEARNER, Role, has_lane, is_engine, is_reward_model, reward_model_name, role_of
from penstock.messages.training import Activity
from penstock.runtime.observability.facts import devices_of
from penstock.runtime.preflight.checkpoints import check_reward_model
from penstock.runtime.preflight.gpu_memory import fixed_models
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import place
from penstock.runtime.run.process_table import placement
from penstock.runtime.run.wiring import actor_names
from penstock.runtime.scenario import Scenario, load_scenario
from penstock.runtime.scenario.modelled import load_modelled

if TYPE_CHECKING:
    from collections.abc import Sequence

QUICK = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
BLOCK = "reward_model={path: /models/liking}"
ASKED = ("reward.function=reward_model", BLOCK)


def scenario(*overrides: str) -> Scenario:
    return load_scenario(QUICK, overrides)


def test_reward_models_are_actors_and_no_engines() -> None:
    found = scenario(*ASKED, "reward_model.count=2")
    names = [name for name in actor_names(found) if is_reward_model(name)]
    assert names == ["reward_model/0", "reward_model/1"] == [reward_model_name(index) for index in range(2)]
    assert role_of(names[0]) is Role.REWARD_MODEL
    assert has_lane(names[0])
    assert not is_engine(names[0])
    assert "reward_model/0 … reward_model/1" in [row.name for row in placement(found)]
    assert devices_of(found)["reward_model/1"] == 1
    assert not any(
        map(is_reward_model, actor_names(scenario(*ASKED, "run.only=learner", "run.batches_from=/runs/one")))
    )


def test_a_reward_model_takes_a_gpu_as_engines_do() -> None:
    gpus = ("engines.count=1", "learner.device=cuda", "engines.device=cuda", "reward_model.device=cuda")
    blocks = place(scenario(*ASKED, *gpus), [NodeGpus("here", 3)]).blocks
    assert sorted(block.members for block in blocks) == [("engine/0",), (LEARNER,), ("reward_model/0",)]
    server = ("reward_model.backend=sglang", "reward_model.sglang.tp_size=2")
    blocks = place(scenario(*ASKED, *gpus, *server), [NodeGpus("here", 4)]).blocks
    assert {block.num_gpus for block in blocks if "reward_model/0" in block.members} == {2}
    with pytest.raises(UserFault, match="reward_model: "):
        place(scenario(*ASKED, *server, "reward_model.device=cuda", "learner.device=cpu", "engines.device=cpu"), [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("reward.function=reward_model",),
            r"reward\.function: the score of a reward model is asked for, and there is",
        ),
        ((BLOCK,), r"reward_model: has no effect, as no reward asks it; set reward\.function: reward_model"),
        ((*ASKED, "reward_model.device=gpu"), r"reward_model\.device: must be auto, cpu, cuda or cuda:N; found 'gpu'"),
        ((*ASKED, "reward_model.backend=recorded"), r"reward_model\.backend: .*recorded"),
        (
            (*ASKED, "reward_model.sglang={tp_size: 2}"),
            r"reward_model\.sglang: has no effect with a torch reward model",
        ),
        (
            (*ASKED, "reward_model.backend=sglang", "reward_model.sglang={nnodes: 2, tp_size: 2}"),
            r"reward_model\.sglang: a reward model's server lies on one node",
        ),
        (
            (*ASKED, "reward_model.backend=sglang", "reward_model.sglang={no_such: 2}"),
            r"reward_model\.sglang\.no_such: SGLang .* has no such option",
        ),
        ((*ASKED, "reward.per_group=true"), r"reward\.per_group: 'reward_model' sees one sample"),
    ],
)
def test_a_block_that_cannot_work_says_which_key(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(UserFault, match=message):
        scenario(*overrides)


def test_an_evaluation_alone_may_ask_it() -> None:
    dataset = "evaluation.datasets=[{name: nice, path: 'lines:8', reward: {function: reward_model}}]"
    assert scenario(BLOCK, dataset).reward_model is not None


def test_a_simulation_does_without_it() -> None:
    found, changed = load_modelled(QUICK, ASKED)
    assert found.reward_model is None
    assert "reward_model" in changed


def test_a_folder_that_holds_none_is_refused_before_the_run(tmp_path: Path) -> None:
    from penstock.backends.checkpoint.make import make_model

    found = scenario("reward.function=reward_model", f"reward_model={{path: {tmp_path}}}")
    with pytest.raises(UserFault, match=r"reward_model\.path: .*missing config\.json, tokenizer\.json"):
        check_reward_model(found)
    make_model("xs", tmp_path, 0)
    with pytest.raises(UserFault, match=r"is Qwen3ForCausalLM; a reward model is one …ForSequenceClassification"):
        check_reward_model(found)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(UserFault, match=r"reward_model\.chat_template: .* has no chat template; set it to false"):
        check_reward_model(found)
    plain = scenario(*ASKED, f"reward_model={{path: {tmp_path}, chat_template: false, device: cuda}}")
    check_reward_model(plain)
    (need,) = fixed_models(plain)
    assert (need.key, need.size_bytes) == ("reward_model", 415_232)


def test_the_actor_opens_its_model_and_tells_when_it_works() -> None:
    actor = RewardModel()
    assert (actor.state, actor.shows) == ("starting", (Activity.STARTING, 0.0, 0.0))
    assert actor.handle(Started(epoch=0)) == [OpenEngine()]
    assert [wait.what for wait in actor.waits()] == ["start of"]
    actor.handle(EngineOpened(num_slots=4))
    assert (actor.state, actor.shows, actor.waits()) == ("serving", (Activity.WAITING_FOR_SAMPLES, 0.0, 0.0), ())
    actor.handle(ScoringMoved(num_open=2))
    actor.validate()
    assert actor.shows == (Activity.WORKING, 0.5, 0.0)
