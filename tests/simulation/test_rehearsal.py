"""``penstock rehearse``: rates mean what they say, faults come as often, and chaos can bring them about."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from penstock import api
from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.cli.chaos import planned_faults
from penstock.runtime.prediction.rehearsal import (
    Hit,
    Job,
    Moment,
    Played,
    Rate,
    chaos_faults,
    played,
    quantile_of,
    read_faults,
    rehearse,
)
from penstock.runtime.prediction.workers import Workers
from penstock.runtime.scenario.load import load_scenario
from penstock.runtime.scenario.modelled import load_modelled

FILE = Path(__file__).parents[2] / "scenarios" / "fully_async.yaml"
KEYS = [
    "filter.drop_zero_spread=false",
    "sampling.samples_per_group=4",
    "sampling.max_response_tokens=300",
    "learner.groups_per_batch=6",
    "engines.count=2",
    "engines.slots=8",
    "engines.progress_tokens=50",
    "learner.save_every=5",
    "run.num_steps=24",
    "engines.simulated.response_tokens_median=60",
    "engines.simulated.token_s=0.01",
    "learner.simulated.step_s=0.3",
]
SCENARIO = load_modelled(FILE, KEYS)[0]
NAMES = load_scenario(FILE, KEYS)


def test_rates_are_read() -> None:
    engines = ("engine/0", "engine/1")
    text = "preempt 0.05/h per engine, engine 2/min,learner 0.01 / h, machine 1/day, prompt_source 3/s"
    rates = [each for each in read_faults(text, NAMES) if isinstance(each, Rate)]
    assert [rate.targets for rate in rates] == [engines, engines, ("learner",), ("machine",), ("prompt_source",)]
    assert [rate.per_s for rate in rates] == pytest.approx([2 * 0.05 / 3600, 2 / 60, 0.01 / 3600, 1 / 86400, 3.0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "none is named"),
        ("preempt", "cannot read 'preempt'"),
        ("preempt 0.05", "WHAT TIMES/UNIT"),
        ("preempt -1/h", "cannot read"),
        ("preempt nan/h", "cannot read"),
        ("driver 1/h", "no 'driver' to be hit; there are buffer, engine"),
        ("preempt 99999/s per engine", "is more than ten a second for each that is hit"),
        ("learner 1/week", "a rate is per s, min, h, day; found week"),
        ("learner 1/h per engine", "write learner 1/h"),
        ("preempt 1/h per node", "only preempt and engine"),
        ("preempt 1/h learner 1/h", "cannot read"),
        ("kill:engine/2@0.5", "there is no 'engine/2' to be hit; there are"),
        ("kill:engine/0@1.5", "a share of the steps, between 0 and 1; found 1.5"),
        ("stop:buffer@0.5", "or kill:WHOM@SHARE"),
    ],
)
def test_rates_that_cannot_be_read_name_the_part_and_what_to_write(text: str, said: str) -> None:
    with pytest.raises(UserFault, match=f"--faults: .*{re.escape(said)}"):
        read_faults(text, NAMES)


def test_faults_come_as_often_as_was_asked() -> None:
    (rate,) = read_faults("buffer 2/min", NAMES)
    runs = [played(Job(SCENARIO, seed, (rate,))) for seed in range(12)]
    expected = 2 / 60 * sum(run.finish_s for run in runs)
    num_hits = sum(len(run.hits) for run in runs)
    assert expected > 10
    assert abs(num_hits - expected) < 4 * expected**0.5
    assert {hit.target for run in runs for hit in run.hits} == {"buffer"}
    assert all(list(run.hits) == sorted(run.hits, key=lambda hit: hit.at_s) for run in runs)
    assert all(0 <= hit.progress <= 1 and 0 < hit.at_s <= run.finish_s for run in runs for hit in run.hits)


def test_faults_come_at_the_moments_that_were_named_in_every_run() -> None:
    text = "kill:learner@0.7, kill:engine/1@0.25,machine@0.5"
    faults = read_faults(text, NAMES)
    assert faults == (Moment("learner", 0.7), Moment("engine/1", 0.25), Moment("machine", 0.5))
    with Workers(1) as workers:
        runs = rehearse(SCENARIO, faults, range(2), workers)
    for run in runs:
        assert run.completed
        assert [hit.target for hit in run.hits] == ["engine/1", "machine", "learner"]
        assert [hit.progress for hit in run.hits] == pytest.approx([0.25, 0.5, 0.7], abs=1 / SCENARIO.run.num_steps)
        assert run.steps_again > 0, "the learner had trained since its checkpoint"
        assert all(told.startswith(("kill:", "machine")) for told in chaos_faults(run))


def test_faults_cost_time_and_tokens_and_steps_since_the_checkpoint() -> None:
    rates = read_faults("preempt 2/min per engine, learner 2/min", NAMES)
    with Workers(1) as workers:
        runs = rehearse(SCENARIO, rates, range(5), workers)
    assert all(run.completed for run in runs)
    assert statistics.median(run.finish_s / run.undisturbed_s for run in runs) > 1.03
    assert statistics.median(run.effective for run in runs) < 0.97
    assert sum(run.tokens_lost for run in runs) > 0
    assert sum(run.steps_again for run in runs) > 0
    calm = played(Job(SCENARIO, 3, ()))
    assert (calm.finish_s, calm.hits, calm.tokens_lost, calm.steps_again) == (runs[3].undisturbed_s, (), 0, 0)


def test_the_same_seed_is_the_same_run_in_any_process() -> None:
    rates = read_faults("preempt 2/min per engine, machine 1/min", NAMES)
    found: list[list[Played]] = []
    for number in (1, 2):
        with Workers(number) as workers:
            found.append(rehearse(SCENARIO, rates, range(2), workers))
    assert found[0] == found[1]
    assert found[0][0].hits != found[0][1].hits


def test_a_run_that_does_not_complete_says_why() -> None:
    fragile = replace(SCENARIO, runtime=replace(SCENARIO.runtime, max_restarts=0))
    run = played(Job(fragile, 0, read_faults("learner 10/min", NAMES)))
    assert not run.completed
    assert "learner was lost" in run.story


def test_a_run_that_fails_by_itself_is_refused() -> None:
    broken = replace(
        SCENARIO, engines=replace(SCENARIO.engines, simulated=replace(SCENARIO.engines.simulated, failure_rate=1.0))
    )
    with Workers(1) as workers, pytest.raises(UserFault, match="does not complete without faults either"):
        rehearse(broken, read_faults("learner 1/h", NAMES), range(1), workers)


def run_of(finish_s: float, *hits: Hit) -> Played:
    return Played(
        seed=0, completed=True, story="", finish_s=finish_s, undisturbed_s=10.0, tokens_lost=0, steps_again=0,
        tokens_unused=0, hits=hits,
    )  # fmt: skip


def test_quantiles_are_runs_that_were_played() -> None:
    runs = [run_of(float(seconds)) for seconds in (5, 1, 4, 2, 3)]
    assert [quantile_of(runs, share).finish_s for share in (0.0, 0.5, 0.8, 0.95, 1.0)] == [1, 3, 4, 5, 5]
    assert run_of(9.0).effective == 1.0
    assert run_of(20.0).effective == 0.5


def test_faults_are_such_as_chaos_brings_about() -> None:
    run = run_of(50.0, Hit("engine/1", 1.0, 0.25), Hit("machine", 2.0, 0.5), Hit("learner", 3.0, 1.0))
    texts = list(chaos_faults(run))
    assert texts == ["kill:engine/1@0.250", "machine@0.500"]  # after the last step nothing is left to be hit
    planned = planned_faults(NAMES, texts, num_faults=None, seed=0)
    assert [(str(fault), fault.progress) for fault in planned] == [("kill:engine/1", 0.25), ("machine", 0.5)]


def test_the_command_shows_what_faults_cost_and_how_to_bring_them_about() -> None:
    words = ["rehearse", str(FILE), *KEYS, "--faults", "preempt 2/min per engine, learner 1/min"]
    words += ["--price", "engine=36,learner=72", "--seeds", "3", "--processes", "1"]
    shown = CliRunner().invoke(app, words, terminal_width=200)
    assert shown.exit_code == 0, (shown.output, shown.exception)
    for text in (
        "finish",
        "cost",
        "tokens lost",
        "steps trained again",
        "effective training time",
        "P95",
        "median",
        "worst",
    ):
        assert text in shown.output, text
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert told["hourly"] == 2 * 36 + 72
    by_seed = {run["seed"]: run for run in told["runs"]}
    worst = max(by_seed.values(), key=lambda run: run["finish_s"])
    calls = [shlex.split(line) for line in shown.output.splitlines() if "penstock chaos" in line]
    call = next(each for each in calls if each[-1] == str(worst["seed"]))
    assert call[2 : 3 + len(KEYS)] == [str(FILE), *KEYS]
    texts = call[call.index("--faults") + 1].split(",")
    assert len(texts) == sum(hit["progress"] < 1 for hit in worst["hits"]) > 0
    assert len(planned_faults(NAMES, texts, num_faults=None, seed=0)) == len(texts)


def test_the_command_says_which_runs_were_not_completed() -> None:
    words = ["rehearse", str(FILE), *KEYS, "runtime.max_restarts=0", "--faults", "learner 10/min", "--seeds", "1"]
    shown = CliRunner().invoke(app, [*words, "--processes", "1"], terminal_width=200)
    assert shown.exit_code == 1
    assert "not completed seed 0 of 1" in shown.output
    assert "kill:learner@" in shown.output


def test_a_program_rehearses_as_the_command_does() -> None:
    overrides = {key: json.loads(value) for key, _, value in (each.partition("=") for each in KEYS)}
    found = api.rehearse(FILE, "kill:engine/1@0.5", overrides, num_seeds=2, seed=3, price=2)
    expected = read_faults("kill:engine/1@0.5", NAMES)
    with Workers(1) as workers:
        assert list(found.runs) == rehearse(SCENARIO, expected, range(3, 5), workers)
    assert found.completed == list(found.runs)
    assert found.hourly == 2 * (2 + NAMES.learner.num_ranks)
    with pytest.raises(UserFault, match=r"run\.only"):
        api.rehearse(FILE, "learner 1/h", {"run.only": "learner", "run.batches_from": "somewhere"})
