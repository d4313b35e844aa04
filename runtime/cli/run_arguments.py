"""Options of ``penstock run``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.runtime.submit.scheduler_names import JobAction, Scheduler


class Part(StrEnum):
    """Of a run, where it is not the whole."""

    LEARNER = "learner"
    ROLLOUT = "rollout"


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what the scenario sets, who runs where, layout and memory of a Megatron learner, and what this "
        "machine lacks; start nothing. Exit code 2 if it lacks something. With --submit: write what the scheduler "
        "would be given, and print it.",
    ),
]
Full = Annotated[bool, typer.Option("--full", help="With --dry-run: every key, also those at their defaults.")]
GpusPerNode = Annotated[
    int | None, typer.Option(min=1, help="With --dry-run: GPUs of a node of the cluster; 8 without it.")
]
GpuMemory = Annotated[
    float | None, typer.Option(min=1, metavar="GB", help="With --dry-run: of a GPU; else the scenario's.")
]
KeepSamples = Annotated[
    bool, typer.Option("--keep-samples", help="Keep every trained sample as Parquet; as run.keep_samples=true.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no samples; as observability.show_samples=false.")]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Show it in the browser, until it has ended.")]
Only = Annotated[
    Part | None,
    typer.Option(
        "--only",
        help="[bold]learner[/]: train the batches that another run has recorded again, without engines. "
        "[bold]rollout[/]: generate and score with the model as it is, train nothing, keep the groups.",
    ),
]
BatchesFrom = Annotated[
    Path | None, typer.Option("--from", metavar="RUN", help="With --only learner: the folder of the recorded run.")
]
NumGroups = Annotated[
    int | None,
    typer.Option(min=1, help="With --only rollout: groups to collect; run.num_steps batches of them without it."),
]
Into = Annotated[
    Path | None,
    typer.Option(
        "--run-folder",
        metavar="FOLDER",
        help="Run in this very folder, and go on with the run that is in it already: for a job that may be started "
        "again with the same command.",
    ),
]
Submit = Annotated[
    Scheduler | None,
    typer.Option("--submit", help="Give the run to this scheduler, and follow it; given again, go on with it."),
]
SubmitConfig = Annotated[
    Path | None, typer.Option("--submit-config", metavar="FILE", help="With --submit: partition, image, time limit, …")
]
Job = Annotated[
    JobAction | None,
    typer.Option(
        "--job",
        help="With --submit: [bold]submit[/] and do not follow, show [bold]status[/] or [bold]log[/], [bold]stop[/] "
        "with a checkpoint, or begin a [bold]new[/] run of the same name.",
    ),
]
