"""A recorded run again: what each actor handled goes through the same machines, and every command must come out again.

Invariants:

* Actors are built by the wiring from what they were built from then, and hear nothing but what they heard then: a rule
  that is another one now shows at the first event on which it matters, in the actor that has it, and nowhere else.
* Events are handled in the order of their times over all actors, each actor's in its own order; with the first command
  that differs, and with an exception where there was none, the replay ends.
* Nothing of the run's folder is changed, and nothing is asked of any backend.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from penstock import __version__
from penstock.messages.base import UNREADABLE
from penstock.messages.books import KeptBooks
from penstock.messages.errors import UserFault
from penstock.messages.flow import GenerationProgressed
from penstock.messages.local import EpisodeMoved, GenerationAdvanced
from penstock.messages.names import BUFFER
from penstock.messages.training import StepFinished
from penstock.messages.wire import InboxDecoder, WireError
from penstock.runtime.observability.facts import SCENARIO_FILE
from penstock.runtime.observability.jsonl import read_rows
from penstock.runtime.observability.recording import (
    FORM,
    FULL_FILE,
    RECORDING_FOLDER,
    AskedCommand,
    Began,
    Handled,
    LedgerRead,
    asked_command,
    error_text,
    rules_digest,
)
from penstock.runtime.observability.segments import files_in
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import build_machine, event_union
from penstock.runtime.run_folder import file_of_run, folder_of_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.actors.machine import Machine
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand

Plain: TypeAlias = "dict[str, Plain] | list[Plain] | bytes | str | int | float | None"
"""What msgpack holds, without the classes that it was."""
STORY_LINES: Final = 24
_PROGRESS: Final = frozenset(kind.__name__ for kind in (GenerationAdvanced, GenerationProgressed, EpisodeMoved))
"""Not told in a story: there are many, and nothing follows from most."""
_STEP: Final = StepFinished.__name__
_EVENT_ID: Final = re.compile(r"[a-z_]+(-\d+)?-\d+:\d+")


class Choice(NamedTuple):
    """What is replayed, and where it stops; without bounds all is."""

    actor: str = ""
    """Name of one actor; empty: all."""
    until: str = ""
    """Stop when the Buffer has heard of this step, ``12``, or behind this event, ``buffer-1:123``."""
    breaks_on: str = ""
    """Stop at the first event or command of this class, or about this subject."""
    anyway: bool = False
    """Also where the rules are other ones than those of the run."""


class Command(msgspec.Struct, frozen=True):
    """One command on both sides; None where a side has none."""

    recorded: AskedCommand | None
    derived: AskedCommand | None

    @property
    def is_same(self) -> bool:
        """Whether it came out again. A 2 that was recorded in the place of a float comes back as 2.0."""
        one, other = self.recorded, self.derived
        if one is None or other is None:
            return False
        if one.body and other.body:
            return one.body == other.body or plain(one.body) == plain(other.body)
        return (one.size_bytes, one.checksum) == (other.size_bytes, other.checksum)


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """An event, what came of it, and how the actor stands after it."""

    incarnation: str
    """``buffer-1``: actor and epoch."""
    handled: Handled
    state: str
    waits: tuple[str, ...]
    commands: tuple[Command, ...]
    error: str = ""
    """Class and message of what the machine raised now."""

    @property
    def event_id(self) -> str:
        """``buffer-1:123``."""
        return f"{self.incarnation}:{self.handled.number}"

    @property
    def is_same(self) -> bool:
        """Whether every command came out again, and no other; or the actor has raised, as it did then."""
        raised, raises = (error.partition(":")[0] for error in (self.handled.error, self.error))
        return raised == raises and all(command.is_same for command in self.commands)


class StoryLine(msgspec.Struct, frozen=True):
    """An event of the past."""

    event_id: str
    at_s: float
    event: str
    subject: str
    sender: str


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to."""

    num_events: int
    num_commands: int
    num_incarnations: int
    end_s: float
    """Time of the last event, seconds since the start of the run."""
    moment: Moment | None
    """Where the commands differ, or where it was to stop; None: it went to the end."""
    notes: tuple[str, ...]
    """What is missing in the recording, and what is not as it was."""

    @property
    def is_same(self) -> bool:
        """Whether every command came out again."""
        return self.moment is None or self.moment.is_same


