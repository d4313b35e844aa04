"""A scenario: a YAML file, read strictly into frozen structs, checked, resolved and written back whole."""

from penstock.runtime.scenario.load import dump_scenario, load_scenario
from penstock.runtime.scenario.resolve import resolve
from penstock.runtime.scenario.rules import broken_rule
from penstock.runtime.scenario.structure import Scenario

__all__ = ["Scenario", "broken_rule", "dump_scenario", "load_scenario", "resolve"]
