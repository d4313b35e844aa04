"""``penstock bench``: one module of ``penstock.benchmarks`` for each claim, found by its name."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.table import Table
from rich.text import Text

from penstock import benchmarks
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

HARNESS: Final = "penstock.benchmarks._harness"


class Benchmark(NamedTuple):
    """What is known of a benchmark before it is imported."""

    doc: str
    """The first paragraph of its docstring, on one line."""
    quick: tuple[str, ...] | None
    """Its ``QUICK``: arguments with which it takes a minute or so; None: there are none."""
    quick_s: float
    """Its ``QUICK_S``: wall seconds that this is given, twice what two quiet cores take or so; 0 without."""
    is_on_harness: bool
    """Whether it makes a result, and takes the harness's options."""


def registered() -> dict[str, Benchmark]:
    """Every benchmark by its name; nothing is imported for it."""
    found: dict[str, Benchmark] = {}
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name.startswith("_"):
            continue
        stem = Path(benchmarks.__path__[0]) / module.name
        tree = ast.parse((stem / "__init__.py" if module.ispkg else stem.with_suffix(".py")).read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[module.name] = Benchmark(
                doc=" ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split()),
                quick=None if (quick := _constant(tree, "QUICK")) is None else tuple(ast.literal_eval(quick)),
                quick_s=0.0 if (quick_s := _constant(tree, "QUICK_S")) is None else float(ast.literal_eval(quick_s)),
                is_on_harness=any(_imports_benchmark(node) for node in tree.body),
            )
    return found


def _imports_benchmark(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == HARNESS
        and any(name.name == "Benchmark" for name in node.names)
    )


def _constant(tree: ast.Module, name: str) -> ast.expr | None:
    """What a constant of the module is set to; None: it has none of this name."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return node.value
    return None


def benchmark_docs() -> dict[str, str]:
    """Every benchmark with the first paragraph of its docstring; nothing is imported for it."""
    return {name: found.doc for name, found in registered().items()}


def list_benchmarks(console: Console) -> None:
    """Print the names and what each measures."""
    table = Table.grid(padding=(0, 2))
    for name, doc in benchmark_docs().items():
        table.add_row(Text(name, style="bold"), Text(doc))
    console.print(table)


def run_benchmark(name: str, arguments: Sequence[str], *, is_quick: bool = False) -> int:
    """Run one benchmark; its exit code.

    Raises:
        UserFault: there is none of this name, or it cannot be quick.
    """
    known = registered()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known) or 'none yet'}"
        raise UserFault(f"no benchmark is called '{name}'; {hint}")
    if is_quick:
        if (quick := known[name].quick) is None:
            raise UserFault(f"{name} has no quick form; penstock bench {name} --help says what makes it shorter")
        arguments = [*quick, *arguments]
    module = importlib.import_module(f"penstock.benchmarks.{name}")
    return int(module.main(list(arguments)))
