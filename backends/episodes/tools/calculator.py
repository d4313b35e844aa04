"""Arithmetic for a model.

Invariants:

* Nothing but numbers, the operators and functions of the two tables below is ever evaluated: there are no names, no
  attributes and no calls of anything else.
* An expression costs a bounded time and memory, whatever it is: its length is bounded, and so is every whole number on
  the way (``9**9**9`` is refused before it is computed).
* Whole numbers stay exact; a quotient without remainder is one.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

from penstock.backends.episodes.interfaces import ToolError
from penstock.backends.episodes.tools.arguments import text_argument, text_schema

if TYPE_CHECKING:
    from penstock.backends.episodes.interfaces import JsonObject

MAX_CHARS: Final = 512
MAX_BITS: Final = 4096
"""Of a whole number, on the way too; some 1,200 digits."""
NUM_SHOWN_DIGITS: Final = 12
"""Digits that are shown of a number that is not whole."""
_SPELT_OTHERWISE: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})

Number = int | float


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if base.bit_length() * exponent > MAX_BITS and abs(base) > 1:
            raise ToolError("the result is too large")
        return cast("int", base**exponent)
    result = cast("float | complex", base**exponent)
    if isinstance(result, complex):
        raise ToolError("a negative number has no such power")
    return result


def _quotient(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _factorial(value: Number) -> Number:
    if not isinstance(value, int) or not 0 <= value <= 450:
        raise ToolError("factorial takes a whole number from 0 to 450")
    return math.factorial(value)


def _whole(value: Number) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ToolError("gcd and lcm take whole numbers")
    return int(value)


OPERATORS: Final[dict[type[ast.AST], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
Function = Callable[[Sequence[Number]], Number]


def _lcm(values: Sequence[Number]) -> Number:
    return math.lcm(*map(_whole, values))


FUNCTIONS: Final[dict[str, tuple[int, Function]]] = {
    # name: number of arguments, 0 for any from 1 on
    "abs": (1, lambda values: abs(values[0])), "ceil": (1, lambda values: math.ceil(values[0])),
    "floor": (1, lambda values: math.floor(values[0])), "round": (1, lambda values: round(values[0])),
    "sqrt": (1, lambda values: math.sqrt(values[0])), "exp": (1, lambda values: math.exp(values[0])),
    "log": (1, lambda values: math.log(values[0])), "log2": (1, lambda values: math.log2(values[0])),
    "log10": (1, lambda values: math.log10(values[0])), "sin": (1, lambda values: math.sin(values[0])),
    "cos": (1, lambda values: math.cos(values[0])), "tan": (1, lambda values: math.tan(values[0])),
    "asin": (1, lambda values: math.asin(values[0])), "acos": (1, lambda values: math.acos(values[0])),
    "atan": (1, lambda values: math.atan(values[0])), "factorial": (1, lambda values: _factorial(values[0])),
    "min": (0, min), "max": (0, max), "gcd": (0, lambda values: math.gcd(*map(_whole, values))), "lcm": (2, _lcm),
}  # fmt: skip
CONSTANTS: Final = {"pi": math.pi, "e": math.e}


class Calculator:
    """Evaluates one arithmetic expression."""

    name: Final = "calculator"
    description: Final = "Evaluates an arithmetic expression, such as (3 + 4) * 12 / 5 or sqrt(2)."
    parameters: Final[JsonObject] = text_schema("expression", "the expression")

    async def call(self, arguments: JsonObject) -> str:
        """See :class:`~penstock.backends.episodes.interfaces.Tool`."""
        return calculate(text_argument(arguments, "expression", max_chars=MAX_CHARS))


def calculate(expression: str) -> str:
    """The value, as text.

    Raises:
        ToolError: it has none, or cannot be computed within the bounds.
    """
    try:
        tree = ast.parse(expression.translate(_SPELT_OTHERWISE).strip(), mode="eval")
        return _shown(_value(tree.body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except SyntaxError as error:
        raise ToolError(f"not an arithmetic expression: {error.msg}") from None
    except (OverflowError, MemoryError, RecursionError):
        raise ToolError("the result is too large, or the expression too deep") from None
    except ValueError as error:  # of a function outside its domain; of digits and null bytes in the text
        raise ToolError(f"it has no value: {error}") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            num_arguments, function = FUNCTIONS[name]
            if len(args) != (num_arguments or max(1, len(args))):
                raise ToolError(f"{name} takes {num_arguments or 'at least one'} argument(s), got {len(args)}")
            return _bounded(function([_value(arg) for arg in args]))
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case _:
            raise ToolError(f"{ast.unparse(node)[:60]!r} is not arithmetic; there are numbers, + - * / // % **, "
                            f"{', '.join(FUNCTIONS)}, {', '.join(CONSTANTS)}")  # fmt: skip


def _bounded(value: Number) -> Number:
    if value.bit_length() > MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise ToolError("the result is too large")
    return value


def _shown(value: Number) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.{NUM_SHOWN_DIGITS}g}"
