"""A scenario: a YAML file, read strictly into frozen structs, checked, resolved and written back whole.

Every process of a run gets a scenario that was read and checked before; what reads and checks it is imported with the
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.runtime.scenario.structure import Scenario

if TYPE_CHECKING:
    from penstock.runtime.scenario.load import dump_scenario, load_scenario
    from penstock.runtime.scenario.rules import broken_rule

__all__ = ["Scenario", "broken_rule", "dump_scenario", "load_scenario"]

_MODULES = {"broken_rule": "rules", "dump_scenario": "load", "load_scenario": "load"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
