"""The driver's end of :mod:`penstock.runtime.hosts.ray.prepare`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.errors import PreflightError
from penstock.runtime.hosts.ray.prepare import PhaseBegun, Preparation, PreparationFailed, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.runtime.hosts.ray.job import DriverJob
    from penstock.runtime.plan import RunPlan

COMMAND: Final = (sys.executable, "-m", "penstock.runtime.hosts.ray.prepare")


class PreparationError(RuntimeError):
    """The process that prepares the run has failed; its traceback is in the driver's log."""


class PreparationProcess:
    """Starts to prepare at once; ``finish`` waits for the result."""

    def __init__(self, job: DriverJob) -> None:
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.msgpack.encode(job))
        self._process.stdin.close()

    def finish(self, tell: Callable[[str], None]) -> RunPlan:
        """Wait for the end; large datasets take a while.

        Args:
            tell: is told what is being done.

        Raises:
            PreflightError: the user has to change something.
            PreparationError: anything else went wrong.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word: Preparation = msgspec.json.decode(line, type=Preparation)
            match word:
                case PhaseBegun():
                    tell(word.text)
                case PreparationFailed():
                    raise PreflightError(word.message)
                case Prepared():
                    self._process.wait()
                    return word.plan
        raise PreparationError(f"preparing the run failed (exit code {self._process.wait()})")
