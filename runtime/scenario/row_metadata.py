"""What rewards, episodes and the PromptSource get to see of a row beside prompt and label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.data.options import metadata_names

if TYPE_CHECKING:
    from penstock.backends.data.options import DataOptions, SourceOptions
    from penstock.backends.evaluation.options import EvaluationSettings
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def metadata_blocks(s: Scenario) -> list[tuple[KeyPath, DataOptions | SourceOptions | EvaluationSettings]]:
    """Every block that says so, with its place in the scenario."""
    return [
        (("data",), s.data),
        *((("data", "sources", index), source) for index, source in enumerate(s.data.sources)),
        (("evaluation", "defaults"), s.evaluation.defaults),
        *((("evaluation", "datasets", index), dataset) for index, dataset in enumerate(s.evaluation.datasets)),
    ]


def unnamed(s: Scenario, key: str, consequence: str) -> str | None:
    """What is wrong with a key that is to be found in the metadata of rows; None where some row may have it.
    ``consequence``: of its absence, as a clause."""
    if key in metadata_names(block for _, block in metadata_blocks(s)):
        return None
    return (
        f"{key!r} is neither among data.metadata_keys nor a field of the metadata of data or of a source, so that "
        f"{consequence}; add it there"
    )
