"""Python for a model: it writes a program, and reads what that prints.

Invariants:

* Whatever the program does is text for the model: its output, its traceback, and for what limit it was ended.
* A program that could not be run is :class:`EpisodeInfraError`: the sample is issued again.
* The same program prints the same in every call, unless it asks for the time, for chance, or for what does not fit.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Final

from penstock.backends.episodes.interfaces import EpisodeInfraError
from penstock.backends.episodes.tools.arguments import text_argument, text_schema
from penstock.backends.processes.sandbox.sandbox import Isolation, Sandbox, SandboxLimits
from penstock.backends.processes.sandbox.warded import ProgramRun, SandboxFailedError

if TYPE_CHECKING:
    from penstock.backends.episodes.interfaces import JsonObject

MAX_CHARS: Final = 64 << 10
_FENCED: Final = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
"""The whole program between the marks that models like to put around one."""


class PythonTool:
    """Runs a program that the model wrote, in a sandbox; see ``docs/tools.md`` for what that protects against.

    Each call begins anew: nothing is left of the one before. One object serves all episodes of a process.
    """

    name: Final = "python"
    description: Final = (
        "Runs a Python program and returns what it prints, and the value of an expression on its last line. Nothing "
        "is kept between calls; there is no network."
    )
    parameters: Final[JsonObject] = text_schema("code", "the program")

    def __init__(
        self,
        *,
        wall_s: float = 10.0,
        cpu_s: int = 5,
        memory_bytes: int = 512 << 20,
        disk_bytes: int = 16 << 20,
        output_bytes: int = 8 << 10,
        may_start_processes: bool = False,
        packages: bool = True,
        isolation: Isolation = "auto",
        max_running: int | None = None,
    ) -> None:
        """The arguments are those of :class:`SandboxLimits` and :class:`Sandbox`.

        Raises:
            UserFault: this machine cannot shut programs in as asked.
        """
        limits = SandboxLimits(
            wall_s=wall_s,
            cpu_s=cpu_s,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            output_bytes=output_bytes,
            may_start_processes=may_start_processes,
        )
        self._sandbox = Sandbox(limits, isolation=isolation, packages=packages, max_running=max_running)

    @property
    def isolation(self) -> str:
        """What is in force: ``namespaces``, ``filter`` or ``none``."""
        return self._sandbox.isolation

    async def call(self, arguments: JsonObject) -> str:
        """See :class:`~penstock.backends.episodes.interfaces.Tool`."""
        return await self.run(text_argument(arguments, "code", max_chars=MAX_CHARS))

    async def run(self, code: str) -> str:
        """What the model reads of this program.

        Raises:
            EpisodeInfraError: the program could not be run.
        """
        fenced = _FENCED.fullmatch(code)
        try:
            run = await self._sandbox.run(fenced[1] if fenced else code)
        except SandboxFailedError as error:
            raise EpisodeInfraError(str(error)) from error
        return told(run, self._sandbox.limits)


def told(run: ProgramRun, limits: SandboxLimits) -> str:
    """A run in the words that the model reads."""
    end = _how_it_ended(run, limits)
    output = run.output.rstrip("\n")
    if not end:
        return output or "(the program ended without output)"
    return f"{output}\n({end})" if output else f"({end})"


def _how_it_ended(run: ProgramRun, limits: SandboxLimits) -> str:
    """Empty when there is nothing to say: it ended by itself, or its traceback says it."""
    if run.is_flood:
        return "the program was ended: it wrote too much"
    if run.is_overdue:
        return f"the program was ended: it did not finish within {limits.wall_s:g} seconds"
    match run.exit_code:
        case None:
            return "the program was ended"
        case 0 | 1:
            return ""
        case code if code == -signal.SIGXCPU:
            return f"the program was ended: it used more than {limits.cpu_s} seconds of CPU time"
        case code if code == -signal.SIGSEGV:
            return "the program crashed: segmentation fault, as of a recursion that is too deep or too much memory"
        case code if code < 0:
            return f"the program was ended by signal {-code}"
        case code:
            return f"the program ended with exit code {code}"
