"""How faults are named, read and drawn; and when a run counts as recovered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from trials.faults import FaultKind

from penstock.messages.errors import UserFault
from penstock.runtime.chaos.faults import (
    FIRST_PROGRESS,
    LAST_PROGRESS,
    LINK_FAULTS,
    PROCESS_FAULTS,
    REWARD_FAULTS,
    ChaosFault,
    ChaosKind,
    last_reward_progress,
    plan_faults,
)
from penstock.runtime.chaos.rewards import (
    FUNCTION_VARIABLE,
    MET_FOLDER,
    ORDERS_VARIABLE,
    Misbehaving,
    MisbehavingError,
)
from penstock.runtime.chaos.throughput import Throughput

if TYPE_CHECKING:
    from pathlib import Path

NAMES = (
    "buffer", "prompt_source", "scorer", "filter", "weight_publisher", "learner", "engine/0", "engine/1",
)  # fmt: skip


def plan(*texts: str, num_faults: int | None = None, seed: int = 0) -> tuple[ChaosFault, ...]:
    return plan_faults(texts, num_faults=num_faults, seed=seed, names=NAMES)


def test_what_the_virtual_host_can_do_has_the_same_name_on_the_real_one() -> None:
    assert {kind.name: kind.value for kind in FaultKind}.items() <= {k.name: k.value for k in ChaosKind}.items()


def test_every_kind_concerns_a_process_a_link_the_reward_or_the_run() -> None:
    of_the_run = {ChaosKind.DISK_FULL, ChaosKind.MACHINE, ChaosKind.NODE_LOSS}
    assert PROCESS_FAULTS | LINK_FAULTS | REWARD_FAULTS | of_the_run == set(ChaosKind)


def test_what_is_written_is_taken_and_the_rest_is_drawn() -> None:
    [stop] = plan("stop:engine/1@0.5+2.5")
    assert (stop.kind, stop.target, stop.progress, stop.duration_s) == (ChaosKind.STOP, "engine/1", 0.5, 2.5)
    [drop] = plan("drop:scorer>filter=0.25")
    assert (drop.target, drop.peer, drop.amount) == ("scorer", "filter", 0.25)
    assert FIRST_PROGRESS <= drop.progress <= LAST_PROGRESS
    assert drop.duration_s > 0


def test_faults_of_rewards_come_while_rewards_are_asked_for() -> None:
    assert last_reward_progress(12, 2) == 7 / 12
    assert last_reward_progress(1000, 2) == LAST_PROGRESS
    assert last_reward_progress(3, 8) == 0.0
    pool = ("reward_nan", "kill:*")
    drawn = plan_faults(pool, num_faults=40, seed=1, names=NAMES, last_reward=0.3)
    latest = {kind: max(f.progress for f in drawn if f.kind is kind) for kind in (ChaosKind.REWARD_NAN, ChaosKind.KILL)}
    assert latest[ChaosKind.REWARD_NAN] <= 0.3 < latest[ChaosKind.KILL]


def test_the_same_seed_draws_the_same_plan_and_another_one_another() -> None:
    pool = ("kill:*", "stop:*", "cut:*>*")
    assert plan(*pool, num_faults=20, seed=3) == plan(*pool, num_faults=20, seed=3)
    assert plan(*pool, num_faults=20, seed=3) != plan(*pool, num_faults=20, seed=4)


def test_the_earliest_comes_first() -> None:
    drawn = [fault.progress for fault in plan("kill:*", num_faults=30, seed=1)]
    assert drawn == sorted(drawn)


def test_drawn_targets_reach_every_role_before_one_comes_again() -> None:
    hit = {fault.target.partition("/")[0] for fault in plan("kill:*", num_faults=7, seed=5)}
    assert hit == {"buffer", "prompt_source", "scorer", "filter", "weight_publisher", "learner", "engine"}


def test_a_rank_of_the_learner_is_hit_only_where_one_is_named() -> None:
    [fault] = plan_faults(["kill:learner/1"], num_faults=None, seed=0, names=NAMES, num_ranks=2)
    assert (fault.target, fault.actor) == ("learner/1", "learner")
    drawn = plan_faults(["kill:*"], num_faults=40, seed=0, names=NAMES, num_ranks=2)
    assert not [fault for fault in drawn if fault.target.startswith("learner/")]
    for text in ("kill:learner/2", "cut:learner/1>buffer"):
        with pytest.raises(UserFault, match="the run has no 'learner/"):
            plan_faults([text], num_faults=None, seed=0, names=NAMES, num_ranks=2)
    with pytest.raises(UserFault, match="the run has no 'learner/0'"):
        plan("kill:learner/0")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kil:buffer", "there is no 'kil'"),
        ("kill", "kill takes an actor"),
        ("kill:engine/7", "the run has no 'engine/7'"),
        ("cut:scorer", "cut takes a sender and a receiver"),
        ("stop:scorer>filter", "stop takes an actor"),
        ("cut:scorer>scorer", "scorer does not send anything to itself"),
        ("cut:driver>scorer", "the run has no 'driver'"),
        ("drop:scorer>filter=1.5", "is a share"),
        ("kill:buffer@1.5", "is a share"),
        ("reward_nan:scorer", "reward_nan takes no target"),
        ("kill buffer", "cannot read 'kill buffer'"),
        ("stop:buffer+1.2.3", "1.2.3 is not a number"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(UserFault, match=f"^--faults: .*{told}"):
        plan(text)


def steady(*, hole: tuple[float, float] = (0.0, 0.0), end_s: float = 60.0) -> Throughput:
    """Ten tokens every tenth of a second, but for a hole."""
    times = [i / 10 for i in range(int(end_s * 10))]
    return Throughput([(at_s, 10.0) for at_s in times if not hole[0] <= at_s < hole[1]], window_s=2.0)


def test_the_usual_rate_is_that_before_the_first_fault() -> None:
    assert steady(hole=(30.0, 40.0)).median_rate(10.0, 30.0) == pytest.approx(100.0)
    assert steady(hole=(0.0, 30.0)).median_rate(40.0, 50.0) == pytest.approx(100.0)
    assert steady().median_rate(30.0, 31.0) is None, "no window fits"


def test_a_fault_that_slows_nothing_down_took_no_time() -> None:
    assert steady().restored_after_s(20.0, 100.0) == 0.0


def test_the_rate_is_restored_when_a_whole_window_is_fast_again() -> None:
    speed = steady(hole=(20.0, 25.0))
    restored_s = speed.restored_after_s(20.0, 100.0)
    assert restored_s is not None
    assert restored_s == pytest.approx(5.0 - 0.2 * 2.0, abs=0.15)  # a window may have lost a fifth


def test_a_rate_that_does_not_come_back_before_the_end_is_not_restored() -> None:
    assert steady(hole=(20.0, 59.5)).restored_after_s(20.0, 100.0) is None
    assert steady().restored_after_s(59.5, 100.0) is None


def test_a_loss_of_speed_long_after_a_fault_is_not_its_doing() -> None:
    assert steady(hole=(45.0, 50.0)).restored_after_s(20.0, 100.0) == 0.0
    assert steady(hole=(25.0, 30.0)).restored_after_s(20.0, 100.0, next_s=22.0) == 0.0


def test_a_sample_meets_one_order_however_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = tmp_path / "orders"
    for folder in (orders, tmp_path / MET_FOLDER):
        folder.mkdir()
    monkeypatch.setenv(FUNCTION_VARIABLE, "random")
    monkeypatch.setenv(ORDERS_VARIABLE, str(orders))
    reward = Misbehaving()
    for order in ("reward_throw-0", "reward_throw-1"):
        (orders / order).touch()
    for index in (0, 1):
        with pytest.raises(MisbehavingError):
            reward(group_id=7, index=index)
        assert 0.0 <= float(str(reward(group_id=7, index=index))) <= 1.0, "tried again, it is scored"
    assert not list(orders.iterdir())
