"""The heartbeat of a process: a thread with sockets of its own, so that a long turn of the loop is not death.

Invariants:

* It says only what it can see from outside the loop: how many turns are finished, and how old the current one is.
* A process that hears that it was given up kills itself, whatever its loop is doing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import zmq

from penstock.messages.names import SUPERVISOR
from penstock.messages.wire import Header, encode_pack
from penstock.runtime.hosts.processes.control import DISMISSED, ProcessBeat
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.processes.wakeup import Wakeup

if TYPE_CHECKING:
    from penstock.runtime.hosts.processes.boot import Boot


class Pulse:
    """What the loop leaves for its heartbeat to read. Written by the loop alone."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.turn_start_s: float | None = None
        """On the monotonic clock; None between turns."""
        self.directory_sequence = 0

    def begin_turn(self) -> None:
        """The loop has something to do."""
        self.turn_start_s = time.monotonic()

    def end_turn(self) -> None:
        """The loop goes back to waiting."""
        self.turn_start_s = None
        self.num_turns += 1

    def beat(self) -> ProcessBeat:
        """How things stand."""
        start_s = self.turn_start_s
        return ProcessBeat(
            num_turns=self.num_turns,
            turn_s=0.0 if start_s is None else time.monotonic() - start_s,
            directory_sequence=self.directory_sequence,
        )


class Heartbeat:
    """Sends beats from its own thread until it is stopped."""

    def __init__(self, boot: Boot, pulse: Pulse) -> None:
        self._boot = boot
        self._pulse = pulse
        self._stop: Wakeup[None] = Wakeup()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        boot = self._boot
        header = Header(boot.name, boot.epoch, 0, 0, 0)
        links = Links(client_keys=boot.client_keys, has_inbox=False)
        links.connect(boot.supervisor)
        links.poller.register(self._stop.fileno(), zmq.POLLIN)
        links.poller.register(links.socket_of(SUPERVISOR), zmq.POLLIN)
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= due_s:
                links.send(SUPERVISOR, encode_pack([(header, self._pulse.beat())]))
                due_s = now_s + boot.heartbeat_s
            ready = dict(links.poller.poll(max(1, int(1000 * (due_s - now_s)))))
            if self._stop.fileno() in ready:
                break
            if links.receive_reply(SUPERVISOR) == DISMISSED:
                os.kill(os.getpid(), signal.SIGKILL)
        links.close(linger_ms=0)

    def stop(self) -> None:
        """End the thread."""
        self._stop.put(None)
        self._thread.join(timeout=5.0)
