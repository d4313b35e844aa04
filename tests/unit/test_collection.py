"""Which files a collection reads, for an expression of marks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"
FILES = {
    "some/test_plain.py": "import pytest\ndef test_a(): pass\n@pytest.mark.ray\ndef test_b(): pass\n",
    "some/test_ray.py": "import pytest\npytestmark = [\n    pytest.mark.timeout(3),\n    pytest.mark.ray,\n]\n"
    "def test_c(): pass\n",
    "other/test_slow.py": "import pytest\npytestmark = pytest.mark.slow\ndef test_d(): pass\n",
    "other/conftest.py": "",
}
NOTE = """
from pathlib import Path
with (Path(__file__).parents[1] / "read").open("a") as read:
    read.write(Path(__file__).name + " ")
"""
PLAIN, RAY, SLOW = {"test_plain.py"}, {"test_ray.py"}, {"test_slow.py", "conftest.py"}


@pytest.fixture
def collect(pytester: pytest.Pytester) -> Callable[..., tuple[set[str], set[str]]]:
    """The tests that are selected, and the files that were imported for that."""
    shutil.copy(CONFTEST, pytester.path / "conftest.py")
    for name, text in FILES.items():
        file = pytester.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(NOTE + text)

    def run(*words: str) -> tuple[set[str], set[str]]:
        (pytester.path / "read").write_text("")
        result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *words)
        tests = {line.rpartition("::")[2] for line in result.outlines if "::" in line}
        return tests, set((pytester.path / "read").read_text().split())

    return run


@pytest.mark.parametrize(
    ("expression", "tests", "files"),
    [
        ("ray and not slow", {"test_b", "test_c"}, PLAIN | RAY),
        ("not slow and not ray", {"test_a"}, PLAIN),
        ("slow", {"test_d"}, SLOW),
        (
            "ray or slow",
            {"test_b", "test_c", "test_d"},
            PLAIN | RAY | SLOW,
        ),
        ("", {"test_a", "test_b", "test_c", "test_d"}, PLAIN | RAY | SLOW),
    ],
)
def test_files_without_a_test_of_the_expression_are_not_read(
    collect: Callable[..., tuple[set[str], set[str]]], expression: str, tests: set[str], files: set[str]
) -> None:
    assert collect("-m", expression) == (tests, files)


def test_a_file_that_is_named_is_collected(collect: Callable[..., tuple[set[str], set[str]]]) -> None:
    assert collect("other/test_slow.py", "-m", "not slow") == (set(), SLOW)
