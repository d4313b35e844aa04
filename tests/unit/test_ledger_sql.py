"""People's own questions to a ledger: it answers, says what its tables mean, and cannot be changed by asking."""

from __future__ import annotations

import csv
import io
import sqlite3
from pathlib import Path

import ledger_entries as make
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.backends.ledger.archive import COLUMNS
from penstock.backends.ledger.sqlite import SqliteStore, open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE, TABLES, VIEWS, tables_markdown
from penstock.messages.errors import UserFault
from penstock.messages.ledger import VersionRecorded
from penstock.runtime.cli.app import app
from penstock.runtime.cli.ledger import ask_ledger

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    store = SqliteStore(tmp_path / LEDGER_FILE)
    store.claim(1)
    store.commit(make.whole_run())
    return store


def asked(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["ledger", str(folder), *arguments], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    return result.output


def answer(folder: Path, sql: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(asked(folder, "--csv", "--sql", sql))))


def refused(folder: Path, sql: str, *, timeout_s: float = 60.0) -> str:
    with pytest.raises(UserFault) as caught:
        ask_ledger(folder, sql, Console(file=io.StringIO()), as_csv=False, timeout_s=timeout_s)
    return str(caught.value)


@pytest.mark.usefixtures("store")
def test_a_query_is_answered_as_csv(tmp_path: Path) -> None:
    sql = "SELECT state, num_samples, num_tokens FROM balance WHERE state IN ('trained', 'stale') ORDER BY state"
    assert answer(tmp_path, sql) == [
        ["state", "num_samples", "num_tokens"],
        ["stale", "4", "12"],
        ["trained", "8", "24"],
    ]


@pytest.mark.usefixtures("store")
def test_a_query_is_answered_as_a_table(tmp_path: Path) -> None:
    text = asked(tmp_path, "--sql", "SELECT group_id, body, version FROM groups LEFT JOIN payloads USING (group_id)")
    lines = [line.split() for line in text.splitlines()]
    assert ["group_id", "body", "version"] in lines
    assert ["0", "–", "1"] in lines
    assert any(line[:1] == ["8"] and line[2:3] == ["bytes"] for line in lines)
    assert "9 rows" in text


@pytest.mark.usefixtures("store")
def test_the_body_of_an_entry_can_be_read(tmp_path: Path) -> None:
    rows = answer(tmp_path, "SELECT entry_json(body) FROM entries WHERE kind = 'VersionRecorded' ORDER BY sequence")
    assert rows[1:] == [['{"type":"VersionRecorded","version":0}'], ['{"type":"VersionRecorded","version":1}']]


def test_the_run_goes_on_while_it_is_asked(store: SqliteStore, tmp_path: Path) -> None:
    for version in (2, 3):
        store.commit([VersionRecorded(version=version)])
        assert answer(tmp_path, "SELECT max(version) FROM versions")[1:] == [[str(version)]]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM entries",
        "UPDATE samples SET reward = 1",
        "DROP TABLE entries",
        "INSERT INTO claims VALUES (99, 0)",
        "PRAGMA query_only = OFF; DELETE FROM entries",
        "WITH gone AS (SELECT 1) DELETE FROM entries RETURNING sequence",
    ],
)
@pytest.mark.usefixtures("store")
def test_nothing_can_be_changed(tmp_path: Path, sql: str) -> None:
    before = answer(tmp_path, "SELECT count(*), sum(length(body)) FROM entries")
    assert refused(tmp_path, sql)
    assert answer(tmp_path, "SELECT count(*), sum(length(body)) FROM entries") == before


@pytest.mark.parametrize("sql", ["ATTACH '{}' AS other", "ATTACH 'file://{}?mode=rwc' AS other", "VACUUM INTO '{}'"])
@pytest.mark.usefixtures("store")
def test_no_file_is_made_or_opened_beside_the_ledger(tmp_path: Path, sql: str) -> None:
    made = tmp_path / "other.db"
    assert "cannot be answered" in refused(tmp_path, sql.format(made)) or "would write" in refused(tmp_path, sql)
    assert not made.exists()


@pytest.mark.usefixtures("store")
def test_a_wrong_query_says_what_is_wrong_and_where_to_look(tmp_path: Path) -> None:
    text = refused(tmp_path, "SELECT rewards FROM samples")
    assert text == (
        "the query cannot be answered: no such column: rewards. "
        "`penstock ledger` without --sql lists tables and columns"
    )
    assert "gives no rows" in refused(tmp_path, "")


@pytest.mark.usefixtures("store")
def test_a_query_without_end_is_ended(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    assert "has not ended within 0.1 s" in refused(tmp_path, endless, timeout_s=0.1)


def test_a_ledger_of_another_penstock_is_named(store: SqliteStore, tmp_path: Path) -> None:
    store.close()
    database = sqlite3.connect(tmp_path / LEDGER_FILE)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(UserFault, match="a newer penstock wrote this ledger"):
        ask_ledger(tmp_path, "SELECT 1", Console(file=io.StringIO()), as_csv=False, timeout_s=60)


# --- what is documented is what is there ------------------------------------------------------------------------


def test_every_table_and_column_is_listed_with_its_meaning(tmp_path: Path) -> None:
    text = " ".join(asked(tmp_path).split())
    for table in (*TABLES, *VIEWS):
        assert table.name in text
        assert all(f"{column.name} " in text for column in table.columns)


def test_a_run_that_is_not_there_is_said_so_without_a_query_too(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ledger", str(tmp_path / "gone")])
    assert isinstance(result.exception, UserFault)
    assert str(result.exception).endswith("gone: no such folder; penstock list shows the runs that are there")


@pytest.mark.usefixtures("store")
def test_what_is_documented_is_what_the_file_has(tmp_path: Path) -> None:
    database = open_read_only(tmp_path / LEDGER_FILE)
    names = {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")}
    assert names == {table.name for table in (*TABLES, *VIEWS)}
    for table in (*TABLES, *VIEWS):
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table.name})")]
        assert columns == [column.name for column in table.columns]
    database.close()


def test_the_page_has_the_tables_as_they_are() -> None:
    assert tables_markdown() in PAGE.read_text(encoding="utf-8"), (
        "docs/ledger.md: replace the tables by tables_markdown()"
    )


def test_the_page_has_the_columns_of_the_archive() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, meaning in COLUMNS.items():
        kind, _, what = meaning.partition("; ")
        assert f"| `{name}` | {kind} | {what} |" in text
