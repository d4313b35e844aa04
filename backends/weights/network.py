"""Weights over the network: an engine takes from the learner's service what has changed since the version it has.

Nothing has to be shared between the machines, neither a disk nor a process group. Who has no version yet, or one that
the learner has let go of, takes all.

Invariants:

* What landed is whole and has the manifest's digest, or it was not landed. Bytes that were made of others and have
  another digest are taken whole, once.
* It lies in memory of this process that has a descriptor and no name: a server on this machine can read it through
  that, and nothing is left behind when the process ends.
* Nobody writes into what has landed; the next version is made of a copy.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

from penstock.backends.weights.fetched import MappedWeights, checked_digest
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pulled import described, pull
from penstock.backends.weights.service_messages import publish_of
from penstock.backends.weights.tensor_file import parse_layout, tensor_views

if TYPE_CHECKING:
    from penstock.backends.weights.service_messages import PublishId
    from penstock.messages.weights import WeightManifest

_log: Final = logging.getLogger(__name__)


class Landed:
    """The bytes of one publish."""

    def __init__(self, publish: PublishId, size_bytes: int) -> None:
        self.publish = publish
        self.digest = ""
        """Of the bytes, once they are there."""
        self._descriptor = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, size_bytes)  # no room is an error here, and no SIGBUS later
            self.mapping = mmap.mmap(self._descriptor, size_bytes)
        except OSError as error:
            os.close(self._descriptor)
            raise WeightFetchError(
                f"there is no memory for version {publish.version} ({size_bytes:,} bytes): {error.strerror}"
            ) from error
        weakref.finalize(self, os.close, self._descriptor)

    def opened(self) -> int:
        """Another descriptor of it, which keeps the bytes for as long as it is open."""
        return os.dup(self._descriptor)


class Landing:
    """What this process has landed last: what the next version is made of. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Landed | None = None

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
            try:
                self._fill(manifest, landed, base)
            except WeightFetchError as error:
                if base is None:
                    raise
                _log.warning("version %d is taken whole, as its changes did not do: %s", manifest.version, error)
                self._fill(manifest, landed, None)
            self._last = landed
            return landed

    def fetch(self, manifest: WeightManifest) -> MappedWeights:
        """For an engine in this process; see :class:`~penstock.backends.weights.protocol.WeightFetcher`."""
        landed = self.land(manifest)
        layout = parse_layout(memoryview(landed.mapping))
        return MappedWeights(tensor_views(layout, landed.mapping), landed.digest)

    def _fill(self, manifest: WeightManifest, landed: Landed, base: Landed | None) -> None:
        data = memoryview(landed.mapping)
        if base is not None:
            data[:] = memoryview(base.mapping)
        pulled = pull(manifest, data, None if base is None else base.publish)
        landed.digest = checked_digest(described(manifest), data)
        _log.info(
            "version %d: %d of %d bytes came over the network", manifest.version, pulled.size_bytes, manifest.size_bytes
        )


LANDING: Final = Landing()
"""Of this process: fetchers are functions, and a process has one engine's weights."""
