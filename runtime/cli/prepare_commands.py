"""Commands for before a run. Each is a few lines that call the part which does the work."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.messages.errors import UserFault
from penstock.runtime.cli.program import (
    Overrides,
    ScenarioFile,
    app,
    check_commands,
    console,
    data_commands,
    environments,
)
from penstock.runtime.run_folder import RUNS


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
    from penstock.runtime.output_file import check_new_output

    check_new_output(file, "")  # before anything is asked
    needed = [name for name, given in (("--model", model), ("--data", data)) if given is None]
    if needed and not sys.stdin.isatty():
        are = "is" if len(needed) == 1 else "are"
        raise UserFault(f"{' and '.join(needed)} {are} needed: there is no terminal here to ask for it")
    wanted = Wanted(
        model=_ask(model, "Model (a folder, or a name such as Qwen/Qwen3-0.6B)"),
        data=_ask(data, "Rows (a .jsonl or .parquet file)"),
        reward=_ask(reward, "Reward (a name, or file.py:function)", "math"),
        policy=policy,
        engine=engine,
    )
    write_new_scenario(file, wanted, console)


def _ask(given: str | None, question: str, default: str | None = None) -> str:
    if given is not None:
        return given
    if default is not None and not sys.stdin.isatty():
        return default
    return str(typer.prompt(question, default=default))


@app.command()
def schema() -> None:
    """Print the JSON Schema of scenarios, for editors."""
    from penstock.runtime.scenario.schema import schema_text

    sys.stdout.write(schema_text())


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock convert runs/quickstart-20260801-120000 my/model --dtype bfloat16\n\n"
    "penstock convert runs/quickstart-20260801-120000 my/model --version 40 --max-shard-size 2GB\n\n"
    "penstock convert /models/DeepSeek-V3 /models/DeepSeek-V3-BF16 --dtype bfloat16\n\n"
    "penstock convert my/model --check"
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
        str | None,
        typer.Option(help="float32, bfloat16, float16 or fp8 (in blocks of 128, as DeepSeek-V3); else as it is."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Where the next file of weights begins.")] = "5GB",
    target_format: Annotated[
        str, typer.Option("--format", help="What to write: huggingface or megatron.")
    ] = "huggingface",
) -> None:
    """Write the model of a run as a folder that transformers and engines load; or say what is wrong with a model.

    For a launch script of slime: [bold]penstock convert scenario --help[/].
    """
    if check == (out is not None):
        raise UserFault("name either OUT, the folder to write, or --check, which writes nothing")
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
    "convert scenario",
    hidden=True,
    epilog="[bold]Example[/]\n\npenstock convert scenario run-qwen3-4B.sh > scenarios/qwen3_4b.yaml",
)
def convert_scenario(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A launch script of slime.")],
    check: Annotated[
        bool, typer.Option("--check", help="Print what is not in the scenario, and whether it is the same job.")
    ] = False,
) -> None:
    """Print what the arguments of a slime launch script are as a scenario."""
    from penstock.runtime.cli.convert_script import convert_script

    raise typer.Exit(convert_script(script, console, is_check=check))


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
            help="What it is: reward, group_reward, filter, sample_filter, all_samples, source, priority, policy, "
            "routing, generate, postprocess, advantage, loss, reduction, importance, conversion, rollout_log, "
            "step_log, evaluation_log, weight_names, tracker.",
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


@app.command()
def doctor() -> None:
    """Check that this machine has what Penstock needs, and say what to do where it has not."""
    from penstock.runtime.cli.doctor import examine

    raise typer.Exit(0 if examine(console, RUNS) else 1)


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
    epilog="[bold]Examples[/]\n\npenstock bench engine\n\npenstock bench engine --help\n\npenstock bench --all --quick",
)
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which benchmark; without it they are listed.")] = None,
    is_list: Annotated[bool, typer.Option("--list", help="List them, with what each measures.")] = False,
    is_all: Annotated[bool, typer.Option("--all", help="Run every one, each in a process of its own.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With arguments of theirs that take a minute or so.")] = False,
    deadline: Annotated[
        float | None, typer.Option(min=1, help="For each of --all, in seconds; 3600, or its own with --quick.")
    ] = None,
    into: Annotated[Path, typer.Option(help="Folder of the results of --all, their history and their page.")] = Path(
        "benchmarks/history"
    ),
) -> None:
    """Measure a claim on this machine. What follows the name goes to the benchmark."""
    if is_all:
        if name is not None or context.args:
            raise UserFault(f"--all runs every benchmark as it is: leave out {' '.join([name or '', *context.args])}")
        from penstock.runtime.cli.bench_all import run_all

        raise typer.Exit(run_all(console, into, is_quick=quick, deadline_s=deadline))
    from penstock.runtime.cli.benches import list_benchmarks, run_benchmark

    if name is None or is_list:
        list_benchmarks(console)
        return
    raise typer.Exit(run_benchmark(name, context.args, is_quick=quick))


@app.command(
    epilog="[bold]Examples[/]\n\n"
    "penstock calibrate runs/sync-20260801-120000 -o models.yaml\n\n"
    "penstock calibrate runs/sync-20260801-120000 runs/fully_async-20260801-130000 -o models.yaml\n\n"
    "penstock calibrate --from logs/verl.jsonl --about engines=8 --about learner_ranks=8 --scenario mine.yaml\n\n"
    "penstock simulate scenarios/fully_async.yaml --models models.yaml --seeds 5"
)
def calibrate(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Folders of recorded runs of one model.")
    ] = None,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the models go.")] = Path(
        "models.yaml"
    ),
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Play each run again with the models: how far are they off?"),
    ] = True,
    logs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="LOG", help="Metrics that another system logged, instead; parts may be several."
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(
            "--from-format", metavar="SYSTEM", help="verl, trl, slime, nemo-rl, prime-rl; without it told by the names."
        ),
    ] = None,
    about: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="What the log does not say: engines, samples, … (docs/prediction.md)."),
    ] = None,
    rollouts: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Single responses that verl or NeMo-RL wrote beside the log.")
    ] = None,
    described: Annotated[
        Path | None,
        typer.Option("--scenario", metavar="FILE", help="Write a scenario of what the log describes."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Fit the models of the simulation to recorded runs, or to the log of another system: how long engines, learner and
    rewards take, and how long responses get; with the error of each fit on steps that it has not seen, and what the
    runs could not say."""
    if logs:
        if runs:
            raise UserFault(f"{runs[0]}: runs of Penstock and --from say different things: calibrate them apart")
        from penstock.runtime.cli.imported import import_and_show
        from penstock.runtime.prediction.imports.about import read_about
        from penstock.runtime.prediction.imports.imported import LogsGiven

        given = LogsGiven(logs, read_about(about or []), log_format, rollouts, described, out)
        return import_and_show(given, out, console, has_checks=check, as_json=as_json)
    if not runs:
        raise UserFault("give the folders of one run or more, or --from and the log of another system")
    if any((log_format, about, rollouts, described)):
        raise UserFault(
            "--from-format, --about, --rollouts and --scenario go with --from: a run of Penstock says these"
        )
    from penstock.runtime.cli.prediction import calibrate_and_show

    calibrate_and_show(runs, out, console, has_checks=check, as_json=as_json)
