"""Functions of a script, a notebook or a closure, written down and loaded again as another process would."""

from __future__ import annotations

import itertools
import json
import linecache
import math
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.backends.processes.user_code import UserCodeError, load_object
from penstock.backends.processes.user_source import function_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCRIPT = '''
import functools
import json as written
import math
import re
import xml.dom.minidom

NUMBER = re.compile(r"\\d+", re.IGNORECASE)
WEIGHTS = {"number": 2.0}
data = object()


def twice(function):
    @functools.wraps(function)
    def called(response):
        return 2 * function(response)

    return called


@functools.lru_cache
def weight(name: "Unknown") -> float:
    return WEIGHTS[name]


def helper(text):
    return math.sqrt(len(NUMBER.findall(text))) * weight("number")


@twice
def decorated(response):
    data = response  # a name that means something else outside
    return helper(data)


def countdown(response):
    return countdown(response[1:]) + 1 if response else 0


class Judge:
    """Of a notebook."""

    def __init__(self):
        self.base = base()

    def __call__(self, response):
        return self.base + helper(response)


def base():
    return 5


def of_a_submodule(response):
    return xml.dom.minidom.parseString(response).documentElement.tagName


def made(factor, suffix="""
two lines"""):
    def inner(response):
        text = """
not indented"""
        return factor * len(response) + len(text) + len(suffix)

    return inner


closure = made(3)
first, second = (lambda response: len(response)), (lambda response: written.dumps(response))
split = lambda response, extra=(
    len(WEIGHTS)
): len(response) + extra
nested = lambda response: (lambda inner: inner + 1)(len(response))
with_object = lambda response: data
through = lambda response: with_object(response)
partial = functools.partial(helper, "7")
'''


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    """The names of a script, whose source is known as that of a notebook's cell is."""
    return run_as_main(SCRIPT)


_numbers = itertools.count()


def run_as_main(text: str) -> dict[str, Any]:
    name = f"<cell-{next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    return names


def written(function: Callable[..., object], folder: Path) -> Callable[..., object]:
    file = folder / "reward.py"
    file.write_text(function_source(function, "reward"))
    found: Any = load_object(f"{file}:reward")
    return cast("Callable[..., object]", found() if isinstance(found, type) else found)


@pytest.mark.parametrize(
    ("name", "response", "result"),
    [
        ("helper", "1 22", 2 * math.sqrt(2)),
        ("decorated", "1 22", 4 * math.sqrt(2)),
        ("countdown", "abc", 3),
        ("Judge", "1", 7.0),
        ("of_a_submodule", "<a/>", "a"),
        ("closure", "ab", 6 + len("\nnot indented") + len("\ntwo lines")),
        ("first", "abc", 3),
        ("second", "abc", '"abc"'),
        ("split", "abc", 4),
        ("nested", "abc", 4),
    ],
)
def test_what_was_written_does_what_the_function_does(
    name: str, response: str, result: object, cell: dict[str, Any], tmp_path: Path
) -> None:
    assert written(cell[name], tmp_path)(response) == result


def test_nothing_that_the_function_does_not_use_is_written(cell: dict[str, Any]) -> None:
    text = function_source(cell["closure"], "reward")
    assert "factor = 3" in text
    for unused in ("WEIGHTS", "data", "Judge", "import"):
        assert unused not in text.replace("from __future__ import", "")


def test_values_are_those_of_the_moment(cell: dict[str, Any], tmp_path: Path) -> None:
    names = run_as_main("LIMIT = 3\n\n\ndef limited(response):\n    return min(len(response), LIMIT)\n")
    text = function_source(names["limited"], "reward")
    names["LIMIT"] = 100
    assert "LIMIT = 3" in text


def test_a_function_with_a_file_of_its_own_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_apart.py").write_text("SECRET = object()\n\n\ndef score(response):\n    return len(response)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    text = function_source(import_module("kept_apart").score, "reward")
    assert "from kept_apart import score as reward" in text
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "r.py").write_text(text)
    module = "penstock.backends.processes.user_code"
    code = f"from {module} import load_object; print(load_object('{tmp_path}/elsewhere/r.py:reward')('abc'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.stdout == "3\n", done.stderr


def test_a_function_of_python_or_a_library_is_imported(tmp_path: Path) -> None:
    assert written(json.JSONDecoder.decode, tmp_path)(json.JSONDecoder(), "3") == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("with_object", r"reward uses 'data', a builtins\.object, which cannot be written into a file; make it within"),
        ("through", r"reward → with_object uses 'data', a builtins\.object"),
        (
            "partial",
            r"reward: a functools\.partial, and no function or class; put it with all that it uses",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(name: str, said: str, cell: dict[str, Any]) -> None:
    with pytest.raises(UserCodeError, match=said):
        function_source(cell[name], "reward")


def test_a_function_without_a_source_is_refused() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(response):\n    return 1\n", names)
    with pytest.raises(UserCodeError, match=r"the source of 'typed' cannot be found .*file\.py:name"):
        function_source(names["typed"], "reward")


def test_one_name_for_two_things_is_refused() -> None:
    names = run_as_main(
        "limit = 1\n\n\ndef inner(response):\n    return limit\n\n\n"
        "def made(limit):\n    return lambda response: inner(response) + limit\n\n\nboth = made(2)\n"
    )
    with pytest.raises(UserCodeError, match="'limit' means two things"):
        function_source(names["both"], "reward")


def test_a_source_that_was_changed_meanwhile_is_refused() -> None:
    names = run_as_main("def score(response):\n    return 1\n")
    name = names["score"].__code__.co_filename
    linecache.cache[name] = (1, None, ["def other(response):\n", "    return 2\n"], name)
    with pytest.raises(UserCodeError, match="'score' is not where its source was"):
        function_source(names["score"], "reward")
