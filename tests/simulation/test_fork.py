"""A recorded run, gone on with by simulation from one of its steps: nothing is lost at the fork, the future as it was
is the one that was recorded, and what is otherwise shows at the first decision to which it matters."""

from __future__ import annotations

import itertools
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import pytest
from test_replay import NUM_TRIALS, recorded
from typer.testing import CliRunner

from penstock.actors.filter.machine import Filter
from penstock.messages.errors import UserFault
from penstock.messages.ledger import GroupsGranted, StepRecorded
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EngineOpened,
    EngineSlept,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    PromptsFetched,
    RowsDrawn,
    SampleJudged,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.names import BUFFER, PROMPT_SOURCE
from penstock.runtime.cli.app import app
from penstock.runtime.cli.fork import Answer
from penstock.runtime.hosts.virtual.simulate import simulated
from penstock.runtime.observability.recording import Handled
from penstock.runtime.prediction.forking.changes import read_change
from penstock.runtime.prediction.forking.futures import play_futures
from penstock.runtime.prediction.forking.owed import answered_by, owed_by
from penstock.runtime.prediction.forking.past import read_past
from penstock.runtime.prediction.forking.restore import Restored
from penstock.runtime.prediction.models import Models
from penstock.runtime.run.replay import Incarnation, merged_rows, recorded_files
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import FilterEvent
    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.prediction.forking.decisions import Decision, Difference
    from penstock.runtime.prediction.forking.futures import Futures

MODELLED = Path(__file__).parents[1] / "chaos" / "modelled.yaml"
STEP = 5
FROM_ROWS = {9}
"""Of the random trials, those in which rows bring their responses."""
KEPT: list[TemporaryDirectory[str]] = []
"""Until the process ends."""


@cache
def run_folder(*overrides: str) -> Path:
    """A simulated run of 14 steps, recorded."""
    KEPT.append(TemporaryDirectory(prefix="fork-"))
    folder = Path(KEPT[-1].name) / "run"
    keys = ("observability.record=true", "run.num_steps=14", *overrides)
    simulated(load_scenario(MODELLED, keys), seed=1, run_folder=folder)
    return folder


def forked(*overrides: str, folder: Path | None = None, step: int = STEP) -> tuple[Futures, Difference | None]:
    """Both futures, with every invariant asserted on the way."""
    folder = folder or run_folder()
    past, change = read_past(folder, step, anyway=False), read_change(folder, overrides, None)
    futures, difference, _ = play_futures(past, change, validate=True)
    return futures, difference


def first_of(difference: Difference | None) -> tuple[Decision, ...]:
    """The decisions of both sides, in their order."""
    assert difference is not None
    return tuple(each for each in difference if each is not None)


# --- the fork itself --------------------------------------------------------------------------------------------------


def steps_of(folder: Path) -> list[int]:
    """Those that the Buffer heard of, as often as it did."""
    rows = (row for _, path, row in merged_rows(recorded_files(folder)) if path.stem.startswith(f"{BUFFER}-"))
    return [int(row.subject.split()[1]) for row in rows if isinstance(row, Handled) and row.event == "StepFinished"]


def go_on(folder: Path, step: int) -> None:
    """The run can be gone on with from this step: it completes, and its ledger adds up."""
    past = read_past(folder, step, anyway=False)
    restored = Restored(past, past.plan.scenario, past.plan, validate=True)
    restored.go_on()
    ending = restored.host.run(past.at_s + 36000)
    assert ending is not None, restored.host.story()
    assert ending.completed, ending.story
    assert ending.finished is not None
    balance = ending.finished.balance
    assert (balance.in_system, balance.issued) == (0, sum(each.num_samples for each in balance.ended))
    check_ledger(restored.host.ledger.entries)


