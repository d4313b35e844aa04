"""What a scenario leaves to the staleness policy, filled in; the only thing that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.runtime.scenario.policies import policy_defaults

if TYPE_CHECKING:
    from penstock.runtime.scenario.structure import Scenario


def resolve(scenario: Scenario) -> Scenario:
    """The scenario with ``staleness.max_staleness`` and ``staleness.update_mode`` as numbers and names, not null.

    Raises:
        ScenarioError: no such policy.
    """
    staleness = scenario.staleness
    defaults = policy_defaults(staleness.policy)
    given_staleness, given_mode = staleness.max_staleness, staleness.update_mode
    resolved = msgspec.structs.replace(
        staleness,
        max_staleness=defaults.max_staleness if given_staleness is None else given_staleness,
        update_mode=defaults.update_mode if given_mode is None else given_mode,
    )
    return msgspec.structs.replace(scenario, staleness=resolved)
