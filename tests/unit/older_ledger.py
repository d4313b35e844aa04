"""A ledger as an earlier form of it was written."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.backends.ledger.tables import COUNTED, COUNTED_SINCE, TABLES, TABLES_SINCE, VIEWS

if TYPE_CHECKING:
    from pathlib import Path


def make_older(path: Path, form: int) -> None:
    """Take away what later forms brought, and say that it has this one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for what, tables in (("VIEW", VIEWS), ("TABLE", TABLES)):
            for table in tables:
                if TABLES_SINCE.get(table.name, form) > form:
                    database.execute(f"DROP {what} {table.name}")
        for column in COUNTED if form < COUNTED_SINCE else ():
            database.execute(f"ALTER TABLE samples DROP COLUMN {column.name}")
        database.execute(f"PRAGMA user_version = {form}")
