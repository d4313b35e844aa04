"""What a run takes of the disk for events and spans: files closed piece by piece, compressed and removed."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from sample_runs import small_run

from penstock.messages.errors import UserFault
from penstock.runtime.cli.trace import Chosen, show_trace
from penstock.runtime.dashboard.sample_page import SampleQuery, answer_life
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.observability.disk_budget import DEAD_AFTER_S, DiskKeeper
from penstock.runtime.observability.following import LineFollower
from penstock.runtime.observability.jsonl import JsonLinesWriter, read_rows
from penstock.runtime.observability.removed import EVENTS, REMOVED_FILE, SPANS, all_removed, removed_text
from penstock.runtime.observability.report import render_report
from penstock.runtime.observability.segments import files_in, segment_path, whole_lines
from penstock.runtime.observability.traces import TRACES_FOLDER, each_span, read_step, read_trace
from penstock.runtime.observability.trackers import (
    ACTIVITY_FILE,
    EVENTS_FILE,
    EVENTS_FOLDER,
    EventLog,
    read_activity,
    read_events,
    read_run_events,
)
from penstock.runtime.scenario import disk_rules, load_scenario
from penstock.runtime.terminal import TerminalConsole

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"
NUM_ROWS = 60
BUDGET_BYTES = 80_000
ROOM_GB = 1.0
"""For all that is written here."""


class Killed(BaseException):
    """The process ends here."""


def events_file(folder: Path, epoch: int = 1) -> Path:
    return folder / EVENTS_FOLDER / f"scorer-{epoch}.jsonl"


def write_rows(path: Path, numbers: range, *, segment_bytes: int = 100) -> None:
    writer = JsonLinesWriter(path, lines_per_write=1, segment_bytes=segment_bytes)
    fill(writer, numbers)
    writer.close()


def fill(writer: JsonLinesWriter, numbers: range) -> None:
    for number in numbers:
        writer.append({"number": number})


def numbers_in(path: Path) -> list[int]:
    return [row["number"] for row in read_rows(path, dict[str, int])]


def dies_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process is killed before the step of this number that changes a folder; 0 is the first."""
    left = [step]

    def guarded(function: Any) -> Any:  # noqa: ANN401 - any of a module's
        def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            if not left[0]:
                raise Killed
            left[0] -= 1
            return function(*args, **options)

        return call

    for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "unlink"), (os, "replace"), (os, "utime")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    monkeypatch.setattr(os, "fsync", guarded(os.fsync))


# --- closed, compressed, read ------------------------------------------------------------------------------------


def test_a_file_in_segments_reads_as_one_that_is_whole(tmp_path: Path) -> None:
    path, whole = events_file(tmp_path), tmp_path / "whole.jsonl"
    write_rows(whole, range(NUM_ROWS), segment_bytes=0)
    write_rows(path, range(NUM_ROWS))
    plain = sorted(each.name for each in path.parent.iterdir())
    assert len(plain) > 5
    assert numbers_in(path) == numbers_in(whole) == list(range(NUM_ROWS))
    DiskKeeper(tmp_path, ROOM_GB).look()
    packed = sorted(each.name for each in path.parent.iterdir())
    assert packed == [name if name == path.name else f"{name}.gz" for name in plain]
    assert numbers_in(path) == numbers_in(whole)
    assert files_in(path.parent) == [path]
    write_rows(path, range(NUM_ROWS, NUM_ROWS + 20))
    assert numbers_in(path) == list(range(NUM_ROWS + 20))
    assert all_removed(tmp_path) == []


