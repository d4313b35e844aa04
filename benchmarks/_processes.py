"""A benchmark in a process of its own, never beyond its deadline.

Waits: it is waited for until the deadline. Then, and whenever it is over, every process that has come from it is
killed: they are known by a variable that all of them inherit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections import deque
from typing import IO, TYPE_CHECKING, Final

from penstock.backends.processes.process_facts import how_it_ended, kill, marked_processes
from penstock.benchmarks._progress import wait_for
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Sequence

MARK: Final = "PENSTOCK_BENCHMARK"
KEPT_LINES: Final = 20
"""Of what a benchmark says on stderr, for why it failed."""
LAST_WORDS_S: Final = 5.0
"""For the rest of what it said, when it is over."""
FAULT: Final = "penstock: "
"""How a message about a fault of the user begins: with exit code 2 it is why a benchmark cannot run here."""


def watched(name: str, command: list[str], deadline_s: float) -> tuple[int, list[str]]:
    """Exit code, and the last lines of stderr, which are shown as they come.

    Raises:
        subprocess.TimeoutExpired: it was not over in time; it is killed.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, MARK: mark}
    )
    said: deque[str] = deque(maxlen=KEPT_LINES)
    assert process.stderr is not None
    relay = threading.Thread(target=_relay, args=(name, process.stderr, said), daemon=True)
    relay.start()
    try:
        code = wait_for(process, deadline_s, name)
    finally:
        for pid, start_ticks in marked_processes([f"{MARK}={mark}".encode()]).items():
            kill(pid, start_ticks)
        relay.join(LAST_WORDS_S)
    return code, list(said)


def failure_text(code: int, said: Sequence[str]) -> str:
    """Of a process that ended so, by the last thing that it said."""
    return f"{how_it_ended(code)}: {said[-1] if said else 'it said nothing'}"


def why_no_result(name: str, module: str, arguments: Sequence[str], deadline_s: float) -> str:
    """Run a module that is to leave a result; what to say if it left none."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        code, said = watched(name, command, deadline_s)
    except subprocess.TimeoutExpired:
        return f"past its deadline: killed after {deadline_s:g} s"
    fault = next((line.removeprefix(FAULT) for line in said if line.startswith(FAULT)), "")
    return fault or failure_text(code, said)


def _relay(name: str, stderr: IO[bytes], said: deque[str]) -> None:
    """Show what it is at, as it comes; ends with the last process that can write there."""
    with stderr:
        for raw in stderr:
            if line := terminal_text(raw.decode(errors="replace").rstrip()):
                said.append(line)
                sys.stderr.write(terminal_lines(f"{name}: {line}\n"))
