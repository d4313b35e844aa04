"""The PromptSource: which prompt next, which engine gets it, retries and replacements."""

from __future__ import annotations

import actor_driver as drive
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_bench import SourceBench, keys

from penstock.actors.prompt_source.machine import PromptSource
from penstock.actors.prompt_source.order import permute, row_of, sample_seed
from penstock.messages.commands import FetchPrompts, PromptRequest
from penstock.messages.flow import (
    DemandGranted,
    GrantSpan,
    RefillAsked,
    SampleFailed,
    SampleIssued,
    SamplesSettled,
    SettledState,
)
from penstock.messages.local import FetchedPrompt, PromptsFetched
from penstock.messages.membership import EngineJoined
from penstock.messages.samples import SampleKey
from penstock.messages.weights import EngineReady

FIRST = SampleKey(0, 0)


# --- which prompt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4097])
def test_the_shuffle_is_a_permutation(size: int) -> None:
    assert sorted(permute(position, size, key=size) for position in range(size)) == list(range(size))


@given(size=st.integers(1, 10**12), position=st.integers(0, 10**12), key=st.integers(0, 2**64 - 1))
@settings(max_examples=100)
def test_the_shuffle_stays_in_range_for_any_size(size: int, position: int, key: int) -> None:
    assert 0 <= permute(position % size, size, key) < size


def rows(*, seed: int, epoch: int, shuffle: bool = True, num_rows: int = 50) -> list[int]:
    ordinals = range(epoch * num_rows, (epoch + 1) * num_rows)
    found = [row_of(ordinal, num_rows=num_rows, seed=seed, shuffle=shuffle) for ordinal in ordinals]
    assert {of_epoch for _, of_epoch in found} == {epoch}
    return [row for row, _ in found]


def test_every_epoch_goes_through_every_row_in_another_order() -> None:
    orders = [rows(seed=3, epoch=epoch) for epoch in range(4)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert rows(seed=4, epoch=0) != orders[0]


def test_rows_are_named_ahead_once_from_the_first_that_no_group_has() -> None:
    bench = SourceBench()
    changed = msgspec.structs.replace(bench.source.settings, prefetch_rows=4)
    bench.driver = drive.Driver(PromptSource(changed))
    assert drive.one(bench.grant(2), FetchPrompts).ahead == (2, 3, 4, 5)
    assert drive.one(bench.grant(3), FetchPrompts).ahead == (6,)
    assert drive.one(bench.grant(9), FetchPrompts).ahead == (9, 10, 11, 12)


def test_without_shuffle_rows_come_in_order() -> None:
    assert rows(seed=3, epoch=2, shuffle=False) == list(range(50))


def test_row_and_seed_of_a_sample_depend_on_nothing_but_the_runs_seed_and_the_group() -> None:
    """However demand arrives, and whichever incarnation it reaches."""
    at_once, one_by_one = SourceBench(shuffle=True), SourceBench(shuffle=True)
    commands = at_once.started().grant(6)
    pieces = [command for total in range(1, 7) for command in one_by_one.started().grant(total)]
    assert {s.key: (s.seed, s.prompt) for s in drive.sent(commands, SampleIssued)} == {
        s.key: (s.seed, s.prompt) for s in drive.sent(pieces, SampleIssued)
    }


def test_every_sample_has_a_seed_of_its_own() -> None:
    seeds = {sample_seed(1, group_id, index) for group_id in range(100) for index in range(16)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(2, 0, 0) not in seeds


def test_a_prompt_is_fetched_once_for_each_granted_group() -> None:
    bench = SourceBench().started()
    assert drive.one(bench.grant(2), FetchPrompts).requests == (PromptRequest(0, 0, 0), PromptRequest(1, 1, 0))
    assert drive.one(bench.grant(3), FetchPrompts).requests == (PromptRequest(2, 2, 0),)
    assert bench.grant(3) == []


def test_a_group_that_is_granted_anew_has_the_prompt_of_the_one_it_replaces() -> None:
    bench = SourceBench().started()
    spans = (GrantSpan(0, 2, 0, 0, 2), GrantSpan(2, 1, 0, 1, 3))
    issued = bench.hear(DemandGranted(total=3, spans=spans, settled=SettledState(0, 0, ())))
    rows_of = [(s.key.group_id, s.prompt.row) for s in drive.sent(issued, SampleIssued)]
    assert sorted(rows_of) == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 0), (2, 0)]


def test_settled_groups_of_a_grant_are_not_issued() -> None:
    bench = SourceBench().started()
    spans = (GrantSpan(0, 5, 0, 0, 2),)
    issued = bench.hear(DemandGranted(total=5, spans=spans, settled=SettledState(3, 2, (3,))))
    assert sorted(keys(issued)) == [(2, 0), (2, 1), (4, 0), (4, 1)]


