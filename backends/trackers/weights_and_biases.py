"""The tracker ``wandb``: a run of Weights & Biases, in the run's folder or on its server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wandb

from penstock.backends.registry import read_options
from penstock.backends.trackers.spec import TrackedSample, WandbOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.backends.trackers.spec import TrackedRun


class WandbTracker:
    """Implements :class:`~penstock.backends.trackers.spec.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        options = read_options(WandbOptions, run.options)
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
        rows = [[str(dict(cell)) if cell is each.components else cell for cell in each] for each in samples]
        self._run.log({"version": version, "samples": wandb.Table(columns=[*TrackedSample._fields], data=rows)})

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The summary stands in the run's summary, the files are an artifact."""
        self._run.summary.update({"penstock": dict(summary)})
        artifact = wandb.Artifact(f"{self._run.id}-report", type="report")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)
        self._run.finish()
        wandb.teardown()
