"""How an engine draws: as the run says, and as each dataset of an evaluation does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backends.checkpoint.model_config import read_end_token_ids, read_tokenizer
from penstock.backends.engines.torch.stopping import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.engines.options import SamplingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """One way to draw a response, and what ends it."""

    sampling: SamplingOptions
    stop_token_ids: frozenset[int]
    """All of them: the model's, the tokenizer's and the scenario's."""
    stop_strings: StopStrings | None


def sampling_parameters(
    model_folder: Path, run: SamplingOptions, by_dataset: Sequence[SamplingOptions]
) -> tuple[SamplingParameters, ...]:
    """That of the run, and those of the datasets in the order of the scenario."""
    ends = read_end_token_ids(model_folder)
    return tuple(
        SamplingParameters(
            sampling=sampling,
            stop_token_ids=ends | frozenset(sampling.stop_token_ids),
            stop_strings=StopStrings(sampling.stop, read_tokenizer(model_folder)) if sampling.stop else None,
        )
        for sampling in (run, *by_dataset)
    )