def check_ledger(entries: list[LedgerEntry]) -> None:
    """Versions follow each other, groups are granted without a hole, and each is trained as often as its batches say.

    A ledger whose Buffer had read a snapshot begins behind that."""
    steps = [entry for entry in entries if isinstance(entry, StepRecorded)]
    assert all(other.version == one.version + 1 for one, other in itertools.pairwise(steps))
    trained = [group_id for step in steps if not step.uses for group_id in step.group_ids]
    assert len(trained) == len(set(trained))
    grants = [entry for entry in entries if isinstance(entry, GroupsGranted)]
    assert all(other.span.first_group == one.total for one, other in itertools.pairwise(grants))


@pytest.mark.parametrize("number", range(NUM_TRIALS))
def test_a_run_with_faults_goes_on_from_any_of_its_steps_and_nothing_is_lost(number: int) -> None:
    if number in FROM_ROWS:
        with pytest.raises(UserFault, match="engines that answer from rows are not modelled"):
            go_on(recorded(number), 1)
        return
    for step in sorted(set(steps_of(recorded(number)))):
        go_on(recorded(number), step)


def test_these_runs_have_steps() -> None:
    assert sum(len(set(steps_of(recorded(number)))) for number in range(NUM_TRIALS)) > 3 * NUM_TRIALS


def test_the_future_as_it_was_is_the_one_that_was_recorded() -> None:
    futures, difference = forked("staleness.max_staleness=2")
    assert difference is None, "the policy is what it was"
    assert futures.was.figures == futures.other.figures
    recorded_one = futures.recorded
    assert recorded_one is not None
    assert futures.was.figures.step_s == pytest.approx(recorded_one.figures.step_s, rel=0.03)
    assert futures.was.figures.occupancy == pytest.approx(recorded_one.figures.occupancy, abs=0.03)
    assert futures.was.rest_s == pytest.approx(recorded_one.rest_s, rel=0.03)
    assert futures.was.figures.engines_busy == pytest.approx(recorded_one.figures.engines_busy, abs=0.02)
    assert len(futures.was.step_ends_s) == len(recorded_one.step_ends_s) == 14 - STEP


def test_a_past_that_does_not_come_out_again_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Filter.handle

    def silent(self: Filter, event: FilterEvent) -> list[AnyCommand]:
        return handle(self, event)[1:]

    monkeypatch.setattr(Filter, "handle", silent)
    with pytest.raises(
        UserFault, match=r"filter.*does not come out again at filter \d+ \(.*penstock replay says where"
    ):
        forked("staleness.policy=sync")


def test_every_answer_of_a_backend_is_to_a_command_that_was_owed_it() -> None:
    seen: set[object] = set()
    for folder in (run_folder(), *map(recorded, range(NUM_TRIALS))):
        for path in recorded_files(folder):
            owed: set[object] = set()
            incarnation: Incarnation | None = None
            for _, _, row in merged_rows([path]):
                if not isinstance(row, Handled):
                    incarnation = Incarnation(path.stem, row)
                    continue
                assert incarnation is not None
                event = incarnation.decoded(row)
                if (key := answered_by(event)) is not None:
                    assert key in owed, f"{path.stem} {row.number}: {row.event}"
                    owed.discard(key)
                    seen.add(type(event))
                owed |= {owed_by(command) for command in incarnation.machine.handle(event)} - {None}
    assert seen >= {
        PromptsFetched, RowsDrawn, WeightsStagedLocally, WeightsSwapped, SampleJudged, EngineOpened, EngineSlept,
        LearnerOpened, LearnerSlept, LearnerWoken, BatchTrained, WeightsPublished, CheckpointWritten,
    }  # fmt: skip


# --- what is otherwise ------------------------------------------------------------------------------------------------


def test_another_policy_shows_at_the_grant_that_it_does_not_give() -> None:
    futures, difference = forked("staleness.policy=sync")
    was, other = first_of(difference)
    assert was.incarnation.startswith(f"{BUFFER}-")
    assert "GroupsGranted" in repr(was.command)
    assert "GroupsGranted" not in repr(other.command)
    assert other.at_s >= was.at_s
    assert futures.replaced == (), "the Buffer is told, as by penstock policy"
    assert futures.other.figures.step_s > 1.5 * futures.was.figures.step_s
    assert sum(futures.other.figures.ages[1:]) < sum(futures.was.figures.ages[1:])


