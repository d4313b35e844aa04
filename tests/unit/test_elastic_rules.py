"""What engines that join and leave need of a scenario, and how a command names those that are to be there."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.backends.engines.options import lent_engines
from penstock.messages.errors import UserFault
from penstock.messages.names import engine_name
from penstock.runtime.cli.app import app
from penstock.runtime.run.placement import needs_of, on_learners_devices
from penstock.runtime.run.process_table import placement
from penstock.runtime.run.wiring import actor_names, possible_actors
from penstock.runtime.scenario import load_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
ATTACHED = ("engines.backend=sglang", "engines.addresses=[http://10.0.0.7:30000]", "engines.count=1")

LENT = ("engines.count=2", "engines.max=3", "engines.lent=1")
ON_GPUS = ("engines.device=cuda", "learner.device=cuda")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("engines.count=2", "engines.min=3"), "engines.min"),
        (("engines.count=2", "engines.max=1"), "engines.max"),
        (
            ("engines.max=3", "engines.placement=colocate", "staleness.policy=sync", "staleness.max_staleness=null"),
            "engines.max",
        ),
        (("engines.max=3", "engines.more=[{backend: torch}]"), "engines.more"),
        (
            ("engines.max=3", *ATTACHED, "engines.router=http://10.0.0.9:30000"),
            "engines.max: the servers behind a router are one engine",
        ),
        (("engines.max=3", *ATTACHED, "engines.scale=by_bound"), "by_bound cannot start servers that run already"),
        (("engines.scale=by_bound",), "engines.scale: by_bound has no room at engines.count = "),
        (
            ("engines.max=3", "engines.scale=by_bound", "staleness.policy=sync", "staleness.max_staleness=null"),
            "engines.scale: with staleness.max_staleness 0",
        ),
        (("engines.max=3", "engines.scale=by_bound", "run.only=rollout"), "and run.only is rollout"),
        (("engines.count=2", "engines.max=3", "engines.lent=2"), "set engines.max to 4 or more"),
        (
            (*LENT, "engines.device=cuda"),
            "engines.lent: the engines are on cuda and the learner on auto, so that lends",
        ),
        (
            (*LENT, "engines.backend=sglang", "engines.sglang={tp_size: 2}"),
            "engines.lent: engines that are lent the learner's GPUs take 2 each, 2 together, and it has 1",
        ),
        (
            (*LENT, "engines.backend=sglang", "engines.sglang={tp_size: 2, nnodes: 2}", "learner.num_ranks=2"),
            "engines.lent: an engine over several nodes",
        ),
        (
            (*LENT, "engines.backend=sglang", "engines.sglang={enable_memory_saver: false}"),
            "engines.sglang.enable_memory_saver: a server on the learner's GPUs",
        ),
        (
            (*LENT, *ON_GPUS, "engines.backend=sglang", "weights.transport=distributed"),
            "weights.transport: a group of NCCL takes each GPU once",
        ),
        (
            (*LENT, "engines.backend=sglang", "learner.lora.publish=adapter"),
            "engines.lent: a server on the learner's GPUs lets go of its adapters",
        ),
        (("engines.max=3", "engines.lent=1", "run.only=rollout"), "engines.lent: nothing trains"),
        (("engines.max=3", "engines.lent=1", *ATTACHED), "engines.lent: servers that run already"),
    ],
)
def test_what_cannot_join_or_leave_is_refused_with_the_key(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(UserFault, match=key.replace(".", r"\.")):
        load_scenario(SCENARIO, list(overrides))


def test_actors_and_gpus_are_foreseen_for_every_engine_that_may_join() -> None:
    scenario = load_scenario(SCENARIO, ["engines.count=1", "engines.max=3", "engines.device=cuda"])
    late = [name for name in possible_actors(scenario) if name not in actor_names(scenario)]
    assert late == ["engine/1", "engine/2"]
    (engines,) = [need for need in needs_of(scenario) if need.key == "engines"]
    assert engines.names == tuple(map(engine_name, range(3)))


def test_servers_may_join_and_leave() -> None:
    for overrides in (("engines.backend=sglang", "engines.count=1"), ATTACHED):
        assert possible_actors(load_scenario(SCENARIO, ["engines.max=2", *overrides]))[-1] == "engine/1"


@pytest.mark.parametrize("words", [["engines=3"], ["engines=+1", "engine/1"], ["a", "b", "engines=+1"], ["engine/x"]])
def test_a_command_that_says_nothing_clear_is_refused(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["scale", *words])
    assert done.exit_code != 0
    assert "expected" in str(done.exception) + done.output


def test_the_last_engines_are_lent_the_learners_device_and_the_placement_says_so() -> None:
    scenario = load_scenario(SCENARIO, [*LENT, "engines.device=cpu", "learner.device=cpu"])
    assert lent_engines(scenario.engines) == on_learners_devices(scenario) == {"engine/2"}
    (engines,) = [each for each in placement(scenario) if each.name.startswith("engine/")]
    assert "1 of them on the learner's device" in engines.remark
