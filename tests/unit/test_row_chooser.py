"""Which row a group is drawn from: the stream, replays of what earned little, and curricula."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.data.row_chooser import ChoosingSettings, RowChooser, RowRecord
from penstock.messages.commands import ChooseRows, StreamPlace
from penstock.messages.flow import GroupRow, RowOutcome
from penstock.messages.rows import ReplayOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPLAY = ReplayOptions(fraction=1.0, below_reward=0.5, max_times=2, min_gap=0)


def choose(
    *group_ids: int, first: int = 0, busy: tuple[int, ...] = (), outcomes: Sequence[RowOutcome] = ()
) -> ChooseRows:
    stream = tuple(StreamPlace(first + index, first + index, 0) for index in range(len(group_ids)))
    return ChooseRows(group_ids, stream, busy, tuple(outcomes))


def replaying(replay: ReplayOptions = REPLAY, num_rows: int = 100) -> RowChooser:
    return RowChooser(ChoosingSettings(seed=1, num_rows=num_rows, replay=replay))


def curriculum(
    weigh: Callable[[int, RowRecord], float | None], *, num_rows: int = 10, num_candidates: int = 1024
) -> RowChooser:
    def priorities(rows: Sequence[tuple[int, RowRecord]]) -> list[float | None]:
        return [weigh(row, record) for row, record in rows]

    chosen = ChoosingSettings(seed=1, num_rows=num_rows, has_priority=True, num_candidates=num_candidates)
    return RowChooser(chosen, priorities)


def low(row: int) -> RowOutcome:
    return RowOutcome(row, 0.1, True)


# --- replays ------------------------------------------------------------------------------------------------------


def test_nothing_to_replay_takes_the_stream_from_its_front_without_a_gap() -> None:
    found = replaying().choose(choose(0, 1, 2, first=7))
    assert found == tuple(GroupRow(index, 7 + index, 0, 7 + index) for index in range(3))


def test_the_hard_row_whose_outcome_is_oldest_comes_first_and_takes_no_place_of_the_stream() -> None:
    outcomes = [low(4), RowOutcome(5, 0.9, False), low(6), low(4)]
    found = replaying().choose(choose(0, 1, 2, first=3, outcomes=outcomes))
    assert found == (GroupRow(0, 6, 1, -1), GroupRow(1, 4, 2, -1), GroupRow(2, 3, 0, 3))


def test_a_row_on_its_way_is_not_replayed() -> None:
    (found,) = replaying().choose(choose(0, busy=(4,), outcomes=[low(4)]))
    assert found.position == 0


def test_a_row_is_replayed_so_often_in_a_row_and_a_good_group_ends_it() -> None:
    chooser = replaying()
    rows = [chooser.choose(choose(group, outcomes=[low(4)]))[0].row for group in range(3)]
    assert rows == [4, 4, 0]
    assert chooser.choose(choose(3, outcomes=[low(4)]))[0].row == 4
    assert chooser.choose(choose(4, outcomes=[RowOutcome(4, 0.5, False)]))[0].row == 0


def test_an_outcome_without_reward_says_nothing_about_hardness() -> None:
    chooser = replaying()
    assert chooser.choose(choose(0, outcomes=[RowOutcome(4, None, True)]))[0].row == 0
    assert chooser.choose(choose(1, outcomes=[low(4), RowOutcome(4, None, True)]))[0].row == 4


def test_a_replay_waits_for_the_gap() -> None:
    chooser = replaying(ReplayOptions(fraction=1.0, below_reward=0.5, max_times=2, min_gap=2))
    assert chooser.choose(choose(0, outcomes=[low(4), RowOutcome(1, 1.0, False)]))[0].row == 0
    assert chooser.choose(choose(1, outcomes=[RowOutcome(2, 1.0, False)]))[0].row == 4


def test_the_share_of_replays_is_the_one_asked_for() -> None:
    chooser = replaying(ReplayOptions(fraction=0.25, below_reward=0.5, max_times=10**6, min_gap=0))
    chooser.choose(choose(0, outcomes=[low(row) for row in range(50)]))
    replays = sum(chooser.choose(choose(group))[0].position < 0 for group in range(1, 2001))
    assert 440 <= replays <= 560


# --- curricula ----------------------------------------------------------------------------------------------------


def test_the_highest_priority_comes_first_and_each_row_once_at_a_time() -> None:
    found = curriculum(lambda row, _: -abs(row - 6.2)).choose(choose(0, 1, 2))
    assert [item.row for item in found] == [6, 7, 5]
    assert {item.position for item in found} == {-1}


def test_equal_priorities_go_through_the_dataset_before_any_row_comes_again() -> None:
    chooser = curriculum(lambda row, record: 0.0)
    seen: Counter[int] = Counter()
    outcomes: list[RowOutcome] = []
    for group in range(30):
        (found,) = chooser.choose(choose(group, outcomes=outcomes))
        seen[found.row] += 1
        outcomes = [RowOutcome(found.row, 0.5, False)]
    assert set(seen.values()) == {3}


def test_priorities_follow_the_history() -> None:
    chooser = curriculum(lambda row, record: record.mean_reward or 0.0)
    outcomes = [RowOutcome(3, 0.2, False), RowOutcome(8, 0.9, False), RowOutcome(3, 0.4, True)]
    assert [item.row for item in chooser.choose(choose(0, 1, outcomes=outcomes))] == [8, 3]


def test_a_function_is_asked_again_only_about_rows_whose_history_changed() -> None:
    asked: list[int] = []

    def weigh(row: int, record: RowRecord) -> float:
        asked.append(row)
        return -float(row)

    chooser = curriculum(weigh)
    chooser.choose(choose(0))
    chooser.choose(choose(1, outcomes=[RowOutcome(5, 1.0, False)]))
    assert asked == [*range(10), 5]


def test_where_nothing_is_wanted_now_the_stream_goes_on() -> None:
    found = curriculum(lambda row, _: None if row != 2 else 1.0).choose(choose(0, 1, first=4))
    assert found == (GroupRow(0, 2, 0, -1), GroupRow(1, 4, 0, 4))


def test_a_large_dataset_is_sampled() -> None:
    chooser = curriculum(lambda row, _: float(row), num_rows=10**9, num_candidates=64)
    rows = [chooser.choose(choose(group))[0].row for group in range(20)]
    assert min(rows) > 10**9 // 2
    assert len(set(rows)) == 20


@pytest.mark.parametrize("restart_after", [0, 3, 9])
def test_a_chooser_that_is_told_everything_again_decides_the_same(restart_after: int) -> None:
    def made() -> RowChooser:
        options = ChoosingSettings(
            seed=5, num_rows=40, has_priority=True, replay=ReplayOptions(
                fraction=0.5, below_reward=0.5, max_times=2, min_gap=1
            ),
        )  # fmt: skip
        return RowChooser(options, lambda rows: [-(record.mean_reward or 0.0) for _, record in rows])

    whole, heir = made(), made()
    outcomes = [RowOutcome(row % 7, (row % 3) / 3, row % 2 == 0) for row in range(12)]
    for group in range(12):
        expected = whole.choose(choose(group, outcomes=[outcomes[group]]))
        if group >= restart_after:
            told = outcomes[: group + 1] if group == restart_after else [outcomes[group]]
            assert heir.choose(choose(group, outcomes=told)) == expected


@given(
    outcomes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, 0.0, 0.5, 1.0]), st.booleans()), max_size=40),
    groups=st.integers(1, 6),
    fraction=st.sampled_from([0.1, 0.5, 1.0]),
)
@settings(max_examples=60)
def test_every_group_gets_one_row_of_the_dataset(
    outcomes: list[tuple[int, float | None, bool]], groups: int, fraction: float
) -> None:
    chooser = replaying(ReplayOptions(fraction=fraction, below_reward=0.6, max_times=2, min_gap=0), num_rows=10)
    found = chooser.choose(choose(*range(groups), outcomes=[RowOutcome(*outcome) for outcome in outcomes]))
    assert [item.group_id for item in found] == list(range(groups))
    taken = [item.position for item in found if item.position >= 0]
    assert taken == list(range(len(taken)))
    replayed = [item.row for item in found if item.position < 0]
    assert len(set(replayed)) == len(replayed)
