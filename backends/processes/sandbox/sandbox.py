"""Runs Python that a model has written, and says what came of it.

Invariants:

* A program that crashes, loops, floods or is killed is a :class:`ProgramRun`: that is what it did. Only a sandbox that
  cannot be built, or that does not answer, is an error, and then nothing of the program counts.
* Nothing is run under a weaker isolation than the one that was found when the sandbox was made.
* When :meth:`Sandbox.run` returns or is cancelled, no process of it is left.

Waits:

| who waits | for what | who ends it |
|---|---|---|
| ``run`` | one of ``max_running`` places | the programs that have them, each with its deadline |
| ``run`` | the program's end | the program; its warden at ``wall_s``; :class:`WardedRun` ``GRACE_S`` later |
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import msgspec

from penstock.backends.processes.sandbox import kernel
from penstock.backends.processes.sandbox.warded import ProgramRun, SandboxFailedError, WardedRun
from penstock.backends.processes.sandbox.warden import FILTER, NAMESPACES, NONE, WardenJob
from penstock.messages.errors import UserFault

Isolation = Literal["auto", "namespaces", "filter", "none"]

_log: Final = logging.getLogger(__name__)

MEANS: Final = {
    NAMESPACES: "processes, files and network of its own (Linux namespaces), a system call filter and limits",
    FILTER: "one process with one thread, without network, that can read the Python installation and write nothing "
    "(Landlock, a system call filter), and limits",
    NONE: "limits on time, memory and output alone: it can read and write what this user can, and reach the network",
}


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one program may use."""

    wall_s: float = 10.0
    """Seconds from the program's start to its end."""
    cpu_s: int = 5
    """CPU seconds of each of its processes."""
    memory_bytes: int = 512 << 20
    """Address space of each of its processes."""
    disk_bytes: int = 16 << 20
    """What it writes, in all; kept in memory, and gone with it."""
    output_bytes: int = 16 << 10
    """Of its output that are kept: the first half and the last."""
    may_start_processes: bool = False
    """It may, up to 32 processes and threads together; only under ``namespaces``."""

    def __post_init__(self) -> None:
        least = {"wall_s": 0.01, "cpu_s": 1, "memory_bytes": 64 << 20, "disk_bytes": 4096, "output_bytes": 64}
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise ValueError(f"{name} must be >= {value}, got {getattr(self, name)}")


class Sandbox:
    """Runs programs, each in a sandbox of its own. Usable from any event loop."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        isolation: Isolation = "auto",
        packages: bool = True,
        max_running: int | None = None,
        python: str | None = None,
    ) -> None:
        """Tries out what this machine allows, and logs what is in force.

        Args:
            limits: of each program.
            isolation: ``auto`` takes the strongest that this machine has and that protects; ``none`` has to be said.
            packages: whether programs can import what is installed in this environment.
            max_running: programs at a time; the number of cores when not given.
            python: interpreter that runs the programs; this one when not given.

        Raises:
            UserFault: this machine has no such isolation.
        """
        self.limits = limits or SandboxLimits()
        self._packages = _package_folders() if packages else ()
        self._python = os.path.realpath(python or str(getattr(sys, "_base_executable", "")) or sys.executable)
        self._readable = _readable_paths(self._python, self._packages)
        self._threads = ThreadPoolExecutor(max_running or os.cpu_count() or 1, thread_name_prefix="sandbox")
        self.isolation = self._found(isolation)
        if self.limits.may_start_processes and self.isolation == FILTER:
            raise UserFault(
                "may_start_processes: this machine lets a program be shut in only as one process (isolation filter)"
            )
        _log.info("programs of the model are run with isolation %s: %s", self.isolation, MEANS[self.isolation])
        if self.isolation == NONE:
            _log.warning("programs of the model are run unprotected, as was asked for: %s", MEANS[NONE])

    async def run(self, source: str, *, stdin: str = "", is_plain: bool = False) -> ProgramRun:
        """Run this, when a place is free.

        Args:
            source: the program.
            stdin: what it reads.
            is_plain: its output is what it writes to stdout, byte for byte; else stderr and the value of an expression
                on the last line are in it as well.

        Raises:
            SandboxFailedError: it could not be run.
        """
        job = self._job(source, self.isolation)._replace(stdin=stdin, is_plain=is_plain)
        run = WardedRun(job, self.limits.output_bytes)
        followed = asyncio.get_running_loop().run_in_executor(self._threads, run.follow)
        try:
            return await asyncio.shield(followed)
        except asyncio.CancelledError:
            run.stop()
            await asyncio.wait([followed])
            raise

    def close(self) -> None:
        """No more programs; those that run end by their deadlines."""
        self._threads.shutdown(wait=False)

    def _job(self, source: str, isolation: str) -> WardenJob:
        return WardenJob(
            caller_pid=os.getpid(),
            isolation=isolation,
            source=source,
            python=self._python,
            readable=self._readable,
            packages=self._packages,
            wall_s=self.limits.wall_s,
            cpu_s=self.limits.cpu_s,
            memory_bytes=self.limits.memory_bytes,
            disk_bytes=self.limits.disk_bytes,
            may_start_processes=self.limits.may_start_processes,
        )

    def _found(self, wanted: Isolation) -> str:
        """The isolation that is in force, tried out on a program of one line."""
        if not kernel.is_known_machine():
            raise UserFault("programs of the model can be run on Linux on x86-64 and AArch64 only")
        reasons: list[str] = []
        for isolation in (NAMESPACES, FILTER) if wanted == "auto" else (wanted,):
            why_not = self._tried(isolation)
            if not why_not:
                return isolation
            reasons.append(f"{isolation}: {why_not}")
        raise UserFault(
            f"programs of the model cannot be shut in on this machine ({'; '.join(reasons)}). Allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0; in a "
            "container: a seccomp profile that allows unshare and mount), or Landlock on Linux 6.12 or newer, or say "
            "isolation 'none' to run them unprotected"
        )

    def _tried(self, isolation: str) -> str:
        """Why it does not work; empty when it does."""
        version = kernel.landlock_version()
        if isolation == FILTER and version < kernel.LANDLOCK_NEEDED:
            has = f"version {version} of Landlock" if version else "no Landlock, or does not allow it here"
            return (
                f"the kernel has {has}; version {kernel.LANDLOCK_NEEDED} is needed (Linux 6.12), since older ones "
                "let a program signal and reach other processes"
            )
        try:
            run = WardedRun(self._job("print(6 * 7)", isolation), self.limits.output_bytes).follow()
        except SandboxFailedError as error:
            return str(error)
        return "" if run.output == "42\n" else f"a program that prints 42 printed {run.output[:300]!r}"


def _package_folders() -> tuple[str, ...]:
    found = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return tuple(sorted(path for path in found if os.path.isdir(path)))


def _readable_paths(python: str, packages: tuple[str, ...]) -> tuple[str, ...]:
    """What a program needs to run: the interpreter, its library and the system's shared ones."""
    variables = sysconfig.get_config_vars()
    shared = Path(str(variables.get("LIBDIR", "")), str(variables.get("INSTSONAME", "")))
    candidates = [
        python, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(shared), "/etc/ld.so.cache",
        "/lib", "/lib64", "/usr/lib", "/usr/lib64", *packages,
    ]  # fmt: skip
    # /lib may be a link: programs name it so, and what is mounted there is what it leads to.
    return tuple(dict.fromkeys(os.path.abspath(path) for path in candidates if os.path.exists(path) and path != "/"))