def test_a_sample_carries_what_its_grant_says() -> None:
    bench = SourceBench().started()
    issued = drive.sent(bench.grant(1, min_version=3), SampleIssued)[0]
    assert (issued.min_version, issued.deadline_version, issued.group_size, issued.attempt) == (3, 5, 2, 0)
    assert issued.prompt == drive.prompt(0)
    assert issued.prefix is None


# --- which engine -------------------------------------------------------------------------------------------------


def test_the_samples_of_a_group_go_to_one_engine_and_groups_to_the_least_loaded() -> None:
    bench = SourceBench(num_samples=3).started(num_engines=2)
    issued = bench.grant(4)
    assert keys(issued, "engine/0") == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)]
    assert keys(issued, "engine/1") == [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1), (3, 2)]


def test_load_is_measured_against_slots() -> None:
    bench = SourceBench(num_samples=1)
    bench.joins("engine/0", num_slots=10)
    bench.joins("engine/1", num_slots=30)
    issued = bench.grant(12)
    assert (len(keys(issued, "engine/0")), len(keys(issued, "engine/1"))) == (3, 9)


def test_an_engine_gets_no_more_than_its_slots_and_a_short_queue() -> None:
    bench = SourceBench(num_samples=1, max_load=1.5).started(num_engines=1, num_slots=4)
    issued = bench.grant(30)
    assert len(keys(issued)) == 6
    assert keys(bench.closed("engine/0", FIRST)) == [(6, 0)]


def test_nothing_is_issued_to_an_engine_that_is_not_ready() -> None:
    bench = SourceBench()
    bench.hear(EngineJoined(name="engine/0", epoch=1))
    assert keys(bench.grant(1)) == []
    bench.driver.ignores(EngineReady(engine="engine/0", engine_epoch=0, num_slots=4))
    bench.driver.ignores(EngineReady(engine="engine/9", engine_epoch=0, num_slots=4))
    assert keys(bench.hear(EngineReady(engine="engine/0", engine_epoch=1, num_slots=4))) == [(0, 0), (0, 1)]


def test_an_engine_that_serves_the_version_goes_before_one_that_is_less_loaded() -> None:
    bench = SourceBench(num_samples=1).started(num_engines=2)
    bench.serves("engine/0", 1)
    bench.serves("engine/1", 2)
    assert keys(bench.grant(3, min_version=2), "engine/1") == [(0, 0), (1, 0), (2, 0)]


def test_word_of_an_incarnation_that_is_not_there_any_more_says_nothing_of_its_successor() -> None:
    bench = SourceBench().started()
    bench.joins("engine/7", epoch=3)
    bench.driver.ignores(EngineReady(engine="engine/7", engine_epoch=2, num_slots=4, version=1))
    assert bench.source.table.router.engines["engine/7"].version == -1


def test_an_engine_that_joins_twice_keeps_its_slots_and_its_load() -> None:
    bench = SourceBench().started(num_engines=1)
    bench.grant(1)
    bench.driver.ignores(EngineJoined(name="engine/0", epoch=0))


# --- settlements --------------------------------------------------------------------------------------------------


def test_settled_groups_are_forgotten_and_make_room() -> None:
    bench = SourceBench(num_samples=1, max_load=3.0).started(num_engines=1, num_slots=4)
    bench.grant(14)
    assert keys(bench.hear(SamplesSettled(settled=SettledState(1, 1, (5,))))) == [(12, 0), (13, 0)]
    assert 0 not in bench.source.table.groups
    assert 5 not in bench.source.table.groups
    bench.hear(SamplesSettled(settled=SettledState(2, 14, ())))
    assert bench.source.table.groups == {}


def test_an_older_settlement_changes_nothing() -> None:
    bench = SourceBench().started()
    bench.grant(3)
    bench.hear(SamplesSettled(settled=SettledState(5, 2, ())))
    bench.driver.ignores(SamplesSettled(settled=SettledState(4, 1, ())))


def test_what_arrives_about_a_settled_group_changes_nothing() -> None:
    bench = SourceBench().started()
    bench.grant(1)
    bench.hear(SamplesSettled(settled=SettledState(1, 1, ())))
    bench.driver.ignores(PromptsFetched(prompts=(FetchedPrompt(0, drive.prompt()),)))
    assert bench.closed("engine/0", FIRST) == []
    assert bench.failed("engine/0", FIRST) == []


