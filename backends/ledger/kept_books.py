"""The snapshot of the Buffer's books in a ledger file: one row that is replaced every so many entries.

Invariants:

* It is written in the transaction of the last entry that it covers, so it is never ahead of the log.
* One that cannot be used is an answer with its reason, and no error: the log says the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.base import UNREADABLE
from penstock.messages.books import SNAPSHOT_FORM, BooksSnapshot

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from penstock.messages.ledger import GroupRecorded

SNAPSHOT_EVERY: Final = 20_000
"""Entries: so many are folded in a third of a second, and no commit but one in thousands is longer for it."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(BooksSnapshot)


class FoundSnapshot(NamedTuple):
    """What there is."""

    sequence: int
    """Of the last entry that it covers; 0: there is none that can be used."""
    snapshot: BooksSnapshot | None
    problem: str = ""
    is_wrong: bool = False
    """It is not what was written."""


def write_snapshot(database: sqlite3.Connection, sequence: int, snapshot: BooksSnapshot) -> None:
    """Replace the one before, within the transaction that is open."""
    body = encoded(snapshot)
    row = (SNAPSHOT_FORM, sequence, _digest(sequence, body), body)
    database.execute("INSERT OR REPLACE INTO snapshot (only, form, sequence, digest, body) VALUES (0, ?, ?, ?, ?)", row)


def read_snapshot(database: sqlite3.Connection) -> FoundSnapshot:
    """The newest, without payloads."""
    row = database.execute("SELECT form, sequence, digest, body FROM snapshot").fetchone()
    (last,) = database.execute("SELECT coalesce(max(sequence), 0) FROM entries").fetchone()
    if row is None:
        return FoundSnapshot(0, None, "it has no snapshot of them" if last >= 2 * SNAPSHOT_EVERY else "")
    form, sequence, digest, body = row
    if form != SNAPSHOT_FORM:
        return FoundSnapshot(0, None, f"their snapshot has form {form}, this penstock reads form {SNAPSHOT_FORM}")
    if digest != _digest(sequence, body):
        return FoundSnapshot(0, None, "their snapshot is damaged", is_wrong=True)
    if sequence > last:
        return FoundSnapshot(0, None, f"their snapshot is of entry {sequence}, the last is {last}", is_wrong=True)
    return decoded(sequence, body)


def encoded(snapshot: BooksSnapshot) -> bytes:
    """As it is stored."""
    return _ENCODER.encode(snapshot)


def decoded(sequence: int, body: bytes) -> FoundSnapshot:
    """The one that these bytes are."""
    try:
        return FoundSnapshot(sequence, _DECODER.decode(body))
    except UNREADABLE as error:
        return FoundSnapshot(0, None, f"their snapshot cannot be read: {error}", is_wrong=True)


def with_payloads(snapshot: BooksSnapshot, filled: Callable[[GroupRecorded], GroupRecorded]) -> BooksSnapshot:
    """The same, each record with the payload that its group still needs."""
    groups = tuple(
        group if group.record is None else msgspec.structs.replace(group, record=filled(group.record))
        for group in snapshot.groups
    )
    return msgspec.structs.replace(snapshot, groups=groups)


def _digest(sequence: int, body: bytes) -> bytes:
    return hashlib.sha256(sequence.to_bytes(8, "big") + body).digest()
