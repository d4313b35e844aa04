"""What a scenario says about the choice of rows, for those who choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.data.row_chooser import ChoosingSettings, ReplaySettings

if TYPE_CHECKING:
    from penstock.runtime.plan import RunPlan


def choosing_settings(plan: RunPlan) -> ChoosingSettings | None:
    """How rows are chosen; None where each follows from its place in the stream of prompts."""
    options = plan.scenario.prompt_source
    if not options.chooses_rows:
        return None
    replay = options.replay
    return ChoosingSettings(
        seed=plan.scenario.run.seed,
        num_rows=plan.num_rows,
        has_priority=options.priority is not None,
        num_candidates=options.priority_candidates,
        replay=None
        if replay is None
        else ReplaySettings(
            fraction=replay.fraction,
            below_reward=replay.below_reward,
            max_times=replay.max_times,
            min_gap=replay.min_gap,
        ),
    )