def test_an_event_log_in_segments_has_the_digest_and_the_events_of_one_that_is_whole(tmp_path: Path) -> None:
    logs = [EventLog(tmp_path / EVENTS_FILE, events_per_write=4, segment_bytes=200), EventLog(events_per_write=4)]
    for log in logs:
        for number in range(NUM_ROWS):
            log.append(number / 100, "buffer", 1, "Event", str(number))
    assert logs[0].digest() == logs[1].digest()
    logs[0].close()
    DiskKeeper(tmp_path, ROOM_GB).look()
    assert len(list(tmp_path.iterdir())) > 5
    assert [row.summary for row in read_run_events(tmp_path)] == [str(number) for number in range(NUM_ROWS)]
    assert len(list(read_events(tmp_path / EVENTS_FILE))) == NUM_ROWS


def test_a_reader_goes_on_while_the_file_is_closed_and_compressed(tmp_path: Path) -> None:
    path = events_file(tmp_path)
    write_rows(path, range(20))
    keeper = DiskKeeper(tmp_path, ROOM_GB)
    read: list[bytes] = []
    lines = whole_lines(path)
    for number, line in enumerate(lines):
        read.append(line.data)
        if number < 10:
            write_rows(path, range(20 + 5 * number, 25 + 5 * number))
            keeper.look()
    assert read == [b'{"number":%d}\n' % number for number in range(len(read))]
    assert len(read) >= 20 + 50


def test_a_torn_segment_in_the_middle_costs_its_last_line_only(tmp_path: Path) -> None:
    path = events_file(tmp_path)
    write_rows(segment_path(path, 1), range(3), segment_bytes=0)
    with segment_path(path, 1).open("ab") as file:
        file.write(b'{"numb')
    write_rows(path, range(3, 5))
    assert numbers_in(path) == [0, 1, 2, 3, 4]


def test_a_damaged_compressed_segment_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = events_file(tmp_path)
    write_rows(path, range(NUM_ROWS))
    DiskKeeper(tmp_path, ROOM_GB).look()
    packed = path.with_name("scorer-1.000002.jsonl.gz")
    packed.write_bytes(gzip.compress(b"x" * 1000)[:-8])
    with pytest.raises(UserFault, match=r"scorer-1\.000002\.jsonl\.gz: damaged"):
        numbers_in(path)


def test_the_file_of_an_incarnation_that_was_replaced_is_closed_after_a_while(tmp_path: Path) -> None:
    for epoch in (1, 2):
        write_rows(events_file(tmp_path, epoch), range(3), segment_bytes=0)
    DiskKeeper(tmp_path, ROOM_GB).look()
    assert events_file(tmp_path, 1).exists()
    for epoch in (1, 2):
        at = events_file(tmp_path, epoch).stat().st_mtime - DEAD_AFTER_S - 1
        os.utime(events_file(tmp_path, epoch), (at, at))
    DiskKeeper(tmp_path, ROOM_GB).look()
    assert not events_file(tmp_path, 1).exists()
    assert events_file(tmp_path, 2).exists()
    assert [numbers_in(each) for each in files_in(tmp_path / EVENTS_FOLDER)] == [[0, 1, 2]] * 2


def test_followers_go_on_over_segments_that_are_closed_compressed_and_removed(tmp_path: Path) -> None:
    path = tmp_path / ACTIVITY_FILE
    follower, late = LineFollower(path), LineFollower(path)
    keeper, read = DiskKeeper(tmp_path, ROOM_GB), list[bytes]()
    assert follower.more() == []
    for begin in range(0, 50, 5):
        write_rows(path, range(begin, begin + 5), segment_bytes=40)
        if begin % 2:
            keeper.look()
        assert not follower.has_shrunk()
        read += follower.more()
        read += follower.more()
    assert read == [b'{"number":%d}' % number for number in range(50)] == late.more()
    path.write_text("")
    assert LineFollower(path).more() == read
    write_rows(path, range(50, 51), segment_bytes=0)
    assert follower.more() == [b'{"number":50}']
    path.write_text("")
    assert follower.has_shrunk()


