"""The ranks of a worker group on a node, as the process sees them that started them: launch, lines, end.

Invariants:

* The place where they report is a socket in a folder that only this user may enter, so only our own processes can.
* What is said to all is written once; ``kill`` leaves no process, no socket and no folder.

| wait | who ends it |
|---|---|
| ``listen`` | a rank, a guardian, what else is watched, ``wake``; at the latest its timeout |
| ``kill`` | the guardians; at the latest its timeout, then the kernel |
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import zmq

from penstock.backends.learners.worker_group.channel import Channel, ChannelClosedError, Parcel
from penstock.backends.learners.worker_group.rank_process import RankProcess
from penstock.backends.learners.worker_group.words import RankCame, RankFailed, decode_rank_word
from penstock.backends.processes.temp_folders import make_folder, remove_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from penstock.backends.learners.worker_group.words import RankWord

_WAKE: Final = 8

Source = zmq.Socket[bytes] | int
"""A socket of ZeroMQ, or a descriptor."""


class RankSet:
    """The ranks. One thread uses it, but for ``wake``."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self.ranks: list[RankProcess] = []
        self.heard: list[tuple[RankProcess, RankWord]] = []
        """What ``listen`` has read, for whoever called it to take."""
        self._poller = zmq.Poller()
        self._serve: dict[Source, Callable[[], object]] = {}
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener: socket.socket | None = None
        self._folder: Path | None = None

    def launch(self, numbers: range, log_path: Callable[[int], Path]) -> None:
        """Start those with these numbers."""
        self._folder = make_folder()
        path = self._folder / "line"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(len(numbers))
        self._listener.setblocking(False)
        self.watch(self._listener.fileno(), self._accept)
        self.watch(self._alarm, partial(os.read, self._alarm, _WAKE))
        now_s = time.monotonic()
        for number in numbers:
            log = log_path(number)
            log.parent.mkdir(parents=True, exist_ok=True)
            rank = RankProcess(number, path, log)
            rank.heard_s = now_s
            self.ranks.append(rank)
            self.watch(rank.guardian_output, partial(self._read_guardian, rank))

    def rank(self, number: int) -> RankProcess:
        """The one with this number."""
        return self.ranks[number - self.ranks[0].rank]

    def watch(self, source: Source, serve: Callable[[], object]) -> None:
        """Have ``listen`` call this whenever there is something to read."""
        self._poller.register(source, zmq.POLLIN)
        self._serve[source] = serve

    def _unwatch(self, source: Source) -> None:
        self._poller.unregister(source)
        del self._serve[source]

    def wake(self) -> None:
        """End the current or the next ``listen``; from any thread."""
        os.eventfd_write(self._alarm, 1)

    def listen(self, timeout_s: float) -> list[tuple[RankProcess, RankWord]]:
        """Wait for something to happen; returns what ranks have said, in order."""
        self.heard = []
        for source, _ in self._poller.poll(int(timeout_s * 1000)):
            self._serve[source]()
        return self.heard

    def say(self, data: bytes, ranks: Iterable[RankProcess]) -> None:
        """A word, encoded, to these; a rank whose line is closed has ended, which is noticed elsewhere.

        Raises:
            TimeoutError: a rank does not read.
        """
        parcel = Parcel(data)
        try:
            for rank in ranks:
                if rank.channel is not None:
                    with contextlib.suppress(ChannelClosedError):
                        rank.channel.send(parcel)
        finally:
            parcel.close()

    def kill(self, timeout_s: float) -> None:
        """End every process, and remove what they met at."""
        for rank in self.ranks:
            rank.order_end()
        deadline_s = time.monotonic() + timeout_s
        for rank in self.ranks:
            rank.await_end(max(0.0, deadline_s - time.monotonic()))
        if self._listener is not None:
            self._listener.close()
        self._remove_folder()

    def _accept(self) -> None:
        assert self._listener is not None
        line, _ = self._listener.accept()
        channel = Channel(line)
        self.watch(channel.fileno(), partial(self._meet, channel))

    def _meet(self, channel: Channel) -> None:
        """The first word of a line says whose it is."""
        self._unwatch(channel.fileno())
        with contextlib.suppress(ChannelClosedError):
            word = channel.receive(decode_rank_word)
            assert isinstance(word, RankCame)
            rank = self.rank(word.rank)
            rank.channel = channel
            self.watch(channel.fileno(), partial(self._read_line, rank, channel))
            self._hear(rank, word)
        if all(rank.channel is not None for rank in self.ranks):
            self._remove_folder()  # nobody else is to come, and a launcher that is killed cannot do it later

    def _remove_folder(self) -> None:
        if self._folder is not None:
            remove_folder(self._folder)
            self._folder = None

    def _read_line(self, rank: RankProcess, channel: Channel) -> None:
        try:
            self._hear(rank, channel.receive(decode_rank_word))
        except ChannelClosedError:
            self._unwatch(channel.fileno())  # the guardian tells how it ended

    def _hear(self, rank: RankProcess, word: RankWord) -> None:
        rank.heard_s = time.monotonic()
        if isinstance(word, RankFailed):
            rank.failure = word
        self.heard.append((rank, word))

    def _read_guardian(self, rank: RankProcess) -> None:
        output = rank.guardian_output
        rank.read_guardian()
        if rank.is_gone:
            self._unwatch(output)
