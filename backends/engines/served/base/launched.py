"""One server of ours: its launch, its log, its death, and the end of all its processes.

```
this process ── guardian ── main (HTTP) ── scheduler, one per GPU, and others that have named themselves
```

Invariants:

* The server never outlives this process, however this process ends, but for ``linger_s`` of its settings, within which
  a successor may take it over, unless :meth:`LaunchedServer.be_last` was called: see
  :mod:`penstock.backends.processes.guardian`.
  What is left when the guardian is killed as well is found by its environment, by the next launch of the same owner.
* ``ended`` completes when any process ends that the server cannot do without. None of them is started again, and its
  main process may take seconds to notice; it is not waited for.
* Nothing is polled: the port, the readiness and the progress of a start are read from the log as it is written, and
  the end of a process is told by the kernel.
* Everything runs on the one event loop that ``launch`` was called on.

| wait | ends with | at the latest |
|---|---|---|
| ``launch`` | the guardian's word that the main process runs | ``SPAWN_TIMEOUT_S`` |
| ``wait_ready`` | the server's word, or its end | ``start_timeout_s`` after the launch |
| ``take_over`` | the guardian's word | ``hand_over.HAND_OVER_TIMEOUT_S`` |
| ``end`` | the guardian's end, then that of what it may have left | its ``timeout_s`` |
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from penstock.backends.engines.served.base.guardian_line import FoundGuardian, GuardianLine, OwnGuardian
from penstock.backends.engines.served.base.hand_over import (
    NotHandedOverError,
    compare,
    handed_over,
    id_of,
    socket_name_of,
)
from penstock.backends.engines.served.base.processes import (
    ServerProcess,
    Watch,
    end_marked,
    exit_code_of,
    how_it_ended,
    named_processes,
)
from penstock.backends.engines.served.base.settings import SERVER_VARIABLE, owner_marks
from penstock.backends.processes.guardian import (
    Exited,
    GuardianJob,
    Handed,
    LogLine,
    Started,
    decode_word,
    start_guardian,
)
from penstock.backends.processes.process_facts import (
    is_running,
    is_stopped,
    marked_processes,
    start_ticks_of,
)
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.engines.served.base.settings import ServerSettings

SPAWN_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 30.0
SWEEP_TIMEOUT_S: Final = 5.0
LAST_WORDS_S: Final = 0.25
"""Between the first sign of death and the story, so that the reason that the server logs is in it."""
KEPT_LINES: Final = 400


class ServerStartError(RuntimeError):
    """A server did not start; the message has the reason and the end of its log. All its processes are gone."""


class ServerEnd(NamedTuple):
    """How a server ended."""

    cause: str
    """One sentence."""
    exit_code: int | None
    """Of the main process; minus the signal's number when one has ended it. None when it had not ended yet."""
    was_asked: bool
    """By ``end``."""
    log_tail: tuple[str, ...]
    log_path: Path
    reason: str
    """Its own last words, as far as it has named an error."""

    @property
    def story(self) -> str:
        """The cause, where the log is, and its last lines."""
        said = f"; it said: {self.reason}" if self.reason else ""
        tail = "".join(f"\n    {line}" for line in self.log_tail)
        return f"{self.cause}{said}. The end of its log, {self.log_path}:{tail}"


