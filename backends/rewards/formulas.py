"""Formulas that a model wrote, read without running anything of them.

Python's own parser makes a tree of the text, as it does for ``ast.literal_eval``; what is computed is decided here,
node by node. There are no attributes, no subscripts, no strings, and no names but those that each function below lists.

Invariants:

* Nothing of the text is evaluated: not by ``eval``, nor by SymPy's ``parse_expr`` and ``sympify``, which are ``eval``.
* Time and memory are bounded whatever the text is: its length, its depth, and every number on the way.
"""

from __future__ import annotations

import ast
import cmath
import hashlib
import re
import warnings
from collections import deque
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from penstock.backends.rewards.instruction_text import stream_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_CHARACTERS: Final = 4096
MAX_LITERAL_CHARACTERS: Final = 1 << 16
MAX_DEPTH: Final = 200
MAX_BITS: Final = 4096
"""Of a numerator or denominator, on the way too."""
MAX_EXPONENT: Final = 1000
_NO_FORMULA: Final = re.compile(r"[^\w\s+\-*/().,]|__|[-+\s(]{200}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z]\w{0,7}", re.ASCII)


class FormulaError(Exception):
    """The text is no formula of this kind, or one beyond the bounds."""


Monomial = tuple[tuple[str, int], ...]
"""Variables with their exponents, in the order of their names."""
Slope = tuple[complex, complex]
"""A value, and that of its derivative."""


def parsed(text: str) -> ast.expr:
    """The tree of a formula.

    Raises:
        FormulaError: it is none, or too long or too deep.
    """
    if len(text) > MAX_CHARACTERS or _NO_FORMULA.search(text):
        raise FormulaError("not a formula")
    return _tree(text.strip())


def literal(text: str) -> object:
    """What is written as a Python literal: lists, tuples, sets, dictionaries, texts, numbers, constants.

    Raises:
        FormulaError: it is none, or too long or too deep.
    """
    if len(text) > MAX_LITERAL_CHARACTERS:
        raise FormulaError("too long")
    try:
        # Python puts names into Unicode's normal form, whose work is the square of the marks on one letter.
        return ast.literal_eval(_tree(stream_safe(text.strip())))
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise FormulaError(str(error)) from None


