"""``penstock bench``: one module of ``penstock.benchmarks`` for each claim, found by its name."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import benchmarks
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


def benchmark_docs() -> dict[str, str]:
    """Every benchmark with the first line of its docstring; nothing is imported for it."""
    docs: dict[str, str] = {}
    for found in pkgutil.iter_modules(benchmarks.__path__):
        if found.name.startswith("_"):
            continue
        stem = Path(benchmarks.__path__[0]) / found.name
        tree = ast.parse((stem / "__init__.py" if found.ispkg else stem.with_suffix(".py")).read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            docs[found.name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return docs


def list_benchmarks(console: Console) -> None:
    """Print the names and what each measures."""
    for name, doc in benchmark_docs().items():
        console.print(f"  [bold]{name:<16}[/] {doc}")


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """Run one benchmark; its exit code.

    Raises:
        UserFault: there is none of this name.
    """
    names = tuple(benchmark_docs())
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names) or 'none yet'}"
        raise UserFault(f"no benchmark is called '{name}'; {hint}")
    module = importlib.import_module(f"penstock.benchmarks.{name}")
    return int(module.main(list(arguments)))
