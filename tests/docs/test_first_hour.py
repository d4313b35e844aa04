"""Where ``docs/first_hour.md`` and the glossary lead to is there, and a simulated run takes the walk of the first."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from typing import TYPE_CHECKING

from blocks import HOUSE

from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from types import FrameType

PAGE = HOUSE / "docs" / "first_hour.md"
PURE = ("actors/", "runtime/shell/shell.py", "runtime/shell/delivery.py")
"""What runs on the virtual host as it does in processes."""


def places(page: str) -> list[tuple[str, str]]:
    """File and qualified name of everything that a page leads to."""
    return re.findall(r"`([\w/]+\.py)::([\w.]+)`", page)


@cache
def names_in(file: str) -> frozenset[str]:
    """Classes, functions and methods of a file."""
    found: set[str] = set()
    for node in ast.parse((HOUSE / file).read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {node.name, *(f"{node.name}.{part.name}" for part in members)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)


def missing(page: str) -> list[str]:
    """What a page leads to and is not there."""
    return [
        f"{file}::{name}" for file, name in places(page) if not (HOUSE / file).is_file() or name not in names_in(file)
    ]


def called(simulation: Simulation) -> set[tuple[str, str]]:
    """File and qualified name of every function that runs in a simulated run."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        assert simulation.run().completed
    finally:
        sys.setprofile(before)
    return found


def test_every_function_that_the_first_hour_leads_to_exists() -> None:
    page = PAGE.read_text()
    assert len(places(page)) > 50, "the functions are looked for in the wrong way"
    assert page.count(".py::") == len(places(page)) + page.count("::test_"), "a name that is none is not looked for"
    assert missing(page) == []


def test_every_place_of_a_word_of_our_own_exists() -> None:
    page = (HOUSE / "docs" / "glossary.md").read_text()
    assert len(places(page)) > 10
    assert page.count(".py::") == len(places(page))
    assert missing(page) == []


def test_the_walk_of_the_first_hour_is_the_one_that_is_taken() -> None:
    small = ("engines.count=2", "learner.groups_per_batch=2", "run.num_steps=4", "learner.save_every=2")
    simulation = Simulation(load_scenario(HOUSE / "scenarios" / "simulated_1024_engines.yaml", small))
    ran = called(simulation)
    walk = [(file, name) for file, name in places(PAGE.read_text()) if file.startswith(PURE)]
    assert len(walk) > 35
    assert [f"{file}::{name}" for file, name in walk if not any(f.endswith(file) and n == name for f, n in ran)] == []


def test_a_name_that_is_gone_is_found() -> None:
    shell = "runtime/shell/shell.py::Shell"
    page = f"`{shell}.end_turn` `{shell}.gone` `gone.py::f` `{shell}`"
    assert missing(page) == [f"{shell}.gone", "gone.py::f"]
