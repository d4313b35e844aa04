"""Tools and environments, as a scenario names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from penstock.backends.processes.user_code import UserCodeError, load_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.episodes.interfaces import Environment, Tool

CALCULATOR: Final = "calculator"
PYTHON: Final = "python"
READY_TOOLS: Final = (CALCULATOR, PYTHON)
_OF_A_TOOL: Final = ("name", "description", "parameters", "call")
_OF_AN_ENVIRONMENT: Final = ("reset", "step", "close")


def load_tools(specs: Sequence[str]) -> list[Tool]:
    """One object of each.

    Raises:
        UserCodeError: one cannot be loaded, is no tool, or has the name of another.
    """
    tools = [_tool(spec) for spec in specs]
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserCodeError(f"episode.tools: two tools have the name {twice!r}; the model could not tell them apart")
    return tools


def load_environment(spec: str) -> Callable[[], Environment]:
    """What makes an environment for each episode: a class, or a function without arguments.

    Raises:
        UserCodeError: it cannot be loaded, or is none.
    """
    if ":" not in spec:
        raise UserCodeError(f"episode.environment: {spec!r}: expected file.py:Class")
    found = load_object(spec)
    if not callable(found):
        raise UserCodeError(f"episode.environment: {spec} is {type(found).__name__}; expected a class, of which each "
                            "episode gets an object")  # fmt: skip
    if isinstance(found, type):
        _check_has(found, _OF_AN_ENVIRONMENT, f"episode.environment: {spec}")
    return cast("Callable[[], Environment]", found)


def _tool(spec: str) -> Tool:
    # pyright takes the constants of a class for no attributes of its objects: hence the casts.
    if spec == CALCULATOR:
        from penstock.backends.episodes.tools import Calculator

        return cast("Tool", Calculator())
    if spec == PYTHON:
        from penstock.backends.episodes.tools import PythonTool

        return cast("Tool", PythonTool())
    if ":" not in spec:
        raise UserCodeError(f"episode.tools: {spec!r} is neither file.py:Tool nor one of {', '.join(READY_TOOLS)}")
    found = load_object(spec)
    if isinstance(found, type):
        found = cast("Callable[[], object]", found)()
    _check_has(found, _OF_A_TOOL, f"episode.tools: {spec}")
    return cast("Tool", found)


def _check_has(found: object, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise UserCodeError(f"{what} has no {', '.join(missing)}; see docs/episodes.md for what it needs")
