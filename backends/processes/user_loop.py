"""The event loop of a process in which a user's ``async`` functions run.

Invariants:

* Whatever a function has started and left to itself (a task, a callback) costs nobody else anything: what it raises is
  told in one line on stderr, with the user's frames, and the loop goes on. That holds for ``KeyboardInterrupt`` and
  ``SystemExit`` as well, which would end any other loop: no terminal sends them here, as these processes lead sessions
  of their own, so it is the user's code that has raised them.
* An error of ours ends the process, with its stack trace.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

from penstock.backends.processes.user_code import told

if TYPE_CHECKING:
    from collections.abc import Coroutine

MAX_LINE_CHARACTERS: Final = 1000
_TOLD: Final = "_penstock_told"


def run_beside_functions(main: Coroutine[Any, Any, None], key: str) -> None:
    """Run ``main``, in which users' functions run, to its end.

    Args:
        main: the coroutine; what it raises is raised here.
        key: of the scenario that names the functions, for what is told of them.
    """
    leftovers = _Leftovers(key)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(leftovers.handle)
        task = loop.create_task(main)
        while True:
            try:
                return loop.run_until_complete(task)
            except (KeyboardInterrupt, SystemExit) as error:  # of another task: that one has it, and has ended with it
                if task.done():
                    raise
                leftovers.tell(error)


class _Leftovers:
    """What users' functions have left to themselves, and what became of it."""

    def __init__(self, key: str) -> None:
        self._key = key

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop has come upon something that nobody waits for."""
        error = context.get("exception")
        if isinstance(error, BaseException):
            self.tell(error)
        else:
            self._say(str(context.get("message", "")))

    def tell(self, error: BaseException) -> None:
        """Say what was raised, once: a task that ended the loop's turn may be found unawaited as well, by the next
        collection of garbage, when others have been told meanwhile. The mark is on the error itself, as those that are
        built in take no weak references."""
        if _TOLD not in error.__dict__:
            error.__dict__[_TOLD] = True
            self._say(f"something that a function had started ended with {told(error)}")

    def _say(self, text: str) -> None:
        line = " ".join(f"penstock: {self._key}: {text}".split())
        sys.stderr.write(f"{line[:MAX_LINE_CHARACTERS]}\n")
        sys.stderr.flush()
