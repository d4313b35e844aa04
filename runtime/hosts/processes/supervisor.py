"""The supervisor: starts every actor, notices who is gone, starts a successor, ends the run with its story.

Invariants:

* Every incarnation that is given up is announced to everyone, then killed, then followed. In this order: a peer must
  not hear of a successor while it still believes the predecessor, and a successor must not run beside one that was
  not even sent SIGKILL. One that shares devices is killed first, and announced when nothing of it is left.
* Epochs of a name rise by one. What a given-up incarnation still says is not heard; its heartbeat is answered with
  the order to kill itself.
* A supervisor that was asleep itself blames nobody for it.
* The run ends once, with one story: that of whatever happened first.

| waits for | who ends it |
|---|---|
| a new process: ``ProcessStarted`` | the process; else ``START_TIMEOUT_S`` |
| a heartbeat | the process; else ``heartbeat_timeout_s``, or a tenth of what its start took |
| a restart that is due | the clock |
| an engine that is to leave, or whose GPUs are to come | ``engine_crew.py``, ``gpu_waits.py`` |
| the end of one that shares devices | ``endings.py`` |
| ``RunFinished``, once it is asked for | the Buffer, when a checkpoint is recorded; else ``stop_timeout_s`` |
| the end of every process, once it is asked for | the processes; else ``END_TIMEOUT_S``, then SIGKILL |
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from penstock.backends.processes.process_facts import facts_of, kill
from penstock.messages.evaluation import EvaluationFinished
from penstock.messages.membership import EngineEmptied, EnginesWanted
from penstock.messages.names import BUFFER, LEARNER, SUPERVISOR
from penstock.messages.operator import OperatorAnswered
from penstock.messages.training import ActorReported, FailuresCounted, NoticeGiven, RunFinished, StepReported, StopAsked
from penstock.messages.waits import WaitsReported
from penstock.messages.wire import InboxDecoder, WireError
from penstock.runtime.hosts.processes.announcer import Announcer
from penstock.runtime.hosts.processes.boot import EndKind
from penstock.runtime.hosts.processes.control import (
    DISMISSED,
    EndAsked,
    MachineNoticed,
    ProcessBeat,
    ProcessStarted,
    ReplacementAsked,
    RunFailureAsked,
    SupervisorInbox,
)
from penstock.runtime.hosts.processes.directory import Directory
from penstock.runtime.hosts.processes.endings import Endings
from penstock.runtime.hosts.processes.ends import verdict_on
from penstock.runtime.hosts.processes.engine_crew import EngineCrew
from penstock.runtime.hosts.processes.incarnations import Incarnation
from penstock.runtime.hosts.processes.links import LineState, Links
from penstock.runtime.hosts.processes.ports import Outcome, OutcomeKind
from penstock.runtime.shell.delivery import Delivery
from penstock.runtime.shell.restarts import Restarts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from signal import Signals as SignalNumber

    from penstock.messages.base import Event
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.processes.boot import Boot
    from penstock.runtime.hosts.processes.operator_door import OperatorDoor
    from penstock.runtime.hosts.processes.ports import EndedProcess, Launcher, RunSink, SupervisorSettings
    from penstock.runtime.hosts.processes.signals import Signals

TURN_S: Final = 0.2
"""How often processes are looked at when nothing arrives."""
JUMP_S: Final = 2.0
"""A turn that comes so much late means that the supervisor itself was stopped."""
END_TIMEOUT_S: Final = 2.0
MISSED_CHANGE_S: Final = 2.0
MAX_FRAMES_A_TURN: Final = 256

_log: Final = logging.getLogger(__name__)


class Supervisor:
    """Runs the actors of one run. For the main thread."""

    def __init__(
        self,
        settings: SupervisorSettings,
        *,
        boot_of: Callable[[str, int], Boot],
        links: Links,
        launcher: Launcher,
        sink: RunSink,
        signals: Signals,
        lifeline: int | None = None,
        door: OperatorDoor | None = None,
    ) -> None:
        """
        Args:
            settings: who is started, and the limits.
            boot_of: what the incarnation of this name and epoch is started with.
            links: the supervisor's sockets, made on this thread.
            launcher: starts and kills processes.
            sink: is told what happens.
            signals: what a user or the system asks for.
            lifeline: a descriptor that reaches its end when whoever started the driver is gone.
            door: where an operator's requests come in, polled with the links.
        """
        self.settings = settings
        self.restarts = Restarts(max_restarts=settings.max_restarts)
        self.num_malformed = 0
        self.num_fenced = 0
        self._boot_of = boot_of
        self._links = links
        self._launcher = launcher
        self._sink = sink
        self._signals = signals
        self._lifeline = lifeline
        self._door = door
        self._directory = Directory()
        self._delivery = Delivery(resend_after_s=60.0)  # for what it accepts; what it sends needs no repeating
        self._decoder: InboxDecoder[Event] = InboxDecoder(SupervisorInbox)
        self._crew: dict[str, Incarnation] = {}
        self._announcer = Announcer(links, self._crew)
        self._due: dict[str, tuple[float, int]] = {}
        """Restarts: when, and as which epoch."""
        self._suspects: set[str] = set()
        """Who was given up because somebody asked for it, or has left: its successor takes nothing over."""
        fail = partial(self._conclude, OutcomeKind.FAILED)
        self._endings = Endings(settings.shares_devices, launcher, fail)
        self._engines = EngineCrew(
            settings, self._directory, self._crew, self._due, ask=partial(self._announcer.say, BUFFER),
            start=self._start, end=self._endings.end, part_from=self._part_from, launcher=launcher,
            broadcast=self._announcer.broadcast, forget=self.restarts.forget, fail=fail, sink=sink,
        )  # fmt: skip
        self._outcome: Outcome | None = None
        self._finished: RunFinished | None = None
        self._is_hurried = False
        """Nobody is asked any more, everybody is killed."""
        self._next_look_s = 0.0
        self._listened_s = 0.0
        for source in (launcher, signals):
            links.poller.register(source.fileno(), zmq.POLLIN)
        if lifeline is not None:
            links.poller.register(lifeline, zmq.POLLIN)

    # --- the run ----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start everyone; return when the run is over and no process of an actor is left."""
        for name in self.settings.names:
            self._start(name, self.settings.first_epoch)
        self._listened_s = time.monotonic()
        while self._outcome is None:
            self._turn(self._pause_s())
        self._stop()
        self._end()
        _log.info("frames dropped: %d malformed, %d of given-up incarnations", self.num_malformed, self.num_fenced)
        return msgspec.structs.replace(self._outcome, finished=self._finished)

    def _stop(self) -> None:
        """Let the Buffer have a checkpoint written and close its books, unless there is nobody who could."""
        assert self._outcome is not None
        if not self._may_save():
            return
        limit_s = self.settings.stop_timeout_s
        deadline_s = time.monotonic() + limit_s
        self._sink.on_stopping(limit_s)
        self._announcer.say(BUFFER, StopAsked(reason=self._outcome.story))
        while self._may_save():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                text = f"no checkpoint was recorded within {limit_s:g} s (runtime.stop_timeout_s)"
                self._sink.on_notice(SUPERVISOR, text)
                break
            self._turn(min(left_s, TURN_S))

    def _may_save(self) -> bool:
        """Whether a last checkpoint is still to come: who writes it and who records it are there and have started."""
        if self._finished is not None or self._is_hurried or self._launcher.broken():
            return False
        there = [name for name in (BUFFER, LEARNER) if name in self._crew and name not in self._endings]
        return len(there) == 2 and all(self._crew[name].is_ready for name in there)

    def _end(self) -> None:
        """End every process: first ask, then kill."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        self._due.clear()
        self._announcer.broadcast(EndAsked(grace_s=END_TIMEOUT_S))
        while self._crew and not self._is_hurried:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._launcher.broken() or all(one.process is None for one in self._crew.values()):
                break
            self._turn(min(left_s, TURN_S))
        for incarnation in list(self._crew.values()):
            self._launcher.kill(incarnation.name, incarnation.epoch, incarnation.process)
            self._forget(incarnation)

    def _pause_s(self) -> float:
        due_s = min((due_s for due_s, _ in self._due.values()), default=float("inf"))
        return max(0.0, min(TURN_S, due_s - time.monotonic()))

    def _turn(self, pause_s: float) -> None:
        self._links.poller.poll(int(1000 * pause_s) + 1)
        now_s = time.monotonic()
        deaf_s, self._listened_s = now_s - self._listened_s, now_s
        if deaf_s > pause_s + JUMP_S:  # it may have been stopped anywhere in a turn, not only while it waited
            _log.warning("the supervisor was asleep for %.1f s; everyone gets a fresh period", deaf_s)
            for incarnation in self._crew.values():
                incarnation.forgive(now_s)
            self._endings.forgive(now_s)
        self._take_signals()
        self._receive(now_s)
        for change in self._links.changes():
            if change.peer in self._crew and change.state is not LineState.REFUSED:
                self._crew[change.peer].line_is(now_s, up=change.state is LineState.UP)
                self._next_look_s = 0.0  # a process that was just killed shows in /proc
        for ended in self._launcher.ended():
            self._on_ended(ended)
        if broken := self._launcher.broken():
            self._conclude(OutcomeKind.FAILED, broken)
        self._look(now_s)
        self._endings.look(now_s)
        self._start_due(now_s)
        if self._door is not None:
            ending = "" if self._outcome is None else self._outcome.story
            self._door.turn(now_s, partial(self._announcer.say, BUFFER), ending=ending)
        self._sink.on_turn()

    def _take_signals(self) -> None:
        for number in self._signals.take():
            self._is_hurried = self._outcome is not None  # somebody asks for the second time
            self._conclude(OutcomeKind.STOPPED, f"stopped by {number.name}", number)
        lifeline = self._lifeline
        if lifeline is not None and select.select([lifeline], [], [], 0)[0] and not os.read(lifeline, 1):
            self._links.poller.unregister(lifeline)
            self._lifeline = None
            self._is_hurried = True
            self._conclude(OutcomeKind.ABANDONED, "the process that started the run is gone")

    def _conclude(self, kind: OutcomeKind, story: str, number: SignalNumber | None = None) -> None:
        if self._outcome is None:
            _log.info("the run ends: %s: %s", kind, story)
            self._outcome = Outcome(kind=kind, story=story, signal=number)

    # --- what arrives -----------------------------------------------------------------------------------------

    def _receive(self, now_s: float) -> None:
        for connection, frame in self._links.receive(MAX_FRAMES_A_TURN):
            try:
                events, errors = self._decoder.decode(frame)
            except WireError as error:
                events, errors = [], [error]
            for bad in errors:
                self.num_malformed += 1
                if self.num_malformed == 1:
                    _log.warning("dropped a malformed frame: %s; more are only counted", bad)
            for header, event in events:
                self._on_event(connection, header, event, now_s)

    def _on_event(self, connection: bytes, header: Header, event: Event, now_s: float) -> None:
        incarnation = self._crew.get(header.sender)
        if incarnation is None or incarnation.epoch != header.epoch:
            self.num_fenced += 1
            if isinstance(event, ProcessBeat) and not self._directory.admits(header.sender, header.epoch):
                self._links.reply(connection, DISMISSED)
            return
        incarnation.heard(now_s)
        match event:
            case ProcessBeat():
                self._on_beat(incarnation, event, now_s)
            case ProcessStarted():
                self._on_started(incarnation, event, now_s)
            case ReplacementAsked():
                self._on_replacement_asked(header.sender, event)
            case RunFailureAsked():
                self._conclude(OutcomeKind.DIVERGED if event.has_diverged else OutcomeKind.FAILED, event.story)
            case ActorReported():
                if told := incarnation.reported(event, now_s, timeout_s=self.settings.heartbeat_timeout_s):
                    self._sink.on_notice(SUPERVISOR, told)
                self._sink.on_report(event)
                self._engines.reported(event)
                if len(self._crew) >= len(self.settings.names) and all(one.is_ready for one in self._crew.values()):
                    self._launcher.make_spare()  # not before: while models are loaded there is no CPU to spare
            case StepReported():
                if self._delivery.accepts(event, header.sender, header.epoch, header.message_id):
                    self._sink.on_step(event)
                    self._engines.reported(event)
            case EvaluationFinished():
                self._sink.on_evaluation(event)
            case RunFinished():
                self._on_finished(event)
            case FailuresCounted():
                self._sink.on_failures(event)
            case NoticeGiven():
                self._sink.on_notice(event.name, event.text, is_warning=event.is_warning)
            case WaitsReported():
                self._sink.on_waits(event)
            case EnginesWanted() | EngineEmptied() | MachineNoticed():
                if self._outcome is None:
                    self._engines.hear(event, incarnation, now_s)
            case OperatorAnswered():
                if self._door is not None:
                    self._door.answered(event)
            case _:
                raise AssertionError(f"the supervisor's inbox lets {type(event).__name__} in and nothing handles it")

    def _on_started(self, incarnation: Incarnation, started: ProcessStarted, now_s: float) -> None:
        change = self._directory.add(started.address)
        if change is None:
            return
        incarnation.process = started
        self._launcher.announced(started)
        self._links.connect(started.address)
        self._announcer.broadcast(change, but=incarnation.name)
        self._send_whole(incarnation, now_s)
        self._sink.on_actor(incarnation.name, incarnation.epoch, "up")
        where = (started.pid, started.node_id[:8], started.address.endpoint)
        _log.info("%s %d is process %d on node %s, %s", incarnation.name, incarnation.epoch, *where)

    def _on_beat(self, incarnation: Incarnation, beat: ProcessBeat, now_s: float) -> None:
        incarnation.beat = beat
        if incarnation.has_become_slow():
            self._tell_slow(incarnation, beat)
        is_behind = beat.num_turns > 0 and beat.directory_sequence < self._directory.sequence
        if is_behind and now_s - incarnation.directory_sent_s > MISSED_CHANGE_S:
            self._send_whole(incarnation, now_s)

    def _tell_slow(self, incarnation: Incarnation, beat: ProcessBeat) -> None:
        self._sink.on_slow(incarnation.name, beat.turn_s)
        _log.warning("%s %d has been in one turn for %.0f s", incarnation.name, incarnation.epoch, beat.turn_s)
        if (process := incarnation.process) is not None and self._launcher.is_local(process):
            kill(process.pid, process.start_ticks, signal.SIGUSR1)  # its log then shows where every thread is

    def _on_replacement_asked(self, asker: str, asked: ReplacementAsked) -> None:
        incarnation = self._crew.get(asked.name)
        if incarnation is not None and incarnation.epoch == asked.epoch:
            self._suspects.add(asked.name)
            self._give_up(incarnation, f"{asker} asked for its replacement: {asked.cause}")

    def _on_finished(self, finished: RunFinished) -> None:
        self._finished = finished
        if finished.completed and self._outcome is not None and self._outcome.kind is OutcomeKind.STOPPED:
            self._outcome = None  # its last step was under way when it was asked to stop
        kind = OutcomeKind.COMPLETED if finished.completed else OutcomeKind.FAILED
        self._conclude(kind, finished.story)

    def _on_ended(self, ended: EndedProcess) -> None:
        incarnation = self._crew.get(ended.name)
        if incarnation is None or incarnation.epoch != ended.epoch:
            return
        if self._outcome is not None and ended.end is not None and ended.end.kind in (EndKind.ASKED, EndKind.DISMISSED):
            self._sink.on_actor(ended.name, ended.epoch, "ended")
            self._forget(incarnation)
            return
        if ended.end is not None and ended.end.traceback:
            _log.error("%s %d crashed\n%s", ended.name, ended.epoch, ended.end.traceback)
        cause, ends_as = verdict_on(ended)
        is_spared = ends_as is OutcomeKind.USER_ERROR and self._engines.membership.can_spare(ended.name)
        if ends_as is not None and not is_spared:
            self._conclude(ends_as, cause)
        self._give_up(incarnation, cause, is_for_good=is_spared)

    # --- who lives --------------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        if now_s < self._next_look_s:
            return
        self._next_look_s, timeout_s = now_s + TURN_S, self.settings.heartbeat_timeout_s
        for incarnation in list(self._crew.values()):
            process = incarnation.process
            is_local = process is not None and self._launcher.is_local(process)
            facts = facts_of(process.pid) if process is not None and is_local else None
            cause = incarnation.cause_of_loss(now_s, facts, timeout_s=timeout_s, is_local=is_local)
            if cause:
                self._give_up(incarnation, cause)
        if self._outcome is None:
            self._engines.look(now_s)

    def _start(self, name: str, epoch: int) -> None:
        self._crew[name] = Incarnation(name, epoch, time.monotonic())
        self._sink.on_actor(name, epoch, "starting")
        takes_over = epoch > self.settings.first_epoch and name not in self._suspects
        self._suspects.discard(name)
        self._launcher.launch(msgspec.structs.replace(self._boot_of(name, epoch), takes_over=takes_over))

    def _start_due(self, now_s: float) -> None:
        for name, (due_s, epoch) in list(self._due.items()):
            if due_s <= now_s and self._outcome is None:
                del self._due[name]
                self._engines.start(name, epoch, now_s)

    def _give_up(self, incarnation: Incarnation, cause: str, *, is_for_good: bool = False) -> None:
        if incarnation.name in self._endings:
            return
        _log.warning("%s %d is lost: %s", incarnation.name, incarnation.epoch, cause)
        then = partial(self._follow, incarnation, cause, is_for_good=is_for_good)
        self._endings.end(incarnation, time.monotonic(), then)

    def _follow(self, incarnation: Incarnation, cause: str, now_s: float, *, is_for_good: bool) -> None:
        """It is given up; another takes its place, or the run goes on without it, or ends."""
        name, epoch = incarnation.name, incarnation.epoch
        is_replaced = self._engines.membership.is_replaced(name)
        self._part_from(incarnation)
        self._sink.on_actor(name, epoch, "lost")
        if self._outcome is not None:
            return
        self._sink.on_lost(name, cause)
        if not is_replaced:
            self._engines.has_gone(name, epoch)
            self._engines.match(now_s)
            return
        pause_s = None if is_for_good else self.restarts.pause_s(name, now_s)
        if pause_s is not None:
            self._due[name] = (now_s + pause_s, epoch + 1)
            return
        story = cause if is_for_good else self.restarts.limit_story(name, cause)
        if not self._engines.gives_up(name, epoch, story, now_s):
            self._conclude(OutcomeKind.FAILED, story)

    def _part_from(self, incarnation: Incarnation) -> None:
        name, epoch = incarnation.name, incarnation.epoch
        if self._engines.membership.is_leaving(name):
            self._suspects.add(name)  # whoever comes by this name later: what it leaves ends with it
        self._engines.membership.gone(name)
        self._forget(incarnation)
        self._announcer.broadcast(self._directory.give_up(name, epoch))
        self._launcher.kill(name, epoch, incarnation.process)

    def _forget(self, incarnation: Incarnation) -> None:
        del self._crew[incarnation.name]
        self._links.disconnect(incarnation.name)

    # --- what is said -----------------------------------------------------------------------------------------

    def _send_whole(self, incarnation: Incarnation, now_s: float) -> None:
        incarnation.directory_sent_s = now_s
        self._announcer.say(incarnation.name, self._directory.whole())

    @property
    def crew(self) -> Sequence[Incarnation]:
        """Who is there."""
        return tuple(self._crew.values())