@given(
    states=st.lists(st.sets(st.integers(0, 40), max_size=41), min_size=1, max_size=12),
    skips=st.lists(st.booleans(), min_size=12, max_size=12),
)
@settings(max_examples=60)
def test_whatever_settlements_are_missed_exactly_the_open_groups_stay(
    states: list[set[int]], skips: list[bool]
) -> None:
    bench = SourceBench(num_samples=1).started(num_engines=1)
    bench.grant(41)
    done: set[int] = set()
    for sequence, (more, skip) in enumerate(zip(states, skips, strict=False), 1):
        done |= more
        floor = next(i for i in range(42) if i not in done)
        if not skip:
            above = tuple(sorted(group_id for group_id in done if group_id > floor))
            bench.hear(SamplesSettled(settled=SettledState(sequence, floor, above)))
            assert set(bench.source.table.groups) == set(range(41)) - done


# --- retries ------------------------------------------------------------------------------------------------------


def test_a_sample_that_failed_is_issued_again_with_its_prefix_and_the_same_seed() -> None:
    bench = SourceBench().started(num_engines=1)
    first = drive.sent(bench.grant(1), SampleIssued)[0]
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 3)))
    bench.progressed("engine/0", FIRST, 3, drive.part((0, 1), (1, 2)))
    again = drive.one_sent(bench.failed("engine/0", FIRST), SampleIssued)
    assert (again.key, again.attempt, again.seed) == (FIRST, 1, first.seed)
    assert again.prefix is not None
    assert [(span.version, span.num_tokens) for span in again.prefix.spans] == [(0, 4), (1, 2)]


def test_a_report_that_does_not_follow_what_is_known_is_left_out() -> None:
    bench = SourceBench().started(num_engines=1)
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 3)))
    bench.progressed("engine/0", FIRST, 5, drive.part((0, 2)))
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 3)))
    bench.progressed("engine/0", FIRST, 3, drive.part((0, 2)), attempt=4)
    again = drive.one_sent(bench.failed("engine/0", FIRST), SampleIssued)
    assert again.prefix == drive.part((0, 3))


def test_a_sample_that_failed_goes_before_those_that_were_never_issued() -> None:
    bench = SourceBench(num_samples=1).started(num_engines=1, num_slots=1)
    bench.grant(20)
    assert keys(bench.failed("engine/0", FIRST)) == [(0, 0)]


def test_a_sample_past_its_retries_fails_on_the_road_that_samples_take() -> None:
    bench = SourceBench(num_retries=1).started(num_engines=1)
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 3)))
    bench.failed("engine/0", FIRST)
    commands = bench.failed("engine/0", FIRST, attempt=1)
    assert keys(commands) == []
    event = drive.one_sent(commands, SampleFailed, to="scorer")
    assert (event.key, event.attempt, event.group_size, event.num_tokens) == (FIRST, 1, 2, 3)
    assert event.reason == "out of memory (2 attempts)"
    assert event.prompt == drive.prompt(0)


def test_a_failure_of_an_earlier_attempt_changes_nothing() -> None:
    bench = SourceBench(num_retries=3).started(num_engines=1)
    bench.grant(1)
    bench.failed("engine/0", FIRST)
    assert bench.failed("engine/0", FIRST, attempt=0) == []
    assert bench.source.issuing.num_reissued == 1


def test_a_failure_after_the_sample_has_left_its_engine_changes_nothing() -> None:
    bench = SourceBench().started(num_engines=1)
    bench.grant(1)
    bench.closed("engine/0", FIRST)
    assert bench.failed("engine/0", FIRST) == []
    assert bench.closed("engine/0", FIRST) == []


# --- replacements -------------------------------------------------------------------------------------------------


def test_replacements_that_the_filter_misses_are_issued_once() -> None:
    bench = SourceBench().started(num_engines=1)
    bench.grant(2)
    asked = RefillAsked(missing=(SampleKey(0, 2), SampleKey(1, 3)))
    issued = sorted(drive.sent(bench.hear(asked), SampleIssued), key=lambda each: each.key)
    assert [(s.key, s.attempt, s.prompt.row) for s in issued] == [(SampleKey(0, 2), 0, 0), (SampleKey(1, 3), 0, 1)]
    assert issued[0].seed == sample_seed(7, 0, 2)
    assert bench.hear(asked) == []


def test_a_replacement_for_a_group_that_is_not_known_yet_waits_for_it() -> None:
    bench = SourceBench().started(num_engines=1)
    assert bench.hear(RefillAsked(missing=(SampleKey(0, 2),))) == []
    assert keys(bench.grant(1)) == [(0, 0), (0, 1), (0, 2)]


def test_a_replacement_for_a_settled_group_is_not_issued() -> None:
    bench = SourceBench().started(num_engines=1)
    bench.grant(1)
    bench.hear(SamplesSettled(settled=SettledState(1, 1, ())))
    assert keys(bench.hear(RefillAsked(missing=(SampleKey(0, 2),)))) == []