@pytest.mark.parametrize("built", ["staleness.target_outstanding=24", "run.num_steps=13"])
def test_a_buffer_that_the_fork_builds_anew_is_told_the_policy_too(built: str) -> None:
    futures, difference = forked("staleness.policy=sync", built)
    assert BUFFER in futures.replaced
    assert difference is not None
    assert sum(futures.other.figures.ages[1:]) < sum(futures.was.figures.ages[1:]) / 2


def test_what_a_later_drive_was_given_is_not_taken_for_asked(tmp_path: Path) -> None:
    shutil.copytree(run_folder(), tmp_path / "run")
    file = tmp_path / "run" / "scenario.yaml"
    file.write_text(file.read_text().replace("num_steps: 14", "num_steps: 12"))
    futures, _ = forked("staleness.policy=sync", folder=tmp_path / "run")
    assert futures.replaced == (), "nobody asked for another number of steps"
    assert sum(futures.other.figures.ages[1:]) < sum(futures.was.figures.ages[1:])


@pytest.mark.parametrize(
    ("key", "replaced", "is_quicker"),
    [
        ("engines.count=4", {BUFFER, PROMPT_SOURCE}, True),
        ("engines.count=1", {BUFFER, PROMPT_SOURCE}, False),
        ("engines.slots=4", {BUFFER, PROMPT_SOURCE, "engine/0", "engine/1"}, False),
        ("staleness.target_outstanding=8", {BUFFER}, False),
        ("engines.simulated_speed=0.5", set[str](), False),
        ("engines.simulated_fetch_s=30", set[str](), False),
    ],
)
def test_what_actors_are_built_with_replaces_them_in_both(key: str, replaced: set[str], *, is_quicker: bool) -> None:
    futures, difference = forked(key)
    assert difference is not None
    assert set(futures.replaced) >= replaced
    assert bool(futures.replaced) == bool(replaced)
    was_s, other_s = futures.was.rest_s, futures.other.rest_s
    assert was_s is not None
    assert other_s is not None
    assert (other_s < was_s) == is_quicker


def test_models_that_are_given_take_the_place_of_the_runs_own_and_keys_stand_above_them() -> None:
    scenario = load_scenario(MODELLED)
    models = Models(
        penstock_version="",
        made_at="",
        model="",
        max_response_tokens=128,
        truncated_share=0.0,
        most_running=8,
        engines=scenario.engines.simulated,
        learner=msgspec.structs.replace(scenario.learner.simulated, step_s=0.8),
        reward=scenario.reward.simulated,
        fits=(),
    )
    past = read_past(run_folder(), STEP, anyway=False)
    change = read_change(run_folder(), ["learner.simulated.step_s=0.2"], models)
    futures, difference, _ = play_futures(past, change)
    assert futures.recorded is not None
    assert difference is not None
    assert futures.was.figures.step_s > 1.5 * futures.recorded.figures.step_s
    assert futures.other.figures.step_s == pytest.approx(futures.recorded.figures.step_s, rel=0.2)
    assert any("at most 8 requests ran side by side" in text for text in futures.assumed)


def test_a_real_run_without_traces_asks_for_models(tmp_path: Path) -> None:
    text = (run_folder() / "scenario.yaml").read_text()
    (tmp_path / "scenario.yaml").write_text(text.replace("backend: simulated", "backend: torch"))
    with pytest.raises(UserFault, match=r"no models can be fitted to this run: .*; name others with --models FILE"):
        read_change(tmp_path, ["staleness.policy=sync"], None)


