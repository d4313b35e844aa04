"""Drives one actor by hand: events in, commands out, every invariant asserted after every event."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.requests import RequestTable
from penstock.actors.engine_worker.weights import Weights
from penstock.actors.settled import KnownSettled
from penstock.actors.transitions import Steps
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Command, Entry, Event
from penstock.messages.commands import Record, Send
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.actors.machine import Machine
    from penstock.messages.commands import AnyCommand

MachineT = TypeVar("MachineT", bound="Machine[Any]")
CommandT = TypeVar("CommandT", bound=Command)
EventT = TypeVar("EventT", bound=Event)
EntryT = TypeVar("EntryT", bound=Entry)


class Driver(Generic[MachineT]):
    """One machine and everything that it has asked for."""

    def __init__(self, machine: MachineT) -> None:
        self.machine = machine
        self.machine.validate()

    def hear(self, *events: Event) -> list[AnyCommand]:
        """Hand in events, one after the other; all their commands in order."""
        commands: list[AnyCommand] = []
        for event in events:
            commands.extend(self.machine.handle(event))
            self.machine.validate()
        return commands

    def ignores(self, event: Event) -> None:
        """Hand in an event that is illegal or repeated: nothing is asked for and nothing has changed."""
        before = snapshot(self.machine)
        assert self.hear(event) == []
        assert snapshot(self.machine) == before


def snapshot(value: object) -> object:
    """A deep copy of the state, comparable with ``==``."""
    match value:
        case Steps():
            return None  # what was done, not how things stand
        case Enum() | str() | bytes() | int() | float() | None:
            return value
        case msgspec.Struct():
            fields = {name: snapshot(getattr(value, name)) for name in value.__struct_fields__}
            return (type(value).__name__, fields)
        case dict():
            items = cast("dict[object, object]", value).items()
            return [(key, snapshot(item)) for key, item in items]
        case list() | tuple() | deque():
            return [snapshot(item) for item in cast("Iterable[object]", value)]
        case set() | frozenset():
            return frozenset(cast("set[object]", value))
        case type():
            return value
        case KnownSettled() | EngineWorker() | RequestTable() | Weights():
            return (type(value).__name__, {name: snapshot(getattr(value, name)) for name in type(value).__slots__})
        case _ if hasattr(value, "__dict__"):
            return (type(value).__name__, {name: snapshot(item) for name, item in vars(value).items()})
        case _:
            return value


# --- commands -----------------------------------------------------------------------------------------------------


def every(commands: Sequence[AnyCommand], kind: type[CommandT]) -> list[CommandT]:
    """The commands of this class."""
    return [command for command in commands if isinstance(command, kind)]


def one(commands: Sequence[AnyCommand], kind: type[CommandT]) -> CommandT:
    """The only command of this class."""
    found = every(commands, kind)
    assert len(found) == 1, f"expected one {kind.__name__}, got {found}"
    return found[0]


def sent(commands: Sequence[AnyCommand], kind: type[EventT], to: str | None = None) -> list[EventT]:
    """The events of this class that are sent, to whomever or to one actor."""
    sends = every(commands, Send)
    return [send.event for send in sends if isinstance(send.event, kind) and to in (None, send.to)]


def one_sent(commands: Sequence[AnyCommand], kind: type[EventT], to: str | None = None) -> EventT:
    """The only event of this class that is sent."""
    found = sent(commands, kind, to)
    assert len(found) == 1, f"expected one {kind.__name__}, got {found}"
    return found[0]


def recorded(commands: Sequence[AnyCommand], kind: type[EntryT]) -> list[EntryT]:
    """The ledger entries of this class."""
    return [entry for record in every(commands, Record) for entry in record.entries if isinstance(entry, kind)]


# --- samples ------------------------------------------------------------------------------------------------------


def part(*spans: tuple[int, int]) -> Part:
    """A part of these (version, number of tokens); token ``t`` is ``t``."""
    num_tokens = sum(number for _, number in spans)
    return Part(
        tokens=pack_tokens(range(num_tokens)),
        logprobs=pack_floats(-float(t) for t in range(num_tokens)),
        spans=tuple(VersionSpan(*span) for span in spans),
    )


def prompt(row: int = 0) -> Prompt:
    """A prompt of three tokens."""
    return Prompt(row=row, epoch=0, tokens=pack_tokens([row, 1, 2]))


def sample(group_id: int, index: int, *spans: tuple[int, int], reward: float | None = None, attempt: int = 0) -> Sample:
    """A completed sample of these spans (four tokens of version 0 unless told); scored when there is a reward."""
    return Sample(
        key=SampleKey(group_id, index),
        attempt=attempt,
        engine="engine/0",
        parts=(part(*(spans or ((0, 4),))),),
        outcome=Completed(reward=None if reward is None else Reward(value=reward)),
    )


def group(group_id: int, *spans: tuple[int, int], size: int = 2, ended: tuple[SampleEnd, ...] = ()) -> Group:
    """A group whose samples all have these spans, with rewards 0, 1, 0, 1, …"""
    samples = tuple(sample(group_id, index, *spans, reward=float(index % 2)) for index in range(size))
    return Group(group_id=group_id, prompt=prompt(group_id), samples=samples, ended=ended)
