"""``penstock calibrate``, and ``penstock simulate`` over several seeds or with calibrated models: what they print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from penstock.messages.texts import counted
from penstock.runtime.observability.texts import fixed, length_text, number_text, short_count
from penstock.runtime.output_file import check_new_output
from penstock.runtime.prediction.checking import calibrated
from penstock.runtime.prediction.forecast import forecast
from penstock.runtime.prediction.models import write_models
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.prediction.forecast import Forecast, Interval
    from penstock.runtime.prediction.models import Check, FitResult, Models
    from penstock.runtime.scenario import Scenario

SHORT_QUEUE: Final = 100
QUEUES: Final = (
    ("for_slots", "samples wait for a slot"),
    ("for_rewards", "samples are with the Scorer"),
    ("incomplete", "groups wait for their last samples"),
    ("ready", "groups are ready to be trained"),
)
"""What is said of each of the queues."""


def calibrate_and_show(
    folders: Sequence[Path], out: Path, console: Console, *, has_checks: bool, as_json: bool
) -> None:
    """Fit, check, write, print.

    Raises:
        UserFault: a run cannot be read or fitted, or the file is there already, or cannot be written.
    """
    check_new_output(out, "--output")
    with console.status("reading the runs, and playing them again" if has_checks else "reading the runs"):
        models = calibrated(folders, has_checks=has_checks)
    write_models(models, out)
    show_models(models, out, console, as_json=as_json)


def show_models(models: Models, out: Path, console: Console, *, as_json: bool) -> None:
    """Print what was fitted, how far it is off and what could not be learnt."""
    if as_json:
        print_json(models, console)
        return
    num_steps = sum(run.num_steps for run in models.runs)
    title = f"fitted to {counted(num_steps, 'step')} of {counted(len(models.runs), 'run')}"
    console.print(fits_table(models.fits, title))
    if models.checks:
        console.print(checks_table(models.checks))
    for text in models.unknown:
        console.print(f"[yellow]not learnt[/] {escape(text)}", soft_wrap=True)
    console.print(f"written: {escape(str(out))}", soft_wrap=True)


def fits_table(fits: Sequence[FitResult], title: str) -> Table:
    """What was fitted; the names of the values are never cut off."""
    table = Table(title=title, box=box.ROUNDED, title_justify="left")
    for heading in ("fit", "value", "measured", "error on\nunseen\nsteps", "bias"):
        is_text = heading in ("fit", "value")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading == "value")
    for fit in fits:
        values = "\n".join(f"{key.partition('.')[2]} {number_text(value, 3)}" for key, value in fit.values.items())
        table.add_row(fit.what, values, f"{fit.count:,}", percent(fit.error), percent(fit.bias, sign=True))
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """Recorded runs beside their own scenarios, played with the models."""
    table = Table(title="the same runs, played with these models", box=box.ROUNDED, title_justify="left")
    table.add_column("run\npolicy", overflow="fold")
    for heading in ("step\nerror", "engines busy\npredicted", "learner busy\npredicted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for check in checks:  # two lines each, as one does not fit into a terminal of 80 columns
        table.add_row(
            escape(f"{check.folder.rpartition('/')[2]}\n{check.policy}"),
            f"{length_text(check.step_s)}\n{percent(check.step_error, sign=True)}",
            f"{percent(check.engines_busy)}\n{percent(check.engines_busy_predicted)}",
            f"{percent(check.learner_busy)}\n{percent(check.learner_busy_predicted)}",
        )
    return table


def simulate_and_show(
    scenario: Scenario,
    seeds: Sequence[int],
    console: Console,
    *,
    models: Models | None,
    as_json: bool,
    has_episodes: bool = False,
) -> None:
    """Play a modelled scenario with each seed and print the figures; ``has_episodes``: the real one has some.

    Raises:
        UserFault: a simulation did not come to its end.
    """
    extreme = None if models is None or as_json else models.if_requests_cost_all
    other = None if extreme is None else extreme.applied(scenario)
    if models is not None:
        scenario = models.applied(scenario)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("seeds"))
    with Progress(*columns, console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(seeds) * (1 if other is None else 2))
        found = forecast(scenario, seeds, on_done=lambda: bar.advance(task))
        least = None if other is None else forecast(other, seeds, on_done=lambda: bar.advance(task)).step_s
    if as_json:
        print_json(found, console)
        return
    console.print(_forecast_table(found))
    if least is not None:
        between = f"{length_text(least.mean)} and {length_text(found.step_s.mean)}"
        console.print(
            f"[yellow]between[/] {between} a step: the runs did not tell what a request costs", soft_wrap=True
        )
    for text in () if models is None else models.doubts(scenario, has_episodes=has_episodes):
        console.print(f"[yellow]beyond what was recorded[/] {escape(text)}", soft_wrap=True)
    console.print(_error_text(models), soft_wrap=True)


def _forecast_table(found: Forecast) -> Table:
    title = f"[bold]{escape(found.scenario)}[/]: mean of {counted(len(found.seeds), 'seed')}, lowest to highest"
    table = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("step time", spread_text(found.step_s, length_text))
    table.add_row("tokens/s", f"{spread_text(found.tokens_per_s, short_count)} trained")
    for name, states in (("engines", found.engines), ("learner", found.learner)):
        table.add_row(
            name, "\n".join(f"{spread_text(share, percent)} {escape(state)}" for state, share in states.items())
        )
    table.add_row("slots", f"{spread_text(found.occupancy, percent)} in use while engines work")
    table.add_row("goodput", f"{spread_text(found.goodput, percent)} of the tokens that ended were trained")
    ages = ", ".join(f"{percent(share)} {age} old" for age, share in enumerate(found.ages) if share)
    table.add_row("staleness", f"{ages} (versions)")
    table.add_row("queues", "\n".join(f"{spread_text(found.depths[name], depth_text)} {text}" for name, text in QUEUES))
    bound = found.bound
    most = "" if bound.most_s is None else f" to {length_text(bound.most_s)}"
    slack = f", the other has {length_text(bound.slack_s)} of slack" if bound.slack_s else ""
    table.add_row(
        "bound", f"{escape(bound.formula)}: {length_text(bound.least_s)}{most}; active: {bound.active}{slack}"
    )
    return table


def depth_text(depth: float) -> str:
    """Of a queue: with one digit behind the point where it is short."""
    return fixed(depth, 1) if depth < SHORT_QUEUE else short_count(depth)


def model_errors(models: Models | None) -> list[str]:
    """How far off the models are, as calibration has said; nothing without any."""
    if models is None:
        return []
    fits = [f"{fit.what} {percent(fit.error)}" for fit in models.fits if fit.error is not None]
    lines = [_error_text(models)]
    if fits:
        lines.append(f"error of the fits on steps that they have not seen: {'; '.join(fits)}")
    return lines + [f"not learnt: {text}" for text in models.unknown]


def _error_text(models: Models | None) -> str:
    if models is None:
        return "times are those of the scenario's own models: fit them to a run with: penstock calibrate"
    if models.expected_error is None:
        return "how far the models are off was not checked (penstock calibrate --check)"
    return (
        f"expected error: on the runs that they were fitted to, the models are off by up to "
        f"{percent(models.expected_error)} in the time of a step; further away by more"
    )


def spread_text(found: Interval, text: Callable[[float], str]) -> str:
    """``1,200 (1,100 to 1,300)``; the mean alone where all are equal."""
    low, mean, high = text(found.low), text(found.mean), text(found.high)
    return f"{mean}" if low == high else f"{mean} ({low} to {high})"


def percent(share: float | None, *, sign: bool = False) -> str:
    """``0.123`` → ``12.3 %``."""
    return "–" if share is None else f"{100 * share:{'+' if sign else ''}.1f} %"
