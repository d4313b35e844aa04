"""Commands that start a run, or something of its kind. Each is a few lines that call the part which does the work."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.runtime.cli import run_arguments as given
from penstock.runtime.cli.program import (
    Overrides,
    RunFolder,
    ScenarioFile,
    app,
    console,
    find_scenario_file,
    output_option,
    run_folder,
    scenario_names,
)


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock run scenarios/quickstart.yaml\n\n"
    "penstock run scenarios/fully_async.yaml staleness.max_staleness=4 run.seed=1\n\n"
    "penstock run scenarios/local_model.yaml model.path=my/checkpoint data.path=my/rows.jsonl\n\n"
    "penstock run scenarios/quickstart.yaml --only rollout --num-groups 64\n\n"
    "penstock run scenarios/quickstart.yaml --only learner --from runs/quickstart-20260801-120000 learner.objective=ppo"
    "\n\n"
    "penstock run scenarios/quickstart.yaml --submit slurm --job status"
)
def run(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    dry_run: given.DryRun = False,
    full: given.Full = False,
    gpus_per_node: given.GpusPerNode = None,
    gpu_memory: given.GpuMemory = None,
    keep_samples: given.KeepSamples = False,
    quiet: given.Quiet = False,
    dashboard: given.Dashboard = False,
    only: given.Only = None,
    batches_from: given.BatchesFrom = None,
    num_groups: given.NumGroups = None,
    into: given.Into = None,
    submit: given.Submit = None,
    submit_config: given.SubmitConfig = None,
    job: given.Job = None,
) -> None:
    """Train: start the seven actors on this machine or a Ray cluster, and follow them to the end."""
    from penstock.runtime.scenario import load_scenario

    options = {
        "run.keep_samples": "true" if keep_samples else None,
        "observability.show_samples": "false" if quiet else None,
        "run.only": only,
        "run.batches_from": batches_from,
        "run.num_groups": num_groups,
    }
    keys = [f"{key}={value}" for key, value in options.items() if value is not None]
    goes_on = into is not None and (into.expanduser() / LEDGER_FILE).is_file()
    loaded = load_scenario(scenario, [*(overrides or []), *keys], is_begun=goes_on)
    if submit is not None:
        if full or gpus_per_node is not None or gpu_memory is not None or dashboard or into is not None:
            raise UserFault("--submit: nodes and folders are said by --submit-config; leave the other options away")
        from penstock.runtime.cli.submit import submit_run

        raise typer.Exit(submit_run(loaded, submit, submit_config, job, console, dry_run=dry_run))
    if submit_config is not None or job is not None:
        raise UserFault("--submit-config and --job are for --submit slurm, rayjob or skypilot")
    if dry_run:
        from penstock.runtime.cli.dry_run import show_plan

        raise typer.Exit(show_plan(loaded, console, gpus_per_node=gpus_per_node, gpu_gb=gpu_memory, is_full=full))
    if gpus_per_node is not None or gpu_memory is not None or full:
        raise UserFault("--gpus-per-node, --gpu-memory and --full are for --dry-run; a run takes what is there")
    from penstock.runtime.cli.ending import run_and_tell

    raise typer.Exit(run_and_tell(loaded, scenario, console, has_dashboard=dashboard, folder=into))


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock simulate scenarios/simulated_1024_engines.yaml --seed 7\n\n"
    "penstock simulate scenarios/simulated_1024_engines.yaml engines.count=64 --out /tmp/simulated\n\n"
    "penstock simulate scenarios/fully_async.yaml --models models.yaml --seeds 5"
)
def simulate(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Of latencies and faults; the same seed gives the same run.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the event log and metrics into this folder.")] = None,
    models: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="How long things take, as penstock calibrate fits it to runs."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Play so many seeds, from --seed on, for figures with intervals; 5 with --models alone."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --models or --seeds: as one JSON object.")] = False,
) -> None:
    """Run the same actors on a virtual clock, with modelled engines and learner in place of real ones: hours in
    seconds. How long things take is in engines.simulated, learner.simulated and reward.simulated, or in --models.

    With --models or --seeds it prints what the steady part of the run comes to."""
    from penstock.runtime.scenario.modelled import load_modelled

    loaded, changed = load_modelled(scenario, overrides or [])
    if loaded.run.only is not None:
        raise UserFault(f"run.only: {loaded.run.only}: a part of a run is not simulated; remove it, or: penstock run")
    from penstock.runtime.hosts.virtual.simulate import simulate_scenario  # after the cheap checks: it takes longer

    if changed and not as_json:
        console.print(f"modelled or left out: {', '.join(changed)}", highlight=False, soft_wrap=True)
    if models is not None or seeds is not None:
        if out is not None:
            raise UserFault("--out is for one run; leave --models and --seeds away, or --out")
        from penstock.runtime.cli.prediction import simulate_and_show
        from penstock.runtime.prediction.models import read_models

        fitted = None if models is None else read_models(models)
        each, played = range(seed, seed + (seeds or 5)), "episode" in changed
        simulate_and_show(loaded, each, console, models=fitted, as_json=as_json, has_episodes=played)
        return
    if as_json:
        raise UserFault("--json is for --models or --seeds")
    raise typer.Exit(simulate_scenario(loaded, seed=seed, console=console, run_folder=out))


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock chaos scenarios/quickstart.yaml --num-faults 8 --seed 3\n\n"
    "penstock chaos scenarios/fully_async.yaml --faults kill:engine/0,stop:buffer@0.5+2,drop:scorer>filter=0.3"
)
def chaos(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Of which faults come when.")] = 0,
    faults: Annotated[
        str, typer.Option(help="KIND:TARGET[>PEER][@PROGRESS][+SECONDS][=AMOUNT], with commas; '*' is any actor.")
    ] = "",
    num_faults: Annotated[
        int | None, typer.Option(min=1, help="Draw so many of --faults, by default of kill:* and stop:*.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds that stops, cuts and the like last; drawn without it.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for the whole.")] = 900.0,
) -> None:
    """Run a scenario, do harm to its processes and links, and give a verdict: what was lost, what came twice, how
    long it took to recover."""
    from penstock.runtime.scenario import load_scenario

    loaded = load_scenario(scenario, overrides or [])
    from penstock.runtime.cli.chaos import planned_faults, run_chaos

    texts = [text for text in faults.split(",") if text.strip()]
    if not texts and num_faults is None:
        raise UserFault("name the faults with --faults, or say how many to draw with --num-faults")
    planned = planned_faults(loaded, texts, num_faults=num_faults, seed=seed, duration_s=duration)
    raise typer.Exit(
        run_chaos(loaded, scenario, overrides or [], planned, seed=seed, timeout_s=timeout, console=console)
    )


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock resume\n\n"
    "penstock resume runs/quickstart-20260801-120000\n\n"
    "penstock resume runs/quickstart-20260801-120000 run.num_steps=200 engines.count=4"
)
def resume(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [KEY=VALUE]...",
            help="A run's folder, the newest one under ./runs without it; then keys to change from here on: "
            "run.num_steps, learner.num_ranks, learner.parallel, engines.*, runtime.*, observability.*.",
        ),
    ] = None,
) -> None:
    """Go on with a run that was stopped, failed or was killed, from its last checkpoint and its ledger."""
    from penstock.runtime.cli.ending import tell_end
    from penstock.runtime.launch.resume import resume as go_on

    given = arguments or []
    run = Path(given.pop(0)) if given and ("=" not in given[0] or Path(given[0]).is_dir()) else None
    raise typer.Exit(tell_end(go_on(run_folder(run), given, console)))


@app.command()
def stop(
    run: RunFolder = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for its end.")] = 60.0,
) -> None:
    """End a run cleanly, as Ctrl-C does, and wait until it is gone."""
    from penstock.runtime.launch.runs import check_own, is_alive, other_host, read_record, stop_run

    folder = run_folder(run)
    record = read_record(folder)
    if host := other_host(record):
        raise UserFault(f"{folder}: is driven on {host}, by process {record.pid}; end it there, or with --job stop")
    check_own(folder, record)
    if not is_alive(folder, record):
        console.print(f"{escape(str(folder))}: nothing to stop, its process has ended")
        return
    console.print(f"stopping {escape(str(folder))} (process {record.pid}) …")
    if stop_run(folder, record, timeout):
        console.print("stopped")
        return
    raise UserFault(
        f"{folder}: process {record.pid} is still there after {timeout:g} s; wait longer with --timeout, or end it "
        f"hard with: kill -9 {record.pid}"
    )


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock evaluate runs/math-20260801-120000\n\n"
    "penstock evaluate runs/math-20260801-120000 --version 40 --dataset gsm8k --samples 8 --k 1,8\n\n"
    "penstock evaluate my/model --data gsm8k=my/test.jsonl --reward math --temperature 0 --json result.json\n\n"
    "penstock evaluate my/model --scenario scenarios/math.yaml --at-least gsm8k/pass@1=0.4 engines.count=4"
)
def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A run's folder, a checkpoint, or a model in Hugging Face format.")
    ],
    overrides: Overrides = None,
    scenario: Annotated[
        Path | None,
        typer.Option(
            help="Says what is evaluated and with which engines; without it that of the model's own run.",
            callback=find_scenario_file,
            autocompletion=scenario_names,
        ),
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Of the checkpoint; without it the newest one of the run.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH", help="Rows to evaluate on, instead of the scenario's datasets; may be repeated."
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one of the scenario's datasets; repeatable.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, max=4096, help="Answers to each prompt.")] = None,
    k: Annotated[str | None, typer.Option(metavar="K,K", help="For which k pass@k is told, such as 1,8.")] = None,
    pass_reward: Annotated[float | None, typer.Option(help="An answer passes with at least this reward.")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows of each dataset.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=10, help="0 takes the likeliest token.")] = None,
    max_response_tokens: Annotated[int | None, typer.Option(min=1, help="Longer answers are cut off.")] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="NAME", help="Reward function, by name or as file.py:function.")
    ] = None,
    prompt_key: Annotated[str | None, typer.Option(metavar="KEY", help="Column with the prompt.")] = None,
    label_key: Annotated[str | None, typer.Option(metavar="KEY", help="Column with the right answer.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option("--chat-template/--no-chat-template", help="Whether the model's template renders the prompts."),
    ] = None,
    at_least: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATASET/FIGURE=VALUE", help="Exit with 1 where a figure is lower, as gsm8k/pass@1=0.4; repeatable."
        ),
    ] = None,
    json_out: Annotated[Path | None, output_option("--json", text="Write the figures as JSON as well.")] = None,
) -> None:
    """Evaluate a model on datasets: mean reward, pass@k, lengths, truncation. Nothing is trained.

    Options count for every dataset, over what it says itself. Any other key of a scenario can be set with KEY=VALUE.

    [bold]Exit codes[/]: 0 done, 1 the evaluation failed or a figure is below --at-least, 2 something has to be changed.
    """
    from penstock.runtime.cli.evaluate import asked_settings
    from penstock.runtime.cli.evaluate import evaluate as evaluate_model
    from penstock.runtime.launch.evaluate import Asked

    settings = asked_settings(
        samples_per_prompt=samples,
        k=k,
        pass_reward=pass_reward,
        max_prompts=max_prompts,
        temperature=temperature,
        max_response_tokens=max_response_tokens,
        reward=reward,
        prompt_key=prompt_key,
        label_key=label_key,
        chat_template=chat_template,
    )
    raise typer.Exit(
        evaluate_model(
            model,
            scenario,
            overrides or [],
            console,
            asked=Asked(data or (), dataset or (), settings),
            version=version,
            json_out=json_out,
            floors=at_least or (),
        )
    )


@app.command(
    epilog="[bold]Examples[/]\n\npenstock gateway\n\npenstock gateway runs/tools-20260801-120000 --port 9000",
)
def gateway(
    run: RunFolder = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for agents on other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8470,
) -> None:
    """Serve one OpenAI-compatible address for the agents of a run whose samples are sessions, or that push theirs."""
    from penstock.runtime.cli.gateway import serve_gateway

    raise typer.Exit(serve_gateway(run_folder(run), host, port, console))