def test_a_follower_of_which_segments_were_removed_goes_on_with_what_is_there(tmp_path: Path) -> None:
    path = events_file(tmp_path)
    write_rows(path, range(3), segment_bytes=0)
    follower = LineFollower(path)
    assert len(follower.more()) == 3
    write_rows(path, range(3, NUM_ROWS))
    DiskKeeper(tmp_path, 1e-9).look()
    write_rows(path, range(NUM_ROWS, NUM_ROWS + 1), segment_bytes=0)
    assert follower.more()[-1] == b'{"number":%d}' % NUM_ROWS


# --- kills -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(8))
def test_a_kill_between_two_steps_of_compressing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    path = events_file(tmp_path)
    write_rows(path, range(NUM_ROWS))
    with monkeypatch.context() as patched:
        dies_at(patched, step)
        with pytest.raises(Killed):
            DiskKeeper(tmp_path, ROOM_GB).look()
    assert numbers_in(path) == list(range(NUM_ROWS))
    DiskKeeper(tmp_path, ROOM_GB).look()
    assert numbers_in(path) == list(range(NUM_ROWS))
    assert {"".join(each.suffixes[-2:]) for each in path.parent.iterdir()} == {".jsonl", ".jsonl.gz"}


def test_a_kill_of_the_writer_between_two_segments_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = events_file(tmp_path), cast("Callable[..., Any]", Path.open)
    write_rows(path, range(3))

    def dies(self: Path, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        if any(path.parent.glob("*.0*")):
            raise Killed
        return real(self, *args, **options)

    writer = JsonLinesWriter(path, lines_per_write=1, segment_bytes=100)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", dies)
        with pytest.raises(Killed):
            fill(writer, range(3, NUM_ROWS))
    assert not path.exists()  # renamed, and the next one not yet begun
    written = numbers_in(path)
    assert written == list(range(len(written)))
    write_rows(path, range(len(written), NUM_ROWS))
    assert numbers_in(path) == list(range(NUM_ROWS))


@pytest.mark.parametrize("step", range(6))
def test_a_kill_while_segments_are_removed_leaves_the_newest_and_the_word_of_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    path = events_file(tmp_path)
    write_rows(path, range(NUM_ROWS))
    DiskKeeper(tmp_path, ROOM_GB).look()
    with monkeypatch.context() as patched:
        dies_at(patched, step)
        with pytest.raises(Killed):
            DiskKeeper(tmp_path, 300e-9).look()
    left = numbers_in(path)
    assert left == list(range(NUM_ROWS - len(left), NUM_ROWS))
    if len(left) < NUM_ROWS:
        assert removed_text(tmp_path, EVENTS)
    DiskKeeper(tmp_path, 300e-9).look()
    assert 0 < len(numbers_in(path)) < NUM_ROWS
    assert removed_text(tmp_path, EVENTS)


# --- the budget --------------------------------------------------------------------------------------------------


def test_the_budget_holds_the_newest_lines_stay_and_it_is_told_once(tmp_path: Path) -> None:
    path, keeper, news = events_file(tmp_path), DiskKeeper(tmp_path, 2e-6), list[str]()
    for begin in range(0, 1000, 50):
        write_rows(path, range(begin, begin + 50), segment_bytes=250)
        keeper.look()
        assert sum(each.stat().st_size for each in path.parent.iterdir()) <= 2000
        assert numbers_in(path)[-1] == begin + 49
        news += keeper.take_news()
    left = numbers_in(path)
    assert left == list(range(left[0], 1000))
    assert left[0] > 0
    assert news == ["the oldest events and spans are removed from now on: observability.max_disk_gb is 2e-06"]
    assert "the oldest events, up to 20" in removed_text(tmp_path, EVENTS)
    assert removed_text(tmp_path, SPANS) == ""
    assert removed_text(tmp_path, EVENTS, since=path.stat().st_mtime + 1) == ""


def test_logs_count_and_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner-1.log").write_bytes(b"x" * 1000)
    write_rows(events_file(tmp_path), range(NUM_ROWS))
    keeper = DiskKeeper(tmp_path, 500e-9)
    keeper.look()
    assert [each.name for each in events_file(tmp_path).parent.iterdir()] == ["scorer-1.jsonl"]
    assert "logs and time accounting alone take more" in keeper.take_news()[0]
    assert (tmp_path / "logs" / "learner-1.log").stat().st_size == 1000


@pytest.fixture
def thinned(tmp_path: Path) -> Path:
    """A small run whose spans are removed."""
    folder = small_run(tmp_path / "small")
    for file in files_in(folder / TRACES_FOLDER):
        file.rename(segment_path(file, 1))
    assert list(each_span(folder))
    DiskKeeper(folder, 1e-9).look()
    assert not list(each_span(folder))
    return folder


def test_every_reader_says_what_is_missing(thinned: Path) -> None:
    said = removed_text(thinned, SPANS)
    assert said.endswith("were removed: observability.max_disk_gb is 1e-09")
    console = TerminalConsole(file=io.StringIO(), width=300, force_terminal=False)
    show_trace(thinned, console, Chosen(slowest=3), [])
    assert isinstance(console.file, io.StringIO)
    assert said in console.file.getvalue()
    with pytest.raises(UserFault, match="no trace of step 99; the oldest spans, up to"):
        show_trace(thinned, console, Chosen(step=99), [])
    assert said in render_report(thinned)
    assert said in answer_life(thinned, SampleQuery(sample="0/0")).missing
    with pytest.raises(UserFault, match=r"no trace of sample 0/0 .*; or it is gone: the oldest spans, up to"):
        read_trace(thinned, 0, 0)
    with pytest.raises(UserFault, match=r"no trace of step 1 .*; or it is gone: the oldest spans, up to"):
        read_step(thinned, 1)


def test_a_damaged_word_of_what_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / REMOVED_FILE).write_text("[]")
    with pytest.raises(UserFault, match=REMOVED_FILE):
        removed_text(tmp_path, EVENTS)


