"""Commands that look at runs. Each is a few lines that call the part which does the work."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.messages.errors import UserFault
from penstock.runtime.cli.program import OWN_PROCESS, RunFolder, app, console, give_way, output_option, run_folder
from penstock.runtime.run_folder import RUNS


@app.command()
def status(run: RunFolder = None) -> None:
    """Say whether a run is alive, how far it is, and how it ended."""
    from penstock.runtime.cli.status import show_status

    raise typer.Exit(show_status(run_folder(run), console))


@app.command("list", epilog="[bold]Examples[/]\n\npenstock list\n\npenstock list /scratch/runs")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the runs are.")] = RUNS,
) -> None:
    """List the runs of a folder, newest first: state, time, steps, reward."""
    from penstock.runtime.cli.listing import show_runs

    show_runs(folder, console)


@app.command()
def report(run: RunFolder = None) -> None:
    """Write report.html of a run anew, also of one that goes on or was cut off: one file that works offline; and its
    lanes as lanes.png beside it."""
    from penstock.runtime.launch.runs import read_record
    from penstock.runtime.launch.status import state_of
    from penstock.runtime.observability.report import write_report

    folder = run_folder(run)
    page = write_report(folder, is_running=state_of(folder, read_record(folder)) == "running")
    console.print(f"wrote {escape(str(page))}", soft_wrap=True)


@app.command(
    epilog="[bold]Examples[/]\n\npenstock compare runs/sync-20260801-120000 runs/async-20260801-130000\n\n"
    "penstock compare runs/sync-* runs/async-* --out comparison.html\n\n"
    "penstock compare runs/sync-* runs/async-* --reward 0.8 --json"
)
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of two runs or more.")],
    out: Annotated[Path | None, output_option(text="Write a page with tables and charts that works offline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")] = False,
    reward: Annotated[
        float | None, typer.Option(help="That is to be reached, instead of the highest that all runs reached.")
    ] = None,
) -> None:
    """Compare runs: what their scenarios differ in, figures at equal steps, tokens and wall time, what a reward took.

    Runs whose scenarios differ in the seed alone are one arm, with mean and spread."""
    from penstock.runtime.cli.compare import show_comparison

    show_comparison(runs, console, as_json=as_json, page=out, reward=reward)


@app.command(
    "diff-steps",
    epilog="[bold]Examples[/]\n\npenstock diff-steps runs/before-20260801-120000 runs/after-20260801-130000\n\n"
    "penstock diff-steps runs/one runs/other --step 3 --tolerance 1e-5 --json",
)
def diff_steps(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="The other's.")],
    step: Annotated[int | None, typer.Option(min=1, help="Look at this step only.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="By which log-probs and other figures may differ; ids may not.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find where two runs part: the first step, column and token that differs, in the order of cause and effect.

    Both need steps that are written down (learner.dump). The exit code is 1 where they differ, 0 where they do not."""
    from penstock.runtime.cli.diff_steps import show_difference

    raise typer.Exit(show_difference(first, second, console, step=step, tolerance=tolerance, as_json=as_json))


@app.command(
    epilog="[bold]Examples[/]\n\npenstock dashboard\n\npenstock dashboard runs/math-20260801-120000 --port 0\n\n"
    "penstock dashboard runs/math-20260801-120000 runs/math-20260802-120000"
)
def dashboard(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="A run's folder, the newest one under ./runs without it; or several."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8475,
    until_end: Annotated[bool, typer.Option("--until-end", help="End when the run does.")] = False,
) -> None:
    """Show a run in the browser, live, or as it ended: what flows, what each device does, what is learnt, samples,
    ledger. The page is for this machine alone, and for who has the link; several runs share its charts."""
    from penstock.runtime.cli.dashboard import show_dashboard

    folders, served = runs or [run_folder(None)], give_way if context.obj is OWN_PROCESS else None
    raise typer.Exit(show_dashboard(folders, console, port=port, until_end=until_end, served=served))


@app.command(
    epilog="[bold]Examples[/]\n\npenstock audit\n\n"
    "penstock audit runs/quickstart-20260101-120000 --certificate certificate.json"
)
def audit(
    run: RunFolder = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of a run that has ended: write what anybody can check again without Penstock, and beside it "
            "verify_certificate.py, which checks it.",
        ),
    ] = None,
) -> None:
    """Check that no sample or token was lost or counted twice, from the ledger; also of a run that goes on."""
    from penstock.runtime.cli.audit import show_audit

    raise typer.Exit(show_audit(run_folder(run), console, certificate=certificate))


