"""Which of the arguments that there are a user's function asks for, by its signature."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from penstock.backends.processes.user_code import UserCodeError

if TYPE_CHECKING:
    from collections.abc import Callable


def declared_names(
    function: Callable[..., object],
    spec: str,
    known: tuple[str, ...],
    who: str,
    hint: Callable[[str], str] | None = None,
) -> tuple[str, ...]:
    """The arguments that it declares, of those that there are.

    Args:
        function: to be called with them by name.
        spec: as the scenario names it.
        known: the arguments that there are.
        who: what such a function is called, for the error: ``a reward function``.
        hint: what the error ends with, from the name of the argument that there is not.

    Raises:
        UserCodeError: it needs others; all of them are named.
    """
    asked: list[str] = []
    unknown: list[str] = []
    hints: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return known
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        by_name = parameter.kind is not parameter.POSITIONAL_ONLY
        if parameter.name in known and by_name:
            asked.append(parameter.name)
        elif parameter.default is parameter.empty:
            unknown.append(f"{parameter.name!r}{'' if by_name else ' by position, and arguments are given by name'}")
            hints.append(hint(parameter.name) if hint else "")
    if unknown:
        names, more = ", ".join(unknown), "".join(dict.fromkeys(hints))
        raise UserCodeError(f"{spec} asks for {names}; {who} may ask for {', '.join(known)}{more}")
    return tuple(asked)
