"""The commands. Each is a few lines that call the part which does the work.

Exit codes: 0 done, 1 the run failed or is not well, 2 the user has to change something, 130 and 143 after SIGINT
and SIGTERM. What the user has to change is one message on stderr, never a stack trace.
"""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.runtime.errors import UserError
from penstock.runtime.safe_text import without_credentials
from penstock.runtime.terminal import TerminalConsole

INTERRUPTED = 130

app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
environments = typer.Typer(help="Environments of their own, for what cannot share Penstock's.", no_args_is_help=True)
app.add_typer(environments, name="env")
data_commands = typer.Typer(help="A look at the rows of a scenario before any run.", no_args_is_help=True)
app.add_typer(data_commands, name="data")
check_commands = typer.Typer(help="Functions of yours, tried before any run.", no_args_is_help=True)
app.add_typer(check_commands, name="check")
console = TerminalConsole()
errors = TerminalConsole(stderr=True, soft_wrap=True)


def _find_scenario(given: Path | None) -> Path | None:
    from penstock.runtime.scenario.shipped import find_scenario

    return None if given is None else find_scenario(given)


def _scenario_names(incomplete: str) -> list[str]:
    """For the shell, which completes files itself where none of these is meant."""
    from penstock.runtime.scenario.shipped import shipped_scenarios

    return [name for name in shipped_scenarios() if name.startswith(incomplete)]


ScenarioFile = Annotated[
    Path,
    typer.Argument(
        metavar="SCENARIO",
        help="A YAML file, or the name of one that comes with Penstock, such as quickstart.",
        callback=_find_scenario,
        autocompletion=_scenario_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set over the file, such as staleness.max_staleness=4."),
]


class Part(StrEnum):
    """Of a run, where it is not the whole."""

    LEARNER = "learner"
    ROLLOUT = "rollout"


RunFolder = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run's folder; without it the newest one under ./runs.")
]


def _refuse_dashed_keys(words: list[str]) -> None:
    """Keys with dashes before them, as other systems have them."""
    for word in words:
        if found := re.fullmatch(r"--?(\w+(?:\.\w+)+(?:=.*)?)", word, re.DOTALL):
            raise UserError(f"{word}: keys of a scenario have no dashes before them; write {found[1]}")


def main() -> None:
    """The entry point of the ``penstock`` command."""
    try:
        _refuse_dashed_keys(sys.argv[1:])
        app()
    except UserError as error:
        errors.print(f"[bold red]penstock:[/] {escape(without_credentials(str(error)))}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock run scenarios/quickstart.yaml\n\n"
    "penstock run scenarios/fully_async.yaml staleness.max_staleness=4 run.seed=1\n\n"
    "penstock run scenarios/local_model.yaml model.path=my/checkpoint data.path=my/rows.jsonl\n\n"
    "penstock run scenarios/quickstart.yaml --only rollout --num-groups 64\n\n"
    "penstock run scenarios/quickstart.yaml --only learner --from runs/quickstart-20260801-120000 learner.objective=ppo"
)
def run(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what the scenario sets, who runs where, layout and memory of a Megatron learner, and what this "
            "machine lacks; start nothing. Exit code 2 if it lacks something.",
        ),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --dry-run: every key, also those at their defaults.")
    ] = False,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: GPUs of a node of the cluster; 8 without it.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, metavar="GB", help="With --dry-run: memory of a GPU; 80 without it.")
    ] = None,
    keep_samples: Annotated[
        bool, typer.Option("--keep-samples", help="Keep every trained sample as Parquet; as run.keep_samples=true.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no samples; as observability.show_samples=false.")
    ] = False,
    only: Annotated[
        Part | None,
        typer.Option(
            "--only",
            help="[bold]learner[/]: train the batches that another run has recorded again, without engines. "
            "[bold]rollout[/]: generate and score with the model as it is, train nothing, keep the groups.",
        ),
    ] = None,
    batches_from: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="With --only learner: the folder of the recorded run.")
    ] = None,
    num_groups: Annotated[
        int | None,
        typer.Option(min=1, help="With --only rollout: groups to collect; run.num_steps batches of them without it."),
    ] = None,
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
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    loaded = load_scenario(scenario, [*(overrides or []), *given])
    if dry_run:
        from penstock.runtime.cli.dry_run import show_plan

        raise typer.Exit(show_plan(loaded, console, gpus_per_node=gpus_per_node, gpu_gb=gpu_memory, is_full=full))
    if gpus_per_node is not None or gpu_memory is not None or full:
        raise UserError(
            "--gpus-per-node, --gpu-memory and --full are for --dry-run; a run takes the GPUs that are there"
        )
    from penstock.runtime.cli.launch import launch

    raise typer.Exit(launch(loaded, scenario, console))


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock simulate scenarios/simulated_1024_engines.yaml --seed 7\n\n"
    "penstock simulate scenarios/simulated_1024_engines.yaml engines.count=64 --out /tmp/simulated"
)
def simulate(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    seed: Annotated[int, typer.Option(min=0, help="Of latencies and faults; the same seed gives the same run.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the event log and metrics into this folder.")] = None,
) -> None:
    """Run the same actors on a virtual clock, with modelled engines and learner in place of real ones: hours in
    seconds. How long things take is in engines.simulated and learner.simulated."""
    from penstock.runtime.scenario.modelled import load_modelled

    loaded, changed = load_modelled(scenario, overrides or [])
    if loaded.run.only is not None:
        raise UserError(f"run.only: {loaded.run.only}: a part of a run is not simulated; remove it, or: penstock run")
    from penstock.runtime.hosts.virtual.simulate import simulate_scenario  # after the cheap checks: it takes longer

    if changed:
        console.print(f"modelled or left out: {', '.join(changed)}", highlight=False, soft_wrap=True)
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
        raise UserError("name the faults with --faults, or say how many to draw with --num-faults")
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
    from penstock.runtime.cli.resume import resume as go_on

    given = arguments or []
    run = Path(given.pop(0)) if given and ("=" not in given[0] or Path(given[0]).is_dir()) else None
    raise typer.Exit(go_on(_folder(run), given, console))


