"""Makes the modules beside these tests importable: pytest's importlib mode leaves their folder off the path; and what
several files test with. A file with a fixture of the same name has its own."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_cases import Case
    from learner_cases import RunningLearner
    from rank_cases import Ranks
    from reward_driver import RewardDriver

    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.rewards.options import RewardOptions


@pytest.fixture(scope="session")
def gateway_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls a tool, and then answers: trained once for all processes of a session."""
    from gateway_cases import make_model

    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "gateway_model"
    with (shared / "gateway_model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = tmp_path_factory.mktemp("gateway_model")
            make_model(made)
            made.rename(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model that ``model.make`` knows."""
    from penstock.backends.checkpoint.make import make_model

    path = tmp_path_factory.mktemp("xs")
    make_model("xs", path, seed=0)
    return path


@pytest.fixture
def opened() -> Iterator[list[RunningLearner]]:
    """Learners that are closed at the end."""
    running: list[RunningLearner] = []
    yield running
    for learner in running:
        learner.close()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """What most tests of engines generate with."""
    from engine_cases import make_case

    return make_case("qwen3_tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same architecture with other weights."""
    from engine_cases import make_case

    return make_case("qwen3_tied", tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four processes for all tests of a module, or its ``NUM_RANKS``."""
    from rank_cases import open_ranks

    module = cast("object", request.module)  # pyright: ignore[reportUnknownMemberType]
    with open_ranks(getattr(module, "NUM_RANKS", 4)) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer of single characters."""
    from reward_driver import write_tokenizer

    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def driver(tokenizer_folder: Path) -> Iterator[Callable[..., RewardDriver]]:
    """Opens rewards, and closes them at the end."""
    from reward_driver import RewardDriver

    opened: list[RewardDriver] = []

    def open_driver(options: RewardOptions, surroundings: Surroundings | None = None) -> RewardDriver:
        opened.append(RewardDriver(tokenizer_folder, options, surroundings))
        return opened[-1]

    yield open_driver
    for each in opened:
        each.close()
