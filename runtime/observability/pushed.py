"""Which groups of a run came finished from outside, as its ledger says."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from penstock.backends.data.options import PUSHED
from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.ledger import GroupRecorded

if TYPE_CHECKING:
    from pathlib import Path


def pushed_keys(run_folder: Path) -> dict[int, str]:
    """The key under which each group was pushed, by group.

    Raises:
        UserFault: it cannot be read.
    """
    if not (run_folder / PUSHED).is_dir():
        return {}
    try:
        with closing(SqliteReader(run_folder / LEDGER_FILE)) as reader:
            return {entry.group_id: entry.pushed for entry in reader.entries() if isinstance(entry, GroupRecorded)}
    except LedgerStoreError as error:
        raise UserFault(str(error)) from None


def pushed_facts(run_folder: Path) -> list[tuple[str, str]]:
    """For the report, by label."""
    keys = pushed_keys(run_folder)
    num_pushed = sum(map(bool, keys.values()))
    return [("pushed", f"{num_pushed:,} of {len(keys):,} groups that came in were made outside")] if keys else []
