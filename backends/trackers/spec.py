"""What a tracker of experiments is: its protocol, what the house knows of each before it is opened, and the registry.

Invariants:

* A tracker lives in a process of its own (:mod:`penstock.runtime.observability.tracker_process`). It may raise, hang,
  print or end its process: the run does not wait for it before its end, and then only so long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, cast

from penstock.backends.registry import Registry
from penstock.messages.base import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Everything that a tracker is opened with."""

    tracker: str
    """As the scenario names it."""
    name: str
    """Of the run's folder; the same when the run is resumed."""
    run_folder: Path
    folder: Path
    """In it, for the tracker's own files; it is there."""
    scenario: Mapping[str, Any]
    """As it was resolved: blocks of keys."""
    options: Mapping[str, Any]
    """``options:`` of the tracker."""
    resumes: bool
    """An earlier drive of this run has told a tracker of this name."""


class TrackedSample(NamedTuple):
    """One sample as text. Prompt, response and reason were written by models and strangers."""

    name: str
    """``12/3``: group and index; of an evaluation ``e12/3``."""
    prompt: str
    response: str
    label: str
    reward: float | None
    components: Mapping[str, float]
    fate: str
    """In words: ``trained at step 4``."""
    reason: str
    """Why it failed; empty where it did not."""


class Tracker(Protocol):
    """What is told how a run goes. What it raises is told to the user once; the next call comes all the same."""

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """A step, or an evaluation, whose figures are named ``eval/DATASET/FIGURE``.

        Args:
            version: that the step made, or that was evaluated. Those of evaluations may come late.
            metrics: finite numbers by name.
        """
        ...

    def samples(self, version: int, samples: Sequence[TrackedSample]) -> None:
        """Some samples, the newest first; ``version``: of the last step."""
        ...

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The run is over: keep what is not kept yet, and close.

        Args:
            summary: ``summary.json`` of the run.
            files: to keep with it: the report, and the summary.
        """
        ...


class WandbOptions(Options, frozen=True, kw_only=True):
    """``options:`` of the tracker ``wandb``."""

    project: str = "penstock"
    entity: str | None = None
    """User or team; null: the default one of the account."""
    mode: Literal["offline", "online"] = "offline"
    """``offline`` writes into the run's folder, for ``wandb sync``; ``online`` sends while the run goes on."""
    group: str | None = None
    tags: tuple[str, ...] = ()


class MlflowOptions(Options, frozen=True, kw_only=True):
    """``options:`` of the tracker ``mlflow``."""

    uri: str | None = None
    """``http://…`` of a server, or ``sqlite:////…`` with an absolute path; null: a store in the run's folder."""
    experiment: str = "penstock"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSpec:
    """One tracker. It is looked at in the command line, so its module imports nothing heavy: that is for
    :attr:`open` to do."""

    open: Callable[[TrackedRun], Tracker]
    """Called in the tracker's own process."""
    options: type[Options] | None = None
    """What ``options:`` holds; None: there is no such block."""
    takes_any_options: bool = False
    """Whatever stands in ``options:`` is for it, and it checks it."""
    extra: str = ""
    """The module that it needs, which comes with an extra of Penstock."""
    variables: tuple[str, ...] = ()
    """Of the environment, that its process sees beside those of ``runtime.pass_env``."""


def _tensorboard(run: TrackedRun) -> Tracker:
    from penstock.backends.trackers.tensorboard_events import TensorBoardTracker

    return TensorBoardTracker(run)


def _wandb(run: TrackedRun) -> Tracker:
    from penstock.backends.trackers.weights_and_biases import WandbTracker

    return WandbTracker(run)


def _mlflow(run: TrackedRun) -> Tracker:
    from penstock.backends.trackers.mlflow_runs import MlflowTracker

    return MlflowTracker(run)


def _of_a_file(run: TrackedRun) -> Tracker:
    from penstock.backends.processes.user_code import load_object

    return cast("Callable[[TrackedRun], Tracker]", load_object(run.tracker))(run)


_OF_WANDB: Final = ("WANDB_API_KEY", "WANDB_BASE_URL", "HTTPS_PROXY", "https_proxy")
_OF_MLFLOW: Final = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HTTPS_PROXY")
TRACKERS: Final = Registry(
    "tracker",
    "penstock.trackers",
    TrackerSpec,
    {
        "tensorboard": TrackerSpec(open=_tensorboard, extra="tensorboard"),
        "wandb": TrackerSpec(open=_wandb, options=WandbOptions, extra="wandb", variables=_OF_WANDB),
        "mlflow": TrackerSpec(open=_mlflow, options=MlflowOptions, extra="mlflow", variables=_OF_MLFLOW),
    },
    own=TrackerSpec(open=_of_a_file, takes_any_options=True),
)
"""``file.py:Class`` is called with the run."""


def folder_name(name: str) -> str:
    """Of the tracker's folder in ``trackers/`` of a run: its name, or ``file.Class``."""
    file, _, function = name.rpartition(":")
    return re.sub(r"[^\w.-]", "_", f"{Path(file).stem}.{function}" if file else name)
