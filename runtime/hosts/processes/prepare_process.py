"""The driver's end of :mod:`penstock.runtime.hosts.processes.prepare`."""

from __future__ import annotations

import subprocess
import sys
from typing import IO, TYPE_CHECKING, Final

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.hosts.processes.prepare import PhaseBegun, Preparation, PreparationFailed, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.hosts.processes.job import DriverJob
    from penstock.runtime.run.plan import RunPlan

COMMAND: Final = (sys.executable, "-m", "penstock.runtime.hosts.processes.prepare")


class PreparationError(RuntimeError):
    """The process that prepares the run has failed; its traceback is in the driver's log."""


class PreparationProcess:
    """A process that prepares; ``finish`` waits for the result."""

    def __init__(self, words: IO[bytes], how_it_ended: Callable[[], str]) -> None:
        """
        Args:
            words: what it says, one a line.
            how_it_ended: for the error, once it has said its last word and that was not the result.
        """
        self._words = words
        self._how_it_ended = how_it_ended

    @classmethod
    def start(cls, job: DriverJob) -> PreparationProcess:
        """Start an interpreter that prepares this job."""
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.msgpack.encode(job))
        process.stdin.close()
        return cls(process.stdout, lambda: f"exit code {process.wait()}")

    def finish(self, tell: Callable[[str], None]) -> RunPlan:
        """Wait for the end; large datasets take a while.

        Args:
            tell: is told what is being done.

        Raises:
            UserFault: the user has to change something.
            PreparationError: anything else went wrong.
        """
        with self._words:
            for line in self._words:
                word: Preparation = msgspec.json.decode(line, type=Preparation)
                match word:
                    case PhaseBegun():
                        tell(word.text)
                    case PreparationFailed():
                        raise UserFault(word.message)
                    case Prepared():
                        return word.plan
        raise PreparationError(f"preparing the run failed ({self._how_it_ended()})")
