"""The values of a scenario that name a file, rows, a model or a function of the user's, found by the types of their
keys (:mod:`penstock.messages.option_keys`).

The processes of a run have folders of their own to stand in, so every path is made absolute once, when the scenario
is loaded. ``run.folder`` is not among the keys: runs are written where the command is given.
"""

from __future__ import annotations

import os
from functools import cache, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
from msgspec import inspect as shapes

from penstock.messages.option_keys import Names, is_user_code
from penstock.runtime.scenario.keys import dotted, shape_of
from penstock.runtime.scenario.objective import OBJECTIVE_NAME
from penstock.runtime.scenario.structure import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.runtime.scenario.source import KeyPath

MADE_DATA: Final = ("lines:", "sums:", "shapes:", "reasoning_gym:")
"""Prefixes of datasets that are made, not read."""


class Named(NamedTuple):
    """One such value."""

    path: KeyPath
    """Where it stands in the scenario."""
    value: str
    names: Names

    @property
    def key(self) -> str:
        """As people write it."""
        return dotted(OBJECTIVE_NAME[:-1] if self.path == OBJECTIVE_NAME else self.path)


def named_values(block: msgspec.Struct, path: KeyPath = ()) -> Iterator[Named]:
    """Every one that is given in a scenario, or in this block of it."""
    for name, names in fields_of(type(block)).items():
        value: object = getattr(block, name)
        items = enumerate(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else ((None, value),)
        for index, item in items:
            at = (*path, name) if index is None else (*path, name, index)
            if isinstance(item, msgspec.Struct):
                yield from named_values(item, at)
            elif names is not None and isinstance(item, str):
                yield Named(at, item, names)


def with_values(scenario: Scenario, change: Callable[[Named], str]) -> Scenario:
    """The scenario with what ``change`` gives in the place of each."""
    data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(scenario))
    for each in named_values(scenario):
        reduce(getitem, each.path[:-1], cast("Any", data))[each.path[-1]] = change(each)
    return msgspec.convert(data, Scenario)


@cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, Names | None]:
    """What the value of each field names; None where it names nothing."""
    return {field.name: names_of(field.type) for field in shape_of(struct).fields}


def names_of(shape: shapes.Type) -> Names | None:
    """What a value of this type, or an item of it, names."""
    match shape:
        case shapes.Metadata(extra={"names": Names() as names}):
            return names
        case shapes.UnionType(types=types):
            return next(filter(None, map(names_of, types)), None)
        case shapes.VarTupleType(item_type=item):
            return names_of(item)
        case _:
            return None


def absolute(names: Names, value: str, folder: Path) -> str:
    """``value`` with its path, if it is one, made absolute from ``folder``; ``~`` is the user's folder.

    What follows the path (``@[a:b]``, ``:function``) stays as it is.
    """
    if names is Names.ROWS and value.startswith(MADE_DATA):
        return value
    if names.is_function and not is_user_code(value):
        return value
    return str(folder / os.path.expanduser(value))  # that of Path raises where nobody has such a name
