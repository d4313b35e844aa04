"""The health of a server: what makes it suspect and dead, and what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.engines.served.base.health import (
    Answered,
    Asked,
    Check,
    Ended,
    Fact,
    Failed,
    Health,
    HealthChange,
    HealthLimits,
    HealthState,
    InFlight,
    Occupied,
    Overslept,
    Paused,
    Progress,
    Ready,
    Released,
    Stopped,
    Tick,
)
from penstock.backends.engines.served.sglang.control import SglangControl

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTIONS = SglangControl.questions
LIMITS = HealthLimits(suspect_after_s=10, dead_after_s=100, cold_dead_after_s=900, stopped_dead_after_s=15)
WARM: tuple[tuple[float, Fact], ...] = ((0, Ready()), (1, Progress()))


def after(*facts: tuple[float, Fact]) -> tuple[Health, list[HealthChange]]:
    """A server to which all this happened, and its changes."""
    health = Health(LIMITS, 0, QUESTIONS)
    changes = [change for at_s, fact in facts if (change := health.feed(fact, at_s)) is not None]
    return health, changes


def states(facts: Sequence[tuple[float, Fact]]) -> list[HealthState]:
    return [change.after for change in after(*facts)[1]]


def test_nothing_is_held_against_a_server_that_starts() -> None:
    health, changes = after((0, Asked(Check.FRONT)), (5000, Tick()))
    assert (health.state, changes, health.next_s()) == (HealthState.STARTING, [], None)


def test_a_silent_scheduler_makes_suspect_then_dead() -> None:
    health, changes = after(
        *WARM, (2, Asked(Check.SCHEDULER)), (11.9, Tick()), (12, Tick()), (101.9, Tick()), (102, Tick())
    )
    assert [(change.after, change.at_s) for change in changes] == [
        (HealthState.HEALTHY, 0), (HealthState.SUSPECT, 12), (HealthState.DEAD, 102),
    ]  # fmt: skip
    assert "scheduler does not answer /server_info" in health.cause


def test_an_answer_ends_the_suspicion() -> None:
    facts = [*WARM, (2, Asked(Check.SCHEDULER)), (50, Tick()), (60, Answered(Check.SCHEDULER)), (5000, Tick())]
    assert states(facts) == [HealthState.HEALTHY, HealthState.SUSPECT, HealthState.HEALTHY]


def test_a_check_that_is_given_up_and_asked_again_is_as_silent_as_before() -> None:
    asked_again = [
        (2.0 + 30 * n, fact) for n in range(3) for fact in (Asked(Check.SCHEDULER), Failed(Check.SCHEDULER, "cut"))
    ]
    health, _ = after(*WARM, *asked_again, (102, Tick()))
    assert health.state is HealthState.DEAD
    assert "(cut)" in health.cause


def test_a_silent_main_process_is_blamed_before_the_scheduler_behind_it() -> None:
    health, _ = after(*WARM, (2, Asked(Check.SCHEDULER)), (3, Asked(Check.FRONT)), (13, Tick()))
    assert "main process does not answer /ready" in health.cause


def test_a_silent_part_is_to_blame_for_the_tokens_that_do_not_come_though_they_were_missed_first() -> None:
    health, _ = after(*WARM, (2, InFlight(1)), (3, Asked(Check.SCHEDULER)), (102, Tick()))
    assert health.state is HealthState.DEAD
    assert "scheduler does not answer" in health.cause


def test_a_busy_server_whose_tokens_arrive_is_not_suspected() -> None:
    tokens = [(float(at_s), Progress()) for at_s in range(3, 2000, 9)]
    assert states([*WARM, (2, Asked(Check.SCHEDULER)), (2, InFlight(8)), *tokens]) == [HealthState.HEALTHY]


def test_a_cold_server_that_compiles_has_longer() -> None:
    facts: list[tuple[float, Fact]] = [(0, Ready()), (1, InFlight(1)), (2, Asked(Check.SCHEDULER)), (890, Tick())]
    assert states(facts) == [HealthState.HEALTHY, HealthState.SUSPECT]
    assert states([*facts, (902, Tick())])[-1] is HealthState.DEAD


def test_a_cold_server_whose_main_process_hangs_has_not() -> None:
    assert states([(0, Ready()), (2, Asked(Check.FRONT)), (102, Tick())])[-1] is HealthState.DEAD


def test_requests_without_tokens_point_to_the_detokenizer() -> None:
    answers = [
        (at_s, fact) for at_s in (20.0, 50.0, 80.0) for fact in (Asked(Check.SCHEDULER), Answered(Check.SCHEDULER))
    ]
    health, changes = after(*WARM, (5, InFlight(2)), *answers, (105, Tick()))
    assert [change.after for change in changes] == [HealthState.HEALTHY, HealthState.SUSPECT, HealthState.DEAD]
    assert "2 requests are in flight" in health.cause
    assert "detokenizer" in health.cause


def test_an_idle_server_owes_no_tokens() -> None:
    assert states([*WARM, (5, InFlight(1)), (9, InFlight(0)), (5000, Tick())]) == [HealthState.HEALTHY]


def test_the_wait_for_tokens_begins_with_the_first_request_after_idleness() -> None:
    health, _ = after(*WARM, (500, InFlight(1)), (505, InFlight(2)))
    assert health.state is HealthState.HEALTHY
    assert not health.misses_tokens(509)
    assert health.misses_tokens(510)
    assert health.next_s() == 510


def test_a_paused_server_owes_no_tokens_but_answers() -> None:
    paused: list[tuple[float, Fact]] = [*WARM, (5, InFlight(2)), (6, Paused(is_paused=True)), (5000, Tick())]
    assert states(paused) == [HealthState.HEALTHY]
    going_on = [*paused, (5001.0, Paused(is_paused=False)), (5010.0, Tick())]
    assert states(going_on) == [HealthState.HEALTHY]
    assert states([*going_on, (5101, Tick())])[-1] is HealthState.DEAD
    assert states([*paused, (5001, Asked(Check.SCHEDULER)), (5101, Tick())])[-1] is HealthState.DEAD


def test_a_control_call_excuses_silence_until_its_own_deadline() -> None:
    update: list[tuple[float, Fact]] = [
        *WARM,
        (2, Occupied("update_weights_from_disk", 600)),
        (3, Asked(Check.SCHEDULER)),
    ]
    assert states([*update, (599, Tick())]) == [HealthState.HEALTHY]
    assert states([*update, (599, Released()), (608, Tick())]) == [HealthState.HEALTHY]
    health, changes = after(*update, (610, Tick()), (700, Tick()))
    assert [change.after for change in changes] == [HealthState.HEALTHY, HealthState.SUSPECT, HealthState.DEAD]
    assert "update_weights_from_disk has not ended in its time" in health.cause


def test_a_stopped_process_is_suspect_at_once_and_dead_soon() -> None:
    facts: list[tuple[float, Fact]] = [
        *WARM,
        (50, Stopped(("scheduler",))),
        (55, Progress()),
        (64.9, Stopped(("scheduler",))),
    ]
    assert states(facts) == [HealthState.HEALTHY, HealthState.SUSPECT]
    assert states([*facts, (65, Tick())])[-1] is HealthState.DEAD
    assert states([*facts, (64.9, Stopped(()))])[-1] is HealthState.HEALTHY


def test_who_overslept_begins_to_count_anew() -> None:
    facts = [*WARM, (2, Asked(Check.SCHEDULER)), (5000, Overslept()), (5000, Tick())]
    assert states(facts) == [HealthState.HEALTHY]
    assert states([*facts, (5100, Tick())])[-1] is HealthState.DEAD


@pytest.mark.parametrize("before", [(), WARM, (*WARM, (2, Asked(Check.FRONT)), (20, Tick()))])
def test_the_end_is_final_and_keeps_its_cause(before: tuple[tuple[float, Fact], ...]) -> None:
    health, _ = after(*before, (30, Ended("it was killed")), (31, Ready()), (32, Progress()), (9000, Tick()))
    assert (health.state, health.cause, health.next_s()) == (HealthState.DEAD, "it was killed", None)


FACTS = st.sampled_from(
    [
        Asked(Check.FRONT), Answered(Check.FRONT), Asked(Check.SCHEDULER), Answered(Check.SCHEDULER), Progress(),
        InFlight(0), InFlight(3), Paused(is_paused=True), Paused(is_paused=False), Released(), Stopped(()),
        Stopped(("scheduler",)), Overslept(), Occupied("update", 30), Occupied("update", 500), Tick(),
    ]
)  # fmt: skip


@given(st.lists(st.tuples(st.floats(0, 60), FACTS), max_size=40))
def test_nothing_changes_by_time_alone_before_next_s(steps: list[tuple[float, Fact]]) -> None:
    health = Health(LIMITS, 0, QUESTIONS)
    now_s = 0.0
    health.feed(Ready(), now_s)
    for pause_s, fact in steps:
        next_s = health.next_s()
        if next_s is not None and now_s + pause_s >= next_s:
            now_s = next_s
            change = health.feed(Tick(), now_s)
            assert change is not None
            assert change.at_s == next_s
        else:
            now_s += pause_s
            assert health.feed(Tick(), now_s) is None
        health.feed(fact, now_s)


@pytest.mark.parametrize(("suspect_s", "dead_s", "cold_s"), [(0, 10, 10), (10, 10, 10), (1, 10, 9)])
def test_limits_out_of_order_are_refused(suspect_s: float, dead_s: float, cold_s: float) -> None:
    with pytest.raises(ValueError, match="suspect_after_s < dead_after_s <= cold_dead_after_s"):
        HealthLimits(suspect_after_s=suspect_s, dead_after_s=dead_s, cold_dead_after_s=cold_s)
