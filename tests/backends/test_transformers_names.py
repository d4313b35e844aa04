"""``typings/transformers`` says where each name is, and is right: a checker that does not find one says nothing."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import transformers

NAMES = Path(__file__).parents[2] / "typings" / "transformers" / "__init__.pyi"


def test_each_name_is_the_one_that_transformers_gives() -> None:
    imports = [node for node in ast.parse(NAMES.read_text()).body if isinstance(node, ast.ImportFrom)]
    named = [(str(node.module), each.name, each.asname) for node in imports for each in node.names]
    assert len(named) > 30
    for module, name, shown in named:
        assert shown == name, "else it is not exported"
        assert getattr(import_module(module), name) is getattr(transformers, name), name
