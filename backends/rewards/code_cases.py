"""The cases that a program is tried on, as rows of the usual datasets have them, and when a result is the expected one.

Invariants:

* What a case expects is data, read by a parser that runs nothing; it stays on this side.
* A row that cannot be read gives no reward: that is not the model's doing.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ast
import json
import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from penstock.backends.rewards.functions import NoRewardError

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE: Final = 1e-6
"""Of a number with a decimal point, relative or absolute; whole numbers are exact."""
MAX_RESULT_DEPTH: Final = 100


class Case(NamedTuple):
    """One."""

    stdin: str
    """What a whole program reads."""
    stdout: str
    """What it should print."""
    function: str = ""
    """Empty: a whole program. Else what is called …"""
    arguments: tuple[object, ...] = ()
    """… with these, as JSON has them …"""
    result: object = None
    """… and should return."""


def read_cases(label: str) -> list[Case]:
    """The cases of a row's label.

    Raises:
        NoRewardError: there are none, or they cannot be read.
    """
    if not label.strip():
        raise NoRewardError("the row has no label, and the reward 'code' takes its cases from it (data.label_key)")
    try:
        cases = list(_cases(_document(label)))
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, AttributeError) as error:
        raise NoRewardError(f"the row's cases cannot be read ({error}); docs/rewards.md has the forms") from None
    if not cases:
        raise NoRewardError("the row has no cases, and the reward 'code' tries programs on them")
    return cases


def _document(label: str) -> object:
    try:
        return msgspec.json.decode(label)
    except msgspec.DecodeError:
        return [line for line in label.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _cases(found: object) -> Iterator[Case]:
    match found:
        case {"inputs": list(inputs), "outputs": list(outputs), **others}:
            name = others.get("fn_name") or ""
            for given, wanted in zip(cast("list[object]", inputs), cast("list[object]", outputs), strict=True):
                yield _case(given, wanted, _name(name))
        case list():
            for item in cast("list[object]", found):
                yield from _listed(item)
        case {"cases": list(cases)}:
            yield from _cases(cast("object", cases))
        case _:
            raise ValueError("neither a list nor an object with inputs and outputs")


def _listed(item: object) -> Iterator[Case]:
    match item:
        case str():
            yield from map(_asserted, ast.parse(item.strip()).body)
        case {"input": given, "output": wanted, **others}:
            name = _name(others.get("fn_name") or others.get("func_name") or "")
            if name and isinstance(given, str):  # as in LiveCodeBench: one argument a line, each as JSON
                given = [json.loads(line) for line in given.splitlines() if line.strip()]
                wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
            yield _case(given, wanted, name)
        case _:
            raise ValueError("a case is an object with input and output, or an assertion")


def _case(given: object, wanted: object, name: str) -> Case:
    if not name:
        lines = ["\n".join(map(str, cast("list[object]", text))) if isinstance(text, list) else text
                 for text in (given, wanted)]  # fmt: skip
        if not all(isinstance(text, str) for text in lines):
            raise ValueError("without fn_name, input and output are texts")
        return Case(str(lines[0]), str(lines[1]))
    if not isinstance(given, list):
        raise ValueError("with fn_name, the input is the list of its arguments")
    return Case("", "", name, tuple(cast("list[object]", given)), wanted)


def _name(name: object) -> str:
    if not isinstance(name, str) or (name and not name.isidentifier()):
        raise ValueError(f"{name!r} is no function's name")
    return name


def _asserted(statement: ast.stmt) -> Case:
    """``assert f(1, [2]) == 3``, as in MBPP: arguments and result are literals."""
    match statement:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]), ops=[ast.Eq()], comparators=[wanted]
            )
        ):
            values = [_plain(ast.literal_eval(node)) for node in (*arguments, wanted)]
            return Case("", "", name, tuple(values[:-1]), values[-1])
        case _:
            raise ValueError("an assertion has to be of the form: assert name(literals) == literal")


def _plain(value: object) -> object:
    """As JSON has it."""
    return json.loads(json.dumps(value, allow_nan=False))


# --- comparing ------------------------------------------------------------------------------------------------


def same_output(found: str, wanted: str) -> bool:
    """Whether two outputs are the same: line by line without blanks at their ends, or word by word where words with a
    decimal point are nearly the same number."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (found, wanted)]
    if lines[0] == lines[1]:
        return True
    if len(lines[0]) != len(lines[1]):
        return False
    pairs = zip(*((line.split() for line in text) for text in lines), strict=True)
    return all(len(one) == len(other) and all(map(_same_word, one, other)) for one, other in pairs)


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if "." not in wanted or max(len(found), len(wanted)) > 64:
        return False
    try:
        return _near(float(found), float(wanted))
    except ValueError:
        return False


def same_result(found: object, wanted: object, depth: int = 0) -> bool:
    """Whether two values of JSON are the same. Nothing of the program's is asked: it has written the value down."""
    if depth > MAX_RESULT_DEPTH:
        return False
    if isinstance(wanted, list) and isinstance(found, list):
        pairs = zip_longest(cast("list[object]", found), cast("list[object]", wanted))
        return len(found) == len(wanted) and all(same_result(one, other, depth + 1) for one, other in pairs)
    if isinstance(wanted, dict) and isinstance(found, dict):
        one, other = cast("dict[str, object]", found), cast("dict[str, object]", wanted)
        return one.keys() == other.keys() and all(same_result(one[key], other[key], depth + 1) for key in other)
    if isinstance(wanted, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return _near(float(found), wanted)
    if isinstance(found, float) and isinstance(wanted, int):
        return not isinstance(wanted, bool) and found == float(wanted)
    return type(found) is type(wanted) and found == wanted


def _near(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
