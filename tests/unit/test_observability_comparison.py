"""``penstock compare``: arms and their spread, figures at equal points, what is no fair comparison, the page."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from test_observability_report import FACTS, SCRIPT, SYNC, Page, finished, policy, run, sha256, step, switched
from typer.testing import CliRunner

from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.training import Balance, CauseCount
from penstock.runtime.cli.app import app
from penstock.runtime.observability.compared_runs import read_arms
from penstock.runtime.observability.comparison import Comparison, compare_arms, compare_runs
from penstock.runtime.observability.comparison_page import write_comparison
from penstock.runtime.observability.comparison_texts import arms_table, figures_tables
from penstock.runtime.observability.courses import Axis, Points
from penstock.runtime.observability.evaluations import EvaluationRow
from penstock.runtime.observability.facts import Package, RunFacts, Start, write_start
from penstock.runtime.observability.recorder import RunRecorder
from penstock.runtime.observability.summary import read_summary, write_summary
from penstock.runtime.observability.trackers import MetricsLog, StepRow

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.observability.comparison import ArmFigure

RECORD = {"name": "x", "pid": 1, "start_ticks": 0, "boot_id": "another", "started_at": 0.0}
SCENARIO = "run:\n  name: {name}\n  seed: {seed}\nstaleness:\n  policy: {policy}\n"
AT = "2026-08-01T12:00:00+00:00"


def made(
    folder: Path,
    rewards: Sequence[float],
    *,
    seed: int = 0,
    policy: str = "sync",
    tokens: int = 100,
    filtered: int = 0,
    seconds: float = 1.0,
    facts: RunFacts = FACTS,
    at: str = AT,
    extra: str = "",
) -> Path:
    """A run with a step for each reward, each of so many trained and filtered tokens, and so many seconds."""
    folder.mkdir()
    scenario = SCENARIO.format(name=json.dumps(folder.name), seed=seed, policy=policy)
    (folder / "scenario.yaml").write_text(scenario + extra)
    (folder / "run.json").write_text(json.dumps(RECORD))
    write_start(folder, Start(at=at, facts=facts))
    log = MetricsLog(folder)
    for version, reward in enumerate(rewards, start=1):
        ended = (
            CauseCount(state="trained", cause="", num_samples=version, num_tokens=version * tokens),
            CauseCount(state="filtered", cause="zero_spread", num_samples=version, num_tokens=version * filtered),
        )
        row = StepRow(
            version=version,
            at_s=5 + version * seconds,
            num_steps=len(rewards),
            metrics={"rollout/raw_reward": reward},
            staleness_counts=(1, 1) if policy == "sync" else (0, 0, 2),
            response_lengths=(tokens,),
            group_ids=(version,),
            balance=Balance(issued=2 * version, in_system=0, ended=ended),
            training_s=version * seconds,
        )
        log.append(row)
    log.close()
    return folder


def evaluated(folder: Path, **values: float) -> None:
    """Evaluations of ``v<version>=value``."""
    log = MetricsLog(folder)
    for number, (version, value) in enumerate(values.items()):
        metrics = {"eval/sums/reward_mean": value}
        log.append(EvaluationRow(evaluation=number, version=int(version[1:]), at_s=900.0, metrics=metrics))
    log.close()


def figure(comparison: Comparison, axis: Axis, name: str) -> tuple[ArmFigure | None, ...]:
    (point,) = (point for point in comparison.equal if point.axis is axis)
    return next(each.arms for each in point.figures if each.name == name)


def means(comparison: Comparison, axis: Axis, name: str) -> list[object]:
    """For a comparison with numbers; nearly equal is equal."""
    return [None if arm is None else pytest.approx(arm.mean) for arm in figure(comparison, axis, name)]


# --- arms --------------------------------------------------------------------------------------------------------


def test_runs_that_differ_in_the_seed_alone_are_one_arm_with_a_spread(tmp_path: Path) -> None:
    rewards = {"a": [0.2] * 12, "b": [0.4] * 12, "c": [0.9] * 12}
    seeds = [made(tmp_path / name, found, seed=seed) for seed, (name, found) in enumerate(rewards.items())]
    other = made(tmp_path / "other", [0.5] * 12, policy="fully_async")
    comparison = compare_runs([seeds[0], other, *seeds[1:]])
    assert [[one.name for one in arm.runs] for arm in comparison.arms] == [["a", "b", "c"], ["other"]]
    several, alone = figure(comparison, Axis.STEPS, "reward")
    assert several is not None
    assert alone is not None
    assert several.mean == pytest.approx(0.5)
    assert several.std == pytest.approx(0.3605551)
    assert [several.smallest, several.largest] == pytest.approx([0.2, 0.9])
    assert alone.mean == pytest.approx(0.5)
    assert (several.num_runs, alone.std, alone.num_runs) == (3, None, 1)
    table = figures_tables(comparison)[0]
    assert table.head == ["", "arm A, n = 3", "arm B, n = 1"]
    assert table.rows[0] == ["reward", "0.5 ± 0.36", "0.5"]
    assert "Of arm B there is one run, so nothing says how much of a difference is chance." in comparison.cautions


def test_the_same_scenario_on_another_machine_is_another_arm_and_its_wall_time_no_fair_comparison(
    tmp_path: Path,
) -> None:
    machine = msgspec.structs.replace(FACTS.machine, gpus=("NVIDIA H100",))
    packages = (Package("Penstock", "1.0"), Package("torch", "2.14"))
    there = [
        made(tmp_path / "cpu", [0.1] * 3),
        made(tmp_path / "gpu", [0.1] * 3, facts=msgspec.structs.replace(FACTS, machine=machine)),
        made(tmp_path / "newer", [0.1] * 3, facts=msgspec.structs.replace(FACTS, packages=packages)),
        made(tmp_path / "model", [0.1] * 3, facts=msgspec.structs.replace(FACTS, model="another")),
    ]
    comparison = compare_runs(there)
    assert len(comparison.arms) == 4
    assert [each.name for each in comparison.circumstances] == ["model", "machine", "software"]
    said = ("not train the same model", "same kind of machine", "different versions of software")
    assert [words in text for words, text in zip(said, comparison.cautions, strict=False)] == [True] * 3
    assert not compare_runs([there[0], made(tmp_path / "again", [0.1] * 3, seed=1)]).circumstances


def test_all_keys_that_differ_are_named_also_inside_lists_and_beyond_what_a_line_shows(tmp_path: Path) -> None:
    long = "x" * 100
    one = made(tmp_path / "one", [0.1] * 2, extra=f"data:\n  path: {long}a\n  of: [{{w: 1}}, {{w: 2}}]\n")
    other = made(tmp_path / "other", [0.1] * 2, extra=f"data:\n  path: {long}b\n  of: [{{w: 1}}, {{w: 3}}]\n")
    keys = {each.name: each.values for each in compare_runs([one, other]).keys}
    assert keys == {
        "run.name": (("one",), ("other",)),
        "data.path": ((f"{long}a",), (f"{long}b",)),
        "data.of[1].w": (("2",), ("3",)),
    }


# --- equal points ------------------------------------------------------------------------------------------------


def test_figures_are_those_where_all_runs_have_come_equally_far(tmp_path: Path) -> None:
    """The second has half the tokens, a quarter of the time, and a fifth of its tokens filtered."""
    slow = made(tmp_path / "slow", [n / 20 for n in range(1, 21)], tokens=100, seconds=4.0)
    quick = made(
        tmp_path / "quick", [n / 80 for n in range(1, 41)], policy="fully_async", tokens=40, filtered=10, seconds=1.0
    )
    found = compare_runs([slow, quick])
    assert [(point.axis, point.at, point.farthest_of) for point in found.equal] == [
        ("steps", 20, "slow"),
        ("tokens", 2000, "quick"),
        ("wall_time", 40, "quick"),
    ]
    assert means(found, Axis.STEPS, "reward") == [15.5 / 20, 15.5 / 80]  # the means of steps 11 to 20
    assert means(found, Axis.STEPS, "training_s") == [80, 20]
    assert means(found, Axis.STEPS, "tokens") == [2000, 1000]
    assert means(found, Axis.TOKENS, "steps") == [20, 40]
    assert means(found, Axis.TOKENS, "reward") == [15.5 / 20, 35.5 / 80]
    assert means(found, Axis.WALL_TIME, "steps") == [10, 40]
    assert means(found, Axis.WALL_TIME, "tokens_per_s") == [25, 50]
    assert means(found, Axis.WALL_TIME, "trained_tokens_per_s") == [25, 40]
    assert means(found, Axis.WALL_TIME, "step_time_s") == [4, 1]
    assert means(found, Axis.WALL_TIME, "goodput") == [1, 0.8]
    assert means(found, Axis.WALL_TIME, "waste") == [0, 0.2]
    assert means(found, Axis.WALL_TIME, "waste/filtered: zero_spread") == [0, 0.2]
    assert means(found, Axis.STEPS, "mean_age") == [0.5, 2]
    assert means(found, Axis.STEPS, "largest_age") == [1, 2]


def test_a_value_between_two_measured_points_is_on_their_line_and_beyond_them_there_is_none(tmp_path: Path) -> None:
    points = Points([1.0, 3.0, 3.0, 5.0], [10.0, 20.0, 40.0, 0.0])
    assert [points.at(x) for x in (1.0, 2.0, 3.0, 4.5, 5.0)] == [10, 15, 20, 10, 0]
    assert [points.at(x) for x in (0.99, 5.01)] == [None, None]
    assert Points([], []).at(0.0) is None
    one, other = made(tmp_path / "one", [0.5] * 20), made(tmp_path / "other", [0.5] * 20, policy="fully_async")
    evaluated(one, v0=0.0, v20=1.0)
    evaluated(other, v0=0.0, v10=1.0)
    found = compare_runs([one, other])
    assert means(found, Axis.STEPS, "sums: reward_mean") == [1.0, None]  # not measured after step 10
    third = made(tmp_path / "third", [0.5] * 5, policy="one_step_off")
    found = compare_runs([one, other, third])
    assert means(found, Axis.TOKENS, "sums: reward_mean") == [0.25, 0.5, None]


def test_a_mean_is_of_all_runs_of_an_arm_or_there_is_none(tmp_path: Path) -> None:
    folders = [made(tmp_path / name, [0.5] * 4, seed=seed) for seed, name in enumerate("abc")]
    evaluated(folders[0], v4=1.0)
    evaluated(folders[1], v4=0.0)
    assert means(compare_runs(folders[:2]), Axis.STEPS, "sums: reward_mean") == [0.5]
    names = [each.name for each in compare_runs(folders).equal[0].figures]
    assert "sums: reward_mean" not in names


def test_what_it_took_to_reach_the_reward_that_all_reach(tmp_path: Path) -> None:
    rising = [n / 100 for n in range(101)]
    quick = [made(tmp_path / f"q{seed}", rising, seed=seed, seconds=0.5 + seed) for seed in (0, 1)]
    low = made(tmp_path / "low", [n / 200 for n in range(101)], policy="fully_async", tokens=10)
    found = compare_runs([*quick, low]).reached
    assert found is not None
    assert found.reward == pytest.approx(95.5 / 200)
    assert (found.num_steps, found.num_reached) == (10, (2, 1))
    took = {each.name: each.arms for each in found.figures}
    steps, seconds = took["steps"], took["training_s"]
    assert [arm and arm.mean for arm in steps] == [pytest.approx(53.25), pytest.approx(101)]
    assert [arm and arm.mean for arm in seconds] == [pytest.approx(53.25), pytest.approx(101)]
    assert seconds[0] is not None
    assert seconds[0].smallest == pytest.approx(53.25 / 2)
    asked = compare_runs([*quick, low], reward=0.9).reached
    assert asked is not None
    assert asked.num_reached == (2, 0)
    assert [each.arms[1] for each in asked.figures] == [None, None, None]


def test_a_single_lucky_step_does_not_count_as_reaching(tmp_path: Path) -> None:
    lucky = made(tmp_path / "lucky", [1.0, *[0.0] * 19])
    steady = made(tmp_path / "steady", [0.0] * 10 + [0.1] * 10, policy="fully_async")
    found = compare_runs([lucky, steady]).reached
    assert found is not None
    assert found.reward == pytest.approx(0.1)
    assert [arm and arm.mean for arm in found.figures[0].arms] == [10, pytest.approx(20)]


# --- what is said of it ------------------------------------------------------------------------------------------


def test_what_is_no_fair_comparison_is_said(tmp_path: Path) -> None:
    one = made(tmp_path / "one", [0.5] * 2, extra="reward:\n  function: math\n  timeout_s: 30\n  num_workers: 2\n")
    other = made(tmp_path / "other", [0.5] * 2, extra="reward:\n  function: lines\n")
    same = made(tmp_path / "same", [0.5] * 2, extra="reward:\n  function: lines\nobservability:\n  samples: 5\n")
    idle = made(tmp_path / "idle", [], policy="fully_async")
    (idle / "starts.jsonl").unlink()
    write_start(one, Start(at=AT, facts=msgspec.structs.replace(FACTS, model="another")))
    cautions = compare_runs([one, other, same, idle]).cautions
    for text in (
        "Model, machine and software are not known of idle, which has no starts.jsonl.",
        "Rewards do not measure the same thing where reward.function differs.",
        "one goes on, or was cut off: it is compared as far as it has come.",
        "one was started 2 times; steps that it made again count in its time and tokens.",
        "one changed its model when it was resumed; the last one is shown.",
        "idle made no step, so its arm has no figures; leave it out to see those of the others.",
        "Arm B has several runs of seed 0: they are no independent draws.",
        "The runs of arm B differ in observability.samples, which is taken for no difference.",
    ):
        assert text in cautions


def test_a_dataset_that_only_one_run_evaluates_makes_rewards_no_others(tmp_path: Path) -> None:
    evaluates = "evaluation:\n  datasets:\n  - {name: held, path: 'lines:8', k: null}\n"
    one = made(tmp_path / "one", [0.5] * 2, extra=evaluates)
    found = compare_runs([one, made(tmp_path / "other", [0.5] * 2, extra="evaluation:\n  datasets: []\n")])
    assert not [text for text in found.cautions if "Rewards" in text]
    names = [each.name for each in found.keys if each.name.startswith("evaluation")]
    assert names == [f"evaluation.datasets{part}" for part in ("[0].name", "[0].path", "")], "null says nothing"


def test_runs_that_ran_at_the_same_time_slowed_each_other_down(tmp_path: Path) -> None:
    """Both took 35.5 s; the third began when the first had ended."""
    run(tmp_path / "first", 25, finished(25))
    summary = read_summary(tmp_path / "first")
    assert summary is not None
    begun = {"beside": "2026-08-01T13:00:35+01:00", "after": "2026-08-01T12:01:30+00:00"}
    for name, at in begun.items():
        write_summary(made(tmp_path / name, [0.1] * 2, at=at, policy=name), summary)
    cautions = compare_runs([tmp_path / name for name in ("after", "first", "beside")]).cautions
    assert [text for text in cautions if "slowed" in text] == [
        "While first and beside ran, others of these did; if on one machine, they slowed each other down."
    ]


def test_without_a_step_there_are_facts_and_no_figures(tmp_path: Path) -> None:
    found = compare_runs([made(tmp_path / "one", []), made(tmp_path / "other", [], policy="fully_async")])
    assert (found.equal, found.reached) == ((), None)
    assert [row[:4] for row in arms_table(found).rows] == [["A", "one", "0", "0"], ["B", "other", "0", "0"]]


@pytest.mark.parametrize(("names", "story"), [(["a"], "two runs or more"), (["a", "b", "a"], "a is named twice")])
def test_it_takes_two_runs(tmp_path: Path, names: list[str], story: str) -> None:
    for name in set(names):
        made(tmp_path / name, [0.1])
    with pytest.raises(UserFault, match=story):
        compare_runs([tmp_path / name for name in names])


# --- the page ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A run of 25 steps, one of 3 that was cut off, and one that imitates."""
    long, short, imitates = (tmp_path / name for name in ("long<b>", "short", "imitates"))
    run(long, 25, finished(25))
    run(short, 3, None)
    (short / "scenario.yaml").write_text("run:\n  name: quick<start>\n  seed: 8\nstaleness: {max_staleness: 0}\n")
    run(imitates, 0, None)
    (imitates / "scenario.yaml").write_text("run:\n  name: quick<start>\n  seed: 7\nreward: {function: lines}\n")
    recorder = RunRecorder(imitates, FACTS)
    recorder.step(msgspec.structs.replace(step(1), metrics=(Metric("train/loss", 3.0),)), 1.0)
    recorder.abandon()
    return long, short, imitates


