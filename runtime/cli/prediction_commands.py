"""Commands that say what a run will come to before it is paid for."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.runtime.cli.program import app, console


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock calibrate runs/sync-20260801-120000 -o models.yaml\n\n"
    "penstock calibrate runs/sync-20260801-120000 runs/fully_async-20260801-130000 -o models.yaml\n\n"
    "penstock simulate scenarios/fully_async.yaml --models models.yaml --seeds 5"
)
def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of recorded runs of one model.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the models go.")] = Path(
        "models.yaml"
    ),
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Play each run again with the models: how far are they off?"),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Fit the models of the simulation to recorded runs: how long engines, learner and rewards take, and how long
    responses get; with the error of each fit on steps that it has not seen, and what the runs could not say."""
    from penstock.runtime.cli.prediction import calibrate_and_show

    calibrate_and_show(runs, out, console, has_checks=check, as_json=as_json)
