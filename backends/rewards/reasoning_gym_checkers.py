"""Checkers of reasoning-gym's tasks whose own would run the answer as Python.

Each gives what the library's gives for an answer that is data, and differs where the library can be talked round:

* ``puzzle24`` wants the numbers of the puzzle, where the library takes any four in range and a result that only begins
  with 24;
* an integral has to be worked out: ``Integral(f, x)``, which SymPy differentiates to ``f``, is none. Derivative and
  integrand are compared at :data:`PLACES`, to :data:`TOLERANCE`;
* ``number_sorting`` and ``bitwise_arithmetic`` run the *row* as Python, which may be anybody's as well.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, cast

from penstock.backends.rewards.formulas import FormulaError, arithmetic, literal, parsed, polynomial, slope
from penstock.backends.rewards.functions import NoRewardError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Entry = Mapping[str, object]
    Checker = Callable[[str, Entry], float]

UNREADABLE: Final = 0.01
MISSED: Final = 0.05
"""A formula with the wrong numbers or result, as the library has it for ``countdown``."""
PLACES: Final = tuple(sign * (0.137 + 0.2113 * step) for step in range(14) for sign in (1, -1))
NUM_NEEDED_PLACES: Final = 4
"""At which the integrand has a value."""
TOLERANCE: Final = 1e-9
_WHOLE: Final = re.compile(r"\b\d+\b", re.ASCII)


def countdown(answer: str, entry: Entry) -> float:
    """1 for a formula of all the numbers that gives the target."""
    try:
        value = arithmetic(answer)
    except FormulaError:
        return UNREADABLE
    facts = _facts(entry)
    is_right = _numbers(answer) == _listed_numbers(facts["numbers"]) and value == cast("int", facts["target"])
    return 1.0 if is_right else MISSED


def puzzle24(answer: str, entry: Entry) -> float:
    """1 for a formula of the four numbers that gives 24."""
    try:
        is_right = arithmetic(answer) == 24 and _numbers(answer) == _listed_numbers(_facts(entry)["numbers"])
    except FormulaError:
        return UNREADABLE
    return 1.0 if is_right else UNREADABLE


def _numbers(answer: str) -> list[int]:
    return sorted(map(int, _WHOLE.findall(answer)))


def _listed_numbers(numbers: object) -> list[int]:
    return sorted(cast("list[int]", numbers))


def string_insertion(answer: str, entry: Entry) -> float:
    """A list of characters is worth a tenth of the text."""
    return _written_as_list(answer, str(entry["answer"]), lambda items: "".join(cast("list[str]", items)))


def spiral_matrix(answer: str, entry: Entry) -> float:
    """A list is worth a tenth of the numbers between blanks."""
    return _written_as_list(answer, str(entry["answer"]).strip(), lambda items: " ".join(map(str, _sequence(items))))


def binary_matrix(answer: str, entry: Entry) -> float:
    """A list of lists is worth a tenth of the lines."""
    return _written_as_list(answer, str(entry["answer"]), _board)


def n_queens(answer: str, entry: Entry) -> float:
    """1 for any board that is right, half of it for one that is written as a list of lists."""
    boards = cast("list[str]", _facts(entry)["valid_answers"])
    if answer in boards:
        return 1.0
    return max((5 * _written_as_list(answer, board, _board) for board in boards), default=0.0) if boards else 0.0


def _written_as_list(answer: str, right: str, text_of: Callable[[object], str]) -> float:
    if answer == right:
        return 1.0
    try:
        return 0.1 if text_of(literal(answer)) == right else 0.0
    except (FormulaError, TypeError):
        return 0.0


def _board(value: object) -> str:
    return "\n".join(" ".join(map(str, _sequence(row))) for row in _sequence(value))


def _sequence(value: object) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError("not a list")
    return cast("list[object] | tuple[object, ...]", value)


def polynomial_multiplication(answer: str, entry: Entry) -> float:
    """1 for the product, written out."""
    try:
        wanted = polynomial(str(entry["answer"]))
    except FormulaError as error:
        raise NoRewardError(f"the row's own answer cannot be read: {error}") from None
    try:
        return float(polynomial(answer) == wanted)
    except FormulaError:
        return 0.0


def integration(answer: str, entry: Entry) -> float:
    """1 for a formula whose derivative is the integrand."""
    facts = _facts(entry)
    variable = str(facts["variable"])
    try:
        integrand = parsed(str(facts["integrand"]))
    except FormulaError as error:
        raise NoRewardError(f"the row's integrand cannot be read: {error}") from None
    try:
        given = parsed(answer)
    except FormulaError:
        return 0.0
    num_places = 0
    for place in PLACES:
        try:
            wanted = slope(integrand, variable, place)[0]
        except FormulaError:
            continue  # it has no value there
        num_places += 1
        try:
            found = slope(given, variable, place)[1]
        except FormulaError:
            return 0.0
        if abs(found - wanted) > TOLERANCE * (1 + abs(wanted)):
            return 0.0
    if num_places < NUM_NEEDED_PLACES:
        raise NoRewardError("the row's integrand has no value at the places where answers are compared")
    return 1.0


def bitwise_arithmetic(answer: str, entry: Entry) -> float:
    """1 for the right number, in any base that Python has a mark for."""
    try:
        return float(int(answer.strip(), 0) == int(str(entry["answer"]), 0))
    except ValueError:
        return 0.0


def sorted_numbers_as_json(entry: Entry) -> Entry:
    """So that the library's checker, which can read JSON, has nothing to evaluate."""
    return {**entry, "answer": json.dumps(_facts(entry)["sorted_numbers"])}


def _facts(entry: Entry) -> Mapping[str, object]:
    return cast("Mapping[str, object]", entry["metadata"])


CHECKERS: Final[Mapping[str, Checker]] = {
    "binary_matrix": binary_matrix,
    "bitwise_arithmetic": bitwise_arithmetic,
    "countdown": countdown,
    "intermediate_integration": integration,
    "n_queens": n_queens,
    "polynomial_multiplication": polynomial_multiplication,
    "puzzle24": puzzle24,
    "simple_integration": integration,
    "spiral_matrix": spiral_matrix,
    "string_insertion": string_insertion,
}
"""Instead of the library's."""
PREPARED: Final[Mapping[str, Callable[[Entry], Entry]]] = {"number_sorting": sorted_numbers_as_json}
"""The library's, for an entry that gives it nothing to evaluate."""
