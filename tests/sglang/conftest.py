"""What the tests against real servers share: the environment, tiny models, and one running server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests

from running_server import RunningServer, run_server
from tiny_models import Architecture, make_tiny_model

from penstock.backends.engines.sglang.environment import SglangEnvironment, SglangEnvironmentError, find_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@pytest.fixture(scope="session")
def environment() -> SglangEnvironment:
    """Stock SGLang for the CPU."""
    try:
        return find_environment(is_cpu=True)
    except SglangEnvironmentError as error:
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
