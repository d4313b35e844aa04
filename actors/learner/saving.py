"""Which checkpoints the Learner writes, and when. One at a time; while it is written, training goes on, up to the next
version that is to be kept: that one waits, for a scenario that asks for it counts on its being there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.commands import SaveCheckpoint, Send, StartTimer, StopTimer
from penstock.messages.names import BUFFER
from penstock.messages.training import CheckpointSaved

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand
    from penstock.messages.local import CheckpointWritten
    from penstock.messages.training import CheckpointDemanded, CheckpointNamed

SAVE_DEADLINE: Final = "save"


class Saving:
    """What was written, is being written, and is to be."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: for one checkpoint."""
        self._timeout_s = timeout_s
        self.is_due = False
        """The version at hand; where it stays so, it waits until the one that is being written is done."""
        self.writing: int | None = None
        """Version of the checkpoint that is being written."""
        self._saved: CheckpointSaved | None = None
        """What was written last, or loaded."""
        self._demanded: int | None = None
        """A checkpoint of this version or a later one is wanted."""
        self._ends_run = False
        """The run waits for it, to end."""

    def loads(self, named: CheckpointNamed) -> None:
        """What is loaded is on disk: a demand that its predecessor has met, which the Buffer repeats, is met by it."""
        if named.path:
            self._saved = CheckpointSaved(version=named.version, path=named.path)

    def demanded(self, event: CheckpointDemanded, *, version: int) -> list[AnyCommand]:
        """The Buffer wants one; ``version`` is at hand."""
        if self._saved is not None and self._saved.version == version >= event.version:
            return [Send(BUFFER, self._saved)]
        self._demanded = event.version
        self._ends_run |= event.ends_run
        return []

    def holds_up(self, *, has_batch: bool) -> bool:
        """Whether something waits for what is being written: the batch that is here, or the end of the run. A Learner
        that has nothing to train waits for samples, however long the disk takes."""
        return self.writing is not None and (has_batch or self._ends_run)

    def is_wanted(self, version: int) -> bool:
        """Whether :meth:`start` would write one of the version at hand."""
        is_demanded = self._demanded is not None and version >= self._demanded
        return (self.is_due or is_demanded) and self.writing is None

    def start(self, version: int) -> list[AnyCommand]:
        """Write the version at hand, if that is due or demanded and can be."""
        is_demanded = self._demanded is not None and version >= self._demanded
        if not (self.is_due or is_demanded) or self.writing is not None:
            return []
        self.is_due = False
        if is_demanded:
            self._demanded = None  # what is demanded of a later version is demanded still
        if self._saved is not None and self._saved.version == version:
            return [Send(BUFFER, self._saved)]
        self.writing = version
        return [StartTimer(SAVE_DEADLINE, self._timeout_s), SaveCheckpoint(version)]

    def done(self, event: CheckpointWritten) -> list[AnyCommand]:
        """It is written."""
        self.writing = None
        self._ends_run &= self._demanded is not None  # as where an older one was written when the run came to its end
        self._saved = CheckpointSaved(version=event.version, path=event.path)
        return [StopTimer(SAVE_DEADLINE), Send(BUFFER, self._saved)]
