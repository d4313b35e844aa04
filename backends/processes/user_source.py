"""A Python function as a file of its own, so that another process can load it as ``file.py:name``: also later, when a
run is resumed.

Of a function of a script, a notebook's cell or a closure its source is written, and with it that of every function and
class around it that it uses, the imports and the plain values. What has a file of its own stays there and is imported.

Invariants:

* What is written means what the function means now: a value that its text cannot say is refused by name, and never
  left out. Later changes of the values or of the script do not reach it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import symtable
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from penstock.backends.processes.user_code import UserCodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_VALUE_CHARACTERS: Final = 1 << 20
"""Longest plain value, as source text, that a function may use."""
FUTURE: Final = "from __future__ import annotations"
HEAD: Final = f'"""Written from a function that was given as such, with what it uses."""\n\n{FUTURE}'
ADVICE: Final = "put it with all that it uses into a file, and give that as 'file.py:name'"
_LIBRARIES: Final = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def function_source(function: Callable[..., object], name: str) -> str:
    """The text of a Python file in which ``name`` is this function.

    Args:
        function: or a class whose objects, made without arguments, can be called; a lambda and a closure too.
        name: what the file calls it.

    Raises:
        UserCodeError: it cannot be written down, and why.
    """
    writer = _Writer(name)
    writer.bind(name, function, ())
    folders = sorted(writer.folders)
    paths = [f"import sys\n\nsys.path[:0] = {folders!r}"] if folders else []
    return "\n\n".join([HEAD, *paths, *writer.parts]) + "\n"


class _Definition(NamedTuple):
    text: str
    """As it stands, with its decorators; of a lambda the expression alone."""
    name: str
    """That the text binds; empty for a lambda."""


class _Writer:
    def __init__(self, name: str) -> None:
        self.parts: list[str] = []
        self.folders: set[str] = set()
        """That are not on every process's path."""
        self._name = name
        self._bound: dict[str, object] = {}

    def bind(self, name: str, value: object, users: tuple[str, ...]) -> None:
        """Write whatever gives ``name`` this value; ``users``: who uses it, from the function on."""
        plain = inspect.unwrap(value) if callable(value) else value
        if name in self._bound:
            if self._bound[name] is not plain:
                raise UserCodeError(f"{self._name}: {name!r} means two things in functions that it uses; {ADVICE}")
            return
        self._bound[name] = plain
        if isinstance(value, ModuleType) and value.__name__ != "__main__":
            self._import(value.__name__)
            self.parts.append(f"import {value.__name__}" + f" as {name}" * (name != value.__name__))
        elif found := _imported_from(value):
            module, attribute = found
            self._import(module)
            first, *inner = attribute.split(".")
            alias = name if not inner else f"_{name}_of"
            self.parts.append(f"from {module} import {first} as {alias}")
            self.parts += [f"{name} = {'.'.join((alias, *inner))}"] if inner else []
        elif isinstance(plain, FunctionType | type):
            self._define(name, plain, (*users, name))
        elif isinstance(value, re.Pattern):
            pattern = cast("re.Pattern[str]", value)
            self.parts.append(f"{name} = __import__('re').compile({pattern.pattern!r}, {pattern.flags})")
        else:
            self.parts.append(f"{name} = {self._plain(name, value, users)}")

    def _define(self, name: str, value: FunctionType | type, users: tuple[str, ...]) -> None:
        found = _definition(value, self._name)
        if found.name not in ("", name):
            self.bind(found.name, value, users)
            self.parts.append(f"{name} = {found.name}")
            return
        text = found.text if found.name else f"{name} = {found.text}"
        known = _names_known_to(value)
        for used in sorted(_names_used(text) & known.keys()):
            self.bind(used, known[used], users)
            self.parts += _submodules_used(used, known[used], text)
        self.parts.append(text)

    def _plain(self, name: str, value: object, users: tuple[str, ...]) -> str:
        text = repr(value)
        try:
            is_same = len(text) <= MAX_VALUE_CHARACTERS and bool(ast.literal_eval(text) == value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            is_same = False
        if is_same:
            return text
        what = f"{type(value).__module__}.{type(value).__qualname__}"
        if not users:
            raise UserCodeError(f"{name}: a {what}, and no function or class; {ADVICE}")
        raise UserCodeError(
            f"{' → '.join(users)} uses {name!r}, a {what}, which cannot be written into a file; make it within the "
            f"function, or {ADVICE}"
        )

    def _import(self, module: str) -> None:
        """What is neither of Python nor installed was found through the folder of a script or a notebook."""
        file = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
        if file is None or any(Path(file).is_relative_to(folder) for folder in _LIBRARIES):
            return
        path = Path(file).absolute()
        self.folders.add(str(path.parent.parent if path.name == "__init__.py" else path.parent))


def _imported_from(value: object) -> tuple[str, str] | None:
    """Module and attribute that another process imports this value from; None where there are none."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == "__main__" or not _can_be_found(module):
        return None
    for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
        found: object = sys.modules[module]
        for part in name.split(".") if isinstance(name, str) else ():
            found = getattr(found, part, None)
        if isinstance(name, str) and found is value:
            return module, name
    return None


def _can_be_found(module: str) -> bool:
    try:
        return module in sys.modules and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # made by hand
        return False


def _definition(value: FunctionType | type, wanted_by: str) -> _Definition:
    try:
        lines, _ = inspect.findsource(next(_functions_of(value), value))
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError) as error:
        raise UserCodeError(
            f"{wanted_by}: the source of {value.__qualname__!r} cannot be found ({error}), as of one that was typed at "
            f"a prompt; {ADVICE}"
        ) from None
    node = _class_node(value, tree) if isinstance(value, type) else _function_node(value, tree)
    if node is None:
        raise UserCodeError(
            f"{wanted_by}: {value.__qualname__!r} is not where its source was; run its file or cell anew"
        )
    if isinstance(node, ast.Lambda):
        text = ast.get_source_segment("".join(lines), node)
        assert text is not None, "it was parsed from there"
        return _Definition(f"({text})", "")
    text = "".join(lines[_first_line(node) - 1 : node.end_lineno]).rstrip()
    # What is defined within something keeps its indentation: text in its strings may have less.
    return _Definition(f"if True:\n{text}" if text[:1].isspace() else text, node.name)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """That of its first decorator, where it has any."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _functions_of(value: FunctionType | type) -> Iterator[FunctionType]:
    """Itself, or those that a class defines."""
    members: list[object] = list(vars(value).values()) if isinstance(value, type) else [value]
    for member in members:
        plain = getattr(member, "__func__", member)
        function = inspect.unwrap(plain) if callable(plain) else None
        if isinstance(function, FunctionType) and function.__module__ == value.__module__:
            yield function


def _class_node(value: type, tree: ast.Module) -> ast.ClassDef | None:
    first = next((function.__code__.co_firstlineno for function in _functions_of(value)), None)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == value.__name__]
    held = [node for node in nodes if first is None or node.lineno <= first <= (node.end_lineno or 0)]
    return held[-1] if held else None


