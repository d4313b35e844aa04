"""One rank as the process sees it that started it: its guardian, its log, its line, how far it is, how it ended.

Nothing here waits, but for ``await_end``, which has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.backends.guardian import Exited, GuardianJob, LogLine, Started, decode_word, start_guardian
from penstock.backends.processes import how_it_ended, is_stopped

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.learners.gang.channel import Channel
    from penstock.backends.learners.gang.words import RankFailed

RANK_MODULE: Final = "penstock.backends.learners.gang.rank_main"
RANK_VARIABLE: Final = "PENSTOCK_LEARNER_RANK"
"""In the environment of a rank and of its guardian: its number."""
MAX_LOG_BYTES: Final = 64 << 20
KEPT_LINES: Final = 30
TOLD_LINES: Final = 12
_STACK: Final = re.compile(r"frame #\d+|<unknown function>")
"""What torch writes of its C++ frames, which says nothing to anybody and fills every tail."""


class RankProcess:
    """A rank, from its launch to its end."""

    def __init__(self, rank: int, socket_path: Path, log_path: Path) -> None:
        """Starts it."""
        self.rank: Final = rank
        self.log_path: Final = log_path
        self.channel: Channel | None = None
        self.pid = 0
        self.exit_code: int | None = None
        """Minus the signal's number when one has ended it."""
        self.is_ready = False
        self.is_gone = False
        """Guardian and all."""
        self.num_done = 0
        """Orders that it has carried out."""
        self.failure: RankFailed | None = None
        self.heard_s = 0.0
        """When it last said anything."""
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = b""
        job = GuardianJob(
            command=(sys.executable, "-P", "-m", RANK_MODULE, str(socket_path), str(rank)),
            launcher_pid=os.getpid(),
            log_path=str(log_path),
            max_log_bytes=MAX_LOG_BYTES,
        )
        # A rank finds every module where this process finds it, whoever has put the folder on the path.
        found = os.pathsep.join(folder for folder in sys.path if folder)
        self._guardian = start_guardian(job, {**os.environ, "PYTHONPATH": found, RANK_VARIABLE: str(rank)})
        assert self._guardian.stdout is not None
        os.set_blocking(self._guardian.stdout.fileno(), False)

    @property
    def guardian_output(self) -> int:
        """Descriptor; readable when there is something for ``read_guardian``."""
        assert self._guardian.stdout is not None
        return self._guardian.stdout.fileno()

    def read_guardian(self) -> None:
        """Take what the guardian says."""
        try:
            data = os.read(self.guardian_output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.is_gone = True
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            match decode_word(line):
                case Started(pid):
                    self.pid = pid
                case LogLine(text):
                    if text.strip() and not _STACK.search(text):
                        self._lines.append(text)
                case Exited(exit_code):
                    self.exit_code = exit_code

    @property
    def has_ended(self) -> bool:
        """Itself, or the guardian, which takes it along."""
        return self.exit_code is not None or self.is_gone

    @property
    def is_stopped(self) -> bool:
        """By a signal (SIGSTOP)."""
        return bool(self.pid) and not self.has_ended and is_stopped(self.pid)

    def ended_how(self) -> str:
        """``rank 1 (process 4711) was killed by SIGKILL``."""
        if self.exit_code is None and self.is_gone:
            return f"{self} went with its guardian"
        return f"{self} {how_it_ended(self.exit_code)}"

    def last_lines(self) -> str:
        """Where its log is, and its end."""
        tail = "".join(f"\n    {line}" for line in list(self._lines)[-TOLD_LINES:])
        return f"The end of its log, {self.log_path}:{tail}" if tail else f"Its log, {self.log_path}, is empty"

    def order_end(self) -> None:
        """Have it killed, with all that it has started."""
        if self.channel is not None:
            self.channel.close()
        with contextlib.suppress(BrokenPipeError):
            assert self._guardian.stdin is not None
            self._guardian.stdin.close()

    def await_end(self, timeout_s: float) -> None:
        """Until everything is gone; a guardian that does not manage is killed, and the kernel kills its rank."""
        try:
            self._guardian.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        if self._guardian.stdout is not None:
            self._guardian.stdout.close()

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (process {self.pid})" if self.pid else "")
