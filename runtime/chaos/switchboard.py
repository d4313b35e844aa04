"""Answers the announcements of a run's inboxes with a way through the proxies."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.processes.temp_folders import make_folder, remove_folder
from penstock.runtime.chaos.faults import ChaosKind
from penstock.runtime.chaos.proxy import ByteProxies, FrameProxy, LinkTable
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.rerouting import Rerouted, read_all

if TYPE_CHECKING:
    from collections.abc import Callable

ACCEPT_S: Final = 0.2
LINE_TIMEOUT_S: Final = 5.0
JOIN_S: Final = 5.0


class Switchboard:
    """Listens in a folder that only this user can enter. A context manager; serves from the start of the block."""

    def __init__(self, *, seed: int, pid_of: Callable[[str], int | None]) -> None:
        """
        Args:
            seed: of what happens to single frames.
            pid_of: process of an actor, to know whose a connection is.
        """
        self.table = LinkTable(seed)
        self._bytes = ByteProxies(self.table, pid_of)
        self._frames: dict[str, FrameProxy] = {}
        self._folder = make_folder()  # its name is short: a socket's path may have 107 bytes
        self.path = self._folder / "s"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.path))
        self._socket.listen()
        self._socket.settimeout(ACCEPT_S)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="switchboard", daemon=True)

    def __enter__(self) -> Switchboard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._thread.join(JOIN_S)
        self._socket.close()
        self._bytes.close()
        for proxy in self._frames.values():
            proxy.close()
        remove_folder(self._folder)

    def begin(self, kind: ChaosKind, sender: str, receiver: str, amount: float) -> None:
        """A fault of a link comes."""
        if kind is ChaosKind.RESTORE:
            self.table.restore(sender, receiver)
            return
        self.table.begin(kind, sender, receiver, amount)
        if kind is ChaosKind.CUT:
            self._bytes.cut(sender, receiver)
        elif kind in (ChaosKind.TRUNCATE, ChaosKind.GARBAGE):
            self._bytes.break_once(sender, receiver, kind)

    def end(self, kind: ChaosKind, sender: str, receiver: str, amount: float) -> None:
        """It goes."""
        self.table.end(kind, sender, receiver, amount)

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            try:
                line, _ = self._socket.accept()
            except TimeoutError:
                continue
            # A process may be killed in the middle of this; it then needs no answer.
            with line, contextlib.suppress(OSError, msgspec.DecodeError):
                line.settimeout(LINE_TIMEOUT_S)
                asked = msgspec.msgpack.decode(read_all(line), type=Rerouted)
                line.sendall(msgspec.msgpack.encode(self._reroute(asked)))

    def _reroute(self, asked: Rerouted) -> Address:
        name = asked.address.name
        last = self._frames.pop(name, None)
        if last is not None:
            last.close()
        frames = self._frames[name] = FrameProxy(asked.address, asked.client_keys, self.table)
        return Address(name, asked.address.epoch, self._bytes.before(name, frames.endpoint), frames.server_key)
