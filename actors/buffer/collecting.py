"""A run that trains nothing: it collects so many groups, made by the model as it is.

Invariants:

* At most as many groups are outstanding as are wanted; one that is turned away makes room for another.
* Collected groups stay ready, and in the system: what they are for is decided by the run that trains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.actors.buffer.report import step_report
from penstock.messages.training import StepFinished

if TYPE_CHECKING:
    from penstock.actors.buffer.books import Books
    from penstock.messages.training import StepReported


def is_collected(books: Books) -> bool:
    """Whether every group that is wanted is there, or every one that can be."""
    table, wanted = books.table, books.settings.collects
    assert wanted is not None
    return table.num_ready >= wanted or (books.is_exhausted and table.num_ready == table.num_outstanding)


def collected_ids(books: Books) -> tuple[int, ...]:
    """In the order in which they came."""
    return tuple(group.group_id for group in books.table.ready_groups())


def collected_report(books: Books) -> StepReported | None:
    """For trackers and the terminal: as many groups as a batch has, as if they were one; None between two of these."""
    settings, ids = books.settings, collected_ids(books)
    assert settings.collects is not None
    size = settings.groups_per_batch
    if len(ids) % size and len(ids) < settings.collects:
        return None
    number = -(-len(ids) // size)
    newest = ids[(number - 1) * size :]
    groups = tuple(map(books.payload, newest))
    none_trained = StepFinished(version=number, group_ids=newest, num_trained_tokens=0, max_staleness=0)
    num_parts = -(-settings.collects // size)
    report = step_report(
        groups, none_trained, books.rejections.metrics(), num_steps=num_parts, balance=books.accounts.balance()
    )
    return replace(report, staleness_counts=())