@app.command()
def status(run: RunFolder = None) -> None:
    """Say whether a run is alive, how far it is, and how it ended."""
    from penstock.runtime.cli.status import show_status

    raise typer.Exit(show_status(_folder(run), console))


@app.command("list", epilog="[bold]Examples[/]\n\npenstock list\n\npenstock list /scratch/runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the runs are.")] = Path("runs"),
) -> None:
    """List the runs of a folder, newest first: state, time, steps, reward."""
    from penstock.runtime.cli.listing import show_runs

    raise typer.Exit(show_runs(folder, console))


@app.command()
def stop(
    run: RunFolder = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for its end.")] = 60.0,
) -> None:
    """End a run cleanly, as Ctrl-C does, and wait until it is gone."""
    from penstock.runtime.cli.runs import is_alive, read_record, stop_run

    folder = _folder(run)
    record = read_record(folder)
    if not is_alive(record):
        console.print(f"{escape(str(folder))}: nothing to stop, its process has ended")
        return
    console.print(f"stopping {escape(str(folder))} (process {record.pid}) …")
    if stop_run(record, timeout):
        console.print("stopped")
        return
    raise UserError(
        f"{folder}: process {record.pid} is still there after {timeout:g} s; wait longer with --timeout, or end it "
        f"hard with: kill -9 {record.pid}"
    )


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock convert runs/quickstart-20260801-120000 my/model --dtype bfloat16\n\n"
    "penstock convert runs/quickstart-20260801-120000 my/model --version 40 --max-shard-size 2GB\n\n"
    "penstock convert my/model --check\n\n"
    "penstock convert scenario run-qwen3-4B.sh > scenarios/qwen3_4b.yaml"
)
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, a checkpoint, or a model in Hugging Face format.")
    ],
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The folder to write, which must not be there yet.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing: look at names, shapes, tied weights, files and tokenizer.")
    ] = False,
    version: Annotated[
        int | None, typer.Option(min=0, help="Of the checkpoint; without it the newest one of the run.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; without it every weight stays as it is.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Where the next file of weights begins.")] = "5GB",
    target_format: Annotated[
        str, typer.Option("--format", help="What to write: huggingface or megatron.")
    ] = "huggingface",
) -> None:
    """Write the model of a run as a folder that transformers and engines load; or say what is wrong with a model.

    [bold]penstock convert scenario SCRIPT[/]: what the arguments of a slime launch script are as a scenario; with
    [bold]--check[/] what is not in it, and whether it is the same job.
    """
    if str(source) == "scenario" and out is not None and not source.exists():
        from penstock.runtime.cli.convert_script import convert_script

        raise typer.Exit(convert_script(out, console, is_check=check))
    if check == (out is not None):
        raise UserError("name either OUT, the folder to write, or --check, which writes nothing")
    from penstock.runtime.cli.convert import convert as write_model
    from penstock.runtime.cli.convert import show_problems

    if out is None:
        raise typer.Exit(show_problems(source, console, version=version))
    raise typer.Exit(
        write_model(
            source,
            out,
            console,
            version=version,
            dtype=dtype,
            max_shard_size=max_shard_size,
            target_format=target_format,
        )
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
            callback=_find_scenario,
            autocompletion=_scenario_names,
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
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON as well.")
    ] = None,
) -> None:
    """Evaluate a model on datasets: mean reward, pass@k, lengths, truncation. Nothing is trained.

    Options count for every dataset, over what it says itself. Any other key of a scenario can be set with KEY=VALUE.

    [bold]Exit codes[/]: 0 done, 1 the evaluation failed or a figure is below --at-least, 2 something has to be changed.
    """
    from penstock.runtime.cli.evaluate import Asked, asked_settings
    from penstock.runtime.cli.evaluate import evaluate as evaluate_model

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
    """Serve one OpenAI-compatible address for the agents of a run whose samples are sessions."""
    from penstock.runtime.cli.gateway import serve_gateway

    raise typer.Exit(serve_gateway(_folder(run), host, port, console))


