"""What the Buffer does for evaluations; what they are stands in the books (``evaluating.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.commands import KeepAnswers
from penstock.messages.evaluation import EvaluationOpened, PublishDemanded
from penstock.messages.names import LEARNER, SUPERVISOR
from penstock.messages.samples import group_name

if TYPE_CHECKING:
    from penstock.actors.buffer.bookkeeper import Bookkeeper
    from penstock.messages.samples import Group


class EvaluationSide:
    """Opens evaluations, takes their groups, and sees to it that their versions are published."""

    def __init__(self, keeper: Bookkeeper) -> None:
        self._keeper = keeper
        self._evaluations = keeper.books.evaluations
        self._demanded_publish = -1
        """Version that the Learner was last asked to publish."""

    def advance(self) -> None:
        """Open the evaluation that is due, if engines serve its version; otherwise see to it that they will."""
        evaluations, books = self._evaluations, self._keeper.books
        due, announced = evaluations.due, books.announced
        if due is None or (announced is not None and announced >= due and evaluations.open is not None):
            return
        if announced is not None and announced >= due:
            self._keeper.note(EvaluationOpened(evaluation=evaluations.next(books.policy.max_staleness)))
            self._keeper.out.extend(self._keeper.outbox.evaluation())
        else:
            self._demand_publish(due)

    def came_in(self, group: Group) -> str:
        """A group of an evaluation is complete; why the run has failed with that, if it has."""
        evaluations, keeper = self._evaluations, self._keeper
        if not evaluations.waits_for(group.group_id):
            return ""
        open_one, oldest = evaluations.open, group.oldest_version
        assert open_one is not None
        if oldest is not None and oldest < open_one.version:
            name = group_name(group.group_id)
            return f"group {name} has a token of version {oldest}, the evaluation is of {open_one.version}"
        entry = evaluations.entry_of(group)
        keeper.note(entry)
        name = open_one.datasets[entry.dataset].name
        keeper.out.append(KeepAnswers(evaluation=open_one.number, version=open_one.version, dataset=name, group=group))
        keeper.outbox.came_in((*(sample.key for sample in group.samples), *(end.key for end in group.ended)))
        keeper.out.extend(keeper.outbox.soon())
        if evaluations.open is None:
            self.tell()
        return ""

    def tell(self) -> None:
        """Say what is open, and what was found last."""
        self._keeper.out.extend(self._keeper.outbox.evaluation())
        if self._evaluations.finished is not None:
            self._keeper.send(SUPERVISOR, self._evaluations.finished)

    def stepped(self, version: int, due: int | None) -> None:
        """A version was recorded; ``due`` was before."""
        if due is not None and self._evaluations.is_wanted(version):
            self._note_left_out(due if self._evaluations.due != due else version)

    def end(self, version: int) -> None:
        """Nothing more is trained."""
        evaluations, due = self._evaluations, self._evaluations.due
        evaluations.end(version)
        if due is not None and due != evaluations.due:
            self._note_left_out(due)
        self.advance()
        if evaluations.is_busy:  # engines that sleep, or came anew, get weights by no further step
            self._demand_publish(version)

    def _demand_publish(self, version: int) -> None:
        if self._demanded_publish < version:
            self._demanded_publish = version
            self._keeper.send(LEARNER, PublishDemanded(version=version))

    def _note_left_out(self, version: int) -> None:
        self._keeper.notice(f"version {version} is not evaluated: evaluations are due more often than they can be made")