class Incarnation:
    """One actor as it was built then, built again."""

    def __init__(self, name: str, began: Began) -> None:
        self.name = name
        plan = unpacked(began.plan, RunPlan, f"{name}: the plan of the run")
        read = unpacked(began.ledger, LedgerRead, f"{name}: the ledger") if began.ledger else LedgerRead()
        kept = KeptBooks(read.snapshot, read.later, read.problem) if began.actor == BUFFER else None
        self.machine: Machine[Any] = build_machine(
            began.actor, plan, epoch=began.epoch, records=read.records, kept=kept
        )
        self._decoder: InboxDecoder[Event] = InboxDecoder(event_union(began.actor))

    def decoded(self, handled: Handled) -> Event:
        """The event as it was handled.

        Raises:
            UserFault: this version cannot read it.
        """
        try:
            return self._decoder.decode_event(handled.body)
        except WireError as error:
            raise UserFault(f"{self.name}:{handled.number}: this version cannot read the event: {error}") from error

    def handle(self, handled: Handled) -> Moment:
        """The same event once more."""
        event = self.decoded(handled)
        try:
            commands: list[AnyCommand] = self.machine.handle(event)
        except Exception as error:  # whatever a machine raises is what its user is looking for
            return self.moment(handled, [], error=error_text(error))
        return self.moment(handled, commands)

    def moment(self, handled: Handled, commands: list[AnyCommand], *, error: str = "") -> Moment:
        """What was recorded beside what came of it now."""
        pairs = zip_longest(handled.commands, map(asked_command, commands))
        sides = tuple(Command(recorded, derived) for recorded, derived in pairs)
        return Moment(incarnation=self.name, handled=handled, state="", waits=(), commands=sides, error=error)

    def described(self, moment: Moment) -> Moment:
        """With how the actor stands now; of one that has raised it may be in the middle of something."""
        waits = (
            () if moment.error else tuple(f"{wait.what} {wait.subject} of {wait.on}" for wait in self.machine.waits())
        )
        return msgspec.structs.replace(moment, state=self.machine.state, waits=waits)


def replay_run(folder: Path, choice: Choice, *, on_event: Callable[[float], None] = lambda _: None) -> Replayed:
    """Replay a run as far as it was recorded, or to the first command that does not come out again.

    Args:
        folder: of the run, which may go on.
        choice: what, and up to where.
        on_event: called with the time of each event that was handled.

    Raises:
        UserFault: nothing was recorded; or what is asked for is not there; or the recording is damaged, or was made by
            other rules.
    """
    files, notes, until_s = chosen_files(folder, choice), _notes(folder), _time_of_step(folder, choice.until)
    live: dict[Path, Incarnation] = {}
    num_events, num_commands, end_s, last = 0, 0, 0.0, None
    for at_s, path, row in merged_rows(files):
        if last is not None or (until_s is not None and at_s > until_s):
            break
        if isinstance(row, Began):
            notes.update(checked_rules(path, row, anyway=choice.anyway))
            live[path] = Incarnation(path.stem, row)
            continue
        if (incarnation := live.get(path)) is None:
            raise UserFault(f"{path}: damaged: its first line does not say what {path.stem} was built with")
        moment = incarnation.handle(row)
        num_events, num_commands, end_s = num_events + 1, num_commands + len(moment.commands), at_s
        on_event(at_s)
        if moment.error and moment.is_same:
            notes[f"{moment.event_id} ({row.event}) raises {moment.error}, as it did in the run"] = None
        if not moment.is_same or _is_end(moment, choice):
            last = incarnation.described(moment)
    if last is None and (wanted := choice.breaks_on or (choice.until if until_s is None else "")):
        notes[f"{wanted} did not come"] = None
    return Replayed(
        num_events=num_events,
        num_commands=num_commands,
        num_incarnations=len(live),
        end_s=end_s,
        moment=last,
        notes=tuple(notes),
    )


def story_of(folder: Path, moment: Moment, ids: frozenset[str]) -> tuple[StoryLine, ...]:
    """The last events before this one that were about one of these subjects, by time, without reports of progress;
    where there are none, the last that its actor has handled.

    Raises:
        UserFault: the recording is damaged.
    """
    about: deque[StoryLine] = deque(maxlen=STORY_LINES)
    own: deque[StoryLine] = deque(maxlen=STORY_LINES)
    here = moment.incarnation, moment.handled.number
    for at_s, path, row in merged_rows(recorded_files(folder)):
        if isinstance(row, Began):
            continue
        if at_s > moment.handled.at_s or (path.stem, row.number) == here:
            break
        line = StoryLine(f"{path.stem}:{row.number}", at_s, row.event, row.subject, row.sender)
        if path.stem == moment.incarnation:
            own.append(line)
        if row.event not in _PROGRESS and row.subject and (row.subject in ids or row.subject.partition("/")[0] in ids):
            about.append(line)
    return tuple(about or own)


# --- files ------------------------------------------------------------------------------------------------------------


def recorded_files(folder: Path) -> list[Path]:
    """Every recording of a run.

    Raises:
        UserFault: there is none.
    """
    found = files_in(folder_of_run(folder) / RECORDING_FOLDER)
    if not found:
        file_of_run(folder, SCENARIO_FILE)  # a folder of anything else is told as that
        why = "run it with observability.record=true"
        raise UserFault(f"{folder}: nothing in it can be replayed, as nothing was recorded: {why}")
    return found


