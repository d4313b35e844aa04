"""What carries new weights from the learner to the engines.

The exporter lives in the learner's process, a fetcher in each engine's. Between them travels a
:class:`~penstock.messages.weights.WeightManifest` and nothing else.

Invariants:

* What ``export`` returned a manifest for is whole: nobody can see a part of it.
* ``fetch`` returns only what has the manifest's digest, computed over the bytes that it read.
* The newest export outlives every ``release``, and the exporter that is never closed: engines that start before the
  next learner has published still find it.
* An incarnation removes what earlier ones left when it has exported the same version or a later one itself, or when
  a ``release`` covers it. What a later incarnation exported it never touches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.weights import Canary, WeightManifest


class WeightTransportError(RuntimeError):
    """Weights could not be carried."""


class WeightExportError(WeightTransportError):
    """The weights could not be written: no space, no permission, or a dtype that this transport cannot carry."""


class WeightFetchError(WeightTransportError):
    """The weights are not there (any more), not readable, or not those of the manifest."""


class WeightExporter(Protocol):
    """The learner's end. Not thread-safe: one thread calls it."""

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """Write a whole copy of ``tensors`` (Hugging Face parameter names, any device) and describe it. They may come
        one after the other; what of them is not asked for, for want of anything to carry, is the caller's to end.

        Names that share their memory (tied embeddings) are written once and come out under every name. The
        tensors may change as soon as this returns.

        Raises:
            WeightExportError: it could not be written. What was written of it is gone.
        """
        ...

    def release(self, below_version: int) -> None:
        """What was exported for versions below this one may go. The newest export always stays: the last of this
        incarnation or, as long as it has none, that of the highest version which earlier ones left."""
        ...

    def close(self) -> None:
        """Remove everything that was exported, by earlier incarnations too. For the normal end of a run only: a
        learner that fails leaves the exporter unclosed."""
        ...


class BegunExport(Protocol):
    """An export whose bytes are written, and whose digest may still be in the making."""

    @property
    def size_bytes(self) -> int:
        """Of what was written."""
        ...

    def manifest(self) -> WeightManifest:
        """Of it, when the digest is there. To be called once, from any thread; what it waits for ends by itself.

        Raises:
            WeightExportError: what was written cannot be read.
        """
        ...


@runtime_checkable
class BackgroundExporter(WeightExporter, Protocol):
    """Of a transport for which a learner has to wait no longer than until its weights are copied."""

    def begin(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> BegunExport:
        """As ``export``; the tensors may change as soon as this returns. ``release`` may come before the manifest, the
        next export, or ``close``, must not.

        Raises:
            WeightExportError: see ``export``.
        """
        ...


@runtime_checkable
class BaseExporter(WeightExporter, Protocol):
    """Of a transport that adapters can be published with (``TransportSpec.keeps_bases``)."""

    def export_base(self, tensors: AnyWeights, *, version: int, publish: int) -> WeightManifest:
        """As ``export``, of the model to which what this incarnation exports from now on belongs. No ``release`` takes
        it while anything of this incarnation is kept.

        Raises:
            WeightExportError: see ``export``.
        """
        ...


class FetchedWeights(Protocol):
    """One set of weights as an engine holds it."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameter name → CPU tensor: a view on what was fetched, empty after ``close``. Names that were tied
        share their memory. Writing to one changes this fetch only, never what other engines see."""
        ...

    @property
    def digest(self) -> str:
        """Of the bytes that were read; equal to the manifest's."""
        ...

    def digest_now(self) -> str:
        """Of the bytes as they are now. Memory that is shared may have been changed since it was read, and is hashed
        again; what this process alone has cannot have been."""
        ...

    def close(self) -> None:
        """Let go of the bytes. May be called more than once."""
        ...


class WeightFetcher(Protocol):
    """An engine's end. ``fetch`` may be called from any thread."""

    def fetch(self, manifest: WeightManifest) -> FetchedWeights:
        """Bring the weights near and check their digest; blocks while it reads.

        Raises:
            WeightFetchError: they are gone, not readable, or not those of the manifest; it says which.
        """
        ...
