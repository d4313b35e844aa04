"""What the calculator says, and what it refuses."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.episodes.interfaces import ToolError
from penstock.backends.episodes.tools.calculator import MAX_CHARS, Calculator, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("6 / 2", "3"), ("7 / 2", "3.5"), ("1 / 3", "0.333333333333"),
        ("7 // 2", "3"), ("-7 % 3", "2"), ("2 ** 10", "1024"), ("2^10", "1024"), ("3 × 4 ÷ 6 − 1", "1"),
        ("sqrt(2)", "1.41421356237"), ("max(1, 5, 3)", "5"), ("round(2.6)", "3"),
        ("factorial(20)", str(2432902008176640000)),
        ("gcd(12, 18)", "6"), ("lcm(4, 6)", "12"), ("10 ** 30 + 1", "1" + "0" * 29 + "1"), ("2 * pi", "6.28318530718"),
        ("1e3", "1000"), ("0.1 + 0.2", "0.3"), ("2 ** -2", "0.25"), ("--3", "3"), ("1**(10**300)", "1"),
    ],
)  # fmt: skip
def test_an_expression_has_its_value(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "factorial(1000)", "10**4000 * 10**4000", "2.0 ** 100000", "1 / 0", "1 % 0", "0 ** -1", "sqrt(-1)",
        "(-8) ** 0.5", "log(0)", "__import__('os')", "().__class__", "print(1)", "[1, 2]", "'a' * 9", "True + 1",
        "x + 1", "1 +", "lambda: 1", "1 if 1 else 2", "max()", "sqrt(1, 2)", "abs(x=1)", "gcd(1.5, 2)", "1e999",
        "(" * 250 + "1" + ")" * 250, "1j", "1 < 2", "9" * 5000, "\0", "min(*[1])", "0x",
    ],
)  # fmt: skip
def test_anything_else_is_told_to_the_model(expression: str) -> None:
    with pytest.raises(ToolError):
        asyncio.run(Calculator().call({"expression": expression}))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"expression": 3},
        {"expression": ""},
        {"expression": "1", "precision": 2},
        {"expression": "1" * (MAX_CHARS + 1)},
    ],
)
def test_malformed_arguments_are_told_to_the_model(arguments: dict[str, object]) -> None:
    with pytest.raises(ToolError):
        asyncio.run(Calculator().call(arguments))


@given(st.text(alphabet="0123456789.+-*/%^()e ,absqrtminfcol×÷−_[]'\"\n\0", max_size=60))
@settings(max_examples=300)
def test_whatever_is_written_has_a_value_or_a_reason(expression: str) -> None:
    try:
        said = calculate(expression)
    except ToolError as error:
        said = str(error)
    assert said
