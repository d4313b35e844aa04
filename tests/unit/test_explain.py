"""``penstock explain``: the rules on measured facts, and a whole explanation of a simulated run."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import asdict, replace
from typer.testing import CliRunner

from penstock.backends.ledger.kept_samples import KeptSample
from penstock.backends.ledger.tables import SCHEMA_VERSION
from penstock.messages.errors import UserFault
from penstock.messages.training import Activity, Balance, CauseCount, UpdateMode
from penstock.runtime.cli.app import app
from penstock.runtime.hosts.virtual.simulate import simulated as played
from penstock.runtime.observability.explain import explain
from penstock.runtime.observability.explain.alarms import Lengths, alarms_of, length_bias
from penstock.runtime.observability.explain.bindings import bindings_of, costs_of
from penstock.runtime.observability.explain.bounds import bound_of
from penstock.runtime.observability.explain.causes import Cause
from penstock.runtime.observability.explain.cores import core_time
from penstock.runtime.observability.explain.facts import CoreTime, EngineTime, Facts, LearnerTime, SampleTimes, Waits
from penstock.runtime.observability.explain.waits import Moments, waits_of
from penstock.runtime.observability.report import render_report
from penstock.runtime.observability.summary import read_summary, write_summary
from penstock.runtime.observability.traces import SpanRow
from penstock.runtime.observability.trackers import ActivityRow, StepRow
from penstock.runtime.scenario.load import load_scenario

SYNC = Path(__file__).parents[2] / "scenarios" / "sync.yaml"
SAMPLES = SampleTimes(
    num_samples=100, rows=0.01, placing=0.0, queue=0.0, generate=0.5, generate_median=0.5, generate_longest=0.6,
    score=0.01, swap=0.0, announce=0.01,
)  # fmt: skip


def engine(
    name: str, occupied: float, *, outside: float = 0.0, down: float = 0.0, tokens_per_s: float | None = 100.0
) -> EngineTime:
    return EngineTime(
        name=name, occupied=occupied, outside=outside, working=occupied, for_demand=1 - occupied - down,
        for_weights=0.0, asleep=0.0, down=down, tokens_per_s=tokens_per_s,
    )  # fmt: skip


def learner(training: float, *, publishing: float = 0.0, checkpointing: float = 0.0, down: float = 0.0) -> LearnerTime:
    waiting = 1 - training - publishing - checkpointing - down
    return LearnerTime(
        training=training, waiting=waiting, publishing=publishing, checkpointing=checkpointing, down=down
    )


def facts(**changes: Any) -> Facts:  # noqa: ANN401 - any field
    """Of a balanced run with two engines, but for the changes."""
    balanced = Facts(
        first_step=5, last_step=20, step_s=1.0, policy="fully_async", max_staleness=2,
        update_mode=UpdateMode.IN_FLIGHT, groups_per_batch=8,
        samples_per_group=4, max_concurrent=None, target_outstanding=None, num_slots=32, is_colocated=False,
        learner=learner(0.95), engines=(engine("engine/0", 0.95), engine("engine/1", 0.95)), samples=SAMPLES,
        waits=Waits(full=1.0), outstanding=20.0, in_generation=10.0, rejected=0.0, evaluated=0.0,
    )  # fmt: skip
    return replace(balanced, **changes)


HALF_EMPTY = (engine("engine/0", 0.4), engine("engine/1", 0.4))
IDLE = {"learner": learner(0.4), "engines": HALF_EMPTY}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, Cause.HARDWARE),
        ({"learner": learner(0.4)}, Cause.FEW_ENGINES),
        ({"learner": learner(0.4), "rejected": 0.7}, Cause.FILTER),
        ({"learner": learner(0.4), "engines": (engine("engine/0", 0.1, outside=0.8),)}, Cause.SLOW_TOOL),
        ({"learner": learner(0.4), "evaluated": 0.5}, Cause.EVALUATION),
        ({"learner": learner(0.7), "engines": (engine("engine/0", 1.0), engine("engine/1", 1.0, tokens_per_s=40.0))},
         Cause.SLOW_ENGINE),
        ({"engines": HALF_EMPTY}, Cause.HEAVY_LEARNER),
        ({"learner": learner(0.6, publishing=0.4)}, Cause.SLOW_PUBLISH),
        ({"learner": learner(0.6, checkpointing=0.4)}, Cause.CHECKPOINTS),
        ({"learner": learner(0.6, down=0.4)}, Cause.LOST_TIME),
        ({"learner": learner(0.6), "engines": (engine("engine/0", 0.9), engine("engine/1", 0.2, down=0.7))},
         Cause.LOST_TIME),
        (IDLE | {"waits": Waits(score=0.8, generate=0.2)}, Cause.SLOW_REWARD),
        (IDLE | {"waits": Waits(rows=0.8, generate=0.2)}, Cause.SLOW_ROWS),
        (IDLE | {"waits": Waits(early=0.8, generate=0.2)}, Cause.EARLY_BOUND),
        (IDLE | {"waits": Waits(tail=0.8, generate=0.2)}, Cause.LONG_TAIL),
        (IDLE | {"waits": Waits(announce=0.8, generate=0.2)}, Cause.SLOW_PUBLISH),
        (IDLE | {"waits": Waits(weights=0.8, generate=0.2)}, Cause.SLOW_PUBLISH),
        (IDLE | {"waits": Waits(generate=1.0)}, Cause.SMALL_BOUND),
        (IDLE | {"waits": Waits(nothing=1.0)}, Cause.SMALL_BOUND),
        (IDLE | {"waits": Waits(generate=1.0), "max_concurrent": 10}, Cause.LOW_CONCURRENCY),
        (IDLE | {"waits": Waits(generate=1.0), "target_outstanding": 20}, Cause.LOW_CONCURRENCY),
        (IDLE | {"waits": Waits(generate=1.0), "max_concurrent": 40}, Cause.SMALL_BOUND),
        (IDLE | {"waits": Waits(generate=1.0), "engines": (engine("engine/0", 0.1, outside=0.3),)}, Cause.SLOW_TOOL),
        (IDLE | {"waits": Waits(generate=1.0), "rejected": 0.8}, Cause.FILTER),
        (IDLE | {"waits": None, "samples": None}, Cause.UNKNOWN),
        ({"cores": CoreTime(learner=0.3, engines=0.3, used=2.0)}, Cause.FEW_CORES),
        ({"learner": learner(0.4), "cores": CoreTime(learner=0.1, engines=0.2, used=2.0)}, Cause.FEW_ENGINES),
    ],
)  # fmt: skip
def test_the_dearest_cause_comes_first(changes: dict[str, Any], cause: Cause) -> None:
    found = bindings_of(facts(**changes))
    assert found[0].cause is cause, [(each.cause, each.share) for each in found]
    assert found[0].binds is (cause is not Cause.HARDWARE)
    assert found[0].evidence
    assert all(each.source for each in found[0].evidence)


def test_what_the_learner_waits_for_adds_up_to_its_wait() -> None:
    waits = Waits(full=0.3, rows=0.1, placing=0.05, early=0.1, weights=0.05, generate=0.2, tail=0.1, score=0.1)
    of = facts(**IDLE, waits=waits, rejected=0.2)
    assert sum(costs_of(of).values()) == pytest.approx(of.learner.waiting * of.step_s)


def test_a_cause_below_the_floor_is_told_and_does_not_bind() -> None:
    found = bindings_of(facts(learner=learner(0.85, publishing=0.1)))
    assert [(each.cause, each.binds) for each in found] == [(Cause.HARDWARE, False), (Cause.SLOW_PUBLISH, False),
                                                            (Cause.FEW_ENGINES, False)]  # fmt: skip


def step(version: int, at_s: float, cpu_s: dict[str, float], core_wait_s: dict[str, float]) -> StepRow:
    return StepRow(
        version=version, at_s=at_s, num_steps=30, metrics={}, staleness_counts=(), response_lengths=(), group_ids=(),
        balance=Balance(issued=0, in_system=0, ended=()), cpu_s=cpu_s, core_wait_s=core_wait_s,
    )  # fmt: skip


def test_without_a_core_work_is_longer_by_the_share_of_its_threads_wait() -> None:
    engines = (engine("engine/0", 0.8), engine("engine/1", 0.4))
    rows = [
        step(5, 10.0, {"learner": 5.0, "engine_worker": 9.0}, {"learner": 1.0, "engine_worker": 1.0}),
        step(6, 15.0, {"learner": 7.0, "engine_worker": 10.0}, {"learner": 2.0, "engine_worker": 5.0}),
        step(7, 20.0, {"learner": 8.0, "engine_worker": 12.0}, {"learner": 4.0, "engine_worker": 10.0}),
    ]
    found = core_time(rows, learner(0.9), engines)
    assert found is not None
    assert found.used == pytest.approx((3.0 + 3.0) / 10)
    assert found.learner == pytest.approx(3.0 / 10), "0.9 · 3 ÷ (3 + 3), and its threads waited for 3 s of 10 at most"
    assert found.engines == pytest.approx(0.6 * 9.0 / (3.0 + 9.0)), "9 s of two engines in 10 s would be as much"
    costs = costs_of(facts(learner=learner(0.9), engines=engines, cores=found))
    assert costs[Cause.FEW_CORES] == pytest.approx(found.learner + 0.1), "what was hidden behind the training is free"
    assert core_time([step(5, 10.0, {}, {}), step(7, 20.0, {}, {})], learner(0.9), engines) is None


# --- the bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "eta", "least", "most", "active"),
    [
        (UpdateMode.DRAIN, 0, 0.5 + 0.3 + 0.1, 0.5 + 0.3 + 0.1 + 0.6, "both, one after the other"),
        (UpdateMode.DRAIN, 1, 0.5, 0.5 + 0.6, "generation"),
        (UpdateMode.IN_FLIGHT, 2, 0.5, 0.5 + 0.2, "generation"),
    ],
)
def test_the_bound_of_each_schedule(mode: UpdateMode, eta: int, least: float, most: float, active: str) -> None:
    engines = (engine("engine/0", 0.5), engine("engine/1", 0.5))
    bound = bound_of(facts(update_mode=mode, max_staleness=eta, learner=learner(0.3, publishing=0.1), engines=engines))
    assert bound.least_s == pytest.approx(least)
    assert bound.most_s == pytest.approx(most)
    assert bound.active == active


def test_the_slack_is_that_of_the_smaller_term() -> None:
    bound = bound_of(facts(learner=learner(0.9), engines=(engine("engine/0", 0.3), engine("engine/1", 0.3))))
    assert bound.active == "training"
    assert bound.slack_s == pytest.approx(0.9 - (0.3 + 0.6 / 3))


# --- moments ---------------------------------------------------------------------------------------------------------


def row(actor: str, activity: Activity, start_s: float, end_s: float, occupancy: float = 1.0) -> ActivityRow:
    return ActivityRow(actor=actor, epoch=1, activity=activity, start_s=start_s, end_s=end_s, occupancy=occupancy)


def span(name: str, actor: str, start_s: float, end_s: float, **attributes: float) -> SpanRow:
    return SpanRow(
        actor=actor, epoch=1, name=name, trace_id="", span_id="", parent_id="", start_ns=round(1e9 * start_s),
        end_ns=round(1e9 * end_s), attributes=dict(attributes),
    )  # fmt: skip


def test_each_moment_of_the_wait_is_for_what_samples_were_in() -> None:
    lanes = {
        "learner": [row("learner", Activity.WAITING_FOR_SAMPLES, 0, 10), row("learner", Activity.WORKING, 10, 20)],
        "engine/0": [row("engine/0", Activity.WORKING, 0, 2), row("engine/0", Activity.WORKING, 2, 20, 0.2)],
        "engine/1": [row("engine/1", Activity.WORKING, 0, 2), row("engine/1", Activity.WAITING_FOR_DEMAND, 2, 20)],
    }
    spans = [
        span("generate", "engine/0", 0, 5),  # beyond twice the median from 4 on
        span("queue", "engine/0", 3, 4),
        span("score", "scorer", 5, 6),
        span("issue", "prompt_source", 6, 8, row_wait_s=1.0),
        span("version", "weight_publisher", 8, 9),
        span("generate", "engine/0", 10, 20),  # nobody waits for it
    ]
    found = waits_of(Moments(0, 20), lanes, spans, [(0, 8)], offset_s=0.0, median_s=2.0, capacity=0.5)
    assert found is not None
    expected = Waits(full=0.2, generate=0.15, early=0.05, tail=0.1, score=0.1, rows=0.1, placing=0.1, announce=0.1,
                     nothing=0.1)  # fmt: skip
    assert asdict(found) == pytest.approx(asdict(expected), abs=0.005)


def test_slots_that_are_all_in_use_do_not_bind_where_no_sample_wants_another() -> None:
    lanes = {
        "learner": [row("learner", Activity.WAITING_FOR_SAMPLES, 0, 10)],
        "engine/0": [row("engine/0", Activity.WORKING, 0, 10)],
    }
    spans = [span("generate", "engine/0", 0, 10)]
    for capacity, expected in ((0.5, Waits(full=1.0)), (1.0, Waits(generate=1.0))):
        found = waits_of(Moments(0, 10), lanes, spans, [(0, 10)], offset_s=0.0, median_s=9.0, capacity=capacity)
        assert found == expected


def test_a_slot_that_an_episode_holds_is_not_free() -> None:
    held = msgspec.structs.replace(row("engine/0", Activity.WAITING_FOR_TOOLS, 0, 10), outside=1.0)
    lanes = {"learner": [row("learner", Activity.WAITING_FOR_SAMPLES, 0, 10)], "engine/0": [held]}
    found = waits_of(Moments(0, 10), lanes, [], [(0, 10)], offset_s=0.0, median_s=1.0, capacity=0.5)
    assert found == Waits(full=1.0)


def test_a_learner_that_never_waits_waits_for_nothing() -> None:
    lanes = {"learner": [row("learner", Activity.WORKING, 0, 10)], "engine/0": []}
    assert waits_of(Moments(0, 10), lanes, [], [], offset_s=0.0, median_s=1.0, capacity=1) is None


# --- a whole run -----------------------------------------------------------------------------------------------------

SIMULATED: dict[str, dict[str, Any]] = {
    "run": {"name": "simulated", "num_steps": 20},
    "data": {"path": "lines:500"},
    "sampling": {"samples_per_group": 4, "max_response_tokens": 200},
    "engines": {"backend": "simulated", "slots": 8, "simulated": {
        "response_tokens_median": 100, "response_tokens_sigma": 0.0, "prefill_s": 0.0, "token_s": 0.01,
        "token_load_s": 0.0, "apply_weights_s": 0.0, "fetch_weights_s": 0.0}},
    "learner": {"backend": "simulated", "groups_per_batch": 2, "save_every": 1000,
                "simulated": {"step_s": 0.5, "publish_s": 0.1}},
}  # fmt: skip


def simulated(folder: Path, **blocks: dict[str, Any]) -> Path:
    scenario = {name: {**SIMULATED.get(name, {}), **blocks.get(name, {})} for name in {*SIMULATED, *blocks}}
    file = folder / "given.yaml"
    file.write_text(yaml.safe_dump(scenario))
    played(load_scenario(file), seed=0, run_folder=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("explained"), staleness={"policy": "sync"})


@pytest.mark.parametrize(
    ("policy", "expected_s"),
    [("sync", 1.0 + 0.5 + 0.1), ("one_step_off", 1.0), ("fully_async", 1.0)],
)
def test_a_simulated_schedule_keeps_its_bound(policy: str, expected_s: float, tmp_path: Path) -> None:
    """A batch takes one second of one engine with all its slots, half a second of training, a tenth to export."""
    bound = explain(simulated(tmp_path, staleness={"policy": policy})).bound
    assert bound is not None
    assert bound.generation_s == pytest.approx(1.0, rel=0.05)
    assert bound.training_s == pytest.approx(0.5, rel=0.02)
    assert bound.least_s <= bound.measured_s * 1.001
    assert bound.least_s == pytest.approx(expected_s, rel=0.05)
    assert bound.measured_s <= expected_s + 1.0, "the longest response adds its length at most"


def test_without_ledger_and_traces_it_says_what_is_not_known(folder: Path) -> None:
    found = explain(folder)
    assert any("ledger.sqlite" in text for text in found.missing)
    assert any("observability.tracing" in text for text in found.missing)
    assert found.typical is None
    assert found.bound is not None
    assert found.bound.tail_s is None
    assert {lane.name for lane in found.lanes} == {"learner", "engine/0", "scorer"}
    assert all(sum(lane.percentages.values()) == pytest.approx(100) for lane in found.lanes)


def test_the_command_prints_for_people_and_as_json(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["explain", str(folder)])
    assert shown.exit_code == 0, shown.output
    found = json.loads(CliRunner().invoke(app, ["explain", str(folder), "--json"]).output)
    assert found["headline"] in shown.output
    dearest = found["bindings"][0]
    cost = f"{dearest['cost_s']:.3g} s of a step of {found['facts']['step_s']:.3g} s"
    assert found["headline"] == f"{dearest['cause']}: up to {cost}"
    for knob in found["knobs"]:
        assert f"{knob['key']}: {knob['change']}  a step then takes {knob['step_s']:.3g} s or more" in shown.output
    for binding in found["bindings"]:
        assert binding["cause"] in shown.output
        assert all(each["source"] in shown.output for each in binding["evidence"])
    assert "Bound: g + L + t + s" in shown.output


def test_the_report_says_what_binds(folder: Path) -> None:
    html = render_report(folder)
    assert "<h2>What binds</h2>" in html
    assert explain(folder).headline in html


def test_the_time_between_two_drives_is_no_steps(folder: Path, tmp_path: Path) -> None:
    for name in ("scenario.yaml", "activity.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    for row in rows[:8]:  # of a drive that was stopped 500 s before the next one began
        row["at_s"] -= 500.0
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    resumed, whole = explain(tmp_path).facts, explain(folder).facts
    assert resumed is not None
    assert whole is not None
    assert resumed.first_step > 8
    assert resumed.step_s == pytest.approx(whole.step_s, rel=0.1)
    assert resumed.learner.down == pytest.approx(0.0)


def test_of_the_first_steps_nothing_is_said(folder: Path, tmp_path: Path) -> None:
    for name in ("scenario.yaml", "activity.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    found = explain(tmp_path)
    assert (found.facts, found.bindings, found.knobs) == (None, (), ())
    assert "not known" in found.headline
    assert found.missing
    summary = read_summary(folder)
    assert summary is not None
    write_summary(tmp_path, msgspec.structs.replace(summary, completed=False, story="every reward failed"))
    assert explain(tmp_path).headline == f"{found.headline}. The run did not complete: every reward failed"


def test_a_folder_that_is_none_or_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"scenario\.yaml"):
        explain(tmp_path)
    (tmp_path / "scenario.yaml").write_text("run: {num_steps: many}\n")
    with pytest.raises(UserFault, match=r"scenario\.yaml"):
        explain(tmp_path)
    (tmp_path / "scenario.yaml").write_bytes((folder / "scenario.yaml").read_bytes())
    (tmp_path / "ledger.sqlite").write_bytes(b"no ledger" * 1000)
    (tmp_path / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    with pytest.raises(UserFault, match=r"ledger\.sqlite"):
        explain(tmp_path)


# --- alarms ----------------------------------------------------------------------------------------------------------


def steps(num: int, **metrics: float) -> list[StepRow]:
    ended = (CauseCount(state="trained", cause="", num_samples=90, num_tokens=9000),
             CauseCount(state="failed", cause="scoring_failed", num_samples=10, num_tokens=1000))  # fmt: skip
    balance = Balance(issued=100, in_system=0, ended=ended if metrics.pop("fails", 0) else ended[:1])
    return [
        StepRow(version=version, at_s=float(version), num_steps=num, metrics=dict(metrics), staleness_counts=(32,),
                response_lengths=(), group_ids=(), balance=balance)
        for version in range(1, num + 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        ({}, None),
        ({"train/mismatch_alarm": 1.0, "train/fresh_logprob_abs_diff": 0.3}, "mismatch"),
        ({"train/ess_ratio": 0.2}, "effective sample size"),
        ({"train/ess_ratio": 0.9}, None),
        ({"train/ess_ratio": 0.2, "train/log_ratio_abs": 0.1, "train/heavy_weight": 0.2}, "effective sample size"),
        ({"train/ess_ratio": 0.2, "train/log_ratio_abs": 0.1, "train/heavy_weight": 0.01}, None),
        ({"buffer/announced_lag": 4.0}, "publish lag"),
        ({"buffer/announced_lag": 1.0}, None),
        ({"buffer/ready_groups": 8.0}, "back-pressure"),
        ({"fails": 1.0}, "failing reward"),
    ],
)
def test_an_alarm_has_its_figure(metrics: dict[str, float], name: str | None, folder: Path, tmp_path: Path) -> None:
    scenario = load_scenario(folder / "scenario.yaml")
    found = alarms_of(tmp_path, scenario, steps(12, **metrics))
    assert [alarm.name for alarm in found] == ([] if name is None else [name])


def test_a_reward_that_falls_is_a_collapse(folder: Path, tmp_path: Path) -> None:
    rows = [
        replace(row, metrics={"rollout/raw_reward": 0.8 if row.version <= 20 else 0.1, "rollout/raw_reward_std": 0.4})
        for row in steps(40)
    ]
    scenario = load_scenario(folder / "scenario.yaml")
    assert [alarm.name for alarm in alarms_of(tmp_path, scenario, rows)] == ["reward collapse"]
    assert not alarms_of(tmp_path, scenario, rows[:20])


@pytest.mark.parametrize("spread", [0.0, 0.17], ids=["without their spread", "with their spread"])
def test_rewards_near_0_that_vary_by_chance_are_no_collapse(folder: Path, tmp_path: Path, spread: float) -> None:
    rows = [  # one right answer of 32 in two of the steps
        replace(row, metrics={"rollout/raw_reward": reward, "rollout/raw_reward_std": spread if reward else 0.0})
        for row in steps(40)
        for reward in [1 / 32 if row.version in (14, 17) else 0.0]
    ]
    assert not alarms_of(tmp_path, load_scenario(folder / "scenario.yaml"), rows)


def test_a_term_that_never_moved_is_named(tmp_path: Path) -> None:
    scenario = load_scenario(SYNC, ["learner.objective.kl_coef=0.1"])
    (alarm,) = alarms_of(tmp_path, scenario, steps(4))
    assert alarm.name == "terms without effect"
    assert "learner.objective.kl_coef" in alarm.text
    assert not alarms_of(tmp_path, scenario, steps(4, **{"train/kl_loss": 0.2}))


def test_lengths_that_are_dropped_are_a_bias() -> None:
    assert length_bias(Lengths(100, 50.0, 100, 150.0)) is not None
    assert length_bias(Lengths(100, 50.0, 100, 52.0)) is None
    assert length_bias(Lengths(100, 50.0, 3, 150.0)) is None


def test_rows_with_the_same_prompt_are_duplicates(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[KeptSample] = []

    def read(_: Path) -> list[KeptSample]:
        return kept

    monkeypatch.setattr("penstock.runtime.observability.explain.alarms.read_kept", read)
    scenario = load_scenario(folder / "scenario.yaml")
    for prompts, names in (("abc", []), ("aba", ["duplicate prompts"])):
        kept = [KeptSample(group_id=n, index=0, kept_at=0.0, row=n, prompt=text) for n, text in enumerate(prompts)]
        kept.append(KeptSample(group_id=9, index=0, kept_at=0.0, row=0, prompt=prompts[0]))  # of another epoch
        assert [alarm.name for alarm in alarms_of(tmp_path, scenario, steps(4))] == names


def test_the_lengths_are_the_ledgers(folder: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        database.execute("CREATE TABLE samples (state TEXT, num_tokens INTEGER)")
        rows = [("trained", 10)] * 100 + [("stale", 100)] * 100 + [("evaluated", 900)] * 50
        database.executemany("INSERT INTO samples VALUES (?, ?)", rows)
        database.commit()
    (alarm,) = alarms_of(tmp_path, load_scenario(folder / "scenario.yaml"), steps(4))
    assert alarm.name == "length bias"
    assert [each.value for each in alarm.evidence] == [10.0, 55.0]


def test_alarms_come_in_order_and_take_the_knobs_away(folder: Path, tmp_path: Path) -> None:
    assert explain(folder).knobs
    for name in ("scenario.yaml", "activity.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    for each in rows:
        each["metrics"] |= {"train/mismatch_alarm": 1.0, "train/ess_ratio": 0.1}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    found = explain(tmp_path)
    assert [alarm.name for alarm in found.alarms] == ["mismatch", "effective sample size"]
    assert found.knobs == ()
    assert found.bindings, "what binds is told all the same"
