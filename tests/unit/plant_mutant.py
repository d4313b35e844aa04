"""A plugin of pytest: plants the mutant that ``PENSTOCK_MUTANT`` numbers while its module is imported."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import TYPE_CHECKING

from mutants import MUTANTS, Mutant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

VARIABLE = "PENSTOCK_MUTANT"


class MutantLoader(SourceFileLoader):
    """Reads the source, never what was compiled of it before, and leaves nothing compiled behind."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(mutant.module, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        return compile(self._mutant.planted_in(source), self.path, "exec", dont_inherit=True)


class Planter(MetaPathFinder):
    """Asked before every other finder, about one module alone."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = MutantLoader(self._mutant, spec.origin)
        return spec


if number := os.environ.get(VARIABLE):
    planted = MUTANTS[int(number)]
    assert planted.module not in sys.modules, f"{planted.module} was imported before the mutant could be planted"
    sys.meta_path.insert(0, Planter(planted))
