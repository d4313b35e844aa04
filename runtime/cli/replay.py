"""``penstock replay``: whether every command of a recorded run comes out again, and where not."""

from __future__ import annotations

import itertools
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from penstock.messages import base, commands, inboxes
from penstock.messages.errors import UserFault
from penstock.messages.samples import group_name
from penstock.runtime.run.replay import Choice, Moment, Replayed, StoryLine, num_lines, replay_run, story_of
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.shell.shell import classes_of
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.observability.recording import AskedCommand

MAX_TEXT: Final = 60
"""Characters of a text within an event, and items of a list, that are shown."""
MAX_ITEMS: Final = 8
MAX_LINE: Final = 400
MAX_IDS: Final = 16
"""Groups whose story is told."""
EVENTS_PER_TELL: Final = 100
_EVENT_ID: Final = re.compile(r"[a-z_]+(-\d+)?-\d+:\d+")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it was recorded and as it comes out now; empty where a side has none."""

    recorded: str
    derived: str
    first_difference: str = ""
    """The first place where they differ, with both values."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A moment, for people and programs."""

    event_id: str
    at_s: float
    event: str
    subject: str
    sender: str
    content: str
    state: str
    waits: tuple[str, ...]
    commands: tuple[Side, ...]
    error: str
    story: tuple[StoryLine, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    num_events: int
    num_commands: int
    num_incarnations: int
    end_s: float
    is_same: bool
    divergence: Shown | None
    stopped_at: Shown | None
    notes: tuple[str, ...]


def choice_of(*, actor: str, until: str, break_on: str, anyway: bool) -> Choice:
    """What the options ask for.

    Raises:
        UserFault: one cannot be read.
    """
    if until and not until.isdigit() and not _EVENT_ID.fullmatch(until):
        raise UserFault(f"--until: {until!r} is neither the number of a step nor an event, such as buffer-1:123")
    if break_on[:1].isupper() and break_on not in _kinds():
        raise UserFault(f"--break-on: there is no event and no command {break_on!r}; docs/events.md has the events")
    return Choice(
        actor=actor,
        until_step=int(until) if until.isdigit() else None,
        until_event="" if until.isdigit() else until,
        breaks_on=break_on,
        anyway=anyway,
    )


def show_replay(folder: Path, console: Console, choice: Choice, *, as_json: bool) -> int:
    """Replay a run and print what it comes to; 1 where a command does not come out again, 0 otherwise.

    Raises:
        UserFault: see :func:`penstock.runtime.run.replay.replay_run`.
    """
    with _bar(folder, console, choice, is_shown=console.is_terminal and not as_json) as on_event:
        replayed = replay_run(folder, choice, on_event=on_event)
    if as_json:
        print_json(_answer(folder, replayed), console)
    else:
        _show(folder, replayed, console)
    return 0 if replayed.divergence is None else 1


# --- what is shown ----------------------------------------------------------------------------------------------------


def _answer(folder: Path, replayed: Replayed) -> Answer:
    return Answer(
        num_events=replayed.num_events,
        num_commands=replayed.num_commands,
        num_incarnations=replayed.num_incarnations,
        end_s=replayed.end_s,
        is_same=replayed.divergence is None,
        divergence=None if replayed.divergence is None else _shown(folder, replayed.divergence),
        stopped_at=None if replayed.stopped_at is None else _shown(folder, replayed.stopped_at),
        notes=replayed.notes,
    )


def _shown(folder: Path, moment: Moment) -> Shown:
    handled = moment.handled
    body = msgspec.msgpack.decode(handled.body)
    sides = tuple(_side(each.recorded, each.derived) for each in moment.commands if moment.is_same or not each.is_same)
    return Shown(
        event_id=moment.event_id,
        at_s=handled.at_s,
        event=handled.event,
        subject=handled.subject,
        sender=f"{handled.sender} {handled.sender_epoch}" if handled.sender else "",
        content=_text(body),
        state=moment.state,
        waits=moment.waits,
        commands=sides,
        error=moment.error,
        story=story_of(folder, moment, _ids(moment)),
    )


def _side(recorded: AskedCommand | None, derived: AskedCommand | None) -> Side:
    difference = ""
    if recorded is not None and derived is not None and recorded.body and derived.body:
        difference = first_difference(*(msgspec.msgpack.decode(each.body) for each in (recorded, derived)))
    return Side(recorded=_command_text(recorded), derived=_command_text(derived), first_difference=difference)


def _command_text(command: AskedCommand | None) -> str:
    if command is None:
        return ""
    if command.body:
        return _text(msgspec.msgpack.decode(command.body))
    return f"{command.label}, {command.size_bytes:,} bytes, CRC-32 {command.checksum:08x}"


def first_difference(recorded: Any, derived: Any, place: str = "") -> str:  # noqa: ANN401 - what msgpack holds
    """The first place in which two values differ, with both; empty where they are equal."""
    if recorded == derived:
        return ""
    if isinstance(recorded, dict) and isinstance(derived, dict):
        keys = [*recorded, *(key for key in derived if key not in recorded)]
        pairs = [(f"{place}.{key}", recorded.get(key), derived.get(key)) for key in keys]
    elif isinstance(recorded, list) and isinstance(derived, list) and len(recorded) == len(derived):
        pairs = [(f"{place}[{at}]", *both) for at, both in enumerate(zip(recorded, derived, strict=True))]
    else:
        return f"{place.lstrip('.')}: {_text(recorded)} → {_text(derived)}"
    return next(filter(None, (first_difference(one, other, path) for path, one, other in pairs)), "")


def _text(value: Any) -> str:  # noqa: ANN401 - what msgpack holds
    """On one line, without what is long."""
    if isinstance(value, dict):
        kind = value.get("type", "")
        fields = (f"{key}={_text(each)}" for key, each in value.items() if key != "type")
        return f"{kind}({', '.join(fields)})"
    if isinstance(value, list):
        more = [f"… {len(value) - MAX_ITEMS} more"] if len(value) > MAX_ITEMS else []
        return f"[{', '.join([*map(_text, value[:MAX_ITEMS]), *more])}]"
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}…")
    return repr(value)