# --- scenarios ---------------------------------------------------------------------------------------------------


def scenario(*overrides: str) -> Scenario:
    small = ("engines.count=2", "learner.groups_per_batch=8", "run.num_steps=60")
    return load_scenario(SCENARIOS / "simulated_1024_engines.yaml", [*small, *overrides])


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(UserFault, match=r"observability\.max_disk_gb: 16 files .* at least 0\.009 .* found 0\.001"):
        scenario("observability.max_disk_gb=0.001")
    assert disk_rules.segment_bytes(scenario("observability.max_disk_gb=0.009")) >= disk_rules.MIN_SEGMENT_BYTES
    assert disk_rules.segment_bytes(scenario("observability.max_disk_gb=null")) == 0
    assert disk_rules.segment_bytes(scenario()) == disk_rules.MAX_SEGMENT_BYTES


def test_a_run_on_the_virtual_host_stays_within_its_budget(tmp_path: Path) -> None:
    folders: dict[str, Path] = {}
    for name, budget in (("all", None), ("some", BUDGET_BYTES / 1e9)):
        folders[name] = tmp_path / name
        one = scenario("run.num_steps=8")
        options = msgspec.structs.replace(one.observability, max_disk_gb=budget)
        simulation = Simulation(msgspec.structs.replace(one, observability=options), run_folder=folders[name])
        assert simulation.run().completed
    whole, rest = (read_run_events(folder) for folder in folders.values())
    taken = [each.stat().st_size for each in folders["some"].iterdir() if each.name.startswith(("events", "activity"))]
    assert sum(taken) <= BUDGET_BYTES, taken
    assert 0 < len(rest) < len(whole)
    assert rest == whole[-len(rest) :]
    assert "the oldest events, up to" in (folders["some"] / "report.html").read_text()
    assert all_removed(folders["all"]) == []
    assert read_activity(folders["some"]) == read_activity(folders["all"])
    assert not any(folders["all"].glob("*.0*"))
