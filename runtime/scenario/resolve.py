"""What a scenario leaves to the staleness policy, to the objective and to the type of number, filled in; no more is.

The table of the policies says what each takes by default and what it can be told. A policy of the user's own has no
entry there, so its scenario has to say everything.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.buffer.policies import BUILTIN
from penstock.backends.engines.spec import all_can
from penstock.backends.learners.objectives.validity import learns_from_equals
from penstock.backends.protocol import Capability
from penstock.messages.errors import UserFault
from penstock.messages.option_keys import is_user_code

if TYPE_CHECKING:
    from penstock.actors.buffer.options import StalenessOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

EXACT_CANARY: Final = 1e-3
"""Share of its spread that the canary may be off where both sides compute in float32; `penstock bench canary` says
how far right weights and wrong ones are."""
LOOSE_CANARY: Final = 0.1
"""The same elsewhere."""
QUANTIZED_CANARY: Final = 0.3
"""The same where engines get e4m3 numbers, which round by up to one part in 16."""


def unresolvable(staleness: StalenessOptions) -> tuple[KeyPath, str] | None:
    """Why the block cannot be resolved: the key to change, and what is wrong with it; None when it can."""
    name = staleness.policy
    defaults = BUILTIN.get(name)
    if defaults is not None:
        given, mode = staleness.max_staleness, staleness.update_mode
        if defaults.fixed_staleness and given not in (None, defaults.max_staleness):
            return ("staleness", "max_staleness"), (
                f"the policy {name} means {defaults.max_staleness}, found {given}; remove the key, or take a policy "
                f"that can be told: {', '.join(other for other, d in BUILTIN.items() if not d.fixed_staleness)}"
            )
        if mode is not None and mode not in defaults.update_modes:
            return ("staleness", "update_mode"), (
                f"the policy {name} can have {', '.join(defaults.update_modes)}, found {mode}"
            )
        return None
    if not is_user_code(name):
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return (
            "staleness",
            "policy",
        ), f"no policy is called '{name}'; {hint}there are {', '.join(BUILTIN)}, and file.py:Name"
    for key in ("max_staleness", "update_mode"):
        if getattr(staleness, key) is None:
            return ("staleness", key), "missing; a policy of your own has no default for it"
    return None


def resolve(scenario: Scenario) -> Scenario:
    """The scenario with ``staleness.max_staleness``, ``staleness.update_mode``, ``filter.drop_zero_spread`` and
    ``weights.canary_tolerance`` given, not null.

    Raises:
        UserFault: no such policy, or one that cannot be what the block says.
    """
    staleness = scenario.staleness
    if problem := unresolvable(staleness):
        path, text = problem
        raise UserFault(f"{'.'.join(map(str, path))}: {text}")
    if scenario.filter.drop_zero_spread is None:
        drops = not learns_from_equals(scenario.learner.objective)
        chosen = msgspec.structs.replace(scenario.filter, drop_zero_spread=drops)
        scenario = msgspec.structs.replace(scenario, filter=chosen)
    if scenario.weights.canary_tolerance is None:
        is_exact = scenario.model.dtype == "float32" and all_can(scenario.engines, Capability.EXACT)
        tolerance = EXACT_CANARY if is_exact else LOOSE_CANARY
        tolerance = tolerance if scenario.engines.quantization is None else QUANTIZED_CANARY
        told = msgspec.structs.replace(scenario.weights, canary_tolerance=tolerance)
        scenario = msgspec.structs.replace(scenario, weights=told)
    defaults = BUILTIN.get(staleness.policy)
    if defaults is None:
        return scenario
    given_staleness, given_mode = staleness.max_staleness, staleness.update_mode
    resolved = msgspec.structs.replace(
        staleness,
        max_staleness=defaults.max_staleness if given_staleness is None else given_staleness,
        update_mode=defaults.update_mode if given_mode is None else given_mode,
    )
    return msgspec.structs.replace(scenario, staleness=resolved)
