"""From a YAML file and overrides to a scenario that can be run, or one sentence that says why not.

In this order: read the file, apply the overrides, refuse unknown keys, fill in what the objective's name stands for,
check types and bounds, make paths absolute, fill in what the staleness policy and the longest response decide, and
check what no single key can know. The first thing that
is wrong is reported, with the place where it was written; where several keys are unknown they are all told, as a file
or a command of another system has dozens.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

from penstock.backends.learners.options import ObjectiveOptions
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.hub_names import is_left_to_the_hub
from penstock.runtime.scenario.keys import dotted, misfit, shape_of, unknown_keys
from penstock.runtime.scenario.named import absolute, with_values
from penstock.runtime.scenario.objective import fill_objective, name_objective, with_objective
from penstock.runtime.scenario.part_names import unknown_part
from penstock.runtime.scenario.resolve import resolve, unresolvable
from penstock.runtime.scenario.rules import broken_rule
from penstock.runtime.scenario.source import Place, Plain, Source, plain_text, read_source
from penstock.runtime.scenario.structure import Scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.scenario.named import Named

MIN_LISTED_KEYS: Final = 3
MAX_LISTED_KEYS: Final = 200
"""Unknown ones, so many of which are told at once; of fewer the first."""


def load_scenario(file: Path, overrides: Sequence[str] = (), *, is_begun: bool = False) -> Scenario:
    """Read, check and resolve a scenario.

    Relative paths in the file start from the file's folder, those in overrides from the current one.

    Args:
        file: of the scenario.
        overrides: ``key=value``.
        is_begun: a run goes on with it, as it does with a file in a run's folder.

    Raises:
        UserFault: with file, line and key of the first thing that is wrong.
    """
    source = read_source(file)
    source.is_begun |= is_begun
    return scenario_from(overridden_source(source, overrides))


def overridden_source(source: Source, overrides: Sequence[str]) -> Source:
    """The same source with these keys set over it.

    Raises:
        UserFault: an override that cannot be read.
    """
    name_objective(source)
    for text in overrides:
        source.override(text, Path.cwd())
        name_objective(source)
    return source


def scenario_from(source: Source) -> Scenario:
    """Check and resolve what was read.

    Raises:
        UserFault: as ``load_scenario``.
    """
    name_objective(source)
    if unknown := list(unknown_keys(source.data, shape_of(Scenario))):
        shown = unknown[:MAX_LISTED_KEYS] if len(unknown) >= MIN_LISTED_KEYS else unknown[:1]
        told = [f"{source.place(path).text}: {dotted(path)}: {hint}" for path, hint in shown]
        if len(unknown) > MAX_LISTED_KEYS:
            told.append(f"… and {len(unknown) - MAX_LISTED_KEYS} more")
        raise UserFault("\n".join(told))
    fill_objective(source.data)
    scenario = _make_paths_absolute(_decode(source), source)
    broken = unknown_part(scenario) or unresolvable(scenario.staleness)
    if broken is None:
        scenario = with_objective(resolve(scenario))
        broken = broken_rule(scenario, is_begun=source.is_begun)
    if broken is not None:
        path, text = broken
        raise UserFault(f"{source.place(path).text}: {dotted(path)}: {text}")
    return scenario


def dump_scenario(scenario: Scenario, *, is_short: bool = False) -> str:
    """The scenario as YAML, which loads to an equal one: with every key, or (``is_short``) without those that are left
    at their defaults."""
    data: object = msgspec.to_builtins(scenario)
    if is_short:
        short = cast("dict[str, Plain]", without_defaults(scenario))
        again = scenario_from(Source(copy.deepcopy(short), {(): Place("the short form", Path.cwd())}, is_begun=True))
        data = short if again == scenario else data  # a default that depends on another key may be meant as it stands
    return plain_text(data)


def without_defaults(value: object) -> object:
    """A part of a scenario as plain data, without the keys that have their default. (What an objective's name stands
    for are no defaults: all of its keys stay.)"""
    if isinstance(value, tuple | list):
        return [without_defaults(item) for item in cast("Sequence[object]", value)]
    if not isinstance(value, msgspec.Struct) or isinstance(value, ObjectiveOptions):
        return msgspec.to_builtins(value)
    kept: dict[str, object] = {}
    for field in msgspec.structs.fields(value):
        found = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if found != default:
            kept[field.encode_name] = without_defaults(found)
    return kept


def _decode(source: Source) -> Scenario:
    try:
        return msgspec.convert(source.data, Scenario, strict=True)
    except msgspec.ValidationError as error:
        path, text = misfit(error, source.data, Scenario)
        at = path[:-1] if text.startswith("missing") else path
        raise UserFault(f"{source.place(at).text}: {dotted(path)}: {text}") from None


def _make_paths_absolute(scenario: Scenario, source: Source) -> Scenario:
    def made_absolute(each: Named) -> str:
        folder = source.place(each.path).folder
        is_on_hub = is_left_to_the_hub(each.names, each.value, folder)
        return each.value if is_on_hub else absolute(each.names, each.value, folder)

    return with_values(scenario, made_absolute)