def page_of(folders: Sequence[Path], page: Path) -> str:
    arms = read_arms(folders)
    return write_comparison(arms, compare_arms(arms), page).read_text()


def test_each_figure_has_a_line_for_each_run_in_the_colour_of_its_arm(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    charts = Page(page_of(folders, tmp_path / "c.html")).charts
    reward = charts["Reward"]
    assert [(line.label, len(line.x), line.colour) for line in reward.lines] == [("long<b>", 25, 0), ("short", 3, 1)]
    assert [(line.label, line.y, line.colour) for line in charts["Loss: train/loss"].lines] == [("imitates", [3.0], 2)]
    over_time = charts["Reward over time"]
    assert over_time.x_label == "minutes of training"
    assert over_time.lines[0].x[-1] == pytest.approx(24 / 60)
    over_tokens = charts["Reward over tokens"]
    assert over_tokens.x_label == "generated tokens"
    assert over_tokens.lines[0].x[-1] == 5000
    assert charts["Steps over time"].lines[0].y[-1] == 25
    assert next(iter(charts)) == "Reward"


def test_the_reward_of_several_seeds_is_a_mean_with_a_band_as_far_as_all_of_them_came(tmp_path: Path) -> None:
    folders = [
        made(tmp_path / "a", [0.0] * 12, tokens=100),
        made(tmp_path / "b", [1.0] * 8, seed=1, tokens=200),
        made(tmp_path / "c", [0.25] * 4, policy="fully_async"),
    ]
    charts = Page(page_of(folders, tmp_path / "c.html")).charts
    for title, last in (("Reward", 8), ("Reward over tokens", 1200), ("Reward over time", 8 / 60)):
        several, alone = charts[title].lines
        assert (several.label, several.colour) == ("arm A, mean of 2 runs", 0)
        assert several.x[-1] == pytest.approx(last, rel=1e-5)
        assert several.y == [0.5] * len(several.y)
        assert several.spread == [pytest.approx(0.707107)] * len(several.y)
        assert (alone.label, alone.spread) == ("c", [])
    assert [line.label for line in charts["Reward: rollout/raw_reward"].lines] == ["a", "b", "c"]


def test_it_names_the_keys_that_differ_and_the_facts_of_each(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    text = Page(page_of(folders, tmp_path / "c.html")).text
    assert "run.seed 7 8 7 staleness.max_staleness – 0 –" in text
    assert "run.name" not in text
    assert "steps 25 (of 25) 3 1" in text
    assert f"command {FACTS.command} {FACTS.command} {FACTS.command}" in text
    assert "At equal steps 1 steps, as far as imitates came" in text


def test_it_lets_nothing_in_but_itself(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    html = page_of(folders, tmp_path / "c.html")
    page = Page(html)
    assert page.scripts == [SCRIPT]
    assert f"script-src {sha256(SCRIPT)}" in policy(html)
    assert "b" not in page.tags  # a run's folder may have any name


def test_evaluations_are_compared_by_dataset_and_figure(tmp_path: Path) -> None:
    folders = [made(tmp_path / "one", [0.1] * 4), made(tmp_path / "other", [0.1] * 4, policy="fully_async", tokens=50)]
    evaluated(folders[0], v2=0.5)
    evaluated(folders[1], v2=0.75)
    charts = Page(page_of(folders, tmp_path / "c.html")).charts
    lines = charts["sums: reward_mean"].lines
    assert [(line.label, line.x, line.y, line.colour) for line in lines] == [
        ("one", [2], [0.5], 0),
        ("other", [2], [0.75], 1),
    ]
    assert [line.x for line in charts["sums: reward_mean over tokens"].lines] == [[200], [100]]


def test_a_run_without_a_scenario_is_named(folders: tuple[Path, Path, Path]) -> None:
    (folders[1] / "scenario.yaml").unlink()
    with pytest.raises(UserFault, match=r"short/scenario\.yaml: cannot read"):
        read_arms(folders)


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_prints_tables_or_json_and_writes_the_page(tmp_path: Path) -> None:
    names = ("one", "two\x1b[31m\x9b<b>[b]")
    folders = [made(tmp_path / name, [0.1] * 3, policy=str(place)) for place, name in enumerate(names)]
    words, page = ["compare", *map(str, folders)], tmp_path / "both.html"
    told = CliRunner().invoke(app, [*words, "--out", str(page)])
    assert told.exit_code == 0
    assert "At equal wall time" in told.output
    assert "two\\x1b[31m\\x9b<b>[b]" in told.output
    assert "2 runs compared" in page.read_text()
    told = CliRunner().invoke(app, [*words, "--json", "--reward", "0.5"])
    assert told.output.isascii()
    found = msgspec.json.decode(told.output, type=Comparison)
    assert found == compare_runs(folders, reward=0.5)
    assert not {"\x1b", "\x9b"} & set(told.output)


@pytest.mark.parametrize(
    ("words", "story"),
    [
        (["--out", "{}/missing/c.html"], "--out .*c.html: its folder is not there"),
        (["--reward", "0.5"], "--reward: not every run has a reward"),
        (["{}"], "not a run's folder"),
    ],
)
def test_what_is_asked_in_vain_is_said(tmp_path: Path, words: list[str], story: str) -> None:
    folders = [made(tmp_path / "one", [0.1] * 3), made(tmp_path / "idle", [], policy="fully_async")]
    told = CliRunner().invoke(app, ["compare", *map(str, folders), *(word.format(tmp_path) for word in words)])
    assert isinstance(told.exception, UserFault)
    assert re.search(story, str(told.exception))


def test_a_run_whose_policy_was_switched_is_another_arm_and_says_from_which_step(tmp_path: Path) -> None:
    folders = [made(tmp_path / name, [0.1, 0.2], seed=seed) for seed, name in enumerate("abc")]
    switched(folders[2], SYNC)
    assert [[run.name for run in arm.runs] for arm in read_arms(folders)] == [["a", "b"], ["c"]]
    cautions = compare_runs(folders).cautions
    assert any("switched the policies" in caution for caution in cautions)
    assert any("c followed several policies: fully_async, η = 2, from step 1, then sync" in text for text in cautions)
