"""What goes together where a run is one part of the whole: ``run.only`` and what belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def part_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """The rules that this scenario breaks."""
    only = s.run.only
    if only == "learner" and s.run.batches_from is None:
        yield (
            ("run", "batches_from"),
            "with run.only: learner nobody generates, so the batches come from another run; name its folder (penstock "
            "run … --only learner --from RUN)",
        )
    if only != "learner" and s.run.batches_from is not None:
        yield (
            ("run", "batches_from"),
            "has no effect without run.only: learner; set that (--only learner) or remove it",
        )
    if only != "rollout" and s.run.num_groups is not None:
        yield (
            ("run", "num_groups"),
            "has no effect without run.only: rollout; set that (--only rollout), or remove it: a training run ends "
            "after run.num_steps batches",
        )
