"""The Buffer: what the Filter turned away, by cause; when it is kept after all; and rows that are recorded."""

from __future__ import annotations

import actor_driver as drive
import msgspec
from buffer_bench import NUM_SAMPLES, Bench, announced, ends, states_of

from penstock.actors.buffer.histories import MAX_CAUSES, cause_name
from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.report import ages
from penstock.messages.commands import AnyCommand, FailRun, Record
from penstock.messages.flow import DemandGranted, GroupRejected, GroupRow, RowOutcome, RowsChosen
from penstock.messages.ledger import BatchLeased, GroupClosed, GroupRecorded, LedgerEntry, RowsRecorded
from penstock.messages.local import Started
from penstock.messages.samples import TerminalState
from penstock.messages.training import BatchReady, LearnerReady, OnStale, StepReported


class Kept:
    """A Bench whose ledger entries are kept, so that a successor can be built from them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.entries: list[LedgerEntry] = []

    def hear(self, commands: list[AnyCommand]) -> list[AnyCommand]:
        for record in drive.every(commands, Record):
            self.entries += record.entries
        return commands

    def successor(self) -> Buffer:
        buffer = self.bench.buffer
        return Buffer(buffer.settings, buffer.policy, self.entries)

    def resumed(self) -> Kept:
        """The run goes on with chosen rows; row ``100 + n`` stands at place ``n`` of the stream."""
        buffer = self.bench.buffer
        settings = msgspec.structs.replace(buffer.settings, chooses_rows=True)
        heir = Kept(self.bench)
        heir.entries = self.entries
        self.bench.driver = drive.Driver(
            Buffer(settings, buffer.policy, self.entries, row_of=lambda place: (100 + place, 0))
        )
        return heir


def bench_of(
    *, keep_after_batches: int | None = None, num_prompts: int | None = None, chooses_rows: bool = False,
    max_rejected_batches: int = 20, eta: int = 2, on_stale: OnStale = OnStale.WAIT, mask_old_tokens: bool = False,
) -> Kept:  # fmt: skip
    bench = Bench(num_prompts=num_prompts, max_rejected_batches=max_rejected_batches, eta=eta, on_stale=on_stale)
    settings = bench.buffer.settings
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    fields |= {
        "keep_after_batches": keep_after_batches,
        "chooses_rows": chooses_rows,
        "mask_old_tokens": mask_old_tokens,
    }
    bench.driver = drive.Driver(Buffer(type(settings)(**fields), bench.buffer.policy))
    kept = Kept(bench)
    kept.hear(bench.hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0)))
    return kept


def turned_away(group_id: int, cause: str = "zero_spread", *, whole: bool = True, reward: float = 0.5) -> GroupRejected:
    return GroupRejected(
        group_id=group_id,
        cause=cause,
        ended=ends(group_id, TerminalState.FILTERED),
        mean_reward=reward,
        group=drive.group(group_id, (0, 4), size=NUM_SAMPLES) if whole else None,
    )


def figures(kept: Kept) -> dict[str, float]:
    return {metric.name: metric.value for metric in kept.bench.buffer.books.rejections.metrics()}


# --- causes -------------------------------------------------------------------------------------------------------


def test_rejections_are_counted_by_cause_told_with_each_step_and_known_to_a_successor() -> None:
    kept = bench_of()
    for group_id, cause in enumerate(("zero_spread", "too_long", "zero_spread")):
        kept.hear(kept.bench.hear(turned_away(group_id, cause)))
    kept.hear(kept.bench.admit(3))
    kept.hear(kept.bench.admit(4))
    report = drive.one_sent(kept.hear(kept.bench.train()), StepReported)
    told = {metric.name: metric.value for metric in report.metrics if metric.name.startswith("filter/")}
    assert told == {"filter/rejected/zero_spread": 2, "filter/rejected/too_long": 1}
    successor = kept.successor()
    assert successor.books.rejections.metrics() == kept.bench.buffer.books.rejections.metrics()
    assert states_of(kept.bench)["filtered", "why"] == 3 * NUM_SAMPLES


def test_a_users_causes_are_one_word_each_and_of_bounded_number() -> None:
    assert cause_name("too  much/of it") == "too_much_of_it"
    kept = bench_of(max_rejected_batches=1000)
    for group_id in range(MAX_CAUSES + 3):
        kept.bench.buffer.books.rejections.closed(
            GroupClosed(group_id=group_id, ended=(), rejected_cause=f"cause {group_id}")
        )
    assert len(figures(kept)) == MAX_CAUSES + 1
    assert figures(kept)["filter/rejected/other"] == 3


# --- keeping what was turned away ---------------------------------------------------------------------------------


def test_groups_are_kept_when_enough_batches_worth_of_them_were_turned_away() -> None:
    kept = bench_of(keep_after_batches=2)  # of 2 groups
    for group_id in range(4):
        commands = kept.hear(kept.bench.hear(turned_away(group_id)))
        assert [entry.rejected_cause for entry in drive.recorded(commands, GroupClosed)] == ["zero_spread"]
    commands = kept.hear(kept.bench.hear(turned_away(4, "too_short")))
    (entry,) = drive.recorded(commands, GroupRecorded)
    assert (entry.kept_cause, drive.recorded(commands, GroupClosed)) == ("too_short", [])
    commands = kept.hear(kept.bench.hear(turned_away(5)))
    assert drive.one_sent(commands, BatchReady).groups == tuple(drive.group(i, (0, 4)) for i in (4, 5))
    assert figures(kept)["filter/kept/too_short"] == 1


def test_a_batch_that_is_formed_ends_the_keeping() -> None:
    kept = bench_of(keep_after_batches=1)
    for group_id in (0, 1):
        kept.bench.hear(turned_away(group_id))
    for group_id in (2, 3):
        assert drive.recorded(kept.bench.hear(turned_away(group_id)), GroupRecorded)
    assert kept.bench.batch() == (2, 3)
    assert drive.recorded(kept.bench.hear(turned_away(4)), GroupClosed)


def test_a_successor_keeps_and_turns_away_the_same() -> None:
    kept = bench_of(keep_after_batches=1)
    for group_id in (0, 1):
        kept.hear(kept.bench.hear(turned_away(group_id)))
    heir = drive.Driver(kept.successor())
    heir.hear(Started(epoch=1), LearnerReady(epoch=0, version=0))
    (entry,) = drive.recorded(heir.hear(turned_away(2)), GroupRecorded)
    assert entry.kept_cause == "zero_spread"


def test_what_does_not_travel_whole_is_never_kept() -> None:
    kept = bench_of(keep_after_batches=1, max_rejected_batches=3)
    for group_id in range(5):
        assert drive.recorded(kept.bench.hear(turned_away(group_id, whole=False)), GroupClosed)
    assert "5 groups" not in str(kept.bench.commands)
    assert drive.every(kept.bench.hear(turned_away(5, whole=False)), FailRun)


def test_nothing_is_kept_unless_the_scenario_says_so() -> None:
    kept = bench_of(max_rejected_batches=4)
    for group_id in range(7):
        assert drive.recorded(kept.bench.hear(turned_away(group_id)), GroupClosed)


def test_at_the_end_of_the_data_the_last_batch_keeps_what_it_would_lack() -> None:
    kept = bench_of(keep_after_batches=19, num_prompts=5)  # of 2 groups a batch
    assert kept.bench.granted == 5
    assert drive.recorded(kept.bench.hear(turned_away(0)), GroupClosed)  # four are left: two batches
    kept.bench.admit(1)
    assert drive.recorded(kept.bench.hear(turned_away(2)), GroupClosed)  # three are left: a batch, and a short one
    assert drive.recorded(kept.bench.hear(turned_away(3)), GroupClosed)  # two are left: one batch, the last
    commands = kept.bench.hear(turned_away(4))
    (entry,) = drive.recorded(commands, GroupRecorded)
    (lease,) = drive.recorded(commands, BatchLeased)
    assert (entry.kept_cause, lease.group_ids, lease.is_last) == ("zero_spread", (1, 4), True)


def test_at_the_end_of_the_data_a_single_group_is_kept_too() -> None:
    kept = bench_of(keep_after_batches=19, num_prompts=1)
    (lease,) = drive.recorded(kept.bench.hear(turned_away(0)), BatchLeased)
    assert (lease.group_ids, lease.is_last) == ((0,), True)


# --- rows ---------------------------------------------------------------------------------------------------------


def demand(commands: list[AnyCommand]) -> DemandGranted:
    return drive.sent(commands, DemandGranted)[-1]


def row(group_id: int, number: int, position: int = -1) -> GroupRow:
    return GroupRow(group_id, number, 0, position)


def test_a_chosen_row_is_recorded_before_it_is_told_and_the_first_choice_stands() -> None:
    kept = bench_of(chooses_rows=True)
    commands = kept.bench.hear(RowsChosen(rows=(row(0, 7, 0), row(1, 9)), num_outcomes=0))
    assert isinstance(commands[0], Record)
    assert demand(commands).rows == (row(0, 7, 0), row(1, 9))
    assert demand(commands).next_position == 1
    commands = kept.bench.hear(RowsChosen(rows=(row(0, 8), row(2, 4, 1)), num_outcomes=0))
    (entry,) = drive.recorded(commands, RowsRecorded)
    assert entry.rows == (row(2, 4, 1),)
    assert demand(commands).rows == (row(0, 7, 0), row(1, 9), row(2, 4, 1))
    kept.bench.driver.ignores(RowsChosen(rows=(row(0, 8),), num_outcomes=0))


def test_outcomes_are_told_in_the_order_of_the_ledger_from_where_they_are_known() -> None:
    kept = bench_of(chooses_rows=True)
    kept.hear(kept.bench.hear(RowsChosen(rows=(row(0, 7), row(1, 9), row(2, 3)), num_outcomes=0)))
    kept.hear(kept.bench.hear(turned_away(1, reward=0.0)))
    kept.hear(kept.bench.admit(0))
    expected = (RowOutcome(9, 0.0, True), RowOutcome(7, 0.5, False))
    told = demand(kept.bench.hear(RowsChosen(rows=(), num_outcomes=0)))
    assert (told.first_outcome, told.outcomes, told.num_outcomes) == (0, expected, 2)
    assert told.rows == (row(2, 3),)
    told = demand(kept.bench.hear(RowsChosen(rows=(), num_outcomes=1)))
    assert (told.first_outcome, told.outcomes, told.num_outcomes) == (1, expected[1:], 2)
    entries = kept.entries
    heir = drive.Driver(Buffer(kept.bench.buffer.settings, kept.bench.buffer.policy, entries))
    told = demand(heir.hear(Started(epoch=1), LearnerReady(epoch=0, version=0)))
    assert (told.outcomes, told.num_outcomes, told.rows, told.next_position) == (expected, 2, (row(2, 3),), 0)


def test_a_group_without_a_row_or_a_verdict_has_no_outcome() -> None:
    kept = bench_of(chooses_rows=True)
    kept.bench.admit(0)
    assert demand(kept.bench.hear(RowsChosen(rows=(), num_outcomes=0))).num_outcomes == 0


def test_a_prompt_that_is_granted_anew_keeps_its_row() -> None:
    kept = bench_of(chooses_rows=True, eta=1, on_stale=OnStale.REQUEUE)
    bench = kept.bench
    kept.hear(bench.hear(RowsChosen(rows=tuple(row(g, 10 + g, g) for g in range(4)), num_outcomes=0)))
    for version in (1, 2):
        while bench.open_batch is None:
            waiting = (t.group_id for t in bench.buffer.books.table.outstanding() if t.record is None and t.group_id)
            kept.hear(bench.admit(next(waiting)))
        kept.hear(bench.train())
        kept.hear(bench.hear(announced(version)))
    closed = [entry for entry in kept.entries if isinstance(entry, GroupClosed) and entry.is_requeued]
    assert closed, "group 0 was never admitted and passed its deadline"
    again = [r for entry in kept.entries if isinstance(entry, RowsRecorded) for r in entry.rows if r.row == 10]
    assert again[0].group_id == 0
    assert len(again) == 2
    assert again[1].group_id > 3


def test_a_run_that_goes_on_with_chosen_rows_keeps_those_that_were_drawn_by_their_places() -> None:
    kept = bench_of()
    kept.hear(kept.bench.admit(1))
    kept.hear(kept.bench.hear(turned_away(2, reward=0.25)))
    total = kept.bench.buffer.books.grants.total
    heir = kept.resumed()
    told = demand(heir.hear(heir.bench.hear(Started(epoch=1), LearnerReady(epoch=0, version=0))))
    outstanding = [group_id for group_id in range(total) if group_id not in (1, 2)]
    assert [drawn for drawn in told.rows if drawn.group_id < total] == [
        row(group_id, 100 + group_id, group_id) for group_id in outstanding
    ]
    assert told.next_position == total, "the choice begins behind what was granted"
    assert told.outcomes == (RowOutcome(101, 0.5, False), RowOutcome(102, 0.25, True))
    entries = [entry for entry in heir.entries if isinstance(entry, RowsRecorded)]
    assert len(entries) == 1
    again = drive.Driver(heir.resumed().bench.buffer)
    assert demand(again.hear(Started(epoch=2), LearnerReady(epoch=0, version=0))).next_position == total
    assert len([entry for entry in heir.entries if isinstance(entry, RowsRecorded)]) == 1, "once"


def test_a_run_of_which_nothing_came_in_goes_on_as_if_its_rows_had_been_chosen_from_the_start() -> None:
    kept = bench_of()
    heir = kept.resumed()
    told = demand(heir.hear(heir.bench.hear(Started(epoch=1), LearnerReady(epoch=0, version=0))))
    assert (told.rows, told.next_position, told.num_outcomes) == ((), 0, 0)


def test_the_choice_begins_behind_the_granted_places_when_nothing_is_outstanding() -> None:
    kept = bench_of(num_prompts=3)
    for group_id in range(3):
        kept.hear(kept.bench.hear(turned_away(group_id)))
    heir = kept.resumed()
    told = demand(heir.hear(heir.bench.hear(Started(epoch=1), LearnerReady(epoch=0, version=0))))
    assert (told.next_position, told.rows, told.num_outcomes) == (3, (), 3)


def test_without_chosen_rows_a_demand_says_nothing_of_them() -> None:
    bench = Bench()
    told = demand(bench.hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0)))
    assert (told.rows, told.outcomes, told.num_outcomes, told.next_position) == ((), (), 0, 0)


# --- old tokens ---------------------------------------------------------------------------------------------------


def test_a_batch_says_that_old_tokens_are_masked() -> None:
    for masks in (False, True):
        kept = bench_of(mask_old_tokens=masks)
        kept.bench.admit(0)
        kept.bench.admit(1)
        opened = kept.bench.open_batch
        assert opened is not None
        assert opened.mask_old_tokens is masks


def test_the_age_of_a_sample_is_then_that_of_its_newest_tokens() -> None:
    groups = (drive.group(0, (2, 3), (4, 1)), drive.group(1, (3, 2)))
    assert ages(groups, 6) == [3, 3, 2, 2]
    assert ages(groups, 6, of_newest=True) == [1, 1, 2, 2]
