"""``penstock ledger``: people's own questions to a run's ledger, which is opened so that nothing can change it."""

from __future__ import annotations

import csv
import io
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, Final

from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.sqlite import SqliteReader, open_read_only
from penstock.backends.ledger.tables import TABLES, VIEWS
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.launch.runs import ledger_file
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.console import Console

INSTRUCTIONS_A_CHECK: Final = 10_000
NULL: Final = "[dim]–[/]"


def ask_ledger(folder: Path, sql: str, console: Console, *, as_csv: bool, timeout_s: float) -> None:
    """Print what a query gives.

    Raises:
        UserFault: the query is wrong, would write, or takes longer than ``timeout_s``; or there is no ledger to read.
    """
    file = ledger_file(folder)
    try:
        SqliteReader(file).close()  # says what is wrong with a ledger of another penstock
        database = open_read_only(file)
    except (LedgerStoreError, sqlite3.Error) as error:
        raise UserFault(f"{file}: {error}" if isinstance(error, sqlite3.Error) else str(error)) from None
    deadline_s = time.monotonic() + timeout_s
    database.set_progress_handler(lambda: time.monotonic() > deadline_s, INSTRUCTIONS_A_CHECK)
    try:
        answer = database.execute(sql)
        if answer.description is None:
            raise UserFault(f"the statement gives no rows: {sql!r}. Ask with SELECT; the ledger is opened to be read")
        names = [column[0] for column in answer.description]
        if as_csv:
            _write_csv(names, answer)
        else:
            _show(names, answer, console)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise UserFault(_story(error, timeout_s)) from None
    finally:
        database.close()


def list_tables(console: Console) -> None:
    """Print every table with its columns and what they mean."""
    for spec in (*TABLES, *VIEWS):
        console.print(f"[bold]{spec.name}[/]  {escape(spec.meaning)}")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for column in spec.columns:
            kind = column.declaration.partition(" ")[0].lower()
            table.add_row(f"  {column.name}", f"[dim]{kind}[/]", escape(column.meaning))
        console.print(table)
        console.print()
    console.print('ask with: penstock ledger RUN --sql "SELECT * FROM balance"')


def _show(names: Sequence[str], rows: Iterable[Sequence[object]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    found = list(rows)
    for position, name in enumerate(names):
        is_number = any(isinstance(row[position], int | float) for row in found)
        table.add_column(escape(name), justify="right" if is_number else "left", overflow="fold")
    for row in found:
        table.add_row(*(_cell(value) for value in row))
    console.print(table)
    console.print(counted(len(found), "row"))


def _cell(value: object) -> str:
    if value is None:
        return NULL
    if isinstance(value, bytes):
        return f"[dim]{len(value):,} bytes[/]"
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else escape(str(value))


def _write_csv(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """As it is for a program that reads it; on a terminal without what a terminal would obey."""
    written = io.StringIO(newline="")
    writer = csv.writer(written)
    writer.writerow(names)
    writer.writerows([value.hex() if isinstance(value, bytes) else value for value in row] for row in rows)
    text = written.getvalue()
    sys.stdout.write(terminal_lines(text.replace("\r\n", "\n")) if sys.stdout.isatty() else text)


def _story(error: sqlite3.Error | sqlite3.Warning, timeout_s: float) -> str:
    if str(error) == "interrupted":
        return f"the query has not ended within {timeout_s:g} s; give it longer with --timeout, or ask for less"
    if "readonly" in str(error):
        return "the ledger is opened to be read, and the statement would write. Ask with SELECT"
    return f"the query cannot be answered: {error}. `penstock ledger` without --sql lists tables and columns"