def test_fewer_slots_show_at_the_first_sample_that_finds_none() -> None:
    _, difference = forked("engines.slots=4")
    was, other = first_of(difference)
    assert was.incarnation == other.incarnation == "prompt_source-1"
    assert "SampleIssued" in repr(was.command)
    assert was.command != other.command
    assert was.at_s < other.at_s, "with its slots it goes out at once"


def test_a_run_whose_engines_may_join_is_asked_for_more_and_may_refuse() -> None:
    folder = run_folder("engines.max=3")
    futures, difference = forked("engines.count=3", folder=folder)
    assert futures.replaced == ()
    assert difference is not None
    with pytest.raises(UserFault, match=r"engines\.max"):
        forked("engines.count=4", folder=folder)


def test_engines_that_follow_the_bound_stay_from_the_fork_on_and_it_is_said() -> None:
    folder = run_folder("engines.max=3", "engines.scale=by_bound")
    (doubt,) = read_change(folder, ("engines.count=3",), None).doubts
    assert doubt.startswith("engines.scale: by_bound is not followed")
    _, difference = forked("engines.count=3", folder=folder)
    assert difference is not None


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("data.seed=3", r"data\.seed cannot change in a run that goes on: its groups were drawn"),
        ("engines.device=cuda", "the models say how engines behave"),
        ("runtime.heartbeat_s=3", "decides nothing that a simulation shows"),
        ("staleness.over_sampling=2.0", "groups that were granted were promised this policy"),
        ("learner.groups_per_batch=4", "batches since the last checkpoint"),
        ("engines.slots=0", r"engines\.slots"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(override: str, why: str) -> None:
    with pytest.raises(UserFault, match=why):
        forked(override)


def test_a_step_that_is_not_there_and_the_last_one_are_refused() -> None:
    with pytest.raises(UserFault, match=r"step 99 is not in the recording of .*; it has steps 1 to [0-9]+$"):
        forked("staleness.policy=sync", step=99)
    with pytest.raises(UserFault, match=r"step 14 is the last one|the run refuses it"):
        forked("staleness.policy=sync", step=14)


# --- the command ------------------------------------------------------------------------------------------------------


def asked(*words: str) -> tuple[int, str]:
    """Exit code and output."""
    result = CliRunner(env={"COLUMNS": "180"}).invoke(app, ["replay", *words])
    return result.exit_code, result.output or str(result.exception)


def test_the_command_prints_both_futures_the_parting_and_what_was_assumed(tmp_path: Path) -> None:
    picture = tmp_path / "futures.svg"
    words = (str(run_folder()), "--fork", str(STEP), "staleness.policy=sync")
    code, text = asked(*words, "--plot", str(picture))
    assert code == 0
    for part in (
        "as it was",
        "staleness.policy=sync",
        "as recorded",
        "off what was recorded",
        "the first decision in which they differ",
        "assumed",
    ):
        assert part in text
    assert picture.read_text().count("<polyline") == 3
    code, text = asked(*words, "--json", "--plot", str(tmp_path / "futures.png"))
    assert (tmp_path / "futures.png").read_bytes().startswith(b"\x89PNG")
    answer = msgspec.json.decode(text, type=Answer)
    assert code == 0
    assert answer.parting is not None
    assert answer.parting.was is not None
    assert answer.parting.was.incarnation == "buffer-0"
    assert answer.parting.was.story
    assert answer.parting.at_s == answer.parting.was.at_s
    assert answer.parting.was.event in {line.event for line in answer.parting.was.story}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("staleness.policy=sync",), "say from which step"),
        (("--fork", "5"), "what is to be otherwise"),
        (("--fork", "5", "staleness.policy=sync", "--plot", "futures.jpg"), "an SVG or a PNG"),
        (("--fork", "5", "--until", "3", "staleness.policy=sync"), "leave out --actor"),
        (("another", "--fork", "5", "staleness.policy=sync"), "expected one run's folder"),
    ],
)
def test_the_command_says_what_is_missing(words: tuple[str, ...], why: str) -> None:
    code, text = asked(str(run_folder()), *words)
    assert code != 0
    assert why in text
