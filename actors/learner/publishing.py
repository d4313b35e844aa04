"""Which versions the Learner publishes, and when.

Invariants:

* A version that is demanded because something is evaluated, or a newer one, is published by this incarnation, on or off
  the grid, and be it the last.
* The next batch may be trained when the backend has copied what it exports. Engines are told of the copy when the
  backend has looked at all of it, in the order of the exports.
* A version that engines were told of, or a newer one, is published by this incarnation before it waits for batches
  made with it; an older one is never published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.commands import PublishWeights, StartTimer, StopTimer
from penstock.messages.training import UpdateMode
from penstock.messages.weights import WeightsExported

if TYPE_CHECKING:
    from penstock.actors.learner.settings import LearnerSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.training import BatchReady
    from penstock.messages.weights import WeightManifest

PUBLISH_DEADLINE: Final = "publish"
PUBLISHES_PER_EPOCH: Final = 1_000_000
"""Publish numbers go up over incarnations too, so that an engine never takes an old one for a new one."""


class Publishing:
    """What was published, and whether the version at hand is to be."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self.version = -1
        """Published last, or copied."""
        self.copied: int | None = None
        """The version that is copied, and that engines cannot be told of yet."""
        self.is_due = False
        self.next_publish = settings.epoch * PUBLISHES_PER_EPOCH
        self._update_mode = UpdateMode.DRAIN
        self._announced = -1
        """The newest version that engines were told of, as far as is known here."""
        self._demanded = -1
        """Engines are to serve this version or a later one."""

    def announced(self, version: int) -> bool:
        """Engines were told of this version; whether that is news."""
        is_news = version > self._announced
        self._announced = max(self._announced, version)
        return is_news

    def demanded(self, wanted: int, *, version: int) -> None:
        """Engines are to serve what is wanted; ``version`` is at hand."""
        self._demanded = max(self._demanded, wanted)
        self._see_demand(version)

    def _see_demand(self, version: int) -> None:
        is_wanted = self.version < self._demanded <= version
        self.is_due |= self._settings.publishes and is_wanted and version >= self._announced

    def opened(self, version: int) -> None:
        """This version was loaded."""
        self.is_due = self._settings.publishes and version >= self._announced

    def trained(self, batch: BatchReady, *, are_shared: bool) -> None:
        """The version of this batch is there. ``are_shared``: engines that sleep wake with new weights only, so a turn
        that is given away ends with a publish."""
        self._update_mode = batch.update_mode
        self.announced(batch.announced_version)
        version = batch.version
        is_due = are_shared or version - self.version >= self._settings.publish_every
        # Engines may have been told of a version that this incarnation has not published: off the grid, then.
        is_missing = self._announced > self.version
        is_wanted = (is_due or is_missing) and version >= self._announced and not batch.is_last
        self.is_due |= self._settings.publishes and is_wanted
        self._see_demand(version)

    def failed(self, publish: int) -> None:
        """No engine takes this publish."""
        self.is_due |= publish == self.next_publish - 1

    def start(self, version: int) -> PublishWeights:
        """Publish the version at hand."""
        self.is_due = False
        self.next_publish += 1
        return PublishWeights(version, self.next_publish - 1)

    def copy_taken(self, version: int) -> list[AnyCommand]:
        """The export of this version does not need the weights any more."""
        self.version = self.copied = version
        return [StartTimer(PUBLISH_DEADLINE, self._settings.step_timeout_s)]

    def copy_published(self) -> list[AnyCommand]:
        """What was copied is published."""
        self.copied = None
        return [StopTimer(PUBLISH_DEADLINE)]

    def done(self, manifest: WeightManifest) -> WeightsExported:
        """It is published; what engines are to be told."""
        self.version = manifest.version
        return WeightsExported(manifest=manifest, update_mode=self._update_mode)