def _function_node(value: FunctionType, tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    code = value.__code__
    if code.co_name == "<lambda>":
        places = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda) and _holds(node.body, places)]
        return max(lambdas, key=lambda node: (node.lineno, node.col_offset), default=None)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _first_line(node) == code.co_firstlineno:
            return node if node.name == code.co_name else None
    return None


def _holds(body: ast.expr, places: list[tuple[int, int]]) -> bool:
    start, end = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
    return bool(places) and all(start <= place < end for place in places)


def _names_known_to(value: FunctionType | type) -> dict[str, object]:
    """What names mean within a function, or within the methods of a class, Python's own left out."""
    known: dict[str, object] = dict(vars(sys.modules[value.__module__]))
    for function in _functions_of(value):
        known |= function.__globals__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                known[name] = cell.cell_contents
            except ValueError:  # it has no value yet
                known.pop(name, None)
    known.pop("__class__", None)  # of methods that call super()
    return known


def _submodules_used(name: str, value: object, text: str) -> list[str]:
    """``xml.etree`` is there only where somebody has imported it."""
    if not isinstance(value, ModuleType) or not hasattr(value, "__path__"):
        return []
    steps = [each.split(".")[1:] for each in re.findall(rf"\b{name}(?:\.\w+)+", text)]
    named = {".".join((value.__name__, *each[: length + 1])) for each in steps for length in range(len(each))}
    return [f"import {module}" for module in sorted(named & sys.modules.keys())]


def _names_used(text: str) -> set[str]:
    """Every name that the text takes from outside of itself, or of its functions."""
    top = symtable.symtable(f"{FUTURE}\n{text}", "function", "exec")
    used = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    inner = list(top.get_children())
    for table in inner:
        inner += table.get_children()
        used |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
    return used
