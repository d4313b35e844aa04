"""What the episodes in front of an engine are opened with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from penstock.backends.data.options import DataOptions
    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.playing import ImageRules


@dataclass(frozen=True, kw_only=True)
class EpisodeContext:
    """Everything that the episodes in front of one engine are opened with."""

    engine: str
    """Name of the actor that holds the engine."""
    epoch: int
    """Incarnation of the actor."""
    run_folder: Path
    model_folder: Path
    """With the tokenizer; gateways call the model by its name."""
    max_context: int
    options: EpisodeOptions
    sampling: SamplingOptions
    data: DataOptions
    evaluated: Sequence[str | None] = ()
    """What plays each dataset of the evaluation; None: what plays the run's own rows."""
    can: Collection[str] = ()
    """Capabilities of the engine."""
    images: ImageRules | None = None
    """What may be shown to the model; None: the run shows none."""
