"""The reward ``code``: a program of the model's is tried on the row's cases, in a sandbox.

What the sandbox says is what the program *claims*: its output, or a value as JSON. What a case expects never enters it,
and the comparison is made here. So nothing that the program does to its own process earns anything: there is no verdict
in there that it could forge, and the way in which it ends (``exit``, an exception, a signal) is no verdict either.

Invariants:

* Each case is run in a fresh sandbox, with nothing of the one before.
* A program that crashes, hangs, floods or exceeds its limits has not passed that case: that is the model's doing. A
  sandbox that cannot be built, or does not answer, gives no reward: that is ours.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Final

from penstock.backends.processes.sandbox.sandbox import Sandbox, SandboxLimits
from penstock.backends.processes.sandbox.warded import SandboxFailedError
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.code_cases import read_cases, same_output, same_result
from penstock.backends.rewards.functions import NoRewardError

if TYPE_CHECKING:
    from penstock.backends.processes.sandbox.warded import ProgramRun
    from penstock.backends.rewards.code_cases import Case
    from penstock.backends.rewards.options import CodeOptions

THOUGHT_END: Final = "</think>"
MAX_PROGRAM_CHARACTERS: Final = 1 << 17
MAX_OUTPUT_BYTES: Final = 1 << 22
"""Of a case; a row that expects more cannot be tried."""
SPARE_OUTPUT_BYTES: Final = 1 << 16
"""Beyond what a case expects."""
_FENCE: Final = re.compile(r"^[ \t]{0,3}```[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_LANGUAGES: Final = frozenset(("", "python", "python3", "py"))

DRIVER: Final = """
import json, os, sys
def call(source, name):
    arguments = json.loads(sys.stdin.buffer.read())
    claims = os.dup(1)
    nowhere = os.open("/dev/null", os.O_WRONLY)
    os.dup2(nowhere, 1)
    scope = {"__name__": "program"}
    exec("from typing import *", scope)
    exec(compile(source, "program.py", "exec", dont_inherit=True), scope)
    function = scope.get(name)
    if function is None and "Solution" in scope:
        function = getattr(scope["Solution"](), name)
    claim = json.dumps(function(*arguments), allow_nan=False).encode()
    while claim:
        claim = claim[os.write(claims, claim):]
"""
"""Calls a function of the program with arguments from stdin, and writes what it returned to the output, which the
program's own printing does not reach. A program may write a claim there itself; it is compared like any other."""


class CodeReward:
    """See the module. Asked from an event loop, for many responses at a time."""

    def __init__(self, options: CodeOptions) -> None:
        """
        Raises:
            UserCodeError: this machine does not let programs be shut in.
        """
        self._options = options
        self.concurrency = max(1, len(os.sched_getaffinity(0)))
        self.sandbox = open_sandbox(options, self.concurrency)

    async def __call__(self, *, response: str, label: str) -> float:
        """The share of the cases that the program passes, or whether it passes all."""
        cases = read_cases(label)
        if self._options.max_cases is not None:
            cases = cases[: self._options.max_cases]
        program = program_of(response)
        if program is None:
            return 0.0
        deadline_s = time.monotonic() + self._options.total_s
        num_passed = 0
        for case in cases:
            if time.monotonic() >= deadline_s:
                break
            passed = await self._passes(program, case)
            num_passed += passed
            if not passed and not self._options.partial:
                break
        share = num_passed / len(cases)
        return share if self._options.partial else float(share == 1)

    async def _passes(self, program: str, case: Case) -> bool:
        source = f"{DRIVER}call({program!r}, {case.function!r})\n" if case.function else program
        stdin = json.dumps(case.arguments) if case.function else case.stdin
        try:
            run = await self.sandbox.run(source, stdin=stdin, is_plain=True)
        except SandboxFailedError as error:
            raise NoRewardError(f"the sandbox could not run the program: {error}") from error
        return _is_right(run, case)


def open_sandbox(options: CodeOptions, max_running: int = 1) -> Sandbox:
    """The sandbox that programs are tried in.

    Raises:
        UserCodeError: this machine does not let programs be shut in, or the limits are none.
    """
    try:
        limits = SandboxLimits(
            wall_s=options.wall_s,
            cpu_s=options.cpu_s,
            memory_bytes=options.memory_bytes,
            output_bytes=2 * (MAX_OUTPUT_BYTES + SPARE_OUTPUT_BYTES),
        )
        return Sandbox(limits, packages=options.packages, max_running=max_running)
    except ValueError as error:
        raise UserCodeError(f"reward.code: {error}") from None


def _is_right(run: ProgramRun, case: Case) -> bool:
    has_ended = run.exit_code is not None and run.exit_code >= 0
    if not has_ended or run.is_flood or run.num_left_out_bytes:
        return False
    if not case.function:
        return same_output(run.output, case.stdout)
    try:
        return same_result(json.loads(run.output), case.result)
    except (ValueError, RecursionError, OverflowError):
        return False


def program_of(response: str) -> str | None:
    """The last fenced block of Python, or without a language, behind the last ``</think>``. None: there is none."""
    text = response.rpartition(THOUGHT_END)[2]
    found: str | None = None
    opened: tuple[int, bool] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence.end() + 1, fence[1].lower() in _LANGUAGES
        elif not fence[1]:
            start, is_python = opened
            if is_python:
                found = text[start : fence.start()]
            opened = None
    if found is None or not found.strip() or len(found) > MAX_PROGRAM_CHARACTERS:
        return None
    return found
