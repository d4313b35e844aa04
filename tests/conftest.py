"""What holds for all tests: the profiles of hypothesis, the order in which tests run, and which files are read at all.

``PENSTOCK_HYPOTHESIS=ci``, the default, draws the same examples every time, so that a change alone can turn a test
red. ``PENSTOCK_HYPOTHESIS=nightly`` draws new ones, five times as many, and prints what repeats a failure.

``PENSTOCK_TEST_ORDER=random`` shuffles the test files, and the tests of each file, by a seed that is in the header;
``PENSTOCK_TEST_ORDER=SEED`` repeats that order. A file's tests stay together, for the sake of its fixtures.

A file whose tests ``-m`` would deselect to the last one is left out, unread: collecting it imports what it tests, and
every process that pytest starts pays for that. A file that is named on the command line is collected, and so is one of
which it is not plain to see how it is marked.
"""

from __future__ import annotations

import gc
import os
import random
import re
import secrets
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

PROFILE = "PENSTOCK_HYPOTHESIS"
ORDER = "PENSTOCK_TEST_ORDER"
NIGHTLY_FACTOR = 5
FIRST_PORT = 16_384
DECORATED = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps the settings of a decorated test."""

_PLAIN = re.compile(r"(?:not )?\w+(?: and (?:not )?\w+)*")
_MARKED_WHOLE = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*)", re.MULTILINE)

os.environ["PENSTOCK_CACHE"] = "off"
"""What a test computes is computed: of two equal runs the second would otherwise show nothing. Tests of the cache have
one of their own."""

EITHER = settings(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # it is the clock that decides there, on a machine that others use
)
settings.register_profile("ci", EITHER, derandomize=True)
settings.register_profile("nightly", EITHER, derandomize=False)


@pytest.fixture
def unused_port() -> Callable[[], int]:
    """Ports for a server that has to be told one. Nobody who asks for any free port gets one of these between this and
    the server's start: they lie below those that the kernel gives out."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert first > FIRST_PORT + 1000, f"the kernel gives out ports from {first} on"

    def draw() -> int:
        for _ in range(100):
            port = FIRST_PORT + secrets.randbelow(first - FIRST_PORT)
            try:
                with socket.create_server(("", port)):
                    return port
            except OSError:
                continue
        raise AssertionError("no port is free")

    return draw


def pytest_configure() -> None:
    settings.load_profile(os.environ.get(PROFILE, "ci"))
    if os.environ.get(ORDER) == "random":  # workers of xdist start after this, and have to agree
        os.environ[ORDER] = str(secrets.randbelow(1 << 32))


def pytest_report_header() -> str:
    return f"{PROFILE}={settings.get_current_profile_name()} {ORDER}={os.environ.get(ORDER, 'fixed')}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay: looking for garbage among them finds none, while they are read and at each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if settings.get_current_profile_name() == "nightly":
        for test in {getattr(item, "function", None) for item in items}:
            if is_hypothesis_test(test):
                draw_more(test)
    if seed := os.environ.get(ORDER):
        items[:] = shuffled(items, int(seed))


def draw_more(function: object) -> None:
    """A test that says how many examples it wants says so for ``ci``; the decorator refuses to be applied again."""
    given: settings = getattr(function, DECORATED)
    setattr(function, DECORATED, settings(given, max_examples=given.max_examples * NIGHTLY_FACTOR))


def shuffled(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """The files in another order, and the tests of each in another order, by nothing but the seed and their names."""
    files: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: item.nodeid):
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    draw = random.Random(seed)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    return [item for group in groups for item in group]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True for a file, or a folder of files, that holds no test of the expression; None leaves it to pytest."""
    expression = str(config.option.markexpr).strip()
    if not _PLAIN.fullmatch(expression) or collection_path in _named(config):
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    asked = [file for file in files if not _is_deselected(file, expression)]
    return None if asked or not _holds_tests(collection_path) else True


def _holds_tests(path: Path) -> bool:
    return any(path.rglob("test_*.py")) if path.is_dir() else path.name.startswith("test_")


@cache
def _named(config: pytest.Config) -> frozenset[Path]:
    """What stands on the command line, files and folders."""
    return frozenset((config.invocation_params.dir / word.split("::")[0]).resolve() for word in config.args)


@cache
def _is_deselected(file: Path, expression: str) -> bool:
    """Whether the text of the file shows that the expression takes none of its tests."""
    text = file.read_text(encoding="utf-8")
    whole = " ".join(_MARKED_WHOLE.findall(text))
    for term in expression.split(" and "):
        mark = rf"\bmark\.{term.removeprefix('not ')}\b"
        if re.search(mark, whole) if term.startswith("not ") else not re.search(mark, text):
            return True
    return False
