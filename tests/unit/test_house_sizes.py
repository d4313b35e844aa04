"""How long modules and functions are: most of them short, none beyond a limit but those that are listed and shrink.

Tables that are generated are files of data (``*.json``), so there are none to leave out.
"""

from __future__ import annotations

import ast
from pathlib import Path

HOUSE = Path(__file__).parents[2]
PACKAGES = ("actors", "messages", "backends", "runtime")

MODULE_P90 = 300
LONGEST_MODULE = 450
FUNCTION_P95 = 28
LONGEST_FUNCTION = 60

LONG_MODULES: dict[str, int] = {}
"""Lines of those beyond the limit; by folder and file, so that a folder may move. Lower a number with the module, and
strike it when it is within the limit. Nothing is added here."""
LONG_FUNCTIONS = {
    "run_commands.py:evaluate": 84,
}
"""Likewise, by file and name."""


def lines_of_modules(folder: Path) -> dict[str, int]:
    """Lines by folder and file; of several with one name the most."""
    lines: dict[str, int] = {}
    for file in sorted(folder.rglob("*.py")):
        name = "/".join(file.parts[-2:])
        lines[name] = max(lines.get(name, 0), file.read_text().count("\n"))
    return lines


def lines_of_functions(folder: Path) -> list[tuple[str, int]]:
    """Name and lines of every function and method, from ``def`` to the last line of its body."""
    return [
        (f"{file.name}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def percentile(values: list[int], percent: int) -> int:
    """The least value that so many percent are not above."""
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def offences(found: list[tuple[str, int]], longest: int, listed: dict[str, int]) -> list[str]:
    """What is too long, has grown, or need not be listed any more."""
    lines: dict[str, int] = {}
    for name, number in found:
        lines[name] = max(lines.get(name, 0), number)
    wrong = [
        f"{name} has {number} lines, {listed.get(name, longest)} are allowed: split it"
        for name, number in lines.items()
        if number > listed.get(name, longest)
    ]
    return wrong + [f"{name} is within {longest} lines: strike it" for name in listed if lines.get(name, 0) <= longest]


def test_most_modules_are_short_and_none_is_longer_than_is_listed() -> None:
    found = [item for package in PACKAGES for item in lines_of_modules(HOUSE / package).items()]
    each = [file.read_text().count("\n") for package in PACKAGES for file in (HOUSE / package).rglob("*.py")]
    assert len(each) > 500, "the modules are looked for in the wrong place"
    assert percentile(each, 90) <= MODULE_P90
    assert offences(found, LONGEST_MODULE, LONG_MODULES) == []


def test_most_functions_are_short_and_none_is_longer_than_is_listed() -> None:
    found = [item for package in PACKAGES for item in lines_of_functions(HOUSE / package)]
    assert len(found) > 5000, "the functions are looked for in the wrong place"
    assert percentile([lines for _, lines in found], 95) <= FUNCTION_P95
    assert offences(found, LONGEST_FUNCTION, LONG_FUNCTIONS) == []


def test_the_rules_for_lengths_see_a_violation(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "part"
    folder.mkdir(parents=True)
    (folder / "long.py").write_text("class A:\n    async def f(self):\n        pass\n\n\n" + "x = 1\n" * 5)
    (tmp_path / "deep" / "short.py").write_text("x = 1\n")
    modules = lines_of_modules(tmp_path)
    assert modules == {"part/long.py": 10, "deep/short.py": 1}
    assert offences(list(modules.items()), 5, {}) == ["part/long.py has 10 lines, 5 are allowed: split it"]
    assert offences(list(modules.items()), 5, {"part/long.py": 9}) == [
        "part/long.py has 10 lines, 9 are allowed: split it"
    ]
    assert offences(list(modules.items()), 5, {"part/long.py": 10, "deep/short.py": 1}) == [
        "deep/short.py is within 5 lines: strike it"
    ]
    assert lines_of_functions(tmp_path) == [("long.py:f", 2)]
    assert [percentile(list(range(1, 11)), percent) for percent in (10, 90, 95)] == [1, 9, 10]
