"""A small process between us and a server that makes sure that the server never outlives us.

```
launcher  ── one line of JSON (GuardianJob), then one word a line: K text · L · E ──► guardian's stdin
guardian  ── one word a line: P pid · H text · L line of the server's log · X wait status ──► guardian's stdout
successor ── the words of a launcher ──► socket, one way back as well ──► guardian, when the launcher is gone
server    ── stdout and stderr ──► guardian ──► log file
```

Invariants:

* When the launcher says so (``E``), or ends, however that happens, or closes the pipe, every process that the server
  has ever started is killed: the guardian adopts the orphans among them, also those with a session of their own.
* With ``linger_s`` a launcher that ends without a word is waited for: a successor, which is a process of the same user
  and asks at ``socket_name``, takes its place. Nobody does while the launcher lives, nor after ``linger_s``, nor when
  the launcher had said that nobody comes after it (``L``), nor when the process that had started the launcher has
  ended, which is the host of all actors of this machine.
* When the guardian is killed, the kernel kills the server's main process.
* The server never waits for the launcher: its output is read and written to the log file here, and what the launcher
  does not take in time is left out of what it is told, not out of the file.
* Nothing but the standard library is imported, so that this starts in a few hundredths of a second.

Waits: the one ``poll`` ends with the launcher, the server, or an order; that the server may run for ever is meant. That
for a successor ends after ``linger_s``.
The wait for killed processes has no end of its own: the launcher waits for the guardian with a deadline. The last words
wait ``FAREWELL_S`` for a launcher that does not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import penstock.backends
from penstock.backends.processes.process_facts import (
    await_exit,
    be_subreaper,
    descendants_of,
    end_with_parent,
    facts_of,
)

READ_BYTES: Final = 65536
MAX_LINE_BYTES: Final = 8192
"""Of a line that is passed on; the file has it whole."""
MAX_BACKLOG_BYTES: Final = 1 << 20
"""Most bytes of output that the launcher has not taken yet."""
FAREWELL_S: Final = 10.0
"""For the launcher to take what is left to say when all is over."""
GONE_S: Final = 5.0
"""From the moment when a launcher's pipe closes to its end, which the kernel tells a little later."""
KEEP, LAST, END = b"K ", b"L", b"E"
"""How the words of a launcher begin: keep this text for a successor, there will be none, and end everything."""
_LINE_ENDS: Final = re.compile(rb"[\r\n]+")
_CREDENTIALS: Final = struct.Struct("3i")


class GuardianJob(NamedTuple):
    """What the guardian is to start and keep."""

    command: tuple[str, ...]
    launcher_pid: int
    log_path: str
    max_log_bytes: int
    """The log file is renamed to ``….1`` when it has grown to this, and begun anew."""
    secrets: tuple[str, ...] = ()
    """Words that are left out of the log."""
    secret_path: str = ""
    """A file that is removed in the end."""
    linger_s: float = 0.0
    """When the launcher ends without a word, a successor is waited for so long."""
    socket_name: str = ""
    """Where a successor asks, among the abstract names of Unix sockets; needed to linger."""


class Started(NamedTuple):
    """The main process runs."""

    pid: int


class LogLine(NamedTuple):
    """One line that the server has written."""

    text: str


class Exited(NamedTuple):
    """The main process has ended."""

    exit_code: int
    """Minus the signal's number when one has ended it."""


class Handed(NamedTuple):
    """To a successor: what is handed over."""

    command: tuple[str, ...]
    secrets: tuple[str, ...]
    secret_path: str
    kept: str
    """What the launcher has last given to keep; empty: nothing."""


GuardianWord = Started | Handed | LogLine | Exited


def decode_word(line: bytes) -> GuardianWord:
    """One line of a guardian's stdout."""
    kind, text = line[:1], line[2:].decode(errors="replace").rstrip("\n")
    match kind:
        case b"P":
            return Started(int(text))
        case b"H":
            command, secrets, secret_path, kept = json.loads(text)
            return Handed(tuple(command), tuple(secrets), secret_path, kept)
        case b"L":
            return LogLine(text)
        case b"X":
            return Exited(os.waitstatus_to_exitcode(int(text)))
        case _:
            raise ValueError(f"a guardian said {line!r}")


