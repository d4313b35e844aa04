"""What the dashboard's table of samples takes: the making of its index, and filters, orders, jumps and counts.

The ledger is a made one of so many samples. Wall time of each question to the index, asked again and again from a
connection of its own each time, as the server does it.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import COUNTED, LEDGER_FILE, TABLES
from penstock.benchmarks._progress import in_turn
from penstock.messages.flow import GrantSpan
from penstock.messages.ledger import GroupClosed, GroupRecorded, GroupsGranted, RunRecorded, SampleNote, StepRecorded
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.runtime.dashboard.sample_index import advance, index_file
from penstock.runtime.dashboard.sample_rows import CountQuery, TableQuery, count, table
from penstock.runtime.dashboard.sample_sums import bins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.messages.ledger import LedgerEntry

QUICK: Final = ("--samples", "100000", "--repetitions", "3")
QUICK_S: Final = 10
NUM_SAMPLES: Final = 1_000_000
REPETITIONS: Final = 7
GROUP_SIZE: Final = 8
GROUPS_A_STEP: Final = 32
_LIMIT_MS: Final = 300.0


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 if a page of the table never came within 300 ms."""
    parser = argparse.ArgumentParser(prog="penstock bench sample_table", description=__doc__)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, help="in the ledger")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    given = parser.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ledger(folder / LEDGER_FILE, given.samples)
        made_s = _made_in_s(folder)
        sizes = [file.stat().st_size / 2**20 for file in (folder / LEDGER_FILE, index_file(folder))]
        took = {
            what: [_time_ms(folder, ask) for _ in range(given.repetitions)]
            for what, ask in in_turn(list(QUESTIONS.items()), lambda item: item[0])
        }
    shown = Table("question", "least ms", "median ms", "CPU ms")
    for column in shown.columns[1:]:
        column.justify = "right"
    for what, times in took.items():
        wall, cpu = zip(*times, strict=True)
        shown.add_row(what, f"{min(wall):.1f}", f"{statistics.median(wall):.1f}", f"{statistics.median(cpu):.1f}")
    console.print(shown)
    console.print(
        f"{given.samples:,} samples; the index was made in {made_s[0]:.1f} s, {made_s[1]:.1f} s on a core; "
        f"ledger {sizes[0]:.0f} MiB, index {sizes[1]:.0f} MiB"
    )
    slow = [what for what, ask in QUESTIONS.items() if ask in PAGES and min(wall for wall, _ in took[what]) > _LIMIT_MS]
    for what in slow:
        console.print(f"{what}: slower than {_LIMIT_MS:g} ms", style="red")
    return 1 if slow else 0


def _page(**terms: object) -> Callable[[Path], object]:
    query = msgspec.convert(terms, TableQuery)
    return lambda folder: table(folder, query)


