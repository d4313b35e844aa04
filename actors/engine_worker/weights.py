"""The weights at one engine: those that are fetched, those that are staged, and those that it serves.

Invariants:

* One fetch at a time. Of what the publisher asks for meanwhile, only the last is fetched next.
* Nothing is staged whose digest is not that of what was exported.
* What was wrong counts as never served, so that the version before it may be loaded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.canary import canary_difference, divergence
from penstock.messages.commands import ApplyWeights, FetchWeights, Send
from penstock.messages.names import WEIGHT_PUBLISHER
from penstock.messages.weights import DrainFinished, WeightsApplied, WeightsFetched

if TYPE_CHECKING:
    from penstock.actors.engine_worker.settings import EngineWorkerSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.local import WeightsStagedLocally, WeightsSwapped
    from penstock.messages.weights import WeightDetour, WeightManifest, WeightsCommitted


class Weights:
    """Of one engine."""

    __slots__ = (
        "_loaded", "_settings", "_staged", "_wanted", "applying", "canary_difference", "commit", "fetching",
        "served", "version",
    )  # fmt: skip

    def __init__(self, settings: EngineWorkerSettings) -> None:
        self._settings = settings
        self.version = -1
        self.served: WeightManifest | None = None
        self.applying: WeightManifest | None = None
        """Being swapped to."""
        self.fetching: WeightManifest | None = None
        self._staged: WeightManifest | None = None
        self.commit: WeightsCommitted | None = None
        """What may be swapped to, if it is still what is staged; see :attr:`due`."""
        self._wanted: WeightManifest | None = None
        """Staged by the publisher while another fetch was running."""
        self.canary_difference = 0.0
        """See :func:`penstock.messages.canary.canary_difference`."""
        self._loaded: WeightsSwapped | None = None
        """What the engine said of what it loaded last."""

    def ask(self, manifest: WeightManifest) -> list[AnyCommand]:
        """The publisher wants these to be fetched."""
        if self.served is not None and _is_behind(manifest, self.served):
            return [self.applied()]
        if self.applying is not None and _is_behind(manifest, self.applying):
            return []  # answered when the swap is done
        if self._staged is not None and self._staged.publish == manifest.publish:
            return [self._fetched(manifest, self._staged.digest, "")]
        if self.fetching is None:
            return [self._fetch(manifest)]
        # The publisher knows best: also an older one, when the newer has failed elsewhere.
        self._wanted = None if self.fetching.publish == manifest.publish else manifest
        return []

    def fetched(self, event: WeightsStagedLocally) -> list[AnyCommand]:
        """The backend has them, or cannot get them."""
        manifest, error = self.fetching, event.error
        if manifest is None or manifest.publish != event.publish:
            return []
        self.fetching = None
        if not error and event.digest != manifest.digest:
            error = f"the weights fetched have the digest {event.digest}, those exported {manifest.digest}"
        if not error:
            self._staged = manifest
        told = self._fetched(manifest, event.digest, error, event.detours)
        return [told] if self._wanted is None else [told, self._fetch(self._wanted)]

    def _fetch(self, manifest: WeightManifest) -> FetchWeights:
        self.fetching, self._wanted = manifest, None
        return FetchWeights(manifest)

    def _fetched(
        self, manifest: WeightManifest, digest: str, error: str, detours: tuple[WeightDetour, ...] = ()
    ) -> Send:
        fetched = WeightsFetched(
            engine=self._settings.name,
            engine_epoch=self._settings.epoch,
            version=manifest.version,
            publish=manifest.publish,
            digest=digest,
            error=error,
            detours=detours,
        )
        return Send(WEIGHT_PUBLISHER, fetched)

    # --- a swap ------------------------------------------------------------------------------------------------

    def committed(self, event: WeightsCommitted) -> list[AnyCommand]:
        """These may be swapped to."""
        if self.served is not None and event.publish <= self.served.publish:
            return [self.applied()]
        if self._staged is not None and self._staged.publish == event.publish:
            self.commit = event
        # Otherwise it was meant for the incarnation before this one: this one has not said that it fetched them.
        return []

    @property
    def due(self) -> WeightsCommitted | None:
        """The commit of what is staged."""
        commit, staged = self.commit, self._staged
        return commit if commit is not None and staged is not None and staged.publish == commit.publish else None

    @property
    def would_go_back(self) -> bool:
        """Whether they were staged before the swap to what is served now; engines do not go back."""
        return self._staged is not None and self._staged.version < self.version

    def drop(self) -> Send:
        """They are not swapped to."""
        self.commit = self._staged = None
        return self.applied()

    def drained(self, commit: WeightsCommitted) -> Send:
        """Nothing runs any more, and the swap begins."""
        finished = DrainFinished(
            engine=self._settings.name,
            engine_epoch=self._settings.epoch,
            version=commit.version,
            publish=commit.publish,
        )
        return Send(WEIGHT_PUBLISHER, finished)

    def begin(self) -> ApplyWeights:
        """The swap that is due."""
        assert self.commit is not None
        assert self._staged is not None
        apply = ApplyWeights(self._staged, self.commit.update_mode)
        self.applying, self.commit, self._staged = self._staged, None, None
        return apply

    def swapped(self, event: WeightsSwapped) -> str:
        """The engine has loaded what was being applied; what is wrong with it, if anything is."""
        manifest = self.served = self.applying
        assert manifest is not None
        self.applying, self.version, self._loaded = None, event.version, event
        if event.digest != manifest.digest:
            return f"the digest of what was loaded is {event.digest}, that of what was exported {manifest.digest}"
        if self._settings.check_canary and manifest.canary is not None:
            difference = self.canary_difference = canary_difference(manifest.canary, event.canary_logprobs)
            if difference > self._settings.canary_tolerance:
                return divergence(manifest.canary) or f"the canary is off by {difference:.3g} of its spread"
        return ""

    def forget(self) -> None:
        """Its memory is given up, and nobody counts on it: what it is to load next is said anew."""
        self.forget_served()
        self.commit = None

    def forget_served(self) -> None:
        """What it serves is wrong."""
        self.served, self.version = None, -1

    def applied(self) -> Send:
        """What it serves, for the publisher."""
        served, loaded = self.served, self._loaded
        applied = WeightsApplied(
            engine=self._settings.name,
            engine_epoch=self._settings.epoch,
            version=self.version,
            publish=-1 if served is None else served.publish,
            digest="" if loaded is None else loaded.digest,
            canary_logprobs=b"" if loaded is None else loaded.canary_logprobs,
            layout="" if loaded is None else loaded.layout,
            checksum="" if loaded is None else loaded.checksum,
        )
        return Send(WEIGHT_PUBLISHER, applied)


def _is_behind(manifest: WeightManifest, other: WeightManifest) -> bool:
    """Whether an engine that has the other one would go back for these."""
    return manifest.publish <= other.publish or manifest.version < other.version
