"""``penstock explain``: what binds a run, for people and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.runtime.observability.explain import Explanation, explain
from penstock.runtime.observability.texts import number_text
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.observability.explain.bounds import Bound
    from penstock.runtime.observability.explain.causes import Evidence
    from penstock.runtime.observability.explain.critical_path import StepPath
    from penstock.runtime.observability.explain.explanation import LaneTime


def show_explanation(folder: Path, console: Console, *, as_json: bool = False) -> None:
    """Print what binds a run.

    Raises:
        UserFault: the folder holds no run, or a file of it is damaged.
    """
    found = explain(folder)
    if as_json:
        print_json(found, console)
        return
    _print(found, console)


def _print(found: Explanation, console: Console) -> None:
    console.print(f"[bold]{escape(terminal_text(found.headline))}[/]\n", soft_wrap=True)
    if found.alarms:
        console.print("[bold red]Alarms[/]: look at these first; a quicker run would only learn the wrong thing sooner")
        for alarm in found.alarms:
            console.print(f"  [red]{alarm.name}[/]: {escape(terminal_text(alarm.text))}", soft_wrap=True)
            _print_evidence(alarm.evidence, console)
    if found.facts is not None:
        console.print(f"Steps {found.facts.first_step} to {found.facts.last_step}, {found.facts.step_s:.3g} s each")
    for binding in found.bindings:
        cost = f"{100 * binding.share:.0f} % of a step, {binding.who}" if binding.cost_s else binding.who
        mark = "[bold yellow]binds[/]" if binding.binds else "[dim]below what binds[/]" if binding.cost_s else ""
        console.print(f"  [bold]{binding.cause.value}[/] ({escape(terminal_text(cost))}) {mark}", soft_wrap=True)
        console.print(f"    {escape(terminal_text(binding.text))}", soft_wrap=True)
        _print_evidence(binding.evidence, console)
    if found.bound is not None:
        console.print(_bound_line(found.bound), soft_wrap=True)
    console.print("Where the time of the whole run went")
    for lane in found.lanes:
        console.print(_lane_line(lane), soft_wrap=True)
    if found.scalings:
        console.print("Engines that joined and left")
    for text in found.scalings:
        console.print(f"  {escape(terminal_text(text))}", soft_wrap=True)
    if found.typical is not None:
        _print_path("A typical step", found.typical, console)
    for path in found.slowest:
        _print_path("A slow step", path, console)
    if found.knobs:
        console.print("Knobs to turn next")
    for knob in found.knobs:
        gain = f"a step then takes {knob.step_s:.3g} s or more, up to {knob.gain:.0f} % less"
        console.print(f"  [bold]{escape(knob.key)}[/]: {escape(terminal_text(knob.change))}  {gain}", soft_wrap=True)
    for text in found.missing:
        console.print(f"not known: {escape(terminal_text(text))}", style="yellow", soft_wrap=True)


def _print_evidence(evidence: Sequence[Evidence], console: Console) -> None:
    for each in evidence:
        line = f"{each.what}: {number_text(each.value, 3)} {each.unit}".rstrip()
        console.print(f"      {escape(terminal_text(line))}  ({each.source})", style="dim", soft_wrap=True)


def _bound_line(bound: Bound) -> str:
    tail = "" if bound.tail_s is None else f", L counts {bound.tail_s:.3g} s"
    most = "" if bound.most_s is None else f" to {bound.most_s:.3g}"
    other = f"; the other has {bound.slack_s:.3g} s of slack" if bound.slack_s else ""
    return escape(
        f"Bound: {bound.formula} with g {bound.generation_s:.3g} s, t {bound.training_s:.3g} s, "
        f"s {bound.exposed_s:.3g} s{tail}: {bound.least_s:.3g}{most} s, measured {bound.measured_s:.3g} s; "
        f"active: {bound.active}{other}"
    )


def _lane_line(lane: LaneTime) -> str:
    shares = sorted(lane.percentages.items(), key=lambda item: -item[1])
    slots = "" if lane.occupancy is None else f"; {lane.occupancy:.0f} % of its slots in use while it worked"
    told = ", ".join(f"{share:.1f} % {state}" for state, share in shares)
    return escape(terminal_text(f"  {lane.name:<10} {told}{slots}"))


def _print_path(title: str, path: StepPath, console: Console) -> None:
    if not path.stages:
        console.print(f"{title}: step {path.version}, {path.step_s:.3g} s; no sample of it was traced")
        return
    console.print(f"{title}: step {path.version}, {path.step_s:.3g} s; what came last was sample {path.sample}")
    for stage in path.stages:
        about = "" if stage.is_recorded else "  not recorded, at most so long"
        line = f"{stage.name:<11} {stage.seconds:8.3f} s, {stage.in_step_s:.3f} s of the step  {stage.actor}{about}"
        console.print(f"    {escape(terminal_text(line))}", soft_wrap=True)
