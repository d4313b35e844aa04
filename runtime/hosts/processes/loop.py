"""The loop of one actor's process: it waits, drains what has come, lets the shell act, and waits again.

Invariants:

* One thread runs the loop, the shell, the actor and every socket of the process. Backends answer through a queue.
* What arrives while a turn is worked on becomes the next turn: that is what packs many events into one frame and
  one commit, without a timer and without delay.
* No frame of a peer is handled before the directory has said who is given up.
* A frame that cannot be read is counted and dropped; the first of each kind is written to the log.
* The Buffer is built from the ledger's entries, read after its claim. When a commit fails, nothing of that turn is
  said to anybody and the process ends.

| waits for | who ends it |
|---|---|
| a frame, an answer of the backend | whoever sends it |
| the next timer, the next report | the poller's timeout |
| the directory, at the start | the supervisor; without it the process gives up after ``DIRECTORY_TIMEOUT_S`` |
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, final

import msgspec
import zmq

from penstock.actors.machine import Snapshotting
from penstock.backends.ledger.sqlite import open_ledger
from penstock.backends.protocol import Leaver
from penstock.backends.simulated.timers import ThreadTimers
from penstock.messages.base import Metric
from penstock.messages.commands import FailRun, ReplaceActor
from penstock.messages.names import BUFFER, LEARNER, SUPERVISOR, has_lane, is_engine
from penstock.messages.training import ActorReported
from penstock.messages.wire import Envelope, Header, InboxDecoder, WireError, encode_pack
from penstock.runtime.hosts.processes.boot import Boot, EndKind, load_wiring
from penstock.runtime.hosts.processes.control import (
    DirectoryChanged,
    EndAsked,
    MachineNoticed,
    ProcessControl,
    ReplacementAsked,
    RunFailureAsked,
)
from penstock.runtime.hosts.processes.descendants import core_wait_s, resident_bytes
from penstock.runtime.hosts.processes.links import LineState
from penstock.runtime.hosts.processes.machine_notice import MachineNotice
from penstock.runtime.hosts.processes.wakeup import Wakeup
from penstock.runtime.observability.activity import ActivityClock
from penstock.runtime.observability.recording import LedgerTee
from penstock.runtime.shell.shell import Shell, ShellSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.actors.machine import Accounted, Machine
    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.processes.remote_ranks import RemoteRanks
    from penstock.backends.protocol import Backend
    from penstock.messages.base import Event
    from penstock.messages.commands import BackendCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.local import LocalEvent
    from penstock.runtime.hosts.processes.boot import Wiring
    from penstock.runtime.hosts.processes.heartbeat import Pulse
    from penstock.runtime.hosts.processes.links import Links
    from penstock.runtime.observability.recording import Recording
    from penstock.runtime.shell.shell import Observer

MAX_FRAMES_A_TURN: Final = 64
DIRECTORY_TIMEOUT_S: Final = 60.0
LINES_CHECK_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 1.5
_ORDERS: Final = frozenset((DirectoryChanged, EndAsked))
"""That only the supervisor gives."""

_log: Final = logging.getLogger(__name__)


class NoDirectoryError(RuntimeError):
    """The supervisor did not answer a process that has just started."""


class StrangerError(WireError):
    """Who speaks is no actor of this run, or has no right to say this."""


@final
class _Failure(msgspec.Struct, frozen=True):
    """A backend's thread cannot go on."""

    error: BaseException


class RunClock:
    """Seconds since the start of the run: set by the wall clock once, then steady."""

    def __init__(self, started_unix_s: float) -> None:
        self.offset_s: Final = max(0.0, time.time() - started_unix_s) - time.monotonic()
        """From the monotonic clock to this one; what asks at every event adds it itself, which spares a call."""

    def now_s(self) -> float:
        """Never goes back."""
        return time.monotonic() + self.offset_s


