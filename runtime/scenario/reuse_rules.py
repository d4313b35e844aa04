"""What training groups more than once (``staleness.reuse``) needs of the rest of a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.objectives.validity import is_unbounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def reuse_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Rules that are broken: the key to change, and the reason."""
    uses, bound, key = s.staleness.reuse, s.staleness.max_staleness, ("staleness", "reuse")
    assert bound is not None, "rules are checked on resolved scenarios"
    if uses == 1:
        return
    if uses > bound + 1:
        text = "nothing can be trained again" if bound == 0 else f"it is in {bound + 1} batches at most"
        yield (
            key,
            f"a group gets one version older with each batch, and staleness.max_staleness is {bound}: {text}, found "
            f"{uses}; set it to {bound + 1}, or raise the bound (staleness.policy: fully_async takes any)",
        )
    if s.staleness.over_sampling > 1:
        yield (
            key,
            "trains groups again where new ones are late, and staleness.over_sampling makes new ones to throw away; "
            "set this to 1, or that",
        )
    if is_unbounded(s.learner.objective):
        yield (
            key,
            "what is trained again has to be weighed by how far the policy has moved from the one that drew it; set "
            "learner.objective.old_logprobs: engine with a clipped policy_loss, or a correction; or this to 1",
        )
