"""Weights that an engine has brought near and not loaded yet: the newest few, in the order in which they came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from penstock.messages.weights import WeightManifest

NUM_KEPT: Final = 2


class Closable(Protocol):
    """What holds files or memory."""

    def close(self) -> None:
        """Let go of it."""
        ...


WeightsT = TypeVar("WeightsT", bound=Closable)


class StagedWeights(Generic[WeightsT]):
    """Everything here belongs to one thread."""

    def __init__(self) -> None:
        self._staged: dict[tuple[int, int], WeightsT] = {}
        """By version and publish."""

    def keep(self, manifest: WeightManifest, weights: WeightsT) -> None:
        """Of this publish now these; the oldest beyond ``NUM_KEPT`` go."""
        old = self._staged.pop((manifest.version, manifest.publish), None)
        if old is not None:
            old.close()
        self._staged[manifest.version, manifest.publish] = weights
        self._release(len(self._staged) - NUM_KEPT)

    def take(self, manifest: WeightManifest) -> WeightsT:
        """What is to be loaded now, for the caller to close: newer ones do not let go of it. Older ones go.

        Raises:
            RuntimeError: they are not here.
        """
        key = manifest.version, manifest.publish
        if key not in self._staged:
            raise RuntimeError(f"version {manifest.version}, publish {manifest.publish}, was to be applied unfetched")
        self._release(list(self._staged).index(key))
        return self._staged.pop(key)

    def close(self) -> None:
        """Let go of everything."""
        self._release(len(self._staged))

    def _release(self, count: int) -> None:
        """Let go of the ``count`` oldest."""
        for key in list(self._staged)[: max(0, count)]:
            self._staged.pop(key).close()