def _show(folder: Path, replayed: Replayed, console: Console) -> None:
    for note in replayed.notes:
        console.print(Text(terminal_text(note), style="yellow"), soft_wrap=True)
    came = f"{replayed.num_events:,} events of {replayed.num_incarnations} actors, up to {replayed.end_s:.3f} s"
    if replayed.divergence is not None:
        console.print(Text("the first command that differs", style="bold red"), soft_wrap=True)
        _show_moment(_shown(folder, replayed.divergence), console, is_same=False)
        came = f"before it, {replayed.num_events - 1:,} events gave what they gave in the run"
    elif replayed.stopped_at is not None:
        console.print(Text("stopped", style="bold"), soft_wrap=True)
        _show_moment(_shown(folder, replayed.stopped_at), console, is_same=True)
        came = f"no difference in {came}"
    else:
        came = f"no difference in {came}: {replayed.num_commands:,} commands came out again"
    console.print(Text(came), soft_wrap=True)


def _show_moment(shown: Shown, console: Console, *, is_same: bool) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(Text(terminal_text(text, max_chars=MAX_LINE), style=style), soft_wrap=True)

    sender = f", from {shown.sender}" if shown.sender else ""
    line(f"  {shown.event_id}  at {shown.at_s:.3f} s  {shown.event} {shown.subject}{sender}", "bold")
    line(f"  {shown.content}", "dim")
    line(f"  the actor is now: {shown.state}" + (f"; waits for {', '.join(shown.waits)}" if shown.waits else ""))
    if shown.error:
        line(f"  it raises {shown.error}", "red")
    for side in shown.commands:
        if is_same:
            line(f"  asks for  {side.recorded}")
            continue
        line(f"  recorded  {side.recorded or 'nothing'}", "green")
        line(f"  now       {side.derived or 'nothing'}", "red")
        if side.first_difference:
            line(f"            {side.first_difference}")
    if shown.story:
        line("  before it")
    for each in shown.story:
        sender = f"  from {each.sender}" if each.sender else ""
        line(f"    {each.at_s:10.3f} s  {each.event_id:<24} {each.event} {each.subject}{sender}", "dim")


# --- ids --------------------------------------------------------------------------------------------------------------


def _ids(moment: Moment) -> frozenset[str]:
    """The subjects that an event, or the commands that differ, are about."""
    differing = [side for each in moment.commands if not each.is_same for side in (each.recorded, each.derived)]
    bodies = [msgspec.msgpack.decode(side.body) for side in differing if side is not None and side.body]
    groups = sorted({group for body in bodies for group in _groups(body)})
    if not groups:
        groups = sorted(set(_groups(msgspec.msgpack.decode(moment.handled.body))))
    subject = moment.handled.subject.partition("/")[0]
    return frozenset([*map(group_name, groups[:MAX_IDS]), *([subject] if subject else [])])


def _groups(value: Any) -> Iterator[int]:  # noqa: ANN401 - what msgpack holds
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "group_id" and isinstance(each, int):
                yield each
            elif key == "group_ids" and isinstance(each, list):
                yield from each
            elif key == "key" and isinstance(each, list):
                yield each[0]
            else:
                yield from _groups(each)
    elif isinstance(value, list):
        for each in value:
            yield from _groups(each)


def _kinds() -> frozenset[str]:
    """Every class that can be broken on."""
    unions = [each for name, each in vars(inboxes).items() if name.endswith(("Event", "Wire"))]
    found = {cls for union in unions for cls in classes_of(union)} | classes_of(commands.AnyCommand)
    return frozenset(cls.__name__ for cls in found if issubclass(cls, base.Event | base.Command))


@contextmanager
def _bar(folder: Path, console: Console, choice: Choice, *, is_shown: bool) -> Generator[Callable[[float], None]]:
    """Called with the time of each event, it moves a bar on where somebody looks."""
    if not is_shown:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, count = progress.add_task("replaying", total=num_lines(folder, choice)), itertools.count(1)

        def tell(at_s: float) -> None:
            if (done := next(count)) % EVENTS_PER_TELL == 0:
                progress.update(task, completed=done, description=f"replaying, at {at_s:.1f} s")

        yield tell
