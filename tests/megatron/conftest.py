"""Ranks that are started once for all tests of a module, and tiny models of each family."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests

from ranks import Ranks, start_server
from tiny_families import make_tiny

from penstock.backends.engines.served.sglang.environment import find_environment
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For ``-n 2 --dist loadfile --no-loadscope-reorder``: whole runs come first, and none is left over at the end."""
    first = [item for item in items if item.path.is_relative_to(HERE) and "ray" in item.keywords]
    items.sort(key=lambda item: item not in first)


@pytest.fixture(scope="module")
def ranks() -> Generator[Callable[[int], Ranks]]:
    """``ranks(4)``: so many processes with megatron-core, started when they are first asked for. Anew for each module:
    layouts leave threads of gloo behind, here and there, which never rest."""
    started: dict[int, Ranks] = {}
    start_server()  # it imports while the first models are made

    def get(count: int) -> Ranks:
        if count not in started or not started[count].is_open:
            started[count] = Ranks(count)
        return started[count]

    yield get
    for each in started.values():
        each.close()


@pytest.fixture(scope="session")
def tiny_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_family("qwen3")``: the folder of a checkpoint, made once a session."""
    parent = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        folder = parent / name.replace(" ", "_")
        return folder if folder.exists() else make_tiny(name, folder)

    return make


@pytest.fixture(scope="session")
def servers() -> None:
    """SGLang's environment for the CPU is there."""
    try:
        assert find_environment(is_cpu=True).is_cpu
    except UserFault as error:
        pytest.fail(str(error), pytrace=False)
