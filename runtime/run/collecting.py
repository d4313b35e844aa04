"""What ``run.only: rollout`` and ``run.only: evaluate`` make of a scenario: how many groups are collected (where
the run only evaluates: none), and how many may be outstanding.

The groups are made by one version of the model. A run that trains them afterwards, batch after batch, finds the last of
them as many versions old as there are batches before; they are granted under that bound, and under no tighter one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.actors.buffer.goals import Collect, Evaluate, Train
from penstock.actors.buffer.policies import builtin_policy
from penstock.messages.training import OnStale

if TYPE_CHECKING:
    from penstock.actors.buffer.goals import Goal
    from penstock.actors.buffer.pacing import PacingSettings
    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.runtime.scenario import Scenario


def collected_groups(scenario: Scenario) -> int | None:
    """Groups that are collected and not trained; None where batches are trained."""
    if scenario.run.only == "evaluate":
        return 0
    if scenario.run.only != "rollout":
        return None
    return scenario.run.num_groups or scenario.run.num_steps * scenario.learner.groups_per_batch


def goal_of(scenario: Scenario) -> Goal:
    """What the run is for; a ledger that begins with recorded batches says otherwise."""
    if scenario.run.only == "evaluate":
        return Evaluate()
    num_groups = collected_groups(scenario)
    return Train() if num_groups is None else Collect(num_groups)


def collected_batches(scenario: Scenario) -> int:
    """Batches that they would make."""
    return -(-(collected_groups(scenario) or 0) // scenario.learner.groups_per_batch)


def collecting_pacing(pacing: PacingSettings, scenario: Scenario) -> PacingSettings:
    """As many in generation as the engines hold, and a batch that waits for them; what is collected counts no more."""
    return replace(
        pacing,
        num_steps=collected_batches(scenario),
        target_outstanding=collected_batches(scenario) * pacing.groups_per_batch,
        max_concurrent=pacing.max_concurrent or pacing.engine_capacity_groups + pacing.groups_per_batch,
        over_sampling=1.0,
    )


def collecting_policy(scenario: Scenario) -> StalenessPolicy:
    """With the bound under which nothing that is collected is too old to be trained."""
    update_mode = scenario.staleness.update_mode
    assert update_mode is not None, "rules are checked on resolved scenarios"
    return builtin_policy(
        "fully_async",
        max_staleness=max(1, collected_batches(scenario)) - 1,
        update_mode=update_mode,
        on_stale=OnStale.WAIT,
    )
