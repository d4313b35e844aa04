"""How far the run has come, and how it ends: checkpoints, archives, stops and failures.

Invariants:

* A run ends when its goal says that nothing is left to do, what it made is saved and archived, and its last evaluation
  is done; a stop waits for the same but the evaluation.
* The last word is said again when samples that were under way at the end have changed the balance: the supervisor has
  the one that the ledger has.
* Payloads are released when no checkpoint that is kept needs them, and they are archived if they are to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.buffer.phases import RUN, Phase
from penstock.actors.transitions import Steps
from penstock.messages.commands import ArchiveGroups, ArchiveSamples, FailRun
from penstock.messages.ledger import CheckpointRecorded, PayloadsReleased
from penstock.messages.names import LEARNER, SUPERVISOR
from penstock.messages.training import CheckpointDemanded, CheckpointsKept, RunFinished

if TYPE_CHECKING:
    from penstock.actors.buffer.bookkeeper import Bookkeeper
    from penstock.actors.buffer.evaluation_side import EvaluationSide
    from penstock.actors.buffer.learner_side import LearnerSide
    from penstock.messages.training import CheckpointSaved


class RunState:
    """The phase of the run."""

    def __init__(self, keeper: Bookkeeper, learner: LearnerSide, evaluation: EvaluationSide) -> None:
        self.phase = Phase.FILLING
        self.steps = Steps(RUN)
        self._keeper, self._learner, self._evaluation = keeper, learner, evaluation
        self._books = keeper.books
        self._stop_reason = ""
        self._last_word: RunFinished | None = None
        self._archived_through = self._books.released_through
        self._is_archiving = False

    def turn(self, phase: Phase) -> None:
        """The only way in which the phase changes."""
        self.steps.take(self.phase, phase)
        self.phase = phase

    # --- checkpoints and archives -----------------------------------------------------------------------------

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """The Learner has written one."""
        books, learner = self._books, self._learner
        if event.version > books.version:
            return  # ahead of its receipt; the last one is demanded when that is recorded
        if event.version > books.checkpoint_version:
            self._keeper.note(CheckpointRecorded(version=event.version, path=event.path))
            if learner.stand is not None and learner.stand < event.version:
                learner.stands_at(event.version)
            self._release()
        self.finish_if_saved()

    def archived(self, last_version: int) -> None:
        """A file of samples or of groups is written."""
        self._is_archiving = False
        if last_version > self._archived_through:
            self._archived_through = last_version
            if self._books.checkpoints:
                self._release()
        self.finish_if_saved()

    @property
    def is_archived(self) -> bool:
        """Whether nothing is left to be written to a file."""
        return self._are_samples_archived and not self._is_archiving

    @property
    def _are_samples_archived(self) -> bool:
        return not self._books.settings.keep_samples or self._archived_through >= self._books.checkpoint_version

    def _release(self) -> None:
        """Let go of what no checkpoint that is kept needs, once it is archived if it is to be."""
        books = self._books
        if not self._are_samples_archived:
            if not self._is_archiving:  # or two cover the same steps, and the first one's end releases what both read
                self._is_archiving = True
                self._keeper.out.append(ArchiveSamples(self._archived_through + 1, books.checkpoint_version))
            return
        oldest = books.checkpoints[0].version
        if oldest > books.released_through:
            kept = books.used.needed(books.version, oldest)
            self._keeper.note(PayloadsReleased(through_version=oldest, kept=kept))
        self._keeper.send(LEARNER, CheckpointsKept(oldest_version=oldest))

    # --- ends -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The goal is reached: close what is left over, and see to it that everything is saved."""
        books, keeper = self._books, self._keeper
        self.turn(Phase.ENDING)
        self._evaluation.end(books.version)
        for entry in books.goal.left_over(books):
            keeper.close(entry)
        if books.grants.total:
            keeper.out.extend(keeper.outbox.settled())
        group_ids = books.goal.to_archive(books)
        if group_ids is not None:
            self._is_archiving = True
            keeper.out.append(ArchiveGroups(group_ids))
        elif not books.goal.is_saved(books):
            self._demand_checkpoint()
        else:
            if books.checkpoints:
                self._release()
            self.finish_if_saved()

    def finish_if_saved(self) -> None:
        """End the run, or the stop, when nothing is left to be waited for."""
        books = self._books
        is_evaluating = self.phase is Phase.ENDING and books.evaluations.is_busy
        if self.phase not in (Phase.ENDING, Phase.STOPPING) or is_evaluating:
            return
        if not (books.goal.is_saved(books) and self.is_archived):
            return
        if self.phase is Phase.STOPPING:
            self._stopped(self._stop_reason)
        else:
            self.turn(Phase.ENDED)
            self._finish(books.goal.story(books), completed=True)

    def stop(self, reason: str) -> None:
        """Save what is trained, if that can be done now. A Learner that is still behind has nothing to add. What is
        left of the last evaluation is made when the run is resumed."""
        books = self._books
        if self.phase is Phase.ENDING and books.evaluations.is_busy:
            self._stop_reason = reason
            self.turn(Phase.STOPPING)
            self.finish_if_saved()
        elif self.phase is Phase.FILLING or (self.phase is Phase.RUNNING and not self._learner.is_level):
            self._stopped(reason)
        elif self.phase is Phase.RUNNING:
            self._stop_reason = reason
            self.turn(Phase.STOPPING)
            if books.open_lease is not None or max(0, books.checkpoint_version) < books.version:
                self._demand_checkpoint()
            else:
                self._stopped(reason)

    def stepped(self) -> None:
        """A receipt is recorded. A stop waits for the checkpoint of that version, which the Learner need not write by
        itself: it may have written the one that was demanded beside this step."""
        if self.phase is Phase.STOPPING:
            self._demand_checkpoint()

    def _demand_checkpoint(self) -> None:
        self._keeper.send(LEARNER, CheckpointDemanded(version=self._books.version, ends_run=True))

    def learner_lost(self) -> None:
        """Another Learner begins."""
        if self.phase is Phase.STOPPING:
            self._stopped(self._stop_reason)  # what was to be saved is gone; it is trained again on resumption

    def fail(self, story: str) -> None:
        """It cannot go on."""
        self._stopped(story)
        self._keeper.out.append(FailRun(story))

    def _stopped(self, reason: str) -> None:
        self.turn(Phase.STOPPED)
        self._finish(reason, completed=False)

    def _finish(self, story: str, *, completed: bool) -> None:
        books, keeper = self._books, self._keeper
        keeper.out.extend(keeper.outbox.failures())
        self._last_word = RunFinished(
            completed=completed,
            story=story,
            version=books.version,
            max_staleness=books.max_staleness_seen,
            balance=books.accounts.balance(),
            checkpoint=books.checkpoints[-1].path if books.checkpoints else "",
        )
        keeper.send(SUPERVISOR, self._last_word)

    def finish_again(self) -> None:
        """Something came in after the end."""
        last = self._last_word
        if last is not None and last.balance != self._books.accounts.balance():
            self._finish(last.story, completed=last.completed)
