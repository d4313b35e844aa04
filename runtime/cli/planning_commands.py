"""Commands that ask the simulation before devices are bought."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.messages.errors import UserFault
from penstock.runtime.cli.program import Overrides, ScenarioFile, app, console

ModelsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="How long things take, as penstock calibrate fits it to runs."),
]
Price = Annotated[
    str | None,
    typer.Option(metavar="PRICE", help="Of a device for an hour, 2.5, or one for each: engine=1.2,learner=2.5."),
]
EngineSpeed = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICES=SPEED", help="Try engines of so many devices, so many times as quick as now; repeatable."
    ),
]
Vary = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE,VALUE",
        help="Try these values as well: of learner.groups_per_batch, sampling.samples_per_group or "
        "staleness.update_mode; repeatable.",
    ),
]
Processes = Annotated[int | None, typer.Option(min=1, help="That simulate side by side; without it one for each core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")]


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock plan scenarios/fully_async.yaml --devices 8 --models models.yaml -o planned.yaml\n\n"
    "penstock plan scenarios/qwen3_8b_8gpus.yaml --devices 64 --objective cost --price 2.5 --models models.yaml\n\n"
    "penstock plan scenarios/qwen3_8b_8gpus.yaml --devices 16 --models models.yaml --engine-speed 2=1.7"
)
def plan(
    scenario: ScenarioFile,
    devices: Annotated[int, typer.Option(min=2, max=65536, help="For engines and learner together, at most.")],
    overrides: Overrides = None,
    objective: Annotated[
        str,
        typer.Option(help="throughput: trained tokens a second; goodput: share of the tokens that are trained; cost."),
    ] = "throughput",
    price: Price = None,
    models: ModelsFile = None,
    max_staleness: Annotated[int, typer.Option(min=0, max=64, help="Bounds of staleness to be tried, at most.")] = 4,
    slots: Annotated[
        list[int] | None, typer.Option(min=1, help="Of an engine; may be repeated. Else the scenario's, and near it.")
    ] = None,
    engine_speed: EngineSpeed = None,
    vary: Vary = None,
    rank_efficiency: Annotated[
        float, typer.Option(min=0.5, max=1, help="What is kept of a learner's speed per device when it is doubled.")
    ] = 1.0,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Of each choice that is compared in the end.")] = 5,
    budget: Annotated[int, typer.Option(min=24, max=100_000, help="Simulations, at most.")] = 48,
    processes: Processes = None,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The scenario that is chosen.")] = Path(
        "planned.yaml"
    ),
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A picture of what was tried, as SVG, or PNG by its name; else beside that."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search by simulation for the best use of devices that are not there yet: how many for engines and how many for
    the learner, slots, policy and bound of staleness, colocated or not. Prints what nothing beats, with intervals,
    what was assumed, and how far off the models are; writes the chosen scenario."""
    from penstock.runtime.cli.plan import plan_and_show
    from penstock.runtime.prediction.models import read_models
    from penstock.runtime.prediction.planning.candidate import Asked, read_objective, read_prices, read_speeds
    from penstock.runtime.prediction.planning.varied import read_varied
    from penstock.runtime.prediction.workers import usable_cores

    aim, prices = read_objective(objective), None if price is None else read_prices(price)
    if objective == "cost" and prices is None:
        raise UserFault("--objective cost takes --price, the price of a device for an hour")
    asked = Asked(
        num_devices=devices, objective=aim, prices=prices, max_staleness=max_staleness, slots=tuple(slots or ()),
        engine_speeds=read_speeds(engine_speed or ()), rank_efficiency=rank_efficiency, num_seeds=seeds, budget=budget,
    )  # fmt: skip
    plan_and_show(
        scenario,
        overrides or [],
        asked,
        console,
        models=None if models is None else read_models(models),
        out=out,
        plot=plot,
        num_processes=processes or usable_cores(),
        as_json=as_json,
        varied=read_varied(vary or ()),
    )


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock rehearse scenarios/fully_async.yaml --faults 'preempt 0.05/h per engine, learner 0.01/h' --price 2.5\n\n"
    "penstock rehearse scenarios/fully_async.yaml --faults 'preempt 2/day per engine' --models models.yaml --seeds 50"
)
def rehearse(
    scenario: ScenarioFile,
    faults: Annotated[
        str,
        typer.Option(
            help="WHAT TIMES/UNIT, with commas: preempt (an engine), learner, machine or another actor; s, min, h, day;"
            " 'per engine' where each has the rate. Or kill:WHOM@SHARE, machine@SHARE: when so much is trained."
        ),
    ],
    overrides: Overrides = None,
    price: Price = None,
    models: ModelsFile = None,
    seed: Annotated[int, typer.Option(min=0, help="The first one.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Runs with faults; each is played without them too.")
    ] = 20,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Play a whole run many times with faults that come by chance: how long it takes, what it costs, how much is lost;
    with the penstock chaos command that brings the median run and the worst one about.

    [bold]Exit codes[/]: 0 every run was completed, 1 one was not, 2 something has to be changed."""
    from penstock.runtime.cli.rehearse import rehearse_and_show
    from penstock.runtime.prediction.models import read_models
    from penstock.runtime.prediction.planning.candidate import read_prices
    from penstock.runtime.prediction.workers import usable_cores

    code = rehearse_and_show(
        scenario,
        overrides or [],
        faults,
        range(seed, seed + seeds),
        console,
        prices=None if price is None else read_prices(price),
        models=None if models is None else read_models(models),
        num_processes=processes or usable_cores(),
        as_json=as_json,
    )
    raise typer.Exit(code)
