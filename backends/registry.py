"""Parts by their names: those that are built in, and those that installed packages bring.

A part is described by a *spec*: a frozen, light object that says what the rest of the house has to know before the part
is opened, and opens it. It is named ``module:attribute`` and imported when it is first asked for, whoever brings it.

A package brings one by an entry point::

    [project.entry-points."penstock.engines"]
    echo = "echo_parts.spec:ECHO"

Names that are built in come first, so that the installed packages, which take a while to look through, are asked for
other names only. ``docs/extending.md`` walks through a package.
"""

from __future__ import annotations

import difflib
import importlib
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from penstock.messages.errors import UserFault
from penstock.messages.option_keys import is_user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.metadata import EntryPoint

    from penstock.messages.base import Options

SpecT = TypeVar("SpecT")
OptionsT = TypeVar("OptionsT", bound="Options")
_SAID_CHARS = 300


class PartError(UserFault):
    """There is no part of this name, or the package that brings it cannot be used. The message says what there is."""


class Registry(Generic[SpecT]):
    """All parts of one kind."""

    def __init__(
        self, kind: str, group: str, spec: type[SpecT], builtin: Mapping[str, str | SpecT], *, own: SpecT | None = None
    ) -> None:
        """Args:
        kind: what a part is called in messages.
        group: of the entry points.
        spec: what a part must be described by.
        builtin: each spec that is built in, or its ``module:attribute``.
        own: what ``file.py:function`` stands for, a function of the user's own; None: for nothing.
        """
        self._kind = kind
        self._group = group
        self._spec = spec
        self._builtin = dict(builtin)
        self._own = own
        self._loaded: dict[str, SpecT] = {}

    @property
    def builtin(self) -> tuple[str, ...]:
        """Names of what is built in."""
        return tuple(self._builtin)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, those that are built in first. Looks through the installed packages."""
        return (*self._builtin, *self._brought)

    def spec(self, name: str) -> SpecT:
        """What this name stands for.

        Raises:
            PartError: nothing, or the package that brings it fails.
        """
        if self._own is not None and is_user_code(name):
            return self._own
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def having(self, is_wanted: Callable[[SpecT], bool]) -> tuple[str, ...]:
        """Names of those for which it holds; of those only that can be loaded."""
        return tuple(name for name in self.names if self.problem(name) is None and is_wanted(self.spec(name)))

    def unknown(self, name: str, others: tuple[str, ...], is_good: Callable[[SpecT], bool]) -> str | None:
        """What is wrong with this name, and which there are; None where it can be used.

        Args:
            name: as it was given.
            others: words that may stand in place of a name.
            is_good: which parts can be named here.
        """
        if name in others or (name in self._builtin and is_good(self.spec(name))):
            return None
        if self._own is not None:
            return self.problem(name)
        good = self.having(is_good)
        if name in good:
            return None
        words = [*others, *good]
        return f"must be {', '.join(words[:-1])} or {words[-1]}; found '{name}'{self._broken()}"

    def problem(self, name: str) -> str | None:
        """Why there is no part of this name; None where there is one."""
        try:
            self.spec(name)
        except PartError as error:
            return str(error)
        return None

    @cached_property
    def _brought(self) -> dict[str, list[EntryPoint]]:
        """By name; of a name that is built in, or that two packages bring, all of them."""
        from importlib.metadata import entry_points  # here, as most processes never ask

        found: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self._group):
            if point.name not in self._builtin:
                found.setdefault(point.name, []).append(point)
        return found

    def _broken(self) -> str:
        return "".join(f"; {problem}" for each in self.names if (problem := self.problem(each)) is not None)

    def _said_of(self, name: str) -> str:
        """What is said of a name that nothing has."""
        if self._own is not None and name.endswith(".py"):
            example = f"{name}:{self._kind.split()[0]}"
            return f"'{name}' names a file and no function in it; expected file.py:function, such as {example}"
        near = difflib.get_close_matches(name, self.names, n=1)
        also = "" if self._own is None else ", and file.py:function"
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(self.names)}{also}"
        return f"no {self._kind} is called '{name}'; {hint}{self._broken()}"

    def _load(self, name: str) -> SpecT:
        builtin = self._builtin.get(name)
        if builtin is not None:
            return self._checked(name, builtin, "penstock") if isinstance(builtin, str) else builtin
        match self._brought.get(name, []):
            case []:
                raise PartError(self._said_of(name))
            case [point]:
                return self._checked(name, point.value, _package(point))
            case points:
                packages = ", ".join(sorted(map(_package, points)))
                raise PartError(f"{self._kind} {name}: {packages} all bring one of this name; uninstall all but one")

    def _checked(self, name: str, value: str, package: str) -> SpecT:
        module, _, attribute = value.partition(":")
        try:
            spec: object = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # whatever the import of another's package raises
            said = f"{type(error).__name__}: {error}"[:_SAID_CHARS]
            raise PartError(f"{self._kind} {name}, of the package {package}, cannot be imported: {said}") from error
        if not isinstance(spec, self._spec):
            raise PartError(
                f"{self._kind} {name}, of the package {package}: {value} is no {self._spec.__name__}, found a "
                f"{type(spec).__name__}"
            )
        return spec


def _package(point: EntryPoint) -> str:
    return "?" if point.dist is None else point.dist.name


def read_options(struct: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """A part's own ``options:`` as the struct that its spec names.

    Raises:
        msgspec.ValidationError: they do not fit. Those of a scenario were checked when it was loaded.
    """
    return msgspec.convert(given, struct, strict=True)