@app.command(epilog="[bold]Examples[/]\n\npenstock explain\n\npenstock explain runs/quickstart-20260101-120000 --json")
def explain(
    run: RunFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Say what binds a run: the dearest cause first with its evidence, the bound of its schedule, where each device's
    time went, alarms, and at most three knobs to turn next; also of a run that goes on."""
    from penstock.runtime.cli.explain import show_explanation

    show_explanation(run_folder(run), console, as_json=as_json)


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
        if run is not None:
            run_folder(run)  # says if it is not there, though every ledger has these tables
        list_tables(console)
        return
    ask_ledger(run_folder(run), sql, console, as_csv=csv, timeout_s=timeout)


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
        run_folder(run),
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
    epilog="[bold]Examples[/]\n\npenstock trace --slowest 10\n\npenstock trace runs/math-20260801-120000 --sample 12/3"
    "\n\npenstock trace --failed --dropped --limit 50\n\npenstock trace --step 40 --perfetto step40.json"
)
def trace(
    run: RunFolder = None,
    sample: Annotated[str, typer.Option(metavar="GROUP/INDEX", help="This one; e4/0: of an evaluation.")] = "",
    step: Annotated[int | None, typer.Option(min=1, help="This step, its version, and the samples it trained.")] = None,
    slowest: Annotated[
        int | None, typer.Option(min=1, help="So many with the longest lives; 5 where nothing else is asked for.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Those that failed, with cause and reason.")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="Those filtered, stale or cancelled.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 20,
    events: Annotated[bool, typer.Option("--events", help="Also each event that an actor handled.")] = False,
    perfetto: Annotated[
        Path | None, output_option(text="Write them with the devices' lanes for ui.perfetto.dev; alone: the run.")
    ] = None,
    chrome: Annotated[Path | None, output_option(text="The same, for chrome://tracing: it is one format.")] = None,
    otlp: Annotated[
        Path | None, output_option(text="Write all spans of the run as OTLP/JSON, for a collector.")
    ] = None,
) -> None:
    """Show lives of samples as trees: when each stage began, how long it took, where, by which attempt and weights, and
    what ended it; also of a run that goes on."""
    from penstock.runtime.cli.trace import Chosen, show_otlp, show_trace

    chosen = Chosen(sample, step, slowest, failed, dropped, limit, events)
    if slowest is not None:
        chosen = chosen._replace(limit=max(limit, slowest))
    views = [path for path in (perfetto, chrome) if path is not None]
    if otlp is not None:
        show_otlp(run_folder(run), console, otlp)
    if otlp is None or chosen.num_choices or views:
        show_trace(run_folder(run), console, chosen, views)


@app.command(
    epilog="[bold]Examples[/]\n\npenstock replay\n\npenstock replay runs/math-20260801-120000 --actor buffer --until 12"
    "\n\npenstock replay --break-on 12/3\n\npenstock replay --break-on ReplaceActor --json\n\n"
    "penstock replay runs/math-20260801-120000 --fork 12 staleness.policy=fully_async staleness.max_staleness=2\n\n"
    "penstock replay --fork 12 engines.count=4 --models models.yaml --plot futures.svg"
)
def replay(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [KEY=VALUE]...",
            help="A run's folder, the newest one under ./runs without it; with --fork, what is otherwise from there.",
        ),
    ] = None,
    actor: Annotated[str, typer.Option(metavar="NAME", help="Replay this one alone, such as buffer.")] = "",
    until: Annotated[
        str, typer.Option(metavar="STEP|EVENT", help="Stop behind this step, or behind an event such as buffer-1:123.")
    ] = "",
    break_on: Annotated[
        str,
        typer.Option(metavar="KIND|ID", help="Stop at the first event or command of this class, or about this id."),
    ] = "",
    anyway: Annotated[bool, typer.Option("--anyway", help="Also where other rules recorded the run.")] = False,
    fork: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=1, help="Go on from this step by simulation, as it was and with KEY=VALUE."),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --fork: how long things take, of penstock calibrate; else fitted to this run."
        ),
    ] = None,
    plot: Annotated[
        Path | None, output_option(text="With --fork: draw both futures, as SVG, or PNG by its name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Take a recorded run (observability.record) through the same state machines: every command must come out again.

    It stops at the first that does not, with both sides and what went before. The exit code is 1 then.

    With [bold]--fork STEP KEY=VALUE[/] the past of the run is gone on with from that step by simulation, twice: as it
    was and with the overrides; it prints both futures, and the first decision in which they differ."""
    from penstock.runtime.cli.fork import Asked, show_fork
    from penstock.runtime.cli.replay import show_replay
    from penstock.runtime.run.replay import Choice

    folders = [word for word in arguments or () if "=" not in word or Path(word).is_dir()]
    overrides = [word for word in arguments or () if word not in folders]
    if len(folders) > 1:
        raise UserFault(f"expected one run's folder and KEY=VALUE; found {' and '.join(folders)}")
    folder = run_folder(Path(folders[0]) if folders else None)
    if fork is None:
        if overrides or models is not None or plot is not None:
            raise UserFault("KEY=VALUE, --models and --plot are for futures: say from which step, with --fork STEP")
        choice = Choice(actor, until, break_on, anyway)
        raise typer.Exit(show_replay(folder, console, choice, as_json=as_json))
    if actor or until or break_on:
        raise UserFault("--fork goes on with all actors behind its step: leave out --actor, --until and --break-on")
    show_fork(folder, console, Asked(fork, tuple(overrides), models, plot, anyway), as_json=as_json)
