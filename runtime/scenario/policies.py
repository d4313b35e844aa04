"""Stand-in until the policies' own table is there."""

from __future__ import annotations

import difflib

from penstock.messages.base import Options
from penstock.messages.training import UpdateMode
from penstock.runtime.errors import ScenarioError


class PolicyDefaults(Options, frozen=True, kw_only=True):
    max_staleness: int
    update_mode: UpdateMode


BUILTIN = {
    "sync": PolicyDefaults(max_staleness=0, update_mode=UpdateMode.DRAIN),
    "one_step_off": PolicyDefaults(max_staleness=1, update_mode=UpdateMode.DRAIN),
    "fully_async": PolicyDefaults(max_staleness=2, update_mode=UpdateMode.IN_FLIGHT),
}


def policy_defaults(name: str) -> PolicyDefaults:
    if name in BUILTIN:
        return BUILTIN[name]
    near = difflib.get_close_matches(name, BUILTIN, n=1)
    raise ScenarioError(f"no such policy {name}; did you mean {near}")