class LaunchedServer:
    """One server. ``launch`` makes it, ``wait_ready`` waits until it serves, ``end`` must be called once."""

    def __init__(self, settings: ServerSettings, report: Callable[[str], None] | None) -> None:
        self.settings: Final = settings
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.ended: Final[asyncio.Future[ServerEnd]] = loop.create_future()
        """Completes once, with a result and never with an exception."""
        self.on_line: Callable[[str], None] | None = None
        """Called with each line of the log from when the server is ready; must not raise."""
        self._report = report
        self._id = secrets.token_hex(16)
        self._launched_s = loop.time()
        self._key_path: Path | None = None
        self._port = 0
        self._says_ready = False
        self._main_pid = 0
        self._exit_code: int | None = None
        self._was_asked = False
        self._dying: asyncio.TimerHandle | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._last_news = ""
        self._processes: tuple[ServerProcess, ...] = ()
        self._watches: list[Watch] = []
        self._started = asyncio.Event()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._guardian_gone = asyncio.Event()
        self._guardian: GuardianLine
        self._reading: asyncio.Task[None]

    @classmethod
    async def launch(cls, settings: ServerSettings, *, report: Callable[[str], None] | None = None) -> Self:
        """Start the processes of a server on this node. It is not ready yet.

        Args:
            settings: how.
            report: called with each line of the log that says how the start goes on, until the server is ready.

        Raises:
            UserFault: the interpreter or the model is not there.
            ServerStartError: the processes cannot be started, or an earlier server of this owner cannot be ended.
        """
        if not os.access(settings.python, os.X_OK):
            raise UserFault(f"{settings.kind}'s interpreter {settings.python} is not there or cannot be executed")
        if not settings.model_folder.is_dir():
            raise UserFault(f"the model folder {settings.model_folder} is not there")
        if settings.owner and (left := await end_marked(owner_marks(settings.owner, os.environ), END_TIMEOUT_S)):
            raise ServerStartError(f"processes {left} of an earlier server of {settings.owner} cannot be ended")
        server = cls(settings, report)
        try:
            await server._spawn()
        except BaseException:
            await server.end()
            raise
        return server

    async def _spawn(self) -> None:
        settings = self.settings
        descriptor, key_path = tempfile.mkstemp(prefix="penstock-server-", suffix=".yaml")  # for its owner alone
        os.write(descriptor, settings.key_file_text().encode())
        os.close(descriptor)
        self._key_path = Path(key_path)
        job = GuardianJob(
            command=settings.command(Path(key_path)),
            launcher_pid=os.getpid(),
            log_path=str(settings.log_path),
            max_log_bytes=settings.max_log_bytes,
            secrets=(settings.admin_api_key,),
            secret_path=key_path,
            linger_s=settings.linger_s,
            socket_name=socket_name_of(self._id),
        )
        guardian = OwnGuardian(start_guardian(job, settings.environment_of(os.environ, self._id)))
        self._guardian = guardian
        await guardian.open()
        self._reading = self._loop.create_task(self._read(guardian))
        try:
            async with asyncio.timeout(SPAWN_TIMEOUT_S):
                await self._started.wait()
        except TimeoutError:
            raise ServerStartError(f"the server's process did not start within {SPAWN_TIMEOUT_S:.0f} s") from None
        if not self._main_pid:
            raise ServerStartError("the server's guardian ended before it could start the server; see stderr")

    @classmethod
    async def take_over(cls, settings: ServerSettings) -> tuple[Self, str]:
        """The server that an earlier process of this owner has left on this node, if it was launched in just this way.
        It may be anything but idle.

        Returns:
            The server, with the key that it was launched with in its settings, and what was kept for its successor.

        Raises:
            NotHandedOverError: there is none, or another one. It may run still: ``launch`` ends it.
        """
        marks = owner_marks(settings.owner, os.environ)
        found = {id_of(pid) for pid in marked_processes(marks)} - {""}
        if len(found) != 1:
            raise NotHandedOverError(f"{len(found) or 'none'} of its servers are left")
        [server_id] = found
        try:
            guardian = await FoundGuardian.open(socket_name_of(server_id))
        except OSError as error:
            raise NotHandedOverError(f"nobody hands it over ({error})") from None
        try:
            main_pid, handed = await handed_over(guardian)
            compare(settings, handed, server_id, guardian.pid)
            server = cls(replace(settings, admin_api_key=handed.secrets[0]), None)
        except BaseException:
            guardian.end()
            raise
        server._id, server._guardian, server._main_pid = server_id, guardian, main_pid
        server._reading = server._loop.create_task(server._read(guardian))
        return server, handed.kept

    def serves_at(self, port: int) -> None:
        """Of one that was taken over: it is ready, and listens there."""
        self._port = port
        self._ready.set_result(None)
        self._watch_processes()

    def keep(self, text: str) -> None:
        """Have the guardian keep this line for a process that takes the server over, in place of the last one."""
        self._guardian.keep(text)

    def be_last(self) -> None:
        """Have the guardian end it when this process is gone: nobody takes it over, whatever its settings say."""
        self._guardian.be_last()

    @property
    def port(self) -> int:
        """Where it listens; 0 until it is ready, and for a node that does not serve."""
        return self._port

    @property
    def address(self) -> str:
        """``http://host:port`` of a server that is ready."""
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"http://{host}:{self._port}"

    @property
    def processes(self) -> tuple[ServerProcess, ...]:
        """Those whose end is the end of the server; complete when it is ready."""
        return self._processes

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines that it has written since it was ready, or since its launch."""
        return self.settings.log_words.tail_of(self._lines)

    def stopped(self) -> tuple[str, ...]:
        """Names of its processes that a signal has stopped (SIGSTOP)."""
        return tuple(process.name for process in self._processes if is_stopped(process.pid))

    async def wait_ready(self) -> None:
        """Wait until it takes requests, or for a node that does not serve, until it has loaded its part.

        When this raises, also because it is cancelled, the server has been ended.

        Raises:
            ServerStartError: it ended, or was not ready in time.
        """
        try:
            await self._wait_ready()
        except BaseException:
            await self.end()
            raise

    async def _wait_ready(self) -> None:
        left_s = self._launched_s + self.settings.start_timeout_s - self._loop.time()
        ends: set[asyncio.Future[ServerEnd] | asyncio.Future[None]] = {self._ready, self.ended}
        await asyncio.wait(ends, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            raise ServerStartError(f"the server did not start: {self.ended.result().story}")
        if not self._ready.done():
            last = f"; the last that it reported: {self._last_news}" if self._last_news else ""
            tail = "".join(f"\n    {line}" for line in self.log_tail)
            raise ServerStartError(
                f"the server was not ready within start_timeout_s = {self.settings.start_timeout_s:g}{last}. "
                f"The end of its log, {self.settings.log_path}:{tail}"
            )
        self._watch_processes()

    def _watch_processes(self) -> None:
        found = named_processes(self._main_pid, self.settings.title_prefix)
        for process in found:
            if process.pid == self._main_pid:
                continue  # the guardian tells of that one, with its exit code
            try:
                self._watches.append(Watch(process.pid, partial(self._lose_process, process)))
            except ProcessLookupError:
                self._lose(f"its {process.name} process ({process.pid}) ended as soon as it was ready")
        guardian = ServerProcess("guardian", self._guardian.pid, start_ticks_of(self._guardian.pid))
        self._processes = (*found, guardian)

    async def _read(self, guardian: GuardianLine) -> None:
        """Everything that the guardian says, until its end."""
        while line := await guardian.word():
            match decode_word(line):
                case Started(pid):
                    self._main_pid = pid
                    self._started.set()
                case Handed():
                    pass  # heard before
                case LogLine(text):
                    self._take_line(text)
                case Exited(exit_code):
                    self._exit_code = exit_code
                    self._lose(f"its main process ({self._main_pid}) {how_it_ended(exit_code)}")
        # The pipe closes when the process ends, so this waits for no more than the kernel's book-keeping.
        ended_with = await guardian.wait()
        self._started.set()
        self._guardian_gone.set()
        self._lose(f"its guardian ({guardian.pid}) {how_it_ended(ended_with)}")

    def _take_line(self, line: str) -> None:
        self._lines.append(line)
        if self._ready.done():
            if self.on_line is not None:
                self.on_line(line)
            return
        words = self.settings.log_words
        self._port = words.port_in(line) or self._port
        if news := words.news_in(line):
            self._last_news = news
            if self._report is not None:
                self._report(news)
        self._says_ready |= words.says_ready(line, serves=self.settings.serves)
        if self._says_ready and (self._port or not self.settings.serves):  # these come in either order
            self._lines.clear()  # what it complained about on its way is not why it will end
            self._remove_key()
            self._ready.set_result(None)

    def _lose_process(self, process: ServerProcess) -> None:
        main = next((each for each in self._processes if each.name == "main"), None)
        if main is not None and not is_running(main.pid, main.start_ticks):
            return  # it went with the main process, and the guardian tells of that
        self._lose(f"its {process.name} process ({process.pid}) {how_it_ended(exit_code_of(process))}")

    def _lose(self, what: str) -> None:
        """The server is dead; the first thing that is seen of it is the cause."""
        if self._dying is None:
            self._dying = self._loop.call_later(LAST_WORDS_S, self._bury, what)

    def _bury(self, what: str) -> None:
        if not self.ended.done():
            settings, tail = self.settings, self.log_tail
            cause = "the server was ended" if self._was_asked else f"the {settings.kind} server died: {what}"
            reason = settings.log_words.reason_in(tail)
            self.ended.set_result(ServerEnd(cause, self._exit_code, self._was_asked, tail, settings.log_path, reason))

    async def end(self, timeout_s: float = END_TIMEOUT_S) -> list[int]:
        """Kill all its processes and wait until they are gone. May be called again; does nothing then.

        There is no drain: what runs in the server has been taken back before.

        Returns:
            Processes that are still there after the time, which should be none.
        """
        self._was_asked = True
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        deadline_s = self._loop.time() + timeout_s
        if hasattr(self, "_reading"):
            self._guardian.end()
            await self._wait_for_guardian(max(deadline_s - self._loop.time() - SWEEP_TIMEOUT_S, timeout_s / 2))
        left = await end_marked([f"{SERVER_VARIABLE}={self._id}".encode()], max(deadline_s - self._loop.time(), 0))
        self._remove_key()
        self._bury("it was ended")
        return left

    def _remove_key(self) -> None:
        """The server has read it, or will not. The guardian does the same in the end, for a launcher that is killed."""
        if self._key_path is not None:
            self._key_path.unlink(missing_ok=True)
            self._key_path = None

    async def _wait_for_guardian(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._guardian_gone.wait()
        except TimeoutError:
            self._guardian.kill()  # the sweep finds what it has not managed to kill
