"""A child process that runs a user's functions, as its parent sees it.

Invariants:

* The process leads a session of its own: signals of the terminal do not reach it, and killing its group ends what the
  user's functions started as well.
* It has none of our environment's secrets: see :mod:`penstock.backends.processes.user_environment`.
* What it prints goes to our log within bounds: see :mod:`penstock.backends.processes.user_output`.
* Writing never blocks: what the socket does not take follows with :meth:`FunctionProcess.flush`.
* It is killed at its end, so nothing of it can tidy up: one whose libraries leave temporary files has a folder of its
  own for them, which its parent removes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.backends.processes.frames import READ_BYTES, FrameReader, LoadFailed, Ready, frame
from penstock.backends.processes.process_facts import await_exit, how_it_ended
from penstock.backends.processes.temp_folders import make_folder, remove_folder
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.processes.user_environment import user_environment
from penstock.backends.processes.user_output import passed_outputs
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from msgspec.msgpack import Decoder

REAP_TIMEOUT_S: Final = 5.0
EXIT_TIMEOUT_S: Final = 1.0
"""From when it closes its end of the socket until it is killed."""
OUT_OF_MEMORY: Final = ", as the kernel does when memory runs out"

SaidT = TypeVar("SaidT")


class FunctionProcess(Generic[SaidT]):
    """See the module."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        said: Decoder[list[Ready | LoadFailed | SaidT]],
        variables: Sequence[str] = (),
        is_silent: bool = False,
        has_own_tmp: bool = False,
        name: str = "",
    ) -> None:
        """
        Args:
            module: run as ``python -m MODULE FD … PARENT``, with the number of its end of the socket first and our
                process id last.
            arguments: between the two.
            said: of what it says.
            variables: of our environment, that it needs beside those that every such process gets.
            is_silent: what it prints goes nowhere.
            has_own_tmp: its folder of temporary files is its own, and is removed once the process is gone.
            name: of what it runs, for our log.
        """
        self.is_gone = False
        """It has closed its end: nothing more comes."""
        self.fault = ""
        """Why it is gone, where that is not how it ended."""
        self.ready: Ready | None = None
        """Its word that it has loaded its functions."""
        self.started_at_s = time.monotonic()
        self._inbox = FrameReader(said)
        self._outbox = bytearray()
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._outputs = () if is_silent else passed_outputs(name or module)
        environment = user_environment(variables)
        self._tmp = make_folder() if has_own_tmp else None
        if self._tmp is not None:
            environment["TMPDIR"] = str(self._tmp)
        streams = [output.descriptor for output in self._outputs] or [subprocess.DEVNULL] * 2
        with theirs, self._their_end():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )

    @contextlib.contextmanager
    def _their_end(self) -> Generator[None]:
        """Of the pipes: once they are theirs, we let go of them, or their end would never come."""
        try:
            yield
        finally:
            for output in self._outputs:
                os.close(output.descriptor)

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._outbox)

    def send(self, messages: Iterable[object]) -> None:
        """Send these in one frame; what the socket does not take now follows with :meth:`flush`."""
        self._outbox += frame(messages)
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # death shows on reading
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]

    def waits(self, deadline_s: float) -> bool:
        """Wait for its next words, or for its end; False when there is neither by this time of ``time.monotonic``."""
        something = select.poll()
        something.register(self.socket, select.POLLIN)
        return bool(something.poll(1000 * max(0.0, deadline_s - time.monotonic())))

    def heard(self) -> Iterator[SaidT]:
        """What it has said since; afterwards ``is_gone`` says whether more can come. One that says what is no message
        of ours is as good as gone.

        Raises:
            UserCodeError: what it was to load cannot be loaded.
        """
        while not self.is_gone:
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.is_gone = True
                return
            for output in self._outputs:
                output.next_stretch()
            try:
                for said in self._inbox.feed(data):
                    if isinstance(said, LoadFailed):
                        raise UserCodeError(said.message)
                    if isinstance(said, Ready):
                        self.ready = said
                    else:
                        yield said
            except UNREADABLE as error:
                self.is_gone, self.fault = True, f"said what nobody understands ({error})"

    def end(self) -> str:
        """Kill it with all that it started; returns in words how it ended. Again has no further effect."""
        how = self._ended()
        if self._tmp is not None:
            remove_folder(self._tmp)
        return self.fault or how

    def _ended(self) -> str:
        if self._process.returncode is not None:
            return how_it_ended(self._process.returncode)
        has_ended = self._has_ended()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what has begun to exit keeps its own exit code
        self.socket.close()
        for output in self._outputs:
            output.close(EXIT_TIMEOUT_S)
        try:
            words = how_it_ended(self._process.wait(REAP_TIMEOUT_S))
            return f"{words}{OUT_OF_MEMORY}" if has_ended and words.endswith("SIGKILL") else words
        except subprocess.TimeoutExpired:  # in the kernel, on a dead network file system say; it ends when it returns
            return f"(process {self._process.pid}) does not end"

    def _has_ended(self) -> bool:
        """Whether it has ended without us; one that has closed its end of the socket is about to. It is not reaped, so
        its group keeps its number."""
        handle = os.pidfd_open(self._process.pid)
        try:
            return await_exit(handle, EXIT_TIMEOUT_S if self.is_gone else 0.0)
        finally:
            os.close(handle)
