"""What the house knows of each tracker of experiments before it is opened, and the registry of all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

from penstock.backends.registry import Registry
from penstock.messages.base import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.trackers.protocol import TrackedRun, Tracker


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