def _built(
    wiring: Wiring,
    boot: Boot,
    plan: Any,  # noqa: ANN401 - of the wiring
    store: LedgerStore | None,
    recording: Recording | None,
) -> Machine[Any]:
    if store is None:
        machine = wiring.build_machine(boot.name, plan, epoch=boot.epoch)
        if recording is not None:
            recording.begin(boot.plan)
        return machine
    store.claim(boot.epoch)  # from here on nobody else adds to what is read next
    records, kept = store.entries(), store.kept_books()
    if recording is None:
        return wiring.build_machine(boot.name, plan, epoch=boot.epoch, records=records, kept=kept)
    tee = LedgerTee(kept, records)
    machine = wiring.build_machine(boot.name, plan, epoch=boot.epoch, records=tee.records, kept=tee.kept)
    recording.begin(boot.plan, tee.read())
    return machine


class ActorLoop:
    """One incarnation of an actor. Implements ``penstock.runtime.shell.shell.Host``."""

    def __init__(
        self,
        boot: Boot,
        links: Links,
        pulse: Pulse,
        clock: RunClock,
        observer: Observer | None,
        remote_ranks: RemoteRanks | None = None,
        recording: Recording | None = None,
    ) -> None:
        """Imports the actor and builds it; nothing of it runs yet."""
        wiring = load_wiring(boot.wiring)
        plan = msgspec.msgpack.decode(boot.plan, type=wiring.RunPlan)
        self.boot = boot
        self._links = links
        self._pulse = pulse
        self.now_s: Final[Callable[[], float]] = clock.now_s  # of the shell's ``Host``: asked for each event
        self._answers: Wakeup[LocalEvent | _Failure] = Wakeup()
        self._decoder: InboxDecoder[Event] = InboxDecoder(wiring.inbox_union(boot.name) | ProcessControl)
        self._senders = frozenset((*boot.names, SUPERVISOR))
        self._header = Header(boot.name, boot.epoch, 0, 0, 0)
        self._malformed: dict[str, int] = {}
        self._num_undeliverable = 0
        self._end: EndKind | None = None
        self._has_directory = False
        self._held: list[tuple[Header, Event]] = []
        self._cut: set[str] = set()
        """Peers whose line went down, and whom nobody has given up."""
        self._next_report_s = self._next_lines_s = 0.0
        self._recording = recording
        self._store = open_ledger(Path(boot.run_folder)) if boot.name == BUFFER else None
        self._notice = MachineNotice(boot.notice_s, boot.notice_file, boot.notice_url)
        self._timers = ThreadTimers(self._fail)
        self._machine: Machine[Any] = _built(wiring, boot, plan, self._store, recording)
        # Asked once: an instance check of a protocol is slow, and there is a commit in nearly every turn.
        self._snapshot = self._machine.snapshot if isinstance(self._machine, Snapshotting) else None
        self._backend: Backend[Any] | None = wiring.open_backend(
            boot.name, plan, epoch=boot.epoch, timers=self._timers, store=self._store, host=links.host,
            remote_ranks=remote_ranks if is_engine(boot.name) or boot.name == LEARNER else None,
            takes_over=boot.takes_over,
        )  # fmt: skip
        is_accounted = has_lane(boot.name)
        self._accounted = cast("Accounted", self._machine) if is_accounted else None
        self._activities = ActivityClock(clock.now_s()) if is_accounted else None
        settings = ShellSettings(
            name=boot.name, epoch=boot.epoch, heartbeat_s=boot.heartbeat_s, resend_after_s=boot.resend_after_s,
            overdue_after_s=boot.overdue_after_s, keeps_encoded=True, validate=boot.validate,
        )  # fmt: skip
        self.shell = Shell(self._machine, self, settings=settings, hears=wiring.hears(boot.name), observer=observer)
        for source in (self._answers, self._notice):
            links.poller.register(source.fileno(), zmq.POLLIN)

    # --- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> EndKind:
        """Until the supervisor asks for the end, or this incarnation hears that it was given up.

        Raises:
            NoDirectoryError: the supervisor never answered.
            StaleEpochError: somebody else has claimed the ledger.
            LedgerStoreError: it cannot be written or read.
            Exception: whatever the actor or its backend raised.
        """
        self._await_directory()
        self._notice.listen()
        if self._backend is not None:
            self._backend.start(self._answers.put, self._fail)
        self.shell.start()
        held, self._held = self._held, []
        for header, event in held:
            self._on_event(header, event)
        self._finish_turn()
        while self._end is None:
            self._links.poller.poll(self._pause_ms())
            self._pulse.begin_turn()
            self._receive()
            self._take_answers()
            if self._notice.take():
                self._next_report_s = self.now_s()
            if self.now_s() >= self.shell.next_timer_s():
                self.shell.fire_timers()
            self._finish_turn()
            self._pulse.end_turn()
        if self._end is EndKind.ASKED:
            self._report(self.now_s())  # the last word on tokens and times
        return self._end

    def close(self) -> None:
        """Close the backend and the ledger; the sockets stay open, so that the last events can leave."""
        # A learner that did not end with the run leaves its exports: engines need them until another has published.
        leaves_exports = self.boot.name == LEARNER and self._end is not EndKind.ASKED
        if self._backend is not None and not leaves_exports:
            self._backend.close(CLOSE_TIMEOUT_S)
        self._timers.close(CLOSE_TIMEOUT_S)
        if self._store is not None:
            self._store.close()
        self._answers.close()
        self._notice.close()

    def _fail(self, error: BaseException) -> None:
        self._answers.put(_Failure(error))

    def _await_directory(self) -> None:
        deadline_s = self.now_s() + DIRECTORY_TIMEOUT_S
        while not self._has_directory and self._end is None:
            if self.now_s() > deadline_s:
                raise NoDirectoryError(f"the supervisor sent no directory within {DIRECTORY_TIMEOUT_S:.0f} s")
            self._links.poller.poll(100)
            self._receive()

    def _pause_ms(self) -> int:
        due_s = min(self.shell.next_timer_s(), self._next_report_s, self._next_lines_s)
        return max(0, math.ceil(1000 * (due_s - self.now_s())))

    def _receive(self) -> None:
        for _, frame in self._links.receive(MAX_FRAMES_A_TURN):
            try:
                events, errors = self._decoder.decode(frame)
            except WireError as error:
                events, errors = [], [error]
            for bad in errors:
                self._note_malformed(bad)
            for header, event in events:
                self._on_event(header, event)

    def _on_event(self, header: Header, event: Event) -> None:
        if header.sender not in self._senders:
            self._note_malformed(StrangerError(f"{header.sender[:80]!r} is no actor of this run"))
        elif type(event) in _ORDERS:
            self._on_order(header, event)
        elif self._has_directory:
            self.shell.on_frame(header, event)
        else:
            self._held.append((header, event))

    def _on_order(self, header: Header, event: Event) -> None:
        if header.sender != SUPERVISOR:
            self._note_malformed(StrangerError(f"{header.sender} gives an order of the supervisor"))
        elif isinstance(event, EndAsked):
            self._end = self._end or EndKind.ASKED
        elif isinstance(event, DirectoryChanged):
            self._on_directory(event)

    def _on_directory(self, change: DirectoryChanged) -> None:
        if not change.is_whole and not self._has_directory:
            return  # the whole is on its way
        boot, links = self.boot, self._links
        for fence in change.fences:
            if fence.name == boot.name and fence.epoch >= boot.epoch:
                self._end = EndKind.DISMISSED
            address = links.address_of(fence.name)
            if address is not None and address.epoch <= fence.epoch:
                links.disconnect(fence.name)
                self._cut.discard(fence.name)
            self.shell.on_lost(fence.name, fence.epoch)
        for member in change.members:
            if member.name == boot.name or not self.shell.membership.admits(member.name, member.epoch):
                continue
            known = links.address_of(member.name)
            if known is None or known.epoch < member.epoch:
                links.connect(member)
            self.shell.on_returned(member.name, member.epoch)
        for leaver in change.leaving:
            self.shell.on_leaving(leaver.name, leaver.epoch)
            if (leaver.name, leaver.epoch) == (boot.name, boot.epoch) and isinstance(self._backend, Leaver):
                self._backend.leaves()
        if change.is_whole or change.sequence == self._pulse.directory_sequence + 1:
            self._pulse.directory_sequence = max(change.sequence, self._pulse.directory_sequence)
        self._has_directory = True

    def _take_answers(self) -> None:
        for answer in self._answers.take():
            if type(answer) is _Failure:
                raise answer.error
            self.shell.on_local(answer)

    def _finish_turn(self) -> None:
        now_s = self.now_s()
        if now_s >= self._next_lines_s:
            self._next_lines_s = now_s + LINES_CHECK_S
            self._look_at_lines()
        self.shell.end_turn()
        now_s = self.now_s()
        if self._activities is not None and self._accounted is not None:
            activity, occupancy, outside = self._accounted.shows
            self._activities.switch(activity, now_s, occupancy, outside)
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + self.boot.heartbeat_s
            if self._recording is not None:
                self._recording.flush()
            self._report(now_s)
            if not self.shell.is_leaving and (word := self._notice.word()) is not None:
                self._tell_supervisor(MachineNoticed(notice_s=word.left_s, how=word.how))

    def _look_at_lines(self) -> None:
        for change in self._links.changes():
            if change.state is LineState.DOWN:
                self._cut.add(change.peer)
            elif change.state is LineState.UP and change.peer in self._cut:
                self._cut.remove(change.peer)
                self.shell.on_line_restored(change.peer)

    def _report(self, now_s: float) -> None:
        activities = () if self._activities is None else self._activities.take(now_s)
        gauges = () if self._backend is None else self._backend.gauges()
        report = ActorReported(
            name=self.boot.name,
            epoch=self.boot.epoch,
            state=self._machine.state,
            activities=activities,
            metrics=(*self.shell.metrics, *self._process_metrics(), *gauges),
        )
        self._tell_supervisor(report)

    def _process_metrics(self) -> tuple[Metric, ...]:
        links = self._links
        return (
            Metric("process/cpu_s", time.process_time()),
            Metric("process/core_wait_s", core_wait_s()),
            Metric("process/resident_bytes", resident_bytes()),
            Metric("wire/malformed", sum(self._malformed.values())),
            Metric("wire/undeliverable", self._num_undeliverable),
            Metric("wire/refused", links.num_refused),
            Metric("wire/lines_down", links.num_down),
        )

    def _note_malformed(self, error: WireError) -> None:
        kind = type(error).__name__
        self._malformed[kind] = self._malformed.get(kind, 0) + 1
        if self._malformed[kind] == 1:
            _log.warning("dropped (%s): %s; more of this kind are only counted", kind, error)

    # --- what the shell asks for ------------------------------------------------------------------------------

    def commit(self, entries: Sequence[LedgerEntry]) -> None:
        assert self._store is not None, "only the Buffer keeps records"
        self._store.commit(entries, self._snapshot)

    def transmit(self, to: str, envelopes: list[Envelope]) -> None:
        if not self._links.send(to, encode_pack(envelopes)):
            self._num_undeliverable += len(envelopes)

    def execute(self, command: BackendCommand) -> None:
        assert self._backend is not None, f"{self.boot.name} has no backend for {type(command).__name__}"
        self._backend.execute(command)

    def ask_supervisor(self, command: ReplaceActor | FailRun) -> None:
        match command:
            case ReplaceActor():
                self._tell_supervisor(ReplacementAsked(name=command.name, epoch=command.epoch, cause=command.cause))
            case FailRun():
                self._tell_supervisor(RunFailureAsked(story=command.story, has_diverged=command.has_diverged))

    def _tell_supervisor(self, event: Event) -> None:
        self._links.send(SUPERVISOR, encode_pack([(self._header, event)]))