def start_guardian(job: GuardianJob, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a guardian, and with it the server; both have this environment.

    It is in a session of its own: a Ctrl-C in the terminal is for the launcher to handle.
    """
    # Without site-packages the interpreter finds this package only where this process has it from.
    root = os.path.abspath(Path(penstock.backends.__path__[0]).parents[1])
    boot = f"import sys; sys.path.insert(0, {root!r}); from penstock.backends.processes.guardian import main; main()"
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", boot],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert guardian.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is noticed by whoever waits for it
        guardian.stdin.write(json.dumps(job._asdict()).encode() + b"\n")
        guardian.stdin.flush()
    return guardian


class LogFile:
    """The server's output on disk, in at most two files."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Appends to what is there."""
        self._path = path
        self._max_bytes = max_bytes
        self._open()

    def _open(self) -> None:
        # Options of the server are in it, so it is for its owner alone.
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Write, or leave out what the disk has no room for: the server must not stop for its log."""
        if self._size >= self._max_bytes:
            os.close(self._descriptor)
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()
        with contextlib.suppress(OSError):
            self._size += os.write(self._descriptor, data)


class _OrderedToEndError(Exception):
    """A signal asks for the end."""


class Guardian:
    """One server and all its processes."""

    def __init__(self, job: GuardianJob, launcher: int) -> None:
        """Starts the server.

        Args:
            job: what to start.
            launcher: handle of the launcher's process.
        """
        self._job = job
        self._launcher = launcher
        self._orders, self._words = sys.stdin.fileno(), sys.stdout.fileno()
        self._order = self._kept = b""
        self._is_last = False
        """The launcher has said that nobody comes after it."""
        self._listener: socket.socket | None = None
        self._host: int | None = None
        """Handle of the process that has started the launcher."""
        if job.linger_s > 0:
            self._listener, self._host = _listen(job)
        self._log = LogFile(Path(job.log_path), job.max_log_bytes)
        self._secrets = [secret.encode() for secret in job.secrets]
        self._output, write_end = os.pipe2(os.O_CLOEXEC)
        for descriptor in (self._output, self._orders, self._words):
            os.set_blocking(descriptor, False)
        self._backlog = bytearray()
        self._partial = b""
        server = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGKILL),
        )
        os.close(write_end)
        self._server_pid = server.pid
        self._server = os.pidfd_open(server.pid)
        server.returncode = 0  # reaped here, by its pid
        self._say(b"P %d" % server.pid)

    def run(self) -> None:
        """Until the server ends, a launcher says so, or is gone and nobody takes its place."""
        while self._serve() and self._await_successor():
            pass

    def _serve(self) -> bool:
        """Until the launcher is gone without a word (True), or all is to end."""
        poll = select.poll()
        for descriptor in (self._launcher, self._server, self._orders, self._output):
            poll.register(descriptor, select.POLLIN)
        while True:
            if self._backlog:
                poll.register(self._words, select.POLLOUT | (select.POLLIN if self._words == self._orders else 0))
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._launcher in ready or self._orders in ready:
                is_open = self._take_orders()
                if self._order == END:
                    return False
                if self._launcher in ready or not is_open:
                    may_follow = self._listener is not None and not self._is_last
                    return may_follow and await_exit(self._launcher, GONE_S)
            if self._words in ready:
                self._flush()
                poll.unregister(self._words)
                if self._words == self._orders:
                    poll.register(self._orders, select.POLLIN)
            if self._output in ready and not self._read():
                poll.unregister(self._output)
            if self._server in ready:
                self._say_end()
                return False

    def _take_orders(self) -> bool:
        """Take what the launcher has said; whether it may say more. The end, once said, is the last word."""
        while True:
            try:
                data = os.read(self._orders, READ_BYTES)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            *lines, self._order = (self._order + data).split(b"\n")
            self._is_last |= LAST in lines
            self._kept = next((line[2:] for line in reversed(lines) if line.startswith(KEEP)), self._kept)
            if END in lines:
                self._order = END
                return False
            if not data:
                return False

    def _await_successor(self) -> bool:
        """Whether another process takes the place of the launcher; what the server writes meanwhile is in its log."""
        listener, host = self._listener, self._host
        if listener is None or host is None:
            return False
        self._order = b""
        poll = select.poll()
        for descriptor in (self._server, self._output, listener.fileno(), host):
            poll.register(descriptor, select.POLLIN)
        deadline_s = time.monotonic() + self._job.linger_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poll.poll(left_s * 1000)}
            if self._output in ready and not self._read():
                poll.unregister(self._output)
            if host in ready or self._server in ready:
                return False
            if listener.fileno() in ready and self._welcome(listener.accept()[0]):
                return True
        return False

    def _welcome(self, caller: socket.socket) -> bool:
        """Hand over to a process of this user; whether it is one, and is there still."""
        peer = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(peer)
        try:
            launcher = os.pidfd_open(pid)
        except OSError:
            launcher = None
        if user != os.getuid() or launcher is None:
            caller.close()
            return False
        self._launcher = launcher
        self._orders = self._words = caller.detach()
        os.set_blocking(self._orders, False)
        self._backlog.clear()  # it was for the other one
        job = self._job
        handed = json.dumps([job.command, job.secrets, job.secret_path, self._kept.decode(errors="replace")])
        self._say(b"P %d\nH %s" % (self._server_pid, handed.encode()))
        return True

    def _say_end(self) -> None:
        self._read_rest()
        _, status = os.waitpid(self._server_pid, 0)
        self._say(b"X %d" % status)

    def kill_all(self) -> None:
        """Kill and reap everything below this process until nothing is left.

        This process adopts orphans, so every one that is killed is a child in the end; each that ends lets look again
        for what it may have started meanwhile.
        """
        while True:
            for pid in descendants_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def finish(self) -> None:
        """Say what is left to say, if the launcher listens."""
        self._read_rest()
        self._flush()
        poll = select.poll()
        poll.register(self._words, select.POLLOUT)
        poll.register(self._launcher, select.POLLIN)
        deadline_s = time.monotonic() + FAREWELL_S
        while self._backlog and (left_s := deadline_s - time.monotonic()) > 0:
            if any(descriptor == self._launcher for descriptor, _ in poll.poll(left_s * 1000)):
                return
            self._flush()

    def _read_rest(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        """Take what the server has written; False when there is nothing more for now, or ever."""
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._partial = _LINE_ENDS.split(self._partial + data)
        if not data and self._partial:
            lines, self._partial = [self._partial], b""
        for line in lines:
            for secret in self._secrets:
                line = line.replace(secret, b"(secret)")
            self._log.write(line + b"\n")
            if len(self._backlog) < MAX_BACKLOG_BYTES:
                self._backlog += b"L " + line[:MAX_LINE_BYTES] + b"\n"
        self._flush()
        return bool(data)

    def _say(self, word: bytes) -> None:
        self._backlog += word + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: os.write(self._words, self._backlog[:READ_BYTES])]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._backlog.clear()


def _listen(job: GuardianJob) -> tuple[socket.socket, int | None]:
    """Where a successor asks, and a handle of the process that has started the launcher; None: that is not known."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{job.socket_name}")
    listener.listen()
    facts = facts_of(job.launcher_pid)
    try:
        return listener, None if facts is None else os.pidfd_open(facts.parent)
    except OSError:
        return listener, None


def main() -> None:
    """The guardian's process."""
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what comes behind it is an order
        more = os.read(sys.stdin.fileno(), 1)
        if not more:
            return
        line += more
    job = GuardianJob(**json.loads(line))
    try:
        launcher = os.pidfd_open(job.launcher_pid)
    except ProcessLookupError:
        return
    if os.getppid() != job.launcher_pid:
        return
    be_subreaper()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        guardian = Guardian(job, launcher)
        try:
            guardian.run()
        except _OrderedToEndError:
            pass
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            guardian.kill_all()
            guardian.finish()
    finally:
        if job.secret_path:
            Path(job.secret_path).unlink(missing_ok=True)


def _end(number: int, frame: object) -> None:
    raise _OrderedToEndError
