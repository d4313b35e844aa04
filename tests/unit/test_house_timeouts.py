"""A test's timeout is longer than those of the runs that it starts, so that a slow run's own output tells the story."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parents[1]
HARNESS: Final = TESTS / "integration" / "live_run.py"
LIMIT: Final = re.compile(r"pytest\.mark\.timeout\((\d+)\)")
RUN: Final = re.compile(r"LiveRun(?:\.resumed)?\(")
FILES: Final = [path for path in sorted(TESTS.rglob("test_*.py")) if RUN.search(path.read_text(encoding="utf-8"))]


def run_timeout_s() -> float:
    found = re.search(r"^RUN_TIMEOUT_S = ([\d.]+)$", HARNESS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return float(found[1])


def usual_timeout_s() -> float:
    """Of a test that says nothing."""
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    return float(settings["tool"]["pytest"]["ini_options"]["timeout"])


def too_short(text: str, run_s: float, usual_s: float) -> list[str]:
    """The functions whose runs may take longer than the test, so many seconds each; a run that is given a limit of its
    own is not looked at."""
    tree = ast.parse(text)
    whole = next((limit_s for node in tree.body if (limit_s := _limit_of(node)) is not None), usual_s)
    found: list[str] = []
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        own = [LIMIT.search(ast.unparse(each)) for each in function.decorator_list]
        own_s = next((float(each[1]) for each in own if each is not None), whole)
        calls = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Call)]
        num_runs = sum(RUN.match(call) is not None and "timeout_s=" not in call for call in calls)
        if num_runs and own_s <= num_runs * run_s:
            found.append(f"{function.name}: {num_runs} runs of {run_s:.0f} s in {own_s:.0f} s")
    return found


def _limit_of(node: ast.stmt) -> float | None:
    """Of the whole file, where this statement marks it."""
    text = ast.unparse(node)
    found = LIMIT.search(text) if text.startswith("pytestmark = ") else None
    return None if found is None else float(found[1])


def test_there_are_such_files() -> None:
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_test_outlasts_its_runs(path: Path) -> None:
    assert too_short(path.read_text(encoding="utf-8"), run_timeout_s(), usual_timeout_s()) == []


def test_a_test_that_would_end_first_is_found() -> None:
    text = """
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
def test_one():
    with LiveRun("a", tmp_path, ()) as run:
        pass
def test_two():
    with LiveRun("a", tmp_path, ()) as run:
        pass
    with LiveRun.resumed(run.folder) as again:
        pass
@pytest.mark.timeout(600)
def test_two_with_time():
    with LiveRun("a", tmp_path, ()), LiveRun("a", tmp_path, (), timeout_s=400):
        pass
"""
    assert too_short(text, 240.0, 300.0) == ["test_two: 2 runs of 240 s in 300 s"]
    assert len(too_short(text, 300.0, 300.0)) == 2