def _tree(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of odd escapes and comparisons: the model's, not ours
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise FormulaError("not a formula") from None
    front: deque[tuple[ast.AST, int]] = deque([(tree, 1)])
    while front:
        node, depth = front.popleft()
        if depth > MAX_DEPTH:
            raise FormulaError("too deep")
        front.extend((child, depth + 1) for child in ast.iter_child_nodes(node))
    return tree


# --- numbers --------------------------------------------------------------------------------------------------


def arithmetic(text: str) -> Fraction:
    """The exact value of whole numbers with ``+ - * /`` and brackets.

    Raises:
        FormulaError: it has none.
    """
    return _rational(parsed(text))


def _rational(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _bounded(Fraction(number))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_rational(operand) if isinstance(sign, ast.USub) else _rational(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _bounded(_rational(left) + _rational(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _bounded(_rational(left) - _rational(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _bounded(_rational(left) * _rational(right))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _bounded(_quotient(_rational(left), _rational(right)))
        case _:
            raise FormulaError("there are whole numbers, + - * / and brackets")


def _quotient(top: Fraction, bottom: Fraction) -> Fraction:
    if not bottom:
        raise FormulaError("division by zero")
    return top / bottom


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise FormulaError("too large")
    return value


# --- polynomials ----------------------------------------------------------------------------------------------


def polynomial(text: str) -> dict[Monomial, Fraction]:
    """The coefficients of a polynomial that is written out: a sum of numbers times powers of variables.

    A product of two sums is not multiplied here, nor is a power of one: to do so is the task.

    Raises:
        FormulaError: it is none, or not written out.
    """
    return {monomial: number for monomial, number in _polynomial(parsed(text)).items() if number}


def _polynomial(node: ast.expr) -> dict[Monomial, Fraction]:
    match node:
        case ast.Name(id=name) if _NAME.fullmatch(name):
            return {((name, 1),): Fraction(1)}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return {monomial: -number for monomial, number in _polynomial(operand).items()}
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _polynomial(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            found = _polynomial(left)
            for monomial, number in _polynomial(right).items():
                change = number if isinstance(sign, ast.Add) else -number
                found[monomial] = _bounded(found.get(monomial, Fraction(0)) + change)
            return found
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _product(_polynomial(left), _polynomial(right))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            divisor = _rational(right)
            return {monomial: _quotient(number, divisor) for monomial, number in _polynomial(left).items()}
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_polynomial(left), _exponent(right))
        case _:
            return {(): _rational(node)}


def _product(one: dict[Monomial, Fraction], other: dict[Monomial, Fraction]) -> dict[Monomial, Fraction]:
    if min(len(one), len(other)) > 1 or (len(one) != len(other) and not (set(one) <= {()} or set(other) <= {()})):
        raise FormulaError("not written out")
    return {
        _together(left, right): _bounded(number * times)
        for left, number in one.items()
        for right, times in other.items()
    }


def _together(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    return tuple(sorted(exponents.items()))


def _power(base: dict[Monomial, Fraction], exponent: int) -> dict[Monomial, Fraction]:
    if len(base) != 1:
        raise FormulaError("not written out")
    ((monomial, number),) = base.items()
    if abs(number) != 1 and number:
        most = max(number.numerator.bit_length(), number.denominator.bit_length())
        if most * exponent > MAX_BITS:
            raise FormulaError("too large")
    raised = tuple((name, power * exponent) for name, power in monomial if exponent)
    return {raised: number**exponent}


def _exponent(node: ast.expr) -> int:
    value = _rational(node)
    if value.denominator != 1 or not 0 <= value <= MAX_EXPONENT:
        raise FormulaError("expected an exponent that is a whole number, and not too large")
    return int(value)


# --- derivatives ----------------------------------------------------------------------------------------------


def _power_slope(base: Slope, exponent: Slope) -> Slope:
    value = base[0] ** exponent[0]
    slope = exponent[0] * base[0] ** (exponent[0] - 1) * base[1] if exponent[0] and base[1] else 0
    return value, slope + (value * cmath.log(base[0]) * exponent[1] if exponent[1] else 0)


def _inverse_sine(x: complex) -> complex:
    return 1 / cmath.sqrt(1 - x * x)


FUNCTIONS: Final[Mapping[str, tuple[Callable[[complex], complex], Callable[[complex], complex]]]] = {
    # name: the function, and its derivative
    "exp": (cmath.exp, cmath.exp), "log": (cmath.log, lambda x: 1 / x), "ln": (cmath.log, lambda x: 1 / x),
    "sqrt": (cmath.sqrt, lambda x: 0.5 / cmath.sqrt(x)),
    "sin": (cmath.sin, cmath.cos), "cos": (cmath.cos, lambda x: -cmath.sin(x)),
    "tan": (cmath.tan, lambda x: cmath.cos(x) ** -2),
    "sec": (lambda x: 1 / cmath.cos(x), lambda x: cmath.sin(x) / cmath.cos(x) ** 2),
    "csc": (lambda x: 1 / cmath.sin(x), lambda x: -cmath.cos(x) / cmath.sin(x) ** 2),
    "cot": (lambda x: 1 / cmath.tan(x), lambda x: -(cmath.sin(x) ** -2)),
    "asin": (cmath.asin, _inverse_sine), "acos": (cmath.acos, lambda x: -_inverse_sine(x)),
    "atan": (cmath.atan, lambda x: 1 / (1 + x * x)),
    "sinh": (cmath.sinh, cmath.cosh), "cosh": (cmath.cosh, cmath.sinh),
    "tanh": (cmath.tanh, lambda x: cmath.cosh(x) ** -2),
    "asinh": (cmath.asinh, lambda x: 1 / cmath.sqrt(1 + x * x)),
    "Abs": (lambda x: complex(abs(x)), lambda x: x.real / abs(x)),
}  # fmt: skip
"""Functions that a formula may use, by the names that SymPy gives them."""
CONSTANTS: Final = {"pi": complex(cmath.pi), "E": complex(cmath.e), "I": 1j}


def slope(tree: ast.expr, variable: str, at: float) -> Slope:
    """Value and derivative at a place, by the rules of differentiation. Names that are none of the above stand for
    constants.

    Raises:
        FormulaError: it is no formula, or has no value there.
    """
    try:
        value, slope = _slope(tree, variable, complex(at))
    except (ArithmeticError, ValueError):
        raise FormulaError("it has no value there") from None
    if not (cmath.isfinite(value) and cmath.isfinite(slope)):
        raise FormulaError("it has no value there")
    return value, slope


def _slope(node: ast.expr, variable: str, at: complex) -> Slope:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return complex(number), 0j
        case ast.Name(id=name) if name not in FUNCTIONS and _NAME.fullmatch(name):
            return (at, 1 + 0j) if name == variable else (CONSTANTS.get(name) or _constant(name), 0j)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value, change = _slope(operand, variable, at)
            return (-value, -change) if isinstance(sign, ast.USub) else (value, change)
        case ast.BinOp(left=left, op=op, right=right):
            return _combined(op, _slope(left, variable, at), _slope(right, variable, at))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            value, change = _slope(argument, variable, at)
            function, derivative = FUNCTIONS[name]
            return function(value), derivative(value) * change if change else 0j
        case _:
            raise FormulaError(f"there are numbers, names, + - * / **, {', '.join(FUNCTIONS)}")


def _combined(op: ast.operator, one: Slope, other: Slope) -> Slope:
    match op:
        case ast.Add():
            return one[0] + other[0], one[1] + other[1]
        case ast.Sub():
            return one[0] - other[0], one[1] - other[1]
        case ast.Mult():
            return one[0] * other[0], one[1] * other[0] + one[0] * other[1]
        case ast.Div():
            return one[0] / other[0], (one[1] * other[0] - one[0] * other[1]) / other[0] ** 2
        case ast.Pow():
            return _power_slope(one, other)
        case _:
            raise FormulaError("there are + - * / **")


def _constant(name: str) -> complex:
    """Of an integration constant: some number, the same for the same name."""
    return complex(1 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) / 2**48)
