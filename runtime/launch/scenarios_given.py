"""Scenarios and overrides as a program gives them: names, files, mappings, and scenarios that are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.scenario import Scenario
from penstock.runtime.scenario.load import overridden_source
from penstock.runtime.scenario.shipped import find_scenario
from penstock.runtime.scenario.source import Place, Source, read_source

if TYPE_CHECKING:
    from penstock.runtime.scenario.source import Plain

AnyScenario: TypeAlias = "str | Path | Mapping[str, object] | Scenario"
"""The name of one that comes with Penstock, a YAML file, its blocks as a mapping, or one that is loaded."""
Overrides: TypeAlias = "Mapping[str, object] | None"


def source_of(scenario: AnyScenario, overrides: Overrides) -> Source:
    """What is to be resolved.

    Raises:
        UserFault: there is no such scenario, or an override cannot be read.
    """
    here = Path.cwd()
    if isinstance(scenario, Scenario):
        source = Source(msgspec.to_builtins(scenario), {(): Place("the given scenario", here)})
    elif isinstance(scenario, Mapping):
        source = Source(cast("dict[str, Plain]", plain_of(scenario)), {(): Place("the given mapping", here)})
    else:
        source = read_source(find_scenario(Path(scenario)))
    return overridden_source(source, texts_of(overrides))


def texts_of(overrides: Overrides) -> tuple[str, ...]:
    """As the command line takes them; what is JSON is YAML, too."""
    return tuple(f"{key}={msgspec.json.encode(plain_of(value)).decode()}" for key, value in (overrides or {}).items())


def plain_of(value: object) -> object:
    """Numbers, texts, lists and mappings, as a YAML file has them; paths as their texts.

    Raises:
        UserFault: there is something else in it.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_path))
    except (TypeError, ValueError) as error:
        raise UserFault(f"{value!r}: {error}; a scenario has numbers, texts, lists and mappings") from None


def _path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"found {type(value).__qualname__}")
