"""The Ledger view: balance and waste, and a box for SQL that can read the ledger and do nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from dashboard_runs import Asker, served
from sample_runs import small_run

from penstock.backends.ledger import sqlite
from penstock.backends.ledger.sqlite import open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE, TABLES, VIEWS
from penstock.messages.errors import UserFault
from penstock.runtime.dashboard import sql_box
from penstock.runtime.dashboard.ledger_view import answer_ledger, answer_tables
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.dashboard.sql_box import MAX_ROWS, SqlAnswer, SqlQuery, answer_in_here, ask

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("ledger") / "run")


def asked(run: Path, sql: str, limit_s: float = 20.0) -> SqlAnswer:
    """In this process, with the fences but those of the process."""
    return answer_in_here(str(run / LEDGER_FILE), sql, limit_s)


def alone(run: Path, sql: str, limit_s: float = 5.0) -> str:
    """In a process of its own, as the page asks: why it was refused."""
    with pytest.raises(UserFault) as caught:
        ask(run, SqlQuery(sql=sql), limit_s)
    return str(caught.value)


# --- the sums --------------------------------------------------------------------------------------------------------


def test_balance_and_tokens_are_the_ledgers(run: Path) -> None:
    page = answer_ledger(run, Query())
    with closing(open_read_only(run / LEDGER_FILE)) as database:
        rows = database.execute(
            "SELECT state, cause, num_samples, num_tokens FROM balance WHERE num_samples"
        ).fetchall()
    assert [(one.state, one.cause, one.num_samples, one.num_tokens) for one in page.balance] == rows
    assert sum(one.num_tokens for one in page.tokens) == page.num_generated
    assert {one.cause for one in page.waste} >= {"zero_spread"}
    assert [one.device_s for one in page.waste] == sorted((one.device_s for one in page.waste), reverse=True)
    (reason,) = page.reasons
    assert (reason.cause, reason.num_samples) == ("reward_timeout", 1)
    assert "\x1b" not in reason.example


def test_samples_are_read_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in run.glob("*.*"):
        if path.name != "summary.json":  # it goes on
            shutil.copy(path, tmp_path)
    asked: list[str] = []

    def traced(path: Path) -> sqlite3.Connection:
        database = open_read_only(path)
        database.set_trace_callback(asked.append)
        return database

    monkeypatch.setattr(sqlite, "open_read_only", traced)
    assert answer_ledger(tmp_path, Query()).num_generated > 0
    assert sum("FROM samples" in sql for sql in asked) == 1


def test_a_run_without_a_ledger_has_an_empty_balance(run: Path, tmp_path: Path) -> None:
    for name in ("run.json", "starts.jsonl", "activity.jsonl", "metrics.jsonl"):
        shutil.copy(run / name, tmp_path)
    assert answer_ledger(tmp_path, Query()).balance == []


def test_every_table_and_column_is_listed(run: Path) -> None:
    found = {table.name: [column.name for column in table.columns] for table in answer_tables(run, Query()).tables}
    assert found == {table.name: [column.name for column in table.columns] for table in (*TABLES, *VIEWS)}


# --- what is answered ------------------------------------------------------------------------------------------------


def test_a_question_is_answered_with_cells_as_text(run: Path) -> None:
    answer = asked(run, "SELECT group_id, state, reward, NULL, 9007199254740993, x'00ff', 1e999 FROM samples LIMIT 1")
    assert answer.names[:3] == ["group_id", "state", "reward"]
    assert answer.rows == [["0", "trained", "0.5", None, "9007199254740993", "2 bytes: 00 ff", "inf"]]
    assert answer.is_number == [True, False, True, True, True, False, True]
    assert answer.cut == answer.error == ""


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM balance",
        "SELECT sequence, entry_json(body) FROM entries",
        "SELECT version, avg(reward), count(*) FILTER (WHERE state = 'trained') FROM samples GROUP BY version HAVING 1",
        "SELECT g.group_id, row_number() OVER (ORDER BY granted_at) FROM groups g LEFT JOIN samples USING (group_id)",
        "WITH n AS (SELECT 1 AS i) SELECT i, json_extract('[1]', '$[0]'), datetime(0, 'unixepoch') FROM n;",
        "SELECT name, sql FROM sqlite_schema -- a remark",
        "EXPLAIN QUERY PLAN SELECT 1",
        "VALUES (1), (2)",
    ],
)
def test_what_reads_is_answered(run: Path, sql: str) -> None:
    answer = asked(run, sql)
    assert answer.error == ""
    assert answer.rows


def test_texts_of_the_ledger_come_without_control_characters(run: Path) -> None:
    (row,) = asked(run, "SELECT reason, char(27, 7, 8238), CAST(x'80ff41' AS TEXT) FROM reasons").rows
    assert "\\x1b]0;title\\x07" in str(row[0])
    assert row[1] == "\\x1b\\x07\\u202e"
    assert row[2] == "\ufffd\ufffdA"


def test_rows_and_bytes_have_a_bound_and_what_is_left_out_is_said(run: Path) -> None:
    many = asked(run, ENDLESS + "SELECT i FROM n")
    assert (len(many.rows), "1,000 rows" in many.cut) == (MAX_ROWS, True)
    wide = asked(run, ENDLESS + "SELECT printf('%8000d', i), printf('%8000d', i) FROM n")
    assert 0 < len(wide.rows) < MAX_ROWS
    assert "2 MiB" in wide.cut
    assert all(cell is not None and len(cell) <= sql_box.MAX_CELL for row in wide.rows for cell in row)


# --- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("ATTACH DATABASE 'other.sqlite' AS other", "only SELECT"),
        ("ATTACH ':memory:' AS m", "only SELECT"),
        ("DETACH main", "only SELECT"),
        ("PRAGMA writable_schema = ON", "only SELECT"),
        ("PRAGMA query_only = OFF", "only SELECT"),
        ("PRAGMA table_info(samples)", "only SELECT"),
        ("SELECT * FROM pragma_database_list", "only SELECT"),
        ("UPDATE sqlite_schema SET sql = ''", "only SELECT"),
        ("DELETE FROM samples RETURNING 1", "only SELECT"),
        ("INSERT INTO samples SELECT * FROM samples", "only SELECT"),
        ("WITH gone AS (SELECT 1) DELETE FROM entries", "only SELECT"),
        ("CREATE TEMP TABLE mine AS SELECT 1", "only SELECT"),
        ("CREATE TEMP TRIGGER mine AFTER INSERT ON samples BEGIN SELECT 1; END", "only SELECT"),
        ("CREATE VIRTUAL TABLE mine USING fts5(x)", "only SELECT"),
        ("BEGIN EXCLUSIVE", "only SELECT"),
        ("SAVEPOINT here", "only SELECT"),
        ("ANALYZE", "only SELECT"),
        ("REINDEX", "only SELECT"),
        ("VACUUM INTO 'copy.sqlite'", "only SELECT"),
        ("SELECT load_extension('evil.so')", "load_extension"),
        ("SELECT fts3_tokenizer('simple', x'00')", "fts3_tokenizer"),
        ("SELECT sqlite_log(1, 'x')", "sqlite_log"),
        ("SELECT readfile('/etc/passwd')", "no such function: readfile"),
        ("SELECT writefile('x', 'y')", "no such function: writefile"),
        ("SELECT edit('x')", "no such function: edit"),
        ("SELECT * FROM dbstat", "cannot be answered"),
        ("SELECT 1; SELECT 2", "a second statement"),
        ("SELECT 1; DROP TABLE entries", "a second statement"),
        ("", "no question"),
        ("-- nothing", "no question"),
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM nowhere", "no such table: nowhere"),
        ("SELECT rewards FROM samples", "no such column: rewards"),
        ("SELECT ?", "cannot be answered"),
        ("SELECT 'a\x00b'", "cannot be answered"),
        ("SELECT length(randomblob(1000000000))", "8 MiB"),
        ("SELECT length(zeroblob(1000000000))", "8 MiB"),
        ("SELECT replace(hex(zeroblob(4000000)), '0', 'aaaaaaaaaaaaaaaa')", "8 MiB"),
        (ENDLESS.replace("n) ", "n LIMIT 9) ") + "SELECT group_concat(hex(randomblob(1000000))) FROM n", "8 MiB"),
        ("SELECT 'x' LIKE '" + "%a" * 200 + "'", "too complex"),
        ("SELECT " + "(" * 300 + "1" + ")" * 300, "cannot be answered"),
        (" UNION ALL ".join(["SELECT 1"] * 60), "too many terms"),
    ],
)
def test_what_does_anything_but_read_is_refused_in_words(run: Path, sql: str, word: str) -> None:
    answer = asked(run, sql)
    assert word in answer.error
    assert answer.rows == []


def test_a_question_without_end_is_ended(run: Path) -> None:
    began_s = time.monotonic()
    assert "has not ended within 0.2 s" in asked(run, ENDLESS + "SELECT max(i) FROM n", 0.2).error
    assert time.monotonic() - began_s < 10


def test_one_call_that_never_looks_up_is_ended_with_its_process(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite asks nobody while a function works: here a search that takes hours."""
    many = "hex(zeroblob({}))"
    monkeypatch.setattr(sql_box, "START_S", 1.0)
    slow = f"SELECT instr({many.format(3500000)}, {many.format(1700000)} || '1')"
    began_s = time.monotonic()
    text = alone(run, slow, 1.0)
    assert "has not ended within" in text or "ended its process" in text
    assert time.monotonic() - began_s < 30


