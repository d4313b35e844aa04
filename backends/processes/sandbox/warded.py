"""One program and its warden, as seen from outside.

Invariants:

* What is kept of the output is bounded, and so is what is read of the report.
* When :meth:`WardedRun.follow` is over, the warden has ended, and it has killed all that it started.

Waits: ``follow`` waits for output, the report and the warden's end; the warden ends all of that ``wall_s`` after the
program began, :meth:`WardedRun.stop` earlier, and ``follow`` itself kills the warden ``GRACE_S`` later.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import penstock.backends
from penstock.backends.processes.sandbox.warden import NONE, WardenJob, WardenReport, boot
from penstock.messages.base import UNREADABLE

GRACE_S: Final = 15.0
"""Beyond the program's own time: for the sandbox to be built on a busy machine, and to be taken down."""
READ_BYTES: Final = 1 << 16
FLOOD: Final = 64
"""A program that writes this many times what is kept of its output is ended."""
MAX_REPORT_BYTES: Final = 1 << 16
# Without site-packages the interpreter finds this package only where this process has it from.
IMPORT_ROOT: Final = os.path.abspath(Path(penstock.backends.__path__[0]).parents[1])


class SandboxFailedError(Exception):
    """A program could not be run, or its sandbox does not answer. It says nothing about the program."""


class ProgramRun(NamedTuple):
    """What a program did."""

    output: str
    """Of its stdout and stderr, in the order in which it wrote them."""
    num_left_out_bytes: int
    """Bytes that were left out of the middle of the output."""
    exit_code: int | None
    """Minus the signal's number when one has ended it; None: it was ended for a limit."""
    is_overdue: bool
    """It was ended at ``wall_s``."""
    is_flood: bool
    """It was ended because it wrote too much."""
    cpu_s: float
    """Of the program and the processes that it waited for; 0 if it was ended for a limit."""
    peak_bytes: int
    """Peak of resident memory, likewise."""


class KeptOutput:
    """The first half and the last of what was written."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        """Written next."""
        self.num_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room else data
        del self._tail[: -self._half]

    @property
    def num_left_out_bytes(self) -> int:
        return self.num_bytes - len(self._head) - len(self._tail)

    def text(self) -> str:
        """What is kept, with a line in the place of what is not."""
        if not self.num_left_out_bytes:
            return bytes(self._head + self._tail).decode(errors="replace")
        head, tail = (bytes(part).decode(errors="replace") for part in (self._head, self._tail))
        return f"{head}\n[... {self.num_left_out_bytes} bytes left out ...]\n{tail}"


class WardedRun:
    """Runs one program once."""

    def __init__(self, job: WardenJob, max_output_bytes: int) -> None:
        self._job = job
        self._kept = KeptOutput(max_output_bytes)
        self._max_bytes = max_output_bytes * FLOOD
        self._lock = threading.Lock()
        """Over the warden's stdin, which several threads may close."""
        self._warden: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Have it ended; from any thread."""
        with self._lock:
            self._is_stopped = True
            if self._warden is not None and self._warden.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # of a warden that has ended before it read its job
                    self._warden.stdin.close()

    def follow(self) -> ProgramRun:
        """Run it to its end.

        Raises:
            SandboxFailedError: it could not be run.
        """
        deadline_s = time.monotonic() + self._job.wall_s + GRACE_S
        with self._lock:
            if self._is_stopped:
                raise SandboxFailedError("it was not needed any more")
            pipe = subprocess.PIPE
            try:
                self._warden = subprocess.Popen(
                    boot(IMPORT_ROOT), stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/", start_new_session=True
                )
            except OSError as error:
                raise SandboxFailedError(f"a sandbox cannot be started: {error}") from error
        with self._warden as process:
            try:
                self._hand_over(process)
                said = self._read(process, deadline_s)
                process.wait(max(1.0, deadline_s - time.monotonic()))
            except (TimeoutError, subprocess.TimeoutExpired):
                raise SandboxFailedError(f"a sandbox did not end {GRACE_S:g} s after its program had to") from None
            finally:
                process.kill()  # nothing if it has ended; what it started dies with it
                self.stop()  # closes what the end of the block would, without its complaint of what was not read
        return self._made_of(said)

    def _hand_over(self, process: subprocess.Popen[bytes]) -> None:
        data = json.dumps(self._job._asdict()).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):  # its report says why, or that there is none
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.write(data)
                process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes], deadline_s: float) -> bytes:
        """The output to its end, which is kept, and the report."""
        assert process.stdout is not None
        assert process.stderr is not None
        said = bytearray()
        output, report = process.stdout.fileno(), process.stderr.fileno()
        poll = select.poll()
        open_ones = {output, report}
        for descriptor in open_ones:
            poll.register(descriptor, select.POLLIN)
        while open_ones:
            left_s = deadline_s - time.monotonic()
            ready = poll.poll(left_s * 1000) if left_s > 0 else []
            if not ready:
                raise TimeoutError
            for descriptor, _ in ready:
                data = os.read(descriptor, READ_BYTES)
                if not data:
                    poll.unregister(descriptor)
                    open_ones.discard(descriptor)
                elif descriptor == report:
                    said += data[: MAX_REPORT_BYTES - len(said)]
                else:
                    self._keep(data)
        return bytes(said)

    def _keep(self, data: bytes) -> None:
        self._kept.add(data)
        if self._kept.num_bytes > self._max_bytes:
            self.stop()

    def _made_of(self, said: bytes) -> ProgramRun:
        try:
            report = msgspec.json.decode(said, type=WardenReport)
        except UNREADABLE:
            if self._job.isolation == NONE and self._warden is not None and (self._warden.returncode or 0) < 0:
                # Unprotected as it is, the program may have killed its warden: that is no way to be run once more.
                return self._run(WardenReport())
            text = said.decode(errors="replace").strip()[-2000:]
            raise SandboxFailedError(
                f"a sandbox ended without saying how its program did: {text or 'killed'}"
            ) from None
        if report.failure:
            raise SandboxFailedError(report.failure)
        return self._run(report)

    def _run(self, report: WardenReport) -> ProgramRun:
        return ProgramRun(
            output=self._kept.text(),
            num_left_out_bytes=self._kept.num_left_out_bytes,
            exit_code=report.exit_code,
            is_overdue=report.is_overdue,
            is_flood=self._kept.num_bytes > self._max_bytes,
            cpu_s=report.cpu_s,
            peak_bytes=report.peak_bytes,
        )
