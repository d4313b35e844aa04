"""What the house knows of each transport of weights before it is opened, and the registry of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.backends.registry import Registry
from penstock.backends.weights.segments import SHARED_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter
    from penstock.messages.base import Options
    from penstock.messages.weights import WeightManifest

SHARED_MEMORY: Final = "shared_memory"
DISK: Final = "disk"
DISTRIBUTED: Final = "distributed"
TENSOR: Final = "tensor"
NETWORK: Final = "network"
NONE: Final = "none"
"""For runs in which no engine holds weights; nobody chooses it."""
AUTO: Final = "auto"
"""No transport: which of the others it is, is found out before the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportContext:
    """Everything that the learner's end of a transport is opened with."""

    run_id: str
    learner_epoch: int
    """Epoch of this incarnation of the learner."""
    folder: Path
    """In the run's folder; every process of the run sees it."""
    host: str = "127.0.0.1"
    """This machine's address as the engines see it."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """``weights.options``; see :func:`~penstock.backends.registry.read_options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSite:
    """What is to be carried, and where."""

    size_bytes: int
    """Bytes of all weights, counted once."""
    num_copies: int
    """Kept at once."""
    folder: Path
    """The run's, or where that will be made."""
    addresses: tuple[str, ...] = ()
    """URLs of engines that run already."""
    may_be_elsewhere: bool = False
    """Engines may come to lie on other machines than the learner."""
    is_asked: bool = True
    """The scenario names this transport; else it is tried for ``auto``."""
    shared_folder: Path = SHARED_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """One transport. Looked at before a run starts, so its module imports nothing heavy."""

    open_exporter: Callable[[ExportContext], WeightExporter]
    """The learner's end. Raises WeightExportError."""
    fetch: Callable[[WeightManifest], FetchedWeights]
    """The engine's end; see :class:`~penstock.backends.weights.protocol.WeightFetcher`."""
    check: Callable[[TransportSite], str] = lambda site: "not looked at"
    """Whether it can work there, before anything starts: a line for the log. Raises UserFault."""
    options: type[Options] | None = None
    """What ``weights.options`` holds; None: there is no such block."""
    is_chosen: bool = True
    """Whether a scenario can name it."""
    keeps_bases: bool = False
    """Adapters can be published with it; its exporter is a
    :class:`~penstock.backends.weights.protocol.BaseExporter`."""
    shares_gpus: bool = True
    """Whether engines and learner may be on the same GPUs."""


TRANSPORTS: Final = Registry(
    "transport",
    "penstock.transports",
    TransportSpec,
    {
        name: f"penstock.backends.weights.builtin:{name.upper()}"
        for name in (SHARED_MEMORY, DISK, DISTRIBUTED, TENSOR, NETWORK, NONE)
    },
)
