"""What rewards and episodes get to see of a row beside prompt and label."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def metadata_names(s: Scenario) -> frozenset[str]:
    """The names that any row may have: columns that are kept, and what a source says of each of its rows."""
    blocks = [block for _, block in metadata_blocks(s)]
    return frozenset(name for block in blocks for name in (*(block.metadata_keys or ()), *(block.metadata or {})))
