"""Does something just before a module is imported for the first time: what the stand-ins for single names need."""

from __future__ import annotations

import importlib.abc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _SeesItComing(importlib.abc.MetaPathFinder):
    """Finds no module."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act
        self._is_done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._name and not self._is_done:
            self._is_done = True
            self._act()
        return None


def before_import(name: str, act: Callable[[], None]) -> None:
    """Call ``act`` once, in a process that imports the module of this name, before that is looked for."""
    sys.meta_path.insert(0, _SeesItComing(name, act))
