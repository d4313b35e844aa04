"""How long a batch's walk is: the functions and files of the house that it goes through, from its offer to the Learner
to the answer that it is trained, on one rank and after a first one that has set everything up.

Whoever wants to know what becomes of a batch reads these. The numbers may only shrink; ``python
tests/backends/test_batch_walk.py`` prints the walk.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learner_cases import make_groups, open_learner

from penstock.actors.learner.machine import Learner
from penstock.actors.learner.settings import LearnerSettings
from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.options import LearnerOptions
from penstock.messages.commands import OpenLearner, PublishWeights, Train
from penstock.messages.local import BatchTrained, LearnerOpened, WeightsPublished
from penstock.messages.training import BatchReady, CheckpointNamed, UpdateMode

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from learner_cases import RunningLearner

MAX_FILES = 38
MAX_FUNCTIONS = 177
"""Lower them with the walk. Nothing is added here."""

HOUSE = Path(__file__).parents[2]
STOREYS = ("actors", "messages", "backends", "runtime")


class Walk:
    """Which functions of the house are called, in the order of their first calls, while :attr:`is_noted`."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, tuple[str, str]] = {}
        """By code: file, below the house, and name."""
        self.is_noted = False
        self._places: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:  # noqa: ANN401 - as sys.setprofile asks
        if event != "call" or not self.is_noted or frame.f_code in self.functions:
            return
        code = frame.f_code
        if code.co_filename not in self._places:
            self._places[code.co_filename] = self._place_of(Path(code.co_filename))
        place = self._places[code.co_filename]
        if place is not None and not code.co_name.startswith("<"):  # comprehensions, lambdas, bodies of modules
            self.functions[code] = (place, code.co_qualname)

    @property
    def files(self) -> Counter[str]:
        """With the number of functions of each."""
        return Counter(file for file, _ in self.functions.values())

    @staticmethod
    def _place_of(path: Path) -> str | None:
        path = path.resolve()
        if not path.is_relative_to(HOUSE):
            return None
        place = path.relative_to(HOUSE)
        return str(place) if place.parts[0] in STOREYS else None


def walk_of_a_batch(folder: Path) -> Walk:
    """Of the second batch of a run."""
    make_model("xs", folder / "model", seed=0)
    walk = Walk()
    threading.setprofile(walk)  # for the thread that the learner starts
    try:
        running = open_learner(folder / "model", folder / "checkpoints", LearnerOptions(device="cpu"))
    finally:
        threading.setprofile(None)
    learner = Learner(
        LearnerSettings(epoch=0, publish_every=1, save_every=1000, step_timeout_s=50.0, start_timeout_s=900.0)
    )
    learner.handle(CheckpointNamed(learner_epoch=0, version=0, path="", announced_version=-1))
    learner.handle(running.ask(OpenLearner(path="", version=0), LearnerOpened))
    learner.handle(running.ask(PublishWeights(version=0, publish=1), WeightsPublished))
    train(learner, running, offered(1))
    learner.handle(running.ask(PublishWeights(version=1, publish=2), WeightsPublished))
    offer = offered(2)
    sys.setprofile(walk)
    walk.is_noted = True
    try:
        train(learner, running, offer)
    finally:
        walk.is_noted = False
        sys.setprofile(None)
        running.close()
    return walk


def offered(version: int) -> BatchReady:
    """The batch that makes this version."""
    return BatchReady(
        version=version,
        groups=make_groups(),
        announced_version=version - 1,
        max_staleness=8,
        update_mode=UpdateMode.INTERRUPT,
    )


def train(learner: Learner, running: RunningLearner, offer: BatchReady) -> None:
    """The actor and its backend."""
    (command,) = (command for command in learner.handle(offer) if isinstance(command, Train))
    learner.handle(running.ask(command, BatchTrained))
    assert learner.version == offer.version


def test_a_batch_goes_through_few_files_and_functions(tmp_path: Path) -> None:
    walk = walk_of_a_batch(tmp_path)
    assert any(name == "Learner._on_batch" for _, name in walk.functions.values())
    assert any(name.endswith("MasterAdamW.step") for _, name in walk.functions.values())
    assert len(walk.files) <= MAX_FILES
    assert len(walk.functions) <= MAX_FUNCTIONS


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        walk = walk_of_a_batch(Path(name))
    for file, num_functions in walk.files.items():
        print(f"{num_functions:4} {file}")
        print("".join(f"       {name}\n" for place, name in walk.functions.values() if place == file), end="")
    print(len(walk.files), "files,", len(walk.functions), "functions")
