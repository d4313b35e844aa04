"""Time accounting: spans tile the time, occupancy is a mean over time, shares add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages.training import Activity, ActivitySpan
from penstock.runtime.observability.activity import ActivityClock, LaneTiler
from penstock.runtime.observability.shares import Shares, rounded_shares

ACTIVITIES = st.sampled_from(list(Activity))
DELAYS = st.floats(min_value=0, max_value=1e6, allow_nan=False)
OCCUPANCIES = st.floats(min_value=0, max_value=1, allow_nan=False)
MOVES = st.lists(st.tuples(st.booleans(), ACTIVITIES, DELAYS, OCCUPANCIES), max_size=40)


@given(st.floats(0, 1e6), MOVES)
def test_spans_tile_the_time_without_gap_or_overlap(
    start_s: float, moves: list[tuple[bool, Activity, float, float]]
) -> None:
    clock = ActivityClock(start_s)
    now_s, spans = start_s, list[ActivitySpan]()
    for takes, activity, delay_s, occupancy in moves:
        now_s += delay_s
        if takes:
            spans.extend(clock.take(now_s))
            assert (spans[-1].end_s if spans else start_s) == now_s
        else:
            clock.switch(activity, now_s, occupancy)
            assert clock.activity is activity
    spans.extend(clock.take(now_s))
    edges = [start_s, *(span.end_s for span in spans)]
    assert [span.start_s for span in spans] == edges[:-1]
    assert edges[-1] == now_s
    assert all(span.end_s > span.start_s for span in spans)
    assert all(0 <= span.occupancy <= 1 for span in spans)
    assert all(span.occupancy == 1 for span in spans if span.activity is not Activity.WORKING)


@given(st.lists(st.tuples(st.floats(0.001, 1e3), OCCUPANCIES, st.booleans()), min_size=1, max_size=40))
def test_occupied_time_is_the_integral_however_often_it_is_taken(steps: list[tuple[float, float, bool]]) -> None:
    clock = ActivityClock(0.0)
    now_s, occupied_s, spans = 0.0, 0.0, list[ActivitySpan]()
    for length_s, occupancy, takes in steps:
        clock.switch(Activity.WORKING, now_s, occupancy)
        now_s += length_s
        occupied_s += length_s * occupancy
        if takes:
            spans.extend(clock.take(now_s))
    spans.extend(clock.take(now_s))
    assert sum((span.end_s - span.start_s) * span.occupancy for span in spans) == pytest.approx(occupied_s, abs=1e-6)


def test_switching_to_the_same_state_changes_the_occupancy_only() -> None:
    clock = ActivityClock(10.0, Activity.WORKING)
    clock.switch(Activity.WORKING, 10.0, 0.5)
    clock.switch(Activity.WORKING, 13.0, 1.0)
    clock.switch(Activity.WAITING_FOR_DEMAND, 14.0, 0.0)
    assert clock.take(16.0) == (
        ActivitySpan(Activity.WORKING, 10.0, 14.0, 0.625),
        ActivitySpan(Activity.WAITING_FOR_DEMAND, 14.0, 16.0, 1.0),
    )
    assert clock.take(16.0) == ()
    assert clock.take(17.0) == (ActivitySpan(Activity.WAITING_FOR_DEMAND, 16.0, 17.0, 1.0),)


def test_what_waits_for_tools_is_a_mean_over_the_time_of_any_state_and_survives_a_resume() -> None:
    clock = ActivityClock(10.0, Activity.WORKING)
    clock.switch(Activity.WORKING, 10.0, 0.5, 0.25)
    clock.switch(Activity.WORKING, 13.0, 0.25, 0.5)
    clock.switch(Activity.WAITING_FOR_TOOLS, 14.0, 0.0, 0.75)
    clock.switch(Activity.WAITING_FOR_DEMAND, 15.0, 0.0)
    spans = clock.take(16.0)
    assert spans == (
        ActivitySpan(Activity.WORKING, 10.0, 14.0, 0.4375, 0.3125),
        ActivitySpan(Activity.WAITING_FOR_TOOLS, 14.0, 15.0, 1.0, 0.75),
        ActivitySpan(Activity.WAITING_FOR_DEMAND, 15.0, 16.0, 1.0, 0.0),
    )
    lane = LaneTiler(ActivitySpan(Activity.WORKING, 0.0, 12.0))
    tiles = lane.add(spans)
    assert tiles[0] == ActivitySpan(Activity.WORKING, 12.0, 14.0, 0.4375, 0.3125)
    shares = Shares([*tiles, *lane.close(17.0)])
    assert shares.seconds[Activity.WAITING_FOR_TOOLS] == 1.0
    assert shares.outside_s == 2 * 0.3125 + 0.75


def test_a_clock_starts_as_starting() -> None:
    clock = ActivityClock(0.0)
    assert clock.take(1.0) == (ActivitySpan(Activity.STARTING, 0.0, 1.0),)


def test_time_that_goes_back_is_a_bug() -> None:
    clock = ActivityClock(5.0)
    with pytest.raises(AssertionError, match=r"time went back from 5\.0 to 4\.0"):
        clock.switch(Activity.WORKING, 4.0)


SPANS = st.lists(st.tuples(ACTIVITIES, st.floats(0, 100), st.floats(0.001, 100)), max_size=20)


@given(SPANS, st.floats(0, 300))
def test_a_lane_is_tiled_from_zero_to_the_end_whatever_was_reported(
    reported: list[tuple[Activity, float, float]], end_s: float
) -> None:
    lane = LaneTiler()
    tiles: list[ActivitySpan] = []
    for activity, start_s, length_s in reported:
        tiles.extend(lane.add([ActivitySpan(activity, start_s, start_s + length_s)]))
    tiles.extend(lane.close(end_s))
    edges = [0.0, *(tile.end_s for tile in tiles)]
    assert [tile.start_s for tile in tiles] == edges[:-1]
    assert edges[-1] == max([end_s, *(start_s + length_s for _, start_s, length_s in reported)])


def test_time_of_which_nothing_was_heard_is_starting_first_and_down_later() -> None:
    lane = LaneTiler()
    assert lane.add([ActivitySpan(Activity.WORKING, 2.0, 3.0, 0.5)]) == [
        ActivitySpan(Activity.STARTING, 0.0, 2.0),
        ActivitySpan(Activity.WORKING, 2.0, 3.0, 0.5),
    ]
    lane.lost()
    assert lane.add([ActivitySpan(Activity.STARTING, 5.0, 6.0)]) == [
        ActivitySpan(Activity.DOWN, 3.0, 5.0),
        ActivitySpan(Activity.STARTING, 5.0, 6.0),
    ]
    assert lane.close(6.5) == [ActivitySpan(Activity.STARTING, 6.0, 6.5)]


def test_a_lane_that_was_lost_ends_down() -> None:
    lane = LaneTiler()
    lane.add([ActivitySpan(Activity.WORKING, 0.0, 3.0)])
    lane.lost()
    assert lane.close(4.0) == [ActivitySpan(Activity.DOWN, 3.0, 4.0)]


@given(st.lists(st.floats(0, 1e9, allow_nan=False), max_size=30))
def test_rounded_shares_add_up_to_a_hundred(values: list[float]) -> None:
    shares = rounded_shares(values)
    total = sum(values)
    assert len(shares) == len(values)
    if total > 0:
        assert round(sum(shares), 6) == 100
        assert all(abs(share - 100 * value / total) <= 0.1 + 1e-9 for share, value in zip(shares, values, strict=True))
    else:
        assert shares == [0.0] * len(values)


def test_shares_weigh_working_time_by_occupancy() -> None:
    shares = Shares([ActivitySpan(Activity.WORKING, 0, 6, 0.5), ActivitySpan(Activity.DOWN, 6, 8)])
    shares.add([ActivitySpan(Activity.WORKING, 8, 10, 1.0)])
    assert shares.busy == pytest.approx(0.8)
    assert shares.occupancy == pytest.approx(5 / 8)
    assert shares.last is Activity.WORKING
    assert shares.percentages()[Activity.WORKING] == 80.0
    assert Shares().occupancy is None
    assert Shares().busy == 0
    started = Shares([ActivitySpan(Activity.STARTING, 0, 90), ActivitySpan(Activity.WORKING, 90, 100)])
    assert started.busy == 1


def test_an_engine_that_joins_and_leaves_is_absent_before_and_after_and_starts_when_it_joins() -> None:
    lane = LaneTiler()
    tiles = lane.joins(10.0)
    tiles += lane.add([ActivitySpan(Activity.WORKING, 12.0, 20.0, 0.5)])
    tiles += lane.leaves(21.0)
    tiles += lane.joins(30.0)
    tiles += lane.add([ActivitySpan(Activity.WORKING, 31.0, 33.0, 1.0)])
    tiles += lane.leaves(33.0)
    tiles += lane.close(40.0)
    assert [(tile.activity, tile.start_s, tile.end_s) for tile in tiles] == [
        (Activity.ABSENT, 0.0, 10.0),
        (Activity.STARTING, 10.0, 12.0),
        (Activity.WORKING, 12.0, 20.0),
        (Activity.WORKING, 20.0, 21.0),
        (Activity.ABSENT, 21.0, 30.0),
        (Activity.STARTING, 30.0, 31.0),
        (Activity.WORKING, 31.0, 33.0),
        (Activity.ABSENT, 33.0, 40.0),
    ]
    resumed = LaneTiler(tiles[-1])
    assert [tile.activity for tile in resumed.close(50.0)] == [Activity.ABSENT]