def chosen_files(folder: Path, choice: Choice) -> list[Path]:
    """The recordings of the actors that are chosen.

    Raises:
        UserFault: there are none.
    """
    files, stem = recorded_files(folder), choice.actor.replace("/", "-")
    names = sorted({path.stem.rpartition("-")[0] for path in files})
    if choice.actor and stem not in names:
        raise UserFault(f"actor: {choice.actor} is not in the recording, which has {', '.join(names)}")
    return [path for path in files if not stem or path.stem.rpartition("-")[0] == stem]


def merged_rows(files: list[Path]) -> Iterator[tuple[float, Path, Began | Handled]]:
    """The lines of all files by time; those of a file keep their order."""

    def rows(path: Path) -> Iterator[tuple[float, Path, Began | Handled]]:
        latest_s = 0.0
        for row in read_rows(path, cast("type[Began | Handled]", Began | Handled)):
            latest_s = max(latest_s, row.at_s)
            yield latest_s, path, row

    return heapq.merge(*map(rows, files), key=lambda found: found[0])


def _time_of_step(folder: Path, until: str) -> float | None:
    """When the Buffer heard of it; None where no step is asked for."""
    if not until.isdigit():
        if until and not _EVENT_ID.fullmatch(until):
            raise UserFault(f"until: {until!r} is neither the number of a step nor an event, such as buffer-1:123")
        return None
    if (at_s := time_of_step(folder, int(until))) is None:
        raise UserFault(f"until: step {until} is not in the recording; {recorded_steps(folder)}")
    return at_s


def time_of_step(folder: Path, version: int) -> float | None:
    """When the Buffer heard that this step was trained, in seconds since the start of the run; None: it did not.

    Raises:
        UserFault: nothing was recorded.
    """
    return next((at_s for at_s, step in _steps(folder) if step == version), None)


def recorded_steps(folder: Path) -> str:
    """Which steps the recording of a run has, to be said where another one was asked for."""
    steps = [step for _, step in _steps(folder)]
    return f"it has steps {min(steps)} to {max(steps)}" if steps else "it has none"


def _steps(folder: Path) -> Iterator[tuple[float, int]]:
    buffers = [path for path in recorded_files(folder) if path.stem.rpartition("-")[0] == BUFFER]
    for at_s, _, row in merged_rows(buffers):
        if isinstance(row, Handled) and row.event == _STEP and row.subject.removeprefix("step ").isdecimal():
            yield at_s, int(row.subject.removeprefix("step "))


def _notes(folder: Path) -> dict[str, None]:
    """What a reader has to know, each once, in order."""
    if (folder / RECORDING_FOLDER / FULL_FILE).exists():
        return {"the recording ends before the run did: it had come to half of observability.max_disk_gb": None}
    return {}


def checked_rules(path: Path, began: Began, *, anyway: bool) -> dict[str, None]:
    """What is to be known of the rules that made a recording.

    Raises:
        UserFault: they are other ones than those here, and ``anyway`` is not said.
    """
    if began.form != FORM:
        raise UserFault(f"{path}: the recording has form {began.form}, this version reads form {FORM}")
    if began.rules == rules_digest():
        return {}
    what = f"recorded by Penstock {began.version} with rules {began.rules}; this is {__version__} with {rules_digest()}"
    if not anyway:
        raise UserFault(f"{path}: {what}. Replay it with the version that recorded it, or all the same with --anyway")
    return {what: None}


def unpacked(data: bytes, form: type[Any], what: str) -> Any:  # noqa: ANN401 - of that form
    """What these bytes of a recording hold.

    Raises:
        UserFault: this version cannot read it.
    """
    try:
        return msgspec.msgpack.decode(data, type=form)
    except UNREADABLE as error:
        raise UserFault(f"{what} cannot be read by this version: {error}") from error


def _is_end(moment: Moment, choice: Choice) -> bool:
    if not (wanted := choice.breaks_on):
        return choice.until == moment.event_id
    handled = moment.handled
    return wanted in (handled.event, handled.subject, handled.subject.partition("/")[0]) or any(
        wanted in _names_of(command.derived) for command in moment.commands if command.derived is not None
    )


def plain(body: bytes) -> Plain:
    """An event or a command that was recorded, for looking at it."""
    return cast("Plain", msgspec.msgpack.decode(body))


def _names_of(command: AskedCommand) -> tuple[str, ...]:
    """The classes of a command and of the event that it sends."""
    if not command.body:
        return tuple(command.label.split()[:2])
    body = plain(command.body)
    both = (body, body.get("event")) if isinstance(body, dict) else ()
    return tuple(str(each["type"]) for each in both if isinstance(each, dict))
