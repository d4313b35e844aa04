"""The JSON lines in a run's folder: what is written, what is read back, and what a kill leaves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.training import Activity, ActivitySpan, ActorReported, Balance, CauseCount, StepReported
from penstock.runtime.observability.jsonl import JsonLinesWriter, read_rows
from penstock.runtime.observability.trackers import (
    ActivityLog,
    EventLog,
    EventRow,
    MetricsLog,
    StepRow,
    event_file,
    read_activity,
    read_events,
    read_run_events,
    read_steps,
)

if TYPE_CHECKING:
    from pathlib import Path

TRAINED = CauseCount(state="trained", cause="", num_samples=4, num_tokens=40)


def step(version: int, reward: float = 0.5) -> StepReported:
    return StepReported(
        version=version,
        num_steps=10,
        group_ids=(1, 2),
        metrics=(Metric("rollout/raw_reward", reward), Metric("train/loss", float("nan"))),
        staleness_counts=(3, 1),
        response_lengths=(10, 10, 10, 10),
        balance=Balance(issued=5, in_system=1, ended=(TRAINED,)),
    )


def report(name: str, epoch: int, *spans: ActivitySpan) -> ActorReported:
    return ActorReported(name=name, epoch=epoch, state="x", activities=spans)


# --- lines ------------------------------------------------------------------------------------------------------


def test_lines_are_written_whole_and_in_batches(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    writer = JsonLinesWriter(path, lines_per_write=3)
    for number in range(7):
        writer.append({"number": number})
    assert path.read_text().count("\n") == 6
    writer.close()
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"number": n} for n in range(7)]


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=20), st.integers(1, 10_000))
def test_a_torn_tail_is_passed_over_and_cut_off_by_the_next_writer(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "torn.jsonl"
    path.unlink(missing_ok=True)
    writer = JsonLinesWriter(path)
    for text in texts:
        writer.append(text)
    writer.close()
    whole = path.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    path.write_bytes(kept)
    num_whole = kept.count(b"\n")
    assert list(read_rows(path, str)) == texts[:num_whole]
    writer = JsonLinesWriter(path)
    writer.append("next")
    writer.close()
    assert list(read_rows(path, str)) == [*texts[:num_whole], "next"]


def test_a_long_torn_tail_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'"first"\n"' + b"x" * 300_000)
    writer = JsonLinesWriter(path)
    writer.append("second")
    writer.close()
    assert path.read_bytes() == b'"first"\n"second"\n'


def test_a_bad_line_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('"good"\n17\n"good"\n')
    with pytest.raises(UserFault, match=r"rows\.jsonl, line 2: Expected `str`, got `int`"):
        list(read_rows(path, str))


# --- steps ------------------------------------------------------------------------------------------------------


def test_a_step_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(StepRow.of(1.5, step(1)))
    [row] = read_steps(tmp_path)
    assert (row.version, row.at_s, row.num_steps) == (1, 1.5, 10)
    assert row.metrics == {"rollout/raw_reward": 0.5, "train/loss": None}
    assert row.staleness_counts == (3, 1)
    assert row.balance == step(1).balance
    log.close()


def test_a_version_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for version, reward in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (3, 0.35), (4, 0.4)]:
        log.append(StepRow.of(float(version), step(version, reward)))
    log.close()
    assert [(row.version, row.metrics["rollout/raw_reward"]) for row in read_steps(tmp_path)] == [
        (1, 0.1),
        (2, 0.25),
        (3, 0.35),
        (4, 0.4),
    ]


def test_a_run_without_steps_has_none(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == []
    assert read_activity(tmp_path) == {}
    assert read_run_events(tmp_path) == []


# --- activity ---------------------------------------------------------------------------------------------------


def test_lanes_span_incarnations_and_are_closed_at_the_end(tmp_path: Path) -> None:
    log = ActivityLog(tmp_path)
    log.append(report("learner", 1, ActivitySpan(Activity.WORKING, 0.0, 4.0)))
    log.append(report("engine/0", 1, ActivitySpan(Activity.WORKING, 1.0, 2.0, 0.25)))
    log.append(report("scorer", 1))
    log.lost("engine/0")
    log.append(report("engine/0", 2, ActivitySpan(Activity.STARTING, 3.0, 3.5)))
    log.append(report("engine/0", 2, ActivitySpan(Activity.WORKING, 3.5, 4.0, 0.5)))
    log.close(5.0)
    lanes = read_activity(tmp_path)
    assert set(lanes) == {"learner", "engine/0"}
    assert [(row.epoch, row.activity.value, row.start_s, row.end_s, row.occupancy) for row in lanes["engine/0"]] == [
        (1, "starting", 0.0, 1.0, 1.0),
        (1, "working", 1.0, 2.0, 0.25),
        (2, "down", 2.0, 3.0, 1.0),
        (2, "starting", 3.0, 3.5, 1.0),
        (2, "working", 3.5, 4.0, 0.5),
        (2, "working", 4.0, 5.0, 0.5),
    ]
    assert lanes["learner"][-1].end_s == 5.0


def test_lanes_of_a_later_drive_begin_where_the_earlier_one_ended(tmp_path: Path) -> None:
    log = ActivityLog(tmp_path)
    log.append(report("learner", 1, ActivitySpan(Activity.WORKING, 0.0, 4.0)))
    log.append(report("engine/0", 1, ActivitySpan(Activity.WORKING, 0.0, 4.0)))
    log.abandon()
    log = ActivityLog(tmp_path, resumes=True)
    log.append(report("learner", 1001, ActivitySpan(Activity.STARTING, 100.0, 101.0)))
    log.close(102.0)
    lanes = read_activity(tmp_path)
    assert [(row.epoch, row.activity.value, row.start_s, row.end_s) for row in lanes["learner"]] == [
        (1, "working", 0.0, 4.0),
        (1001, "down", 4.0, 100.0),
        (1001, "starting", 100.0, 101.0),
        (1001, "starting", 101.0, 102.0),
    ]
    assert lanes["engine/0"][-1].activity is Activity.DOWN  # it is no part of this drive
    assert lanes["engine/0"][-1].end_s == 102.0


# --- events -----------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(st.floats(0, 1e6, allow_nan=False), st.text(max_size=8), st.integers(0, 9), st.text(), st.text()),
    max_size=30,
)


def fill(log: EventLog, events: list[tuple[float, str, int, str, str]]) -> EventLog:
    for event in events:
        log.append(*event)
    return log


@given(EVENTS, st.integers(1, 7))
def test_the_digest_depends_on_the_events_and_not_on_the_batches(
    events: list[tuple[float, str, int, str, str]], events_per_write: int
) -> None:
    whole, batched = fill(EventLog(), events), fill(EventLog(events_per_write=events_per_write), events)
    batched.digest()
    assert whole.digest() == batched.digest()
    assert whole.num_events == len(events)


@given(EVENTS.filter(bool), st.data())
def test_the_digest_changes_with_every_event(
    events: list[tuple[float, str, int, str, str]], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(events) - 1))
    at_s, actor, epoch, name, summary = events[place]
    other = (at_s, actor, epoch, name, summary + "'")
    changed = [*events[:place], other, *events[place + 1 :]]
    assert fill(EventLog(), events).digest() != fill(EventLog(), changed).digest()
    assert fill(EventLog(), events).digest() != fill(EventLog(), events[:-1]).digest()


def test_the_log_holds_what_the_digest_covers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, events_per_write=2)
    log.append(0.25, "buffer", 1, "GroupAdmitted", "12")
    log.append(0.5, 'engine/"0"', 2, "SampleIssued", "12/3\n")
    log.append(0.75, "buffer", 1, "TimerFired")
    digest = log.digest()
    log.close()
    assert list(read_events(path)) == [
        EventRow(0.25, "buffer", 1, "GroupAdmitted", "12"),
        EventRow(0.5, 'engine/"0"', 2, "SampleIssued", "12/3\n"),
        EventRow(0.75, "buffer", 1, "TimerFired", ""),
    ]
    again = fill(EventLog(), [msgspec.structs.astuple(row) for row in read_events(path)])
    assert again.digest() == digest
    assert len(digest) == 32


def test_events_do_not_wait_longer_than_a_second_for_their_batch(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append(0.1, "buffer", 1, "A")
    log.append(0.9, "buffer", 1, "B")
    assert path.read_bytes() == b""
    log.append(1.1, "buffer", 1, "C")
    assert [row.event for row in read_events(path)] == ["A", "B", "C"]
    log.close()


def test_the_logs_of_all_actors_are_read_by_time(tmp_path: Path) -> None:
    for actor, epoch, times in [("engine/0", 1, (0.1, 0.4)), ("engine/0", 2, (0.6,)), ("buffer", 1, (0.2, 0.5))]:
        log = EventLog(event_file(tmp_path, actor, epoch))
        for at_s in times:
            log.append(at_s, actor, epoch, "X")
        log.close()
    assert [(row.at_s, row.actor, row.epoch) for row in read_run_events(tmp_path)] == [
        (0.1, "engine/0", 1),
        (0.2, "buffer", 1),
        (0.4, "engine/0", 1),
        (0.5, "buffer", 1),
        (0.6, "engine/0", 2),
    ]