@app.command()
def doctor() -> None:
    """Check that this machine has what Penstock needs, and say what to do where it has not."""
    from penstock.runtime.cli.doctor import examine

    raise typer.Exit(0 if examine(console, Path("runs")) else 1)


@data_commands.command(
    "check",
    epilog="[bold]Examples[/]\n\n"
    "penstock data check scenarios/quickstart.yaml\n\n"
    "penstock data check scenarios/local_model.yaml data.path=my/rows.jsonl.zst --show 10",
)
def check_rows(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="How many prompts to show as the model will see them.")] = 3,
) -> None:
    """Read all rows as a run would: what is wrong with them, how long they are, how the first ones look."""
    from penstock.runtime.cli.data_check import check_data
    from penstock.runtime.scenario import load_scenario

    raise typer.Exit(check_data(load_scenario(scenario, overrides or []), console, num_shown=show))


@check_commands.command(
    "hook",
    epilog="[bold]Examples[/]\n\n"
    "penstock check hook mine.py:reward --as reward\n\n"
    "penstock check hook mine.py:advantages --as advantage",
)
def check_function(
    function: Annotated[str, typer.Argument(metavar="FILE.PY:FUNCTION", help="As a scenario names it.")],
    kind: Annotated[
        str,
        typer.Option(
            "--as",
            help="What it is: reward, group_reward, filter, sample_filter, all_samples, priority, policy, generate, "
            "postprocess, advantage, loss, reduction, importance, conversion, rollout_log, step_log, weight_names.",
        ),
    ],
    reward_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="As reward.key: the entry of a dictionary that is the reward.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Of each check.")] = 20.0,
) -> None:
    """Call a function of yours with usual and awkward inputs, and check what it returns as a run would."""
    from penstock.runtime.cli.check import check_hook

    raise typer.Exit(check_hook(function, kind, console, timeout_s=timeout, reward_key=reward_key))


@environments.command(
    "sglang",
    epilog="[bold]Examples[/]\n\npenstock env sglang\n\npenstock env sglang --stand-ins tests/sglang/stand_ins",
)
def env_sglang(
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to; by default a folder in $PENSTOCK_ENVS or ~/.cache/penstock/envs."),
    ] = None,
    stand_ins: Annotated[
        Path | None,
        typer.Option(help="Build for the CPU, with the modules of this folder in place of CUDA packages; for tests."),
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Python 3.11 or 3.12 to build it with; this one by default.")
    ] = None,
    recreate: Annotated[bool, typer.Option("--recreate", help="Build it anew, also when it is ready.")] = False,
) -> None:
    """Install the SGLang that engines run, at fixed versions, in an environment of its own."""
    from penstock.runtime.cli.env import build_sglang

    build_sglang(console, folder=folder, stand_ins=stand_ins, python=python, recreate=recreate)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="[bold]Examples[/]\n\npenstock bench engine\n\npenstock bench engine --help",
)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without it they are listed.")] = None,
) -> None:
    """Measure a claim on this machine. What follows the name goes to the benchmark."""
    from penstock.runtime.cli.benches import list_benchmarks, run_benchmark

    if name is None:
        list_benchmarks(console)
        return
    raise typer.Exit(run_benchmark(name, context.args))


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="A run's folder, the newest one under ./runs without it; or several."),
    ] = None,
    out: Annotated[Path, typer.Option(help="With several runs: the page to write.")] = Path("comparison.html"),
) -> None:
    """Write report.html of a run anew, also of one that goes on or was cut off; of several runs a page that compares
    them. Either is one file that works offline."""
    from penstock.runtime.cli.runs import is_alive, read_record
    from penstock.runtime.observability.comparison import write_comparison
    from penstock.runtime.observability.report import write_report

    folders = runs or [_folder(None)]
    records = [read_record(folder) for folder in folders]
    if len(folders) > 1:
        page = write_comparison(folders, out)
    else:
        page = write_report(folders[0], is_running=records[0].state == "running" and is_alive(records[0]))
    console.print(f"wrote {escape(str(page))}", soft_wrap=True)


