"""Which names of reward functions there are."""

from __future__ import annotations

import difflib

from penstock.backends.registry import is_user_code
from penstock.backends.rewards.builtin import BUILT_IN


def reward_problem(name: str) -> str | None:
    """What is wrong with the name of a reward function; None when nothing is."""
    if is_user_code(name) or name in BUILT_IN:
        return None
    if name.endswith(".py"):
        return f"'{name}' names a file and no function in it; expected file.py:function, such as {name}:reward"
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(BUILT_IN)}, and file.py:function"
    return f"no reward function is called '{name}'; {hint}"