def test_memory_has_a_bound(run: Path) -> None:
    much = ENDLESS + "SELECT count(*) FROM (SELECT DISTINCT hex(zeroblob(2000000)) || i FROM n)"
    text = alone(run, much, 20.0)
    assert "512 MiB of memory" in text or "has not ended within" in text


def test_nothing_in_the_folder_changes_and_a_ledger_that_nobody_has_open_is_answered(run: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(run / LEDGER_FILE)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(run / LEDGER_FILE, tmp_path)
    shutil.copy(run / "run.json", tmp_path)
    before = hashlib.sha256((tmp_path / LEDGER_FILE).read_bytes()).digest()
    assert ask(tmp_path, SqlQuery(sql="SELECT count(*) FROM samples"), 20.0).rows
    alone(tmp_path, "DELETE FROM samples", 20.0)
    assert hashlib.sha256((tmp_path / LEDGER_FILE).read_bytes()).digest() == before
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {LEDGER_FILE, f"{LEDGER_FILE}-shm", f"{LEDGER_FILE}-wal", "run.json"}


def test_modules_of_the_folder_where_it_is_started_are_not_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("resource", "sqlite3", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of a project')")
    monkeypatch.chdir(tmp_path)
    assert ask(run, SqlQuery(sql="SELECT 1"), 20.0).rows == [["1"]]


def test_one_question_at_a_time(run: Path) -> None:
    told: list[str] = []
    first = threading.Thread(target=lambda: told.append(alone(run, ENDLESS + "SELECT max(i) FROM n", 3.0)))
    first.start()
    while not sql_box._one_at_a_time.locked():  # pyright: ignore[reportPrivateUsage]
        assert first.is_alive()
    assert "another question" in alone(run, "SELECT 1")
    first.join(60)
    assert "has not ended within 3 s" in told[0]
    assert ask(run, SqlQuery(sql="SELECT 1"), 20.0).rows == [["1"]]


def test_the_routes_answer_and_refuse(run: Path) -> None:
    async def get(asker: Asker, sql: str, status: int = 200) -> dict[str, Any]:
        told: dict[str, Any] = await asker.get(f"/api/ledger/sql?sql={quote(sql)}", status=status)
        return told

    async def look() -> None:
        async with served([run]) as asker:
            assert (await asker.get("/api/ledger/balance"))["num_generated"] > 0
            assert len((await asker.get("/api/ledger/tables"))["tables"]) == len(TABLES) + len(VIEWS)
            assert (await get(asker, "SELECT 1 + 1 AS two"))["rows"] == [["2"]]
            assert "only SELECT" in (await get(asker, "ATTACH 'x' AS y", 422))["error"]
            assert "4000" in (await get(asker, f"SELECT '{'x' * 4000}'", 400))["error"]

    asyncio.run(look())