@app.command()
def audit(run: RunFolder = None) -> None:
    """Check that no sample or token was lost or counted twice, from the ledger; also of a run that goes on."""
    from penstock.runtime.cli.audit import show_audit

    raise typer.Exit(show_audit(_folder(run), console))


@app.command(
    epilog="[bold]Examples[/]\n\npenstock ledger\n\n"
    'penstock ledger runs/quickstart-20260101-120000 --sql "SELECT * FROM balance"\n\n'
    'penstock ledger --csv --sql "SELECT engine, count(*), avg(num_tokens) FROM samples GROUP BY engine"'
)
def ledger(
    run: RunFolder = None,
    sql: Annotated[str | None, typer.Option(help="A SELECT; without it the tables are listed.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that the query may take.")] = 60.0,
) -> None:
    """Ask a run's ledger with SQL. It is opened so that nothing can change it; the run may go on meanwhile."""
    from penstock.runtime.cli.ledger import ask_ledger, list_tables

    if sql is None:
        list_tables(console)
        return
    ask_ledger(_folder(run), sql, console, as_csv=csv, timeout_s=timeout)


@app.command(
    epilog="[bold]Examples[/]\n\npenstock samples\n\npenstock samples runs/math-20260801-120000 --worst --limit 20\n\n"
    'penstock samples --failed\n\npenstock samples --step 12 --grep "</think>"'
)
def samples(
    run: RunFolder = None,
    step: Annotated[int | None, typer.Option(min=1, help="Only those that this step trained.")] = None,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first, instead of the newest.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed, with the reason.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Only those filtered, stale or cancelled.")] = False,
    grep: Annotated[
        str, typer.Option(metavar="TEXT", help="Only those with this text in prompt, response, label or reason.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 5,
    full: Annotated[bool, typer.Option("--full", help="Show long texts in full.")] = False,
) -> None:
    """Show what the model was asked, what it wrote, its reward and what came of it; also of a run that goes on."""
    from penstock.runtime.cli.samples import show_samples

    show_samples(
        _folder(run),
        console,
        step=step,
        failed=failed,
        dropped=dropped,
        worst=worst,
        grep=grep,
        limit=limit,
        full=full,
    )


@app.command(
    epilog="[bold]Examples[/]\n\npenstock init\n\n"
    "penstock init gsm8k.yaml --model Qwen/Qwen3-0.6B --data rows.jsonl --reward mine.py:reward"
)
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The scenario to write.")] = Path("scenario.yaml"),
    model: Annotated[str | None, typer.Option(help="A checkpoint folder, or a name on the hub.")] = None,
    data: Annotated[str | None, typer.Option(help="The rows: a .jsonl or .parquet file, or a name on the hub.")] = None,
    reward: Annotated[str | None, typer.Option(help="A reward by name (math), or file.py:function.")] = None,
    policy: Annotated[str, typer.Option(help="sync, one_step_off or fully_async.")] = "fully_async",
    engine: Annotated[str, typer.Option(help="torch: embedded; sglang: servers, see penstock env sglang.")] = "torch",
) -> None:
    """Write a scenario for a model, rows and a reward of yours; asks for what is not given."""
    from penstock.runtime.cli.init import Wanted, write_new_scenario

    wanted = Wanted(
        model=_ask(model, "model", "Model (a folder, or a name such as Qwen/Qwen3-0.6B)"),
        data=_ask(data, "data", "Rows (a .jsonl or .parquet file)"),
        reward=_ask(reward, "reward", "Reward (a name, or file.py:function)", "math"),
        policy=policy,
        engine=engine,
    )
    write_new_scenario(file, wanted, console)


def _ask(given: str | None, option: str, question: str, default: str | None = None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        return str(typer.prompt(question, default=default))
    if default is None:
        raise UserError(f"--{option} is needed: there is no terminal here to ask for it")
    return default


@app.command()
def schema() -> None:
    """Print the JSON Schema of scenarios, for editors."""
    from penstock.runtime.scenario.schema import schema_text

    sys.stdout.write(schema_text())


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")] = False,
) -> None:
    if version:
        from penstock import __version__

        console.print(f"penstock {__version__}")
        raise typer.Exit


def _folder(run: Path | None) -> Path:
    from penstock.runtime.cli.runs import newest_run

    return run if run is not None else newest_run(Path("runs"))
