"""Watches how PromptSource deals with losses and failures, with books of its own.

Invariants:

* Word that an engine or a keeper was lost is answered at once with a question to all others what they hold.
* No sample is given up before it was tried as often as its row, or else the run, allows, or its engines died too often.
* A sample goes on elsewhere from all that PromptSource was told of it, where it can go on from any token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.actors.prompt_source.machine import KEEPERS, PromptSource
from penstock.messages.commands import Send
from penstock.messages.flow import GenerationClosed, GenerationProgressed, SampleFailed, SampleIssued
from penstock.messages.membership import ActorLost, ActorReturned, EngineJoined, EngineLost, LeasesAsked
from penstock.messages.names import is_engine
from penstock.messages.samples import Cancelled, InfraError, SampleKey
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class _Known(msgspec.Struct):
    """What one incarnation of PromptSource was told."""

    members: dict[str, int] = {}
    """Engines and keepers that are there, with their epochs."""
    responses: dict[SampleKey, tuple[int, int]] = {}
    """Of samples that it has issued and that have not left their engine: attempt, and tokens that it knows of."""
    failed: set[tuple[SampleKey, int]] = set()
    """Attempts of which it has heard that they failed; what comes of one afterwards, out of order, may go."""


class SourceWatch(IdleWatcher):
    """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self, *, salvages: bool) -> None:
        """``salvages``: samples go on from any token."""
        self._salvages = salvages
        self._known: dict[Process, _Known] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        machine = process.shell.machine
        if not isinstance(machine, PromptSource):
            return
        known = self._known.setdefault(process, _Known())
        match event:
            case EngineJoined(name=name, epoch=epoch) | ActorReturned(name=name, epoch=epoch):
                if (is_engine(name) or name in KEEPERS) and known.members.get(name, -1) < epoch:
                    known.members[name] = epoch
            case EngineLost(name=name, epoch=epoch) | ActorLost(name=name, epoch=epoch):
                if known.members.get(name, -1) == epoch:
                    del known.members[name]
                    _assert_asked(known, name, commands)
            case GenerationProgressed():
                attempt, num_tokens = known.responses.get(event.key, (-1, 0))
                has_failed = (event.key, attempt) in known.failed
                if not has_failed and (attempt, num_tokens) == (event.attempt, event.from_token):
                    known.responses[event.key] = attempt, num_tokens + event.chunk.num_tokens
            case GenerationClosed(outcome=InfraError() | Cancelled()):
                known.failed.add((event.key, event.attempt))
            case GenerationClosed():
                known.responses.pop(event.key, None)
            case _:
                pass
        for command in commands:
            match command:
                case Send(event=SampleIssued() as issued):
                    self._issued(known, issued)
                case Send(event=SampleFailed() as failed):
                    options, own = machine.settings.options, failed.prompt.num_retries
                    most = min(options.num_retries if own is None else own, options.max_engine_losses)
                    assert failed.attempt >= most, f"{failed.key} is given up after attempt {failed.attempt} of {most}"
                case _:
                    pass

    def _issued(self, known: _Known, issued: SampleIssued) -> None:
        prefix = 0 if issued.prefix is None else issued.prefix.num_tokens
        attempt, num_tokens = known.responses.get(issued.key, (-1, 0))
        if self._salvages and attempt == issued.attempt - 1:
            assert prefix >= num_tokens, f"{issued.key} goes on from token {prefix}, of {num_tokens} that are known"
        known.responses[issued.key] = issued.attempt, prefix


def _assert_asked(known: _Known, lost: str, commands: list[AnyCommand]) -> None:
    asked = {each.to for each in commands if isinstance(each, Send) and isinstance(each.event, LeasesAsked)}
    assert asked >= known.members.keys(), (
        f"{lost} is lost, and of {sorted(known.members)} only {sorted(asked)} are asked"
    )
