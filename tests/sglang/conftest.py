"""What the tests against real servers share: the environment, tiny models, and one running server."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

from penstock.messages.errors import UserFault

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests

from running_server import RunningServer, run_server
from served_engines import ENGINES, Served
from tiny_models import Architecture, make_tiny_model

from penstock.backends.engines.served.base.settings import RUN_VARIABLES
from penstock.backends.engines.served.sglang.environment import SglangEnvironment, find_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from xdist.remote import Producer

HERE = Path(__file__).parent
_NAMES = "|".join(map("-".join, ENGINES))
_SERVED = re.compile(rf"\[({_NAMES})\b")
"""The parameter of ``served``, in the name of a test."""


class SharedServers(LoadScopeScheduling):
    """For ``-n 2 --dist loadscope --no-loadscope-reorder``: tests that share a server stay on one worker. (Marks of
    ``xdist_group`` do not get into the names that are divided with pytest 9.)"""

    def _split_scope(self, nodeid: str) -> str:
        if served := _SERVED.search(nodeid):
            return served[1]
        file = nodeid.partition("::")[0]
        return "server" if "server: RunningServer" in Path(file).read_text() else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SharedServers:
    return SharedServers(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs come first, so that none is left over at the end."""
    first = [item for item in items if item.path.is_relative_to(HERE) and "ray" in item.keywords]
    items.sort(key=lambda item: item not in first)


@pytest.fixture(scope="session", autouse=True)
def _a_run_of_its_own() -> None:
    """An engine ends what an earlier engine of its name *and run* has left; workers and other checkouts are others."""
    os.environ.update(dict.fromkeys(RUN_VARIABLES, f"tests-{secrets.token_hex(8)}"))


@pytest.fixture(scope="session")
def environment() -> SglangEnvironment:
    """Stock SGLang for the CPU."""
    try:
        return find_environment(is_cpu=True)
    except UserFault as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(architecture="qwen3", seed=0)``: the folder of a checkpoint, made once a session."""
    parent = tmp_path_factory.mktemp("models")

    def make(architecture: Architecture = "qwen3", seed: int = 0) -> Path:
        folder = parent / f"{architecture}-{seed}"
        return folder if folder.exists() else make_tiny_model(folder, architecture, seed=seed)

    return make


@pytest.fixture(scope="session")
def server(
    environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[RunningServer]:
    """One server with a tiny Qwen3 for all tests that leave it as they found it: running, healthy, with seed 0."""
    with run_server(environment, tiny_model(), tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session", params=ENGINES, ids="-".join)
def served(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    """An engine that the tests open as a run does. It serves ``served.model`` before and after each test."""
    kind, architecture = request.param
    opened = Served(kind, tiny_model(architecture), tmp_path_factory.mktemp(f"{kind}-{architecture}"))
    try:
        yield opened
    finally:
        opened.bench.close()
