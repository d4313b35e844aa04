"""Weights over the network: an engine takes from the learner's service what has changed since the version it has.

Nothing has to be shared between the machines, neither a disk nor a process group. Who has no version yet, or one that
the learner has let go of, takes all. Where the manifest names sources, most of it comes from other engines, and this
process passes on what it has (:mod:`~penstock.backends.weights.gathered`).

Invariants:

* What landed is whole and has the manifest's digest, or it was not landed. Bytes that were made of others and have
  another digest are taken whole, once.
* It lies in memory of this process that has a descriptor and no name: a server on this machine can read it through
  that, and nothing is left behind when the process ends.
* Nobody writes into what has landed; the next version is made of a copy.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.backends.weights.fetched import MappedWeights, checked_digest
from penstock.backends.weights.gathered import Gathering
from penstock.backends.weights.landed import Landed, PieceService
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pulled import described, pull
from penstock.backends.weights.service_messages import location_of, publish_of
from penstock.backends.weights.tensor_file import parse_layout, tensor_views

if TYPE_CHECKING:
    from penstock.backends.weights.service_messages import PublishId
    from penstock.messages.weights import WeightDetour, WeightManifest

_log: Final = logging.getLogger(__name__)


class Landing:
    """What this process has landed last: what the next version is made of, and passed on to other engines where it is
    to be. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Landed | None = None
        self._coming: Landed | None = None
        self._service: PieceService | None = None
        self._own_names: set[str] = set()
        """Of the engines in this process."""
        self._detours: dict[int, tuple[WeightDetour, ...]] = {}
        """By publish: of the last fetch."""

    # --- for others -------------------------------------------------------------------------------------------

    def pass_on(self, engine: str, host: str) -> str:
        """Serve what lands here to other engines, from here on until ``stop``; the location, for a source of weights.

        Args:
            engine: in this process.
            host: this machine's address as other engines see it.

        Raises:
            ServiceOpenError: this process cannot listen there.
        """
        if self._service is None:
            self._service = PieceService(host, self._find)
        self._own_names.add(engine)
        return location_of(self._service.address)

    def stop(self) -> None:
        """Serve no more."""
        service, self._service = self._service, None
        self._own_names.clear()
        if service is not None:
            service.close()

    @property
    def passed_on_bytes(self) -> int:
        """To other engines so far."""
        return 0 if self._service is None else self._service.num_bytes

    def detours_of(self, publish: int) -> tuple[WeightDetour, ...]:
        """What other engines did not give of this publish; told once."""
        return self._detours.pop(publish, ())

    def _find(self, publish: PublishId) -> Landed | None:
        """See :class:`.PieceService`."""
        for landed in (self._coming, self._last):
            if landed is not None and landed.publish == publish:
                return landed
            if landed is not None and _age_of(landed.publish) > _age_of(publish):
                raise WeightFetchError(f"version {publish.version} is not here any more")
        return None

    # --- for the engine here ----------------------------------------------------------------------------------

    def land(self, manifest: WeightManifest) -> Landed:
        """Have the bytes of a publish here.

        Raises:
            WeightFetchError: the service does not answer, has it no longer, or sent what the manifest does not
                describe.
        """
        with self._lock:
            last, publish = self._last, publish_of(manifest)
            if last is not None and (last.publish, last.digest) == (publish, manifest.digest):
                return last
            base = last if last is not None and len(last.mapping) == manifest.size_bytes else None
            landed = Landed(publish, manifest.size_bytes)
            if manifest.sources:
                self._gather(manifest, landed, base)
            else:
                self._pull(manifest, landed, base)
            landed.is_whole(manifest.digest)
            self._last = landed
            if self._service is not None:
                self._service.look_again()
            return landed

    def fetch(self, manifest: WeightManifest) -> MappedWeights:
        """For an engine in this process; see :class:`~penstock.backends.weights.protocol.WeightFetcher`."""
        landed = self.land(manifest)
        layout = parse_layout(memoryview(landed.mapping))
        return MappedWeights(tensor_views(layout, landed.mapping), landed.digest)

    def _pull(self, manifest: WeightManifest, landed: Landed, base: Landed | None) -> None:
        try:
            self._fill(manifest, landed, base)
        except WeightFetchError as error:
            if base is None:
                raise
            _log.warning("version %d is taken whole, as its changes did not do: %s", manifest.version, error)
            self._fill(manifest, landed, None)

    def _fill(self, manifest: WeightManifest, landed: Landed, base: Landed | None) -> None:
        data = memoryview(landed.mapping)
        if base is not None:
            data[:] = memoryview(base.mapping)
        pulled = pull(manifest, data, None if base is None else base.publish)
        checked_digest(described(manifest), data)
        _log.info(
            "version %d: %d of %d bytes came over the network", manifest.version, pulled.size_bytes, manifest.size_bytes
        )

    def _gather(self, manifest: WeightManifest, landed: Landed, base: Landed | None) -> None:
        if base is not None:
            memoryview(landed.mapping)[:] = memoryview(base.mapping)
            landed.since = base.publish
        service = self._service
        gathering = Gathering(manifest, landed, base, (lambda: None) if service is None else service.look_again)
        self._coming = landed
        try:
            gathering.run(self._own_names)
        finally:
            self._coming = None
            self._detours = {manifest.publish: tuple(gathering.detours)}
            for detour in gathering.detours:
                _log.warning("version %d: not from %s: %s", manifest.version, detour.engine, detour.cause)
        _log.info(
            "version %d: %d bytes came from the learner and %d from other engines, of %d",
            manifest.version,
            gathering.learner_bytes,
            gathering.peer_bytes,
            manifest.size_bytes,
        )


def _age_of(publish: PublishId) -> tuple[int, int]:
    return publish.learner_epoch, publish.publish


LANDING: Final = Landing()
"""Of this process: fetchers are functions, and a process has one engine's weights."""
