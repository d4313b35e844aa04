"""The time in which a run trains begins where the learner's start ends, however rarely its actors report."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.messages.names import LEARNER
from penstock.messages.training import Activity, ActivitySpan, ActorReported, Balance
from penstock.runtime.hosts.virtual.simulate import simulated
from penstock.runtime.observability.trackers import StepRow, read_steps
from penstock.runtime.observability.training_time import TrainingTime, newest_drive
from penstock.runtime.scenario.modelled import load_modelled


def report(*spans: tuple[Activity, float, float], name: str = LEARNER) -> ActorReported:
    return ActorReported(name=name, epoch=1, state="t", activities=tuple(ActivitySpan(*span) for span in spans))


STARTING = report((Activity.STARTING, 1.0, 2.0))
OPEN = report((Activity.STARTING, 2.0, 2.4), (Activity.WORKING, 2.4, 3.0))


def test_it_begins_where_the_learner_is_through_with_its_start_and_not_when_that_is_heard() -> None:
    time = TrainingTime()
    time.everyone_is_up(1.5)
    time.hear(STARTING)
    assert time.at(2.0) == 0.0
    time.hear(report((Activity.WORKING, 2.0, 3.0), name="engine/0"))
    assert time.at(3.0) == 0.0
    time.hear(OPEN)
    assert time.at(3.0) == pytest.approx(0.6)
    time.hear(report((Activity.STARTING, 5.0, 6.0), (Activity.WORKING, 6.0, 7.0)))  # a replacement starts: time goes on
    time.everyone_is_up(7.0)
    assert time.at(8.0) == pytest.approx(5.6)


def test_it_waits_for_the_last_actor() -> None:
    time = TrainingTime()
    time.hear(OPEN)
    assert time.at(3.0) == 0.0
    time.everyone_is_up(3.5)
    assert time.at(4.0) == pytest.approx(0.5)


def test_a_learner_whose_first_reports_were_lost_began_with_what_is_heard() -> None:
    time = TrainingTime()
    time.everyone_is_up(1.0)
    time.hear(report((Activity.WORKING, 4.0, 5.0)))
    assert time.at(5.0) == pytest.approx(1.0)


@pytest.mark.parametrize("is_up", [True, False])
def test_a_step_that_is_quicker_than_a_report_is_not_trained_in_no_time(is_up: bool) -> None:
    time = TrainingTime()
    time.before_s = 10.0
    if is_up:
        time.everyone_is_up(1.5)
    time.hear(STARTING)
    time.step()
    assert time.at(2.25) == pytest.approx(10.25)  # where the learner was last heard to start
    time.hear(OPEN)
    time.everyone_is_up(9.0)
    assert time.at(12.0) == pytest.approx(20.0)  # it has begun


def stepped(*times: tuple[float, float]) -> list[StepRow]:
    """Steps by the clock and by the training time."""
    balance = Balance(issued=0, in_system=0, ended=())
    return [
        StepRow(version=version, at_s=at_s, num_steps=9, metrics={}, staleness_counts=(), response_lengths=(),
                group_ids=(), balance=balance, training_s=training_s)
        for version, (at_s, training_s) in enumerate(times, 1)
    ]  # fmt: skip


def test_the_newest_drive_that_is_long_enough_is_taken() -> None:
    rows = stepped((10, 1), (11, 2), (12, 3), (40, 3.5), (41, 4.5), (90, 5))
    assert [row.version for row in newest_drive(rows, 1)] == [6]
    assert [row.version for row in newest_drive(rows, 2)] == [4, 5]
    assert [row.version for row in newest_drive(rows, 3)] == [1, 2, 3]
    assert newest_drive(rows, 4) == rows
    assert newest_drive(stepped((10, 1), (11, 2), (90, 81)), 3) == stepped((10, 1), (11, 2), (90, 81)), "a slow step"
    assert newest_drive(stepped((1, 0), (2, 0)), 1) == stepped((1, 0), (2, 0)), "recorded before there was this time"
    assert newest_drive([], 1) == []


def test_each_step_of_a_simulation_has_its_time(tmp_path: Path) -> None:
    words = ["run.num_steps=6", "learner.simulated.start_s=7", "engines.simulated.start_s=3"]
    scenario, _ = load_modelled(Path(__file__).parents[2] / "scenarios" / "sync.yaml", words)
    simulated(scenario, seed=1, run_folder=tmp_path / "run")
    rows = read_steps(tmp_path / "run")
    began_s = [row.at_s - row.training_s for row in rows]
    assert began_s == pytest.approx([began_s[0]] * 6)
    assert 7.0 <= began_s[0] < 8.0  # with the first weights, which belong to its start
