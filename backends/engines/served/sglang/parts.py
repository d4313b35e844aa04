"""What the backend of SGLang servers is made with: the model's sizes, and what brings weights near."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from penstock.backends.engines.served.sglang.updates import Loadable
    from penstock.messages.weights import WeightManifest


class EngineFailedError(RuntimeError):
    """The servers of an engine cannot be used any more."""


class ModelShape(NamedTuple):
    """What of the model is needed here."""

    vocab_size: int
    """Rows of the embedding."""
    num_kv_heads: int


class Staging(Protocol):
    """Brings weights near."""

    async def stage(self, manifest: WeightManifest) -> Loadable:
        """Fetch and check.

        Raises:
            WeightFetchError: they are not there, or not for this model.
        """
        ...

    async def close(self) -> None:
        """Let go of what it holds open."""
        ...
