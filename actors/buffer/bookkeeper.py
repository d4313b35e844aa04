"""What the parts of the Buffer share: the books, with the ledger beside them, and the commands of the event at hand.

Invariant: whatever enters the books is recorded, in the same order, and before anything that is said after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.buffer.decisions import expiring
from penstock.actors.buffer.outbox import Outbox
from penstock.messages.commands import Record, Send
from penstock.messages.names import BUFFER, SUPERVISOR
from penstock.messages.training import NoticeGiven

if TYPE_CHECKING:
    from penstock.actors.buffer.books import Books
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import GroupClosed, LedgerEntry


class Bookkeeper:
    """Enters what is known, and gathers what is to be done."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.outbox = Outbox(books)
        self.out: list[AnyCommand] = []

    def note(self, *entries: LedgerEntry) -> None:
        """Enter these in the books and in the ledger."""
        for entry in entries:
            self.books.apply(entry)
        self.out.append(Record(entries))

    def close(self, entry: GroupClosed) -> None:
        """Every sample of the group is terminal, and not by training."""
        self.note(entry)
        self.out.extend(self.outbox.soon())

    def expire(self) -> None:
        """End the groups that can no longer be trained in time."""
        for entry in expiring(self.books):
            self.close(entry)

    def send(self, to: str, event: Event) -> None:
        self.out.append(Send(to, event))

    def notice(self, text: str) -> None:
        """A line for people."""
        self.send(SUPERVISOR, NoticeGiven(name=BUFFER, text=text))

    def taken(self) -> list[AnyCommand]:
        """The commands, which leave here."""
        out, self.out = self.out, []
        return out
