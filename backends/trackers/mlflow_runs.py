"""The tracker ``mlflow``: a run in a store of MLflow, in the run's folder or on a server."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any, Final, cast

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from penstock.backends.registry import read_options
from penstock.backends.trackers.spec import MlflowOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.backends.trackers.protocol import TrackedRun, TrackedSample

STORE_FILE: Final = "mlflow.db"
TAG: Final = "penstock.run"
"""By which a run is found again when it is resumed."""
PARAMS_PER_CALL: Final = 100
MAX_PARAM_CHARS: Final = 6000
"""Limits of MLflow's own."""
MAX_NAME_CHARS: Final = 250
_NO_NAME: Final = re.compile(r"[^\w\-. :/]|(?<![^/])\.|(?<![^/])(?=/|$)")
"""Its names are paths: besides letters that it refuses, what has no name in one, or leads out of it."""


class MlflowTracker:
    """Implements :class:`~penstock.backends.trackers.protocol.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        options = read_options(MlflowOptions, run.options)
        uri = options.uri or f"sqlite:///{run.folder.absolute() / STORE_FILE}"
        artifacts = None if options.uri else (run.folder.absolute() / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(options.experiment, artifacts)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{_name(run.name)}'") if run.resumes else []
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, tags={TAG: _name(run.name)}, run_name=run.name).info.run_id
            self._params(run.scenario)

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Each figure under its name; characters that MLflow refuses in names become ``_``."""
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(_name(name), value, now_ms, version) for name, value in metrics.items()]
        )

    def samples(self, version: int, samples: Sequence[TrackedSample]) -> None:
        """They are an artifact of JSON."""
        text = json.dumps([each._asdict() for each in samples], indent=2)
        self._client.log_text(self._id, text, f"samples/{version}.json")

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The files are artifacts."""
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._client.set_terminated(self._id, "FINISHED" if summary.get("completed") else "FAILED")

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return self._client.create_experiment(name, artifact_location=artifacts)
        except MlflowException:  # a run beside this one was quicker, or it cannot be made
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _params(self, scenario: Mapping[str, Any]) -> None:
        params = [Param(_name(key), str(value)[:MAX_PARAM_CHARS]) for key, value in _leaves(scenario, "")]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_PER_CALL])


def _name(text: str) -> str:
    return _NO_NAME.sub("_", text)[:MAX_NAME_CHARS].rstrip("/")


def _leaves(block: object, path: str) -> Iterator[tuple[str, object]]:
    """``learner.objective.name`` → its value; items of lists by their number."""
    if isinstance(block, dict):
        for key, value in cast("dict[str, object]", block).items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(block, list | tuple):
        for index, value in enumerate(cast("list[object]", block)):
            yield from _leaves(value, f"{path}.{index}")
    else:
        yield path, block
