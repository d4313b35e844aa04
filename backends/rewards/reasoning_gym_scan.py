"""Whether a checker of reasoning-gym could run an answer as Python, read from its source.

What ``score_answer`` can reach within the library is looked through: functions and classes of its module that it names,
methods of its task that it calls, and so on. A use of ``eval`` and the like, of SymPy (whose functions call ``eval`` on
texts), or of modules that start or load things makes it one that is not asked.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ast
import dataclasses
import inspect
import reprlib
import textwrap
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY: Final = "reasoning_gym"
EVALUATING: Final = frozenset(
    ("eval", "exec", "compile", "__import__", "open", "input", "getattr", "setattr", "literal_eval", "breakpoint")
)
EVALUATING_MODULES: Final = frozenset(
    (
        "sympy",
        "pickle",
        "marshal",
        "shelve",
        "subprocess",
        "os",
        "importlib",
        "ctypes",
        "builtins",
        "yaml",
        "sys",
        "code",
    )
)

MADE_BY_DATACLASSES: Final = ("<string>", dataclasses.__file__, reprlib.__file__)


def evaluates(task: type) -> str:
    """What of it could run an answer, as ``function: name``; empty: nothing."""
    seen: set[FunctionType] = set()
    inside = (LIBRARY, _module_of(task))
    front: list[object] = [_function(task, "score_answer")]
    while front:
        found = front.pop()
        if not isinstance(found, FunctionType) or found in seen or found.__code__.co_filename in MADE_BY_DATACLASSES:
            continue
        seen.add(found)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
        except (OSError, SyntaxError):
            return f"{found.__qualname__}: no source"
        for name, value in _used(tree, found, task):
            if _module_of(value) in inside:
                front.extend(_functions_of(value))
            elif name in EVALUATING or _module_of(value) in EVALUATING_MODULES:
                return f"{found.__qualname__}: {name}"
    return ""


def _used(tree: ast.AST, function: FunctionType, task: type) -> Iterator[tuple[str, object]]:
    """Names that the function uses, and what they stand for where that can be told."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name):
                yield name, function.__globals__.get(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield f"self.{name}", _function(task, name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                module = function.__globals__.get(owner)
                if isinstance(module, ModuleType) and _module_of(module) == LIBRARY:
                    yield name, vars(module).get(name)
            case _:
                pass


def _functions_of(value: object) -> Iterator[object]:
    if isinstance(value, type):
        for name in vars(value):
            yield _function(value, name)
    else:
        yield value


def _function(owner: type, name: str) -> object:
    found = inspect.getattr_static(owner, name, None)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _module_of(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""
