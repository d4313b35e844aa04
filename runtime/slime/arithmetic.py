"""Whole numbers as a shell calculates with them: ``$((GPUS * 2))``, ``i < N``, ``i++``."""

from __future__ import annotations

import ast
import operator
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

_SETS: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*([-+*/]?)=(?!=)(.*)", re.DOTALL)
_STEPS: Final = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*))\s*")
_BINARY: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
MAX_CHARACTERS: Final = 1000


def evaluate(text: str, names: MutableMapping[str, int]) -> int | None:
    """The value of an expression; None: it has one that only the environment knows, or is written in a way that is not
    followed. Assignments go into ``names``."""
    if len(text) > MAX_CHARACTERS:
        return None
    if steps := _STEPS.fullmatch(text):
        name, sign = steps[1] or steps[4], steps[2] or steps[3]
        text = f"{name} {sign[0]}= 1"
    if not text.strip():
        return 0
    sets = _SETS.fullmatch(text)
    expression = sets[3] if sets else text
    if sets and sets[2]:
        expression = f"{sets[1]} {sets[2]} ({expression})"
    value = _value(expression, names)
    if sets and value is not None:
        names[sets[1]] = value
    return value


def _value(text: str, names: MutableMapping[str, int]) -> int | None:
    text = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text)
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    try:
        value = _of(_parsed(text.strip()), names)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError):
        return None
    return value if abs(value) < 2**63 else None


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _of(node: ast.expr, names: MutableMapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left, kind, right):
            return _BINARY[type(kind)](_of(left, names), _of(right, names))
        case ast.Compare(left, [kind], [right]):
            return int(_BINARY[type(kind)](_of(left, names), _of(right, names)))
        case ast.UnaryOp(ast.USub(), operand):
            return -_of(operand, names)
        case ast.UnaryOp(ast.Not(), operand):
            return int(not _of(operand, names))
        case ast.BoolOp(ast.And(), values):
            return int(all(_of(value, names) for value in values))
        case ast.BoolOp(ast.Or(), values):
            return int(any(_of(value, names) for value in values))
        case _:
            raise ValueError(type(node).__name__)
