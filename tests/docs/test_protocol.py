"""``docs/protocol.md``: every rule says what breaks without it and names tests that exist; no row is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from blocks import HOUSE

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = HOUSE / "docs" / "protocol.md"
ROWS = "tests/simulation/test_protocol_rows.py"
_TEST = re.compile(r"`((?:tests|backends/contracts)/[\w/]+\.py)::(test_\w+)(?:\[(\w+)\])?`")


class Rule(NamedTuple):
    """One item of the page."""

    name: str
    text: str
    without: str
    tests: tuple[tuple[str, str, str], ...]
    """File, function and parameter of each."""


def rules(page: str) -> Iterator[Rule]:
    """Each item of a list that begins with bold words."""
    for item in re.findall(r"^\* \*\*.*(?:\n +\S.*)*", page, flags=re.MULTILINE):
        text, _, rest = item.partition("* Without it:")
        without, _, tests = rest.partition("* Test")
        name = " ".join(text.split("**")[1].split())
        yield Rule(name, text, without.strip(), tuple(_TEST.findall(tests)))


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the functions at the top of a file, and of the methods of its classes."""
    tree = ast.parse((HOUSE / file).read_text())
    bodies = (tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef)))
    nodes = (node for body in bodies for node in body)
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def classes() -> frozenset[str]:
    """Names of everything that is a class in messages, actors, runtime and the stores."""
    files = [file for folder in ("messages", "actors", "runtime") for file in (HOUSE / folder).rglob("*.py")]
    return frozenset(name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE))


def mistakes(page: str) -> list[str]:
    """What is wrong with a page of rules."""
    wrong: list[str] = []
    for rule in rules(page):
        if not rule.without:
            wrong.append(f"{rule.name}: what breaks without it?")
        if not rule.tests:
            wrong.append(f"{rule.name}: which test holds it?")
        for file, test, parameter in rule.tests:
            if not (HOUSE / file).is_file() or test not in functions_of(file):
                wrong.append(f"{rule.name}: there is no {file}::{test}")
            elif parameter and parameter not in functions_of(file):
                wrong.append(f"{rule.name}: {file} has no {parameter}")
    named = re.findall(r"`((?:[A-Z][a-z]+){2,})`", page)
    return wrong + [f"nothing is called {name}" for name in named if name not in classes()]


def test_every_rule_of_the_protocol_names_tests_that_exist() -> None:
    page = PAGE.read_text()
    found = list(rules(page))
    assert len(found) > 60, "the rules are looked for in the wrong way"
    assert len({rule.name for rule in found}) == len(found)
    assert mistakes(page) == []


def test_every_test_that_is_named_belongs_to_a_rule() -> None:
    """Else an item whose first words are not bold would be no rule, and nobody would look at it."""
    page = PAGE.read_text()
    assert sorted(_TEST.findall(page)) == sorted(test for rule in rules(page) for test in rule.tests)
    assert page.count("::test_") == len(_TEST.findall(page))


def test_every_test_of_a_row_has_a_rule() -> None:
    named = {test for rule in rules(PAGE.read_text()) for file, test, _ in rule.tests if file == ROWS}
    assert {name for name in functions_of(ROWS) if name.startswith("test_")} == named


def test_a_rule_without_a_test_is_found() -> None:
    page = (
        "# Rules\n\n* **One.** Text\n  of `GroupAdmittedTwice`.\n    * Without it: worse.\n"
        f"    * Test: `{ROWS}::test_nothing`.\n* **Two\n  words.**\n    * Without it:\n    * Tests:\n\n## More\n\n"
        "* **Three.**\n    * Without it: x.\n"
        "    * Test: `tests/simulation/test_mutations.py::test_planted_bug_is_found[nobody]`.\n"
    )
    assert [rule.name for rule in rules(page)] == ["One.", "Two words.", "Three."]
    assert mistakes(page) == [
        f"One.: there is no {ROWS}::test_nothing",
        "Two words.: what breaks without it?",
        "Two words.: which test holds it?",
        "Three.: tests/simulation/test_mutations.py has no nobody",
        "nothing is called GroupAdmittedTwice",
    ]
