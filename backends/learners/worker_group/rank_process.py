"""A rank that this process has started: its guardian, its line, its end.

Nothing here waits, but for ``await_end``, which has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.worker_group.rank_view import RankView
from penstock.backends.processes.guardian import (
    Exited,
    GuardianJob,
    Handed,
    LogLine,
    Started,
    decode_word,
    start_guardian,
)
from penstock.backends.processes.process_facts import is_stopped

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.learners.worker_group.channel import Channel

RANK_MODULE: Final = "penstock.backends.learners.worker_group.rank_main"
RANK_VARIABLE: Final = "PENSTOCK_LEARNER_RANK"
"""In the environment of a rank and of its guardian: its number."""
MAX_LOG_BYTES: Final = 64 << 20


class RankProcess(RankView):
    """A rank of this machine, from its launch to its end."""

    def __init__(self, rank: int, socket_path: Path, log_path: Path) -> None:
        """Starts it."""
        super().__init__(rank, log_path)
        self.channel: Channel | None = None
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
                    self.keep_lines([text])
                case Exited(exit_code):
                    self.exit_code = exit_code
                case Handed():  # only servers are handed over
                    pass

    @property
    def is_stopped(self) -> bool:
        """By a signal (SIGSTOP)."""
        return bool(self.pid) and not self.has_ended and is_stopped(self.pid)

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
