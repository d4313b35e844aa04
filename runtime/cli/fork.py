"""``penstock replay --fork``: two futures of a recorded run side by side, and the decision in which they part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.messages.errors import UserFault
from penstock.messages.samples import group_name
from penstock.runtime.cli.prediction import percent
from penstock.runtime.cli.replay import MAX_IDS, MAX_LINE, first_difference, groups_in, value_text
from penstock.runtime.observability.subjects import subject_text
from penstock.runtime.observability.texts import length_text, short_count
from penstock.runtime.pictures import check_picture, write_picture
from penstock.runtime.prediction.forking.changes import read_change
from penstock.runtime.prediction.forking.futures import Futures, play_futures
from penstock.runtime.prediction.forking.futures_svg import futures_svg
from penstock.runtime.prediction.forking.past import read_past
from penstock.runtime.prediction.models import read_models
from penstock.runtime.run.replay import StoryLine, plain
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.prediction.forking.decisions import Decision, Decisions, Difference
    from penstock.runtime.prediction.forking.futures import Future


class Asked(NamedTuple):
    """What is to be forked."""

    step: int
    overrides: tuple[str, ...]
    models: Path | None
    plot: Path | None
    anyway: bool


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, for people and programs."""

    at_s: float
    """Seconds since the start of the run."""
    incarnation: str
    event: str
    subject: str
    sender: str
    content: str
    """Of the event."""
    command: str
    story: tuple[StoryLine, ...]
    """The events before it since the fork: about the same ids, and the last few of the same actor."""


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """The first decision in which the futures differ; null where one decides nothing more."""

    at_s: float
    ids: tuple[str, ...]
    """Groups, steps and versions that it is about."""
    was: Decided | None
    other: Decided | None
    first_difference: str
    """The first place in which the two commands differ, with both values."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    futures: Futures
    parting: Parting | None
    """None: they decide the same to the end."""


def show_fork(folder: Path, console: Console, asked: Asked, *, as_json: bool) -> None:
    """Fork a run and print what comes of it.

    Raises:
        UserFault: it cannot be forked there, or not so; or the picture cannot be written.
    """
    if not asked.overrides:
        raise UserFault("--fork: what is to be otherwise? Say so as KEY=VALUE, such as staleness.max_staleness=4")
    if asked.plot is not None:
        check_picture(asked.plot, "--plot")
    models = None if asked.models is None else read_models(asked.models)
    past = read_past(folder, asked.step, anyway=asked.anyway)
    change = read_change(folder, asked.overrides, models)
    with _bar(console, change.before.run.num_steps - asked.step, is_shown=console.is_terminal and not as_json) as tell:
        futures, difference, decisions = play_futures(past, change, on_step=tell)
    answer = Answer(futures=futures, parting=None if difference is None else _parting(difference, decisions))
    if asked.plot is not None:
        write_picture(asked.plot, futures_svg(futures))
    if as_json:
        print_json(answer, console)
        return
    console.print(_table(futures))
    if futures.recorded is not None:
        measured_s = futures.recorded.figures.step_s
        off = percent(futures.was.figures.step_s / measured_s - 1, sign=True)
        console.print(
            f"expected error: the future as it was has steps that are {off} off what was recorded; compare the two "
            "futures with each other",
            soft_wrap=True,
        )
    _show_parting(answer.parting, futures, console)
    for text in futures.assumed:
        console.print(f"[yellow]assumed[/] {escape(text)}", soft_wrap=True)
    if asked.plot is not None:
        console.print(f"written: {escape(str(asked.plot))}", soft_wrap=True)


# --- the decision -----------------------------------------------------------------------------------------------------


def _parting(difference: Difference, decisions: tuple[Decisions, Decisions]) -> Parting:
    earliest = min((each for each in difference if each is not None), key=lambda each: each.at_s)
    ids = _ids(earliest)
    was, other = (
        None if decision is None else _decided(decision, futures, ids)
        for decision, futures in zip(difference, decisions, strict=True)
    )
    place = ""
    one, two = difference.first, difference.second
    if one is not None and two is not None and type(one.command) is type(two.command) and one.event == two.event:
        encode = msgspec.msgpack.encode
        place = first_difference(plain(encode(one.command)), plain(encode(two.command)))
    return Parting(at_s=difference.at_s, ids=tuple(sorted(ids)), was=was, other=other, first_difference=place)


def _decided(decision: Decision, futures: Decisions, ids: frozenset[str]) -> Decided:
    event = decision.event
    return Decided(
        at_s=decision.at_s,
        incarnation=decision.incarnation,
        event=type(event).__name__,
        subject=subject_text(event),
        sender=decision.sender,
        content=value_text(plain(msgspec.msgpack.encode(event))),
        command=value_text(plain(msgspec.msgpack.encode(decision.command))),
        story=futures.story_of(decision, ids),
    )


def _ids(decision: Decision) -> frozenset[str]:
    """What a decision, or the event that led to it, is about."""
    bodies = [plain(msgspec.msgpack.encode(each)) for each in (decision.command, decision.event)]
    groups = sorted({group for body in bodies for group in groups_in(body)})
    subject = subject_text(decision.event).partition("/")[0]
    return frozenset([*map(group_name, groups[:MAX_IDS]), *([subject] if subject else [])])


def _show_parting(parting: Parting | None, futures: Futures, console: Console) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(Text(terminal_text(text, max_chars=MAX_LINE), style=style), soft_wrap=True)

    if parting is None:
        line("they decide the same to the end: what was changed did not come to bear", "bold")
        return
    about = f", about {', '.join(parting.ids)}" if parting.ids else ""
    line(f"the first decision in which they differ, at {parting.at_s:.3f} s{about}", "bold")
    sides = ((futures.was.label, parting.was, "green"), (futures.other.label, parting.other, "red"))
    for label, side, style in sides:
        if side is None:
            line(f"  {label}: nothing more is decided there", style)
            continue
        late = "" if side.at_s == parting.at_s else "no such decision then; the next one there is "
        sender = f" from {side.sender}" if side.sender else ""
        line(f"  {label}: {late}at {side.at_s:.3f} s by {side.incarnation}")
        line(f"    on   {side.event} {side.subject}{sender}")
        line(f"    asks {side.command}", style)
    if parting.first_difference:
        line(f"  {parting.first_difference}")
    story = next((side.story for _, side, _ in sides if side is not None and side.at_s == parting.at_s), ())
    line("  before it, since the fork")
    for each in story:
        sender = f"  from {each.sender}" if each.sender else ""
        line(f"    {each.at_s:10.3f} s  {each.event_id:<24} {each.event} {each.subject}{sender}", "dim")


# --- the figures ------------------------------------------------------------------------------------------------------


def _table(futures: Futures) -> Table:
    columns = [futures.was, futures.other, *([] if futures.recorded is None else [futures.recorded])]
    title = f"from step {futures.step} at {futures.at_s:.1f} s: steps {futures.step + 1} to {futures.last_step}"
    table = Table(title=title, box=box.ROUNDED, title_justify="left")
    table.add_column("", style="dim")
    for column in columns:
        table.add_column(escape(column.label), justify="right")
    for row in zip(*map(_figures, columns), strict=True):
        (name, _), *_ = row
        table.add_row(name, *(text for _, text in row))
    return table


def _figures(future: Future) -> list[tuple[str, str]]:
    """Name and value of each row."""
    figures = future.figures
    return [
        ("step time", length_text(figures.step_s)),
        ("tokens/s trained", short_count(figures.tokens_per_s)),
        ("engines busy", percent(figures.engines_busy)),
        ("slots in use while they are", percent(figures.occupancy)),
        ("learner busy", percent(figures.learner_busy)),
        ("goodput", percent(figures.goodput)),
        ("staleness, mean", f"{sum(age * share for age, share in enumerate(figures.ages)):.2f}"),
        ("staleness, largest", f"{len(figures.ages) - 1}"),
        ("wasted tokens", _waste_text(future)),
        ("to the end of the run", "–" if future.rest_s is None else length_text(future.rest_s)),
    ]


def _waste_text(future: Future) -> str:
    found = [f"{short_count(each.num_tokens)} {escape(each.cause)}" for each in future.waste[:3]]
    return "\n".join(found) or "0"


@contextmanager
def _bar(console: Console, num_steps: int, *, is_shown: bool) -> Generator[Callable[[int], None]]:
    columns = (TextColumn("playing both futures"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("", total=num_steps)
        yield lambda done: progress.update(task, completed=done)
