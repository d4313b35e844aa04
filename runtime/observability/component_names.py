"""How many names of reward components the metrics of a run follow, and of rewards that whole groups have. Each is a
series wherever metrics go, and functions and agents make names of whatever they like, the model's text too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NAMES: Final = 256
"""Of one run."""
MAX_NAME_CHARACTERS: Final = 160
_PREFIXES: Final = ("rollout/reward/", "/components/", "rollout/zero_std/")
"""Before the name of a component, in figures of steps and, behind a dataset's name, of evaluations; before a reward."""


class ComponentNames:
    """Those that are followed: the first that come."""

    def __init__(self, before: Iterable[str] = ()) -> None:
        """``before``: figures of an earlier drive of the run."""
        self._known = set[str]()
        self._first_left_out: str | None = None
        self._is_told = False
        for figure in before:
            self.follows(figure)

    def follows(self, figure: str) -> bool:
        """Whether this figure stays; those of no component always do."""
        name = next((after for prefix in _PREFIXES if (after := figure.partition(prefix)[2])), None)
        if name is None or name in self._known:
            return True
        if len(self._known) >= MAX_NAMES or len(name) > MAX_NAME_CHARACTERS:
            self._first_left_out = self._first_left_out or name
            return False
        self._known.add(name)
        return True

    def warning(self) -> str | None:
        """That some are left out, once."""
        if self._first_left_out is None or self._is_told:
            return None
        self._is_told = True
        first = terminal_text(self._first_left_out, max_chars=80)
        return (
            f"figures of the reward are left out of the metrics, '{first}' first: a run follows {MAX_NAMES} names of "
            f"up to {MAX_NAME_CHARACTERS} characters, of components and of rewards that whole groups have; have the "
            "reward function or the agent use fixed names (samples that are kept have all of them)"
        )
