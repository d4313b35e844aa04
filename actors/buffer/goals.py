"""Goals: the only code that knows kinds of run.

A goal is a small frozen object with pure methods, as a staleness policy is. That of a run is the scenario's, or the
replay of the batches that its ledger begins with; ``Books.goal`` is the one that holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from penstock.actors.buffer.decisions import closing, formed_lease
from penstock.actors.buffer.report import collected_report
from penstock.messages.base import Value
from penstock.messages.ledger import BatchLeased, GroupRecorded
from penstock.messages.samples import TerminalState
from penstock.messages.texts import counted

if TYPE_CHECKING:
    from penstock.actors.buffer.books import Books
    from penstock.messages.ledger import GroupClosed
    from penstock.messages.training import StepReported


class Goal(Value, frozen=True):
    """To train. The others say where they differ."""

    grants: ClassVar[bool] = True
    """Groups are granted for training, or to be collected."""
    keeps_deadlines: ClassVar[bool] = True
    """Ready groups wait for a batch that is still to be formed, in time."""
    progress: ClassVar[type[BatchLeased | GroupRecorded]] = BatchLeased
    """The entry after which groups that are turned away are counted anew."""
    why_fewer: ClassVar[str] = "the dataset ended"

    def num_steps(self, wanted: int) -> int:
        """Batches to train, where the scenario wants so many."""
        return wanted

    def num_grantable(self, books: Books, number: int) -> int:
        """How many groups to grant of those that policy and pacing allow."""
        return number

    def next_lease(self, books: Books) -> BatchLeased | None:
        """The batch that makes the next version; None when no allowed one exists."""
        return formed_lease(books)

    def report(self, books: Books) -> StepReported | None:
        """What a group that came in completes, for trackers and the terminal. Of training, receipts do that."""
        return None

    def is_over(self, books: Books, *, has_learner: bool) -> bool:
        """Whether nothing is left to do but to save. ``has_learner``: one has loaded its weights."""
        if books.open_lease is not None:
            return False  # a recorded batch is trained, also when num_steps was lowered since
        return books.version >= books.num_steps or (books.is_exhausted and not books.table.num_outstanding)

    def left_over(self, books: Books) -> list[GroupClosed]:
        """What is closed when it is over."""
        return [closing(books, each, TerminalState.CANCELLED, "run_end") for each in books.table.outstanding()]

    def to_archive(self, books: Books) -> tuple[int, ...] | None:
        """Groups that are written to a file at the end, in the order in which they came; None: there is no file."""
        return None

    def is_saved(self, books: Books) -> bool:
        """Whether the checkpoint of all that is trained is recorded."""
        return books.checkpoint_version >= books.version

    def story(self, books: Books) -> str:
        """What was done, when it is."""
        wanted = books.settings.num_steps
        fewer = f" of {wanted}: {self.why_fewer}" if books.version < wanted else ""
        return f"{counted(books.version, 'batch')} trained{fewer}"


class Train(Goal, frozen=True):
    """To train batches that are formed of ready groups."""


class Replay(Goal, frozen=True):
    """To train what another run recorded: its groups are in the ledger, and its batches were formed in time."""

    batches: tuple[BatchLeased, ...]
    """The first makes version 1."""

    grants: ClassVar[bool] = False
    keeps_deadlines: ClassVar[bool] = False
    why_fewer: ClassVar[str] = "no more were recorded"

    def num_steps(self, wanted: int) -> int:
        return min(wanted, len(self.batches))

    def num_grantable(self, books: Books, number: int) -> int:
        return 0

    def next_lease(self, books: Books) -> BatchLeased | None:
        if books.version == len(self.batches):
            return None
        lease = self.batches[books.version]
        return replace(lease, is_last=lease.version == books.num_steps)


class Evaluate(Goal, frozen=True):
    """To train nothing: the evaluations that are due when it begins are all there is to do."""

    grants: ClassVar[bool] = False

    def num_grantable(self, books: Books, number: int) -> int:
        return 0

    def next_lease(self, books: Books) -> None:
        pass

    def is_over(self, books: Books, *, has_learner: bool) -> bool:
        return has_learner

    def left_over(self, books: Books) -> list[GroupClosed]:
        return []

    def is_saved(self, books: Books) -> bool:
        return True

    def story(self, books: Books) -> str:
        return f"{books.evaluations.number} evaluations made"


class Collect(Evaluate, frozen=True):
    """To collect so many groups, made by the model as it is, and to train nothing. One that is turned away makes room
    for another. Collected groups stay ready, and in the system: what they are for, the run that trains them decides."""

    num_groups: int

    grants: ClassVar[bool] = True
    progress: ClassVar[type[BatchLeased | GroupRecorded]] = GroupRecorded

    def num_grantable(self, books: Books, number: int) -> int:
        return min(number, max(0, self.num_groups - books.table.num_outstanding))

    def report(self, books: Books) -> StepReported | None:
        return collected_report(books, self.num_groups)

    def is_over(self, books: Books, *, has_learner: bool) -> bool:
        table = books.table
        has_no_more = books.is_exhausted and table.num_ready == table.num_outstanding
        return has_learner and (table.num_ready >= self.num_groups or has_no_more)

    def to_archive(self, books: Books) -> tuple[int, ...]:
        return books.table.ready_ids()

    def story(self, books: Books) -> str:
        return f"{counted(books.table.num_ready, 'group')} collected of {self.num_groups}"
