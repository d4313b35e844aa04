"""``penstock replay``: whether every command of a recorded run comes out again, and where not."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from penstock.messages.samples import group_name
from penstock.runtime.observability.segments import whole_lines
from penstock.runtime.run.replay import StoryLine, chosen_files, plain, replay_run, story_of
from penstock.runtime.safe_text import terminal_text
from penstock.runtime.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.observability.recording import AskedCommand
    from penstock.runtime.run.replay import Choice, Moment, Plain

MAX_TEXT: Final = 60
"""Characters of a text within an event, and items of a list, that are shown."""
MAX_ITEMS: Final = 8
MAX_LINE: Final = 400
MAX_IDS: Final = 16
"""Groups whose story is told."""
EVENTS_PER_TELL: Final = 100


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

    is_same: bool
    """Whether every command came out again."""
    num_events: int
    num_commands: int
    num_incarnations: int
    end_s: float
    moment: Shown | None
    """The first command that differs, or where it was to stop."""
    notes: tuple[str, ...]


def show_replay(folder: Path, console: Console, choice: Choice, *, as_json: bool) -> int:
    """Replay a run and print what it comes to; 1 where a command does not come out again, 0 otherwise.

    Raises:
        UserFault: see :func:`penstock.runtime.run.replay.replay_run`.
    """
    with _bar(folder, console, choice, is_shown=console.is_terminal and not as_json) as on_event:
        replayed = replay_run(folder, choice, on_event=on_event)
    answer = Answer(
        is_same=replayed.is_same,
        num_events=replayed.num_events,
        num_commands=replayed.num_commands,
        num_incarnations=replayed.num_incarnations,
        end_s=replayed.end_s,
        moment=None if replayed.moment is None else _shown(folder, replayed.moment),
        notes=replayed.notes,
    )
    if as_json:
        print_json(answer, console)
    else:
        _show(answer, console)
    return 0 if replayed.is_same else 1


# --- what is shown ----------------------------------------------------------------------------------------------------


def _shown(folder: Path, moment: Moment) -> Shown:
    handled = moment.handled
    sides = tuple(_side(each.recorded, each.derived) for each in moment.commands if moment.is_same or not each.is_same)
    return Shown(
        event_id=moment.event_id,
        at_s=handled.at_s,
        event=handled.event,
        subject=handled.subject,
        sender=f"{handled.sender} {handled.sender_epoch}" if handled.sender else "",
        content=value_text(plain(handled.body)),
        state=moment.state,
        waits=moment.waits,
        commands=sides,
        error=moment.error,
        story=story_of(folder, moment, _ids(moment)),
    )


def _side(recorded: AskedCommand | None, derived: AskedCommand | None) -> Side:
    difference = ""
    if recorded is not None and derived is not None and recorded.body and derived.body:
        difference = first_difference(plain(recorded.body), plain(derived.body))
    return Side(recorded=_command_text(recorded), derived=_command_text(derived), first_difference=difference)


def _command_text(command: AskedCommand | None) -> str:
    if command is None:
        return ""
    if command.body:
        return value_text(plain(command.body))
    return f"{command.label}, {command.size_bytes:,} bytes, CRC-32 {command.checksum:08x}"


def first_difference(recorded: Plain, derived: Plain, place: str = "") -> str:
    """The first place in which two values differ, with both; empty where they are equal."""
    if recorded == derived:
        return ""
    pairs: list[tuple[str, Plain, Plain]]
    if isinstance(recorded, dict) and isinstance(derived, dict):
        keys = [*recorded, *(key for key in derived if key not in recorded)]
        pairs = [(f"{place}.{key}", recorded.get(key), derived.get(key)) for key in keys]
    elif isinstance(recorded, list) and isinstance(derived, list):
        if len(recorded) != len(derived):
            return f"{place.lstrip('.')}: {len(recorded)} items → {len(derived)}"
        pairs = [(f"{place}[{at}]", *both) for at, both in enumerate(zip(recorded, derived, strict=True))]
    else:
        return f"{place.lstrip('.')}: {value_text(recorded)} → {value_text(derived)}"
    return next(filter(None, (first_difference(one, other, path) for path, one, other in pairs)), "")


def value_text(value: Plain) -> str:
    """What msgpack holds, on one line, without what is long."""
    if isinstance(value, dict):
        tag = value.get("type")
        fields = (f"{key}={value_text(each)}" for key, each in value.items() if key != "type")
        return f"{tag if isinstance(tag, str) else ''}({', '.join(fields)})"
    if isinstance(value, list):
        more = [f"… {len(value) - MAX_ITEMS} more"] if len(value) > MAX_ITEMS else []
        return f"[{', '.join([*map(value_text, value[:MAX_ITEMS]), *more])}]"
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}…")
    return repr(value)


def _show(answer: Answer, console: Console) -> None:
    for note in answer.notes:
        console.print(Text(terminal_text(note), style="yellow"), soft_wrap=True)
    if answer.moment is not None:
        title = Text("stopped", style="bold") if answer.is_same else Text("the first difference", style="bold red")
        console.print(title)
        _show_moment(answer.moment, console, is_same=answer.is_same)
    came = f"no difference in {answer.num_events:,} events of {answer.num_incarnations} actors, up to "
    came += f"{answer.end_s:.3f} s: {answer.num_commands:,} commands came out again"
    if not answer.is_same:
        came = f"before it, {answer.num_events - 1:,} events gave what they gave in the run"
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
    bodies = [plain(side.body) for side in differing if side is not None and side.body]
    groups = sorted({group for body in bodies for group in groups_in(body)})
    if not groups:
        groups = sorted(set(groups_in(plain(moment.handled.body))))
    subject = moment.handled.subject.partition("/")[0]
    return frozenset([*map(group_name, groups[:MAX_IDS]), *([subject] if subject else [])])


def groups_in(value: Plain) -> Iterator[int]:
    """The groups that an event or a command names, as often as it does."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "group_id" and isinstance(each, int):
                yield each
            elif key in ("group_ids", "key") and isinstance(each, list):  # a key is a group's id and an index
                yield from (one for one in (each if key == "group_ids" else each[:1]) if isinstance(one, int))
            else:
                yield from groups_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from groups_in(each)


@contextmanager
def _bar(folder: Path, console: Console, choice: Choice, *, is_shown: bool) -> Generator[Callable[[float], None]]:
    """Called with the time of each event, it moves a bar on where somebody looks."""
    if not is_shown:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    num_lines = sum(1 for path in chosen_files(folder, choice) for _ in whole_lines(path))
    with Progress(*columns, console=console, transient=True) as progress:
        task, count = progress.add_task("replaying", total=num_lines), itertools.count(1)

        def tell(at_s: float) -> None:
            if (done := next(count)) % EVENTS_PER_TELL == 0:
                progress.update(task, completed=done, description=f"replaying, at {at_s:.1f} s")

        yield tell
