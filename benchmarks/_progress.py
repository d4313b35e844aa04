"""What a benchmark is at, on the terminal while it measures: on stderr, so that its result alone is on stdout.

Nothing runs beside what is measured: a line is written between two measurements, or while a process of its own is
waited for.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

STILL_S: Final = 5.0
"""After so long a wait is told again."""

KILLED_S: Final = 60.0
"""For the kernel to end what was killed."""

_STARTED_S: Final = time.monotonic()
T = TypeVar("T")


def say(text: str) -> None:
    """A line, with the seconds since the benchmark began."""
    minutes, seconds = divmod(int(time.monotonic() - _STARTED_S), 60)
    print(f"{minutes:4}:{seconds:02}  {text}", file=sys.stderr, flush=True)


def in_turn(parts: Collection[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """The parts, each told when its turn comes."""
    for number, part in enumerate(parts, 1):
        say(f"{number} of {len(parts)}: {name(part)}")
        yield part


def repeated(num_repetitions: int, parts: Collection[str]) -> Iterator[tuple[int, str]]:
    """All parts again and again, each with the number of its repetition, from 0."""
    return in_turn(
        list(itertools.product(range(num_repetitions), parts)), lambda each: f"{each[1]}, repetition {each[0] + 1}"
    )


def wait_for(process: subprocess.Popen[bytes], timeout_s: float, what: str) -> int:
    """Its exit code.

    Raises:
        subprocess.TimeoutExpired: it took longer; it was killed.
    """
    began_s = time.monotonic()
    try:
        while True:
            try:
                return process.wait(STILL_S)
            except subprocess.TimeoutExpired:
                took_s = time.monotonic() - began_s
                if took_s > timeout_s:
                    raise
                say(f"{what}, for {took_s:.0f} s")
    except BaseException:  # that nobody waits any more, whatever the reason
        process.kill()
        process.wait(KILLED_S)
        raise
