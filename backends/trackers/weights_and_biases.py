"""The tracker ``wandb``: a run of Weights & Biases, in the run's folder or on its server."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import wandb

from penstock.backends.registry import read_options
from penstock.backends.trackers.protocol import TrackedSample
from penstock.backends.trackers.spec import WandbOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.trackers.protocol import TrackedRun


class WandbTracker:
    """Implements :class:`~penstock.backends.trackers.protocol.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        options = read_options(WandbOptions, run.options)
        for variable in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):  # or files of artifacts lie in the user's folder
            os.environ.setdefault(variable, str(run.folder))
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            mode=options.mode,
            group=options.group,
            tags=options.tags,
            dir=str(run.folder),
            id=run.name,
            name=run.name,
            resume="allow" if options.mode == "online" else None,  # one that is offline knows of no earlier one
            config=dict(run.scenario),
            # What this process prints, its machine and its code are not the run's.
            settings=wandb.Settings(
                console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False, disable_code=True
            ),
        )
        self._run.define_metric("*", step_metric="version")  # evaluations come late; its own steps only go up

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Each figure under its name, over ``version``."""
        self._run.log({"version": version, **metrics})

    def samples(self, version: int, samples: Sequence[TrackedSample]) -> None:
        """They are a table of plain texts."""
        rows = [each._asdict() | {"components": json.dumps(dict(each.components))} for each in samples]
        table = wandb.Table(columns=[*TrackedSample._fields], data=[[*row.values()] for row in rows])
        self._run.log({"version": version, "samples": table})

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The summary stands in the run's summary, the files are an artifact."""
        self._run.summary.update({"penstock": dict(summary)})
        artifact = wandb.Artifact(f"{self._run.id}-report", type="report")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)
        self._run.finish()
        wandb.teardown()