PAGES: Final = (
    _page(),
    _page(state="failed"),
    _page(sort="reward", min_tokens=3000),
    _page(sort="tokens", state="failed", cause="scoring_failed", engine="engine/1"),
    _page(sort="age", first_step=10, last_step=20, min_reward=0.9),
    _page(sort="reward", is_ascending=True, is_flat=True),
    _page(sort="reward", max_reward=-1.0),
    _page(sort="tokens", skip=NUM_SAMPLES // 2),
)
QUESTIONS: Final[dict[str, Callable[[Path], object]]] = {
    "the newest": PAGES[0],
    "one rare fate": PAGES[1],
    "few by length, by reward": PAGES[2],
    "failed at one engine, by length": PAGES[3],
    "some steps and good rewards, by age": PAGES[4],
    "groups without spread, by reward": PAGES[5],
    "nothing passes": PAGES[6],
    "a jump into the middle": PAGES[7],
    "count of a filter": lambda folder: count(folder, CountQuery(min_tokens=600, min_reward=0.5)),
    "reward against length": lambda folder: bins(folder, CountQuery()),
}


def _made_in_s(folder: Path) -> tuple[float, float]:
    """Wall time, and time of the thread on a core."""
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    while not (state := advance(folder)).is_ready or state.doing:
        pass
    return time.perf_counter() - began_s, time.thread_time() - began_cpu_s


def _time_ms(folder: Path, ask: Callable[[Path], object]) -> tuple[float, float]:
    """Wall time, and time of the thread on a core."""
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    ask(folder)
    return 1000 * (time.perf_counter() - began_s), 1000 * (time.thread_time() - began_cpu_s)


# --- a ledger of so many samples -------------------------------------------------------------------------------------


def make_ledger(file: Path, num_samples: int, *, seed: int = 0) -> None:
    """A ledger with the entries and rows of a run of so many samples: lengths with a long tail, rewards that rise,
    some groups without spread, some samples that failed."""
    with closing(SqliteStore(file)) as store:
        store.claim(1)
        store.commit([RunRecorded(seed=seed, num_rows=1000, shuffle=True, samples_per_group=8, groups_per_batch=32)])
    # The rows are written as they end, which a store would take minutes for.
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        _write(database, num_samples // GROUP_SIZE, random.Random(seed))
        database.execute("COMMIT")


def _write(database: sqlite3.Connection, num_groups: int, chance: random.Random) -> None:
    entries: list[LedgerEntry] = [
        GroupsGranted(span=GrantSpan(0, num_groups, 0, 0, 9), total=num_groups, max_staleness=2)
    ]
    samples = next(table for table in TABLES if table.name == "samples")
    columns = [column.name for column in samples.columns if column not in COUNTED]
    batch: list[int] = []
    version = 1
    for group_id in range(num_groups):
        notes, ended = _group(group_id, version, num_groups, chance)
        is_trained = chance.random() > 0.05
        if is_trained:
            entries.append(GroupRecorded(group_id=group_id, deadline_version=9, samples=notes, ended=ended))
            batch.append(group_id)
        else:
            closed = tuple(
                SampleEnd(key=SampleKey(group_id, n.index), state=TerminalState.FILTERED, cause="zero_spread")
                for n in notes
            )
            entries.append(
                GroupClosed(group_id=group_id, ended=ended + closed, rejected_cause="zero_spread", mean_reward=1.0)
            )
        database.execute(
            "INSERT INTO groups (group_id, state, version, granted_at, ended_at) VALUES (?, ?, ?, ?, ?)",
            (group_id, "trained" if is_trained else "closed", version, group_id, group_id + chance.expovariate(0.1)),
        )
        database.executemany(
            f"INSERT INTO samples ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            _rows(group_id, notes, ended, version if is_trained else None),
        )
        if len(batch) == GROUPS_A_STEP:
            entries.append(StepRecorded(version=version, group_ids=tuple(batch), num_trained_tokens=1, max_staleness=2))
            batch, version = [], version + 1
        if len(entries) > 1000 or group_id == num_groups - 1:
            database.executemany(
                "INSERT INTO entries (epoch, written_at, kind, body) VALUES (1, 1.0, ?, ?)",
                [(type(entry).__name__, msgspec.msgpack.encode(entry)) for entry in entries],
            )
            entries = []


def _group(
    group_id: int, version: int, num_groups: int, chance: random.Random
) -> tuple[tuple[SampleNote, ...], tuple[SampleEnd, ...]]:
    share, is_flat = group_id / num_groups, chance.random() < 0.2
    notes: list[SampleNote] = []
    ended: list[SampleEnd] = []
    for index in range(GROUP_SIZE):
        num_tokens = min(4096, int(chance.lognormvariate(6, 0.8)))
        if chance.random() < 0.005:
            key = SampleKey(group_id, index)
            cause = chance.choice(["scoring_failed", "engine_lost", "deadline"])
            ended.append(SampleEnd(key=key, state=TerminalState.FAILED, cause=cause, num_tokens=num_tokens))
            continue
        oldest = max(0, version - 1 - chance.randrange(4))
        reward = 1.0 if is_flat else round(min(1.0, max(0.0, chance.gauss(0.2 + 0.6 * share, 0.25))), 3)
        engine = f"engine/{chance.randrange(16)}"
        notes.append(SampleNote(index, 0, engine, "completed", num_tokens, oldest, version - 1, reward))
    return tuple(notes), tuple(ended)


def _rows(
    group_id: int, notes: tuple[SampleNote, ...], ended: tuple[SampleEnd, ...], version: int | None
) -> Iterator[tuple[object, ...]]:
    unknown = (None, None, None)
    for n in notes:
        made = (n.num_tokens, 0, n.oldest_version, n.newest_version)
        if version is not None:
            yield (group_id, n.index, n.attempt, n.engine, n.outcome, *made, n.reward, "trained", "", version)
        else:
            yield (group_id, n.index, *unknown, n.num_tokens, 0, *unknown, "filtered", "zero_spread", None)
    for end in ended:
        yield (group_id, end.key.index, *unknown, end.num_tokens, 0, *unknown, "failed", end.cause, None)


if __name__ == "__main__":
    sys.exit(main())
