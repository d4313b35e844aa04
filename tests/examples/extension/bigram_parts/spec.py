"""What Penstock knows of the parts before one is opened. Nothing heavy is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from penstock.backends.engines.spec import EngineContext, EngineSpec
from penstock.backends.learners.objectives.spec import LossSpec, ObjectiveSpec
from penstock.backends.protocol import Capability
from penstock.backends.registry import read_options
from penstock.backends.rewards.spec import RewardSpec
from penstock.backends.weights.spec import ExportContext, TransportSite, TransportSpec
from penstock.messages.base import Options
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.learners.objectives.protocol import ObjectiveFunction
    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.backends.protocol import Backend
    from penstock.backends.rewards.wire import Launched
    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter
    from penstock.messages.commands import EngineCommand
    from penstock.messages.weights import WeightManifest


class BigramOptions(Options, frozen=True, kw_only=True):
    """``engines.options``."""

    smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """This share of the probability is spread evenly over all tokens."""


class ScratchOptions(Options, frozen=True, kw_only=True):
    """``weights.options``."""

    folder: str
    """On a disk that learner and engines share, and that is faster than that of the runs."""


class TanhOptions(Options, frozen=True, kw_only=True):
    """``learner.objective.options``."""

    scale: Annotated[float, Meta(gt=0)] = 1.0
    """The larger, the sooner a token that moves is no longer pulled on."""


def open_engine(context: EngineContext) -> Backend[EngineCommand]:
    from bigram_parts.engine import BigramEngine

    if (context.sampling.top_p, context.sampling.top_k, context.sampling.min_p) != (1.0, 0, 0.0):
        raise UserFault("bigram engines draw from all tokens; remove sampling.top_p, top_k and min_p")
    return BigramEngine(context, read_options(BigramOptions, context.options.options))


def open_exporter(context: ExportContext) -> WeightExporter:
    from bigram_parts.transport import ScratchExporter

    folder = read_options(ScratchOptions, context.options).folder
    return ScratchExporter(folder, context.run_id, context.learner_epoch)


def fetch(manifest: WeightManifest) -> FetchedWeights:
    from penstock.backends.weights.disk import fetch_disk

    return fetch_disk(manifest)


def check(site: TransportSite) -> str:
    if site.addresses:
        raise UserFault(f"weights.transport is scratch, and nobody tells the server at {site.addresses[0]}")
    return "the scratch disk is looked at when the learner opens it"


def open_brevity(launched: Launched) -> object:
    from bigram_parts.reward import brevity

    return brevity


def open_tanh(options: ObjectiveOptions) -> ObjectiveFunction:
    from bigram_parts.objective import tanh_loss

    return tanh_loss


BIGRAM = EngineSpec(
    open=open_engine,
    capabilities=frozenset(
        {
            Capability.GENERATES,
            Capability.HOLDS_WEIGHTS,
            Capability.SEEDED_SAMPLING,
            Capability.IN_FLIGHT,
            Capability.INTERRUPT,
        }
    ),
    options=BigramOptions,
    size=lambda options: None,  # it takes no GPU
)
SCRATCH = TransportSpec(open_exporter=open_exporter, fetch=fetch, check=check, options=ScratchOptions)
TANH = ObjectiveSpec(
    open=open_tanh,
    loss=LossSpec(is_function=True),  # it has a ratio, and couples no tokens
    keys={"reduction": "sequence_mean"},
    options=TanhOptions,
)
BREVITY = RewardSpec(open=open_brevity, keys=("reward", "num_tokens"))
