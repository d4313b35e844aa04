"""What the base asks of a kind of server, each call in that server's own words.

Every call that goes to a server raises :class:`~penstock.backends.engines.served.base.http.CallError` of the kind that
happened, and has a deadline. Beside what stands here a dialect brings a
:class:`~penstock.backends.engines.served.base.generator.Generator`, and where servers are started here,
:class:`~penstock.backends.engines.served.base.settings.ServerSettings`.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    import torch

    from penstock.backends.engines.served.base.health import Check
    from penstock.messages.training import UpdateMode
    from penstock.messages.weights import WeightManifest


class EngineFailedError(RuntimeError):
    """The servers of an engine cannot be used any more."""


class ServerLoad(Protocol):
    """How busy a server is."""

    @property
    def num_queued(self) -> int:
        """Requests that it has taken and that do not run."""
        ...

    @property
    def token_usage(self) -> float:
        """Share of its cache in use."""
        ...


class Control(Protocol):
    """Small questions to one server."""

    questions: ClassVar[Mapping[Check, str]]
    """How each check is called, for people."""

    async def ask(self, check: Check, timeout_s: float) -> bool:
        """Ask a part whether it answers; whether it says that generation is paused."""
        ...

    async def try_request(self, rid: str, timeout_s: float) -> None:
        """Have one token generated, at the expense of no other request."""
        ...

    async def abort(self, rid: str, timeout_s: float) -> None:
        """End one request; one that is not known does no harm. The request itself says when it has ended."""
        ...

    async def loads(self) -> ServerLoad:
        """How busy it is."""
        ...


class Memory(Enum):
    """Device memory that a server has given up and takes again."""

    WEIGHTS = auto()
    REST = auto()
    """Taken after the load of weights, which may need room of its own."""


class Held(NamedTuple):
    """The weights that a server holds."""

    checksum: str
    """In the server's own layout; servers that are laid out alike have the same for the same weights."""
    wrong: Sequence[str]
    """Parameters that are not what they were to be, as far as that can be told."""


class Endpoint(Protocol):
    """One server of an engine."""

    @property
    def control(self) -> Control:
        """Its small questions."""
        ...

    @property
    def layout(self) -> str:
        """Everything that its checksums depend on besides the weights."""
        ...

    async def pause(self, mode: UpdateMode, timeout_s: float) -> None:
        """Stop generating. Requests that run stay open: under ``in_flight`` they keep their cache, otherwise what they
        have is computed again under the new weights. Requests sent meanwhile wait."""
        ...

    async def resume(self, timeout_s: float) -> None:
        """Go on generating."""
        ...

    async def load_folder(self, folder: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        """Load this checkpoint and call its weights ``label``; ``flush``: forget every cached prefix."""
        ...

    async def forget_adapters(self, used: Collection[str], timeout_s: float) -> None:
        """Let go of the adapters of other names, which no request uses."""
        ...

    async def held(self, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> Held:
        """What is there, compared with these tensors; none are given where they never passed through this process."""
        ...

    async def sleep(self, timeout_s: float) -> None:
        """Give device memory up, weights included. It is idle, or refuses."""
        ...

    async def wake(self, memory: Memory, timeout_s: float) -> None:
        """Take a part of it again; what was in it is gone."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


EndpointT = TypeVar("EndpointT", bound=Endpoint)
EndpointInT = TypeVar("EndpointInT", bound=Endpoint, contravariant=True)


class Loadable(Protocol[EndpointInT]):
    """Weights that are near and checked."""

    manifest: WeightManifest

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What can be compared with; empty where the bytes never pass through this process."""
        ...

    def digest_now(self) -> str:
        """Of the bytes as they are now; they may have been changed since they were checked. The manifest's where they
        are nowhere to be changed."""
        ...

    async def load(self, endpoint: EndpointInT, label: str, *, flush: bool, timeout_s: float) -> None:
        """Have one server load them, and call them ``label``."""
        ...

    def close(self) -> None:
        """Let go of them."""
        ...


class Staging(Protocol[EndpointInT]):
    """Brings weights near."""

    async def stage(self, manifest: WeightManifest) -> Loadable[EndpointInT]:
        """Fetch and check.

        Raises:
            WeightFetchError: they are not there, or not for this model.
        """
        ...

    async def close(self) -> None:
        """Let go of what it holds open."""
        ...
