"""The look-ahead rule: which ready groups make the next batch."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.buffer.policies import RankedGroup
from penstock.actors.buffer.selection import forced_counts, is_possible, select, surplus

if TYPE_CHECKING:
    from collections.abc import Sequence


class State(NamedTuple):
    """Deadlines of the ready groups (by id, in rank order) and of those that are still being generated."""

    version: int
    groups_per_batch: int
    ready: tuple[int, ...]
    unready: tuple[int, ...]

    @property
    def outstanding(self) -> Counter[int]:
        return Counter((*self.ready, *self.unready))


def ranked(deadlines: Sequence[int]) -> list[RankedGroup]:
    return [
        RankedGroup(group_id=group_id, deadline_version=deadline, num_tokens=1)
        for group_id, deadline in enumerate(deadlines)
    ]


def chosen(state: State, num_places: int | None = None) -> list[int] | None:
    """Ids of the batch, in rank order."""
    forced = forced_counts(state.outstanding, version=state.version, groups_per_batch=state.groups_per_batch)
    num_places = state.groups_per_batch if num_places is None else num_places
    batch = select(ranked(state.ready), forced, num_places=num_places)
    return None if batch is None else [group.group_id for group in batch]


def is_allowed(state: State, batch: Sequence[int]) -> bool:
    """The rule, word by word: afterwards, for every d ≥ v, at most (d − v)·B outstanding groups are due by d."""
    left = [*state.unready, *(d for i, d in enumerate(state.ready) if i not in batch)]
    last = max((state.version, *left))
    return all(
        sum(deadline <= d for deadline in left) <= (d - state.version) * state.groups_per_batch
        for d in range(state.version, last + 1)
    )


def is_sound(version: int, groups_per_batch: int, deadlines: Sequence[int]) -> bool:
    """For every d ≥ v at most (d − v + 1)·B outstanding groups are due by d, and none is overdue."""
    return all(deadline >= version for deadline in deadlines) and all(
        sum(deadline <= d for deadline in deadlines) <= (d - version + 1) * groups_per_batch
        for d in range(version, max((version, *deadlines)) + 1)
    )


states = st.builds(
    State,
    version=st.integers(0, 3),
    groups_per_batch=st.integers(1, 4),
    ready=st.lists(st.integers(0, 8), max_size=8).map(tuple),
    unready=st.lists(st.integers(0, 8), max_size=5).map(tuple),
)


def test_counterexample_of_the_design() -> None:
    """η = 2, B = 1: g0, g1, g2 start at version 0, g0 is trained, g3 is born at 1 and ready first. Earliest deadline
    first would train g3, and g1 and g2 would then both be due at version 2."""
    g1, g2, g3 = 2, 2, 3
    assert chosen(State(version=1, groups_per_batch=1, ready=(g3,), unready=(g1, g2))) is None
    assert chosen(State(version=1, groups_per_batch=1, ready=(g3, g2), unready=(g1,))) == [1]


def test_waits_for_nothing_that_is_not_forced() -> None:
    """With room before its deadline, a slow group holds up nobody."""
    assert chosen(State(version=0, groups_per_batch=2, ready=(2, 2), unready=(2, 2, 2))) == [0, 1]


def test_a_group_that_is_due_now_is_waited_for() -> None:
    assert chosen(State(version=4, groups_per_batch=2, ready=(6, 6, 6), unready=(4,))) is None


def test_another_rank_than_earliest_deadline_gets_its_way_where_the_rule_allows() -> None:
    """Rank order here is latest deadline first: one place is free, the other is forced to the group that is due."""
    assert chosen(State(version=0, groups_per_batch=2, ready=(5, 4, 0), unready=())) == [0, 2]


def test_another_rank_than_earliest_deadline_never_blocks() -> None:
    """The first B in rank order are forbidden, and an allowed batch is found behind them."""
    assert chosen(State(version=0, groups_per_batch=2, ready=(3, 3, 0, 0), unready=())) == [2, 3]


def test_a_short_batch_obeys_the_rule_too() -> None:
    assert chosen(State(version=0, groups_per_batch=4, ready=(0, 3), unready=()), num_places=2) == [0, 1]
    assert chosen(State(version=0, groups_per_batch=4, ready=(3,), unready=(0,)), num_places=2) is None


@given(states)
@settings(max_examples=400)
def test_a_batch_is_returned_if_and_only_if_an_allowed_one_exists(state: State) -> None:
    places = state.groups_per_batch
    allowed = [batch for batch in combinations(range(len(state.ready)), places) if is_allowed(state, batch)]
    batch = chosen(state)
    if batch is None:
        assert allowed == []
    else:
        assert tuple(batch) in allowed


@given(states)
@settings(max_examples=400)
def test_the_first_allowed_batch_in_rank_order_is_taken(state: State) -> None:
    """Of all allowed batches the one that is first when batches are compared rank by rank."""
    places = state.groups_per_batch
    allowed = [batch for batch in combinations(range(len(state.ready)), places) if is_allowed(state, batch)]
    batch = chosen(state)
    assert (None if batch is None else tuple(batch)) == min(allowed, default=None)


@given(states)
@settings(max_examples=400)
def test_the_quick_check_agrees_with_the_search(state: State) -> None:
    forced = forced_counts(state.outstanding, version=state.version, groups_per_batch=state.groups_per_batch)
    possible = is_possible(forced, Counter(state.ready), num_places=state.groups_per_batch)
    assert possible == (chosen(state) is not None)


@given(
    max_staleness=st.integers(0, 8),
    groups_per_batch=st.integers(1, 3),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**6)), max_size=120),
)
@settings(max_examples=150)
def test_every_reachable_state_is_sound_and_every_group_is_trained_in_time(
    max_staleness: int, groups_per_batch: int, moves: list[tuple[int, int]]
) -> None:
    """Random walks over grants, finishing in any order, rejections, late announcements and batches in a random rank."""
    version = announced = 0
    ready: list[int] = []
    unready: list[int] = []
    for move, choice in moves:
        if move == 0:
            room = (announced + max_staleness + 1 - version) * groups_per_batch - len(ready) - len(unready)
            unready.extend([announced + max_staleness] * (choice % (room + 1) if room > 0 else 0))
        elif move == 1 and unready:
            ready.insert(choice % (len(ready) + 1), unready.pop(choice % len(unready)))
        elif move == 2 and unready:
            unready.pop(choice % len(unready))
        elif move == 3:
            announced = min(version + 1, announced + choice % 2)  # a late receipt: s > v for a moment
        else:
            batch = chosen(State(version, groups_per_batch, tuple(ready), tuple(unready)))
            if batch is not None:
                assert all(ready[index] >= version for index in batch)
                ready = [deadline for index, deadline in enumerate(ready) if index not in batch]
                version += 1
        assert is_sound(version, groups_per_batch, [*ready, *unready])


@given(states)
@settings(max_examples=100)
def test_what_is_left_without_the_surplus_is_sound_and_no_more_is_given_up_than_needed(state: State) -> None:
    version, places = state.version, state.groups_per_batch
    left = sorted(state.outstanding.elements())
    for deadline, number in surplus(state.outstanding, version=version, groups_per_batch=places):
        for _ in range(number):
            left.remove(max(d for d in left if d <= deadline))
    assert is_sound(version, places, left)
    fits = max(
        len(kept)
        for size in range(len(left) + 2)
        for kept in combinations(sorted(state.outstanding.elements()), size)
        if is_sound(version, places, kept)
    )
    assert len(left) == fits
