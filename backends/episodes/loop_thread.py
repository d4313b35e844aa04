"""An event loop on a thread of its own, for a server in the process of an actor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from collections.abc import Callable

ArgumentTs = TypeVarTuple("ArgumentTs")


class LoopThread:
    """The thread; all but ``loop`` and ``closing`` is for other threads."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        """``run``: what the thread does; it runs ``loop`` until ``closing`` is set."""
        self.loop = asyncio.new_event_loop()
        self.closing = asyncio.Event()
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        """Run the loop in its thread from here on; once only."""
        self._thread.start()

    def runner(self) -> asyncio.Runner:
        """Of its loop."""
        return asyncio.Runner(loop_factory=lambda: self.loop)

    def soon(self, callback: Callable[[Unpack[ArgumentTs]], object], *arguments: *ArgumentTs) -> None:
        """Have this called on it; where the loop is closed, nobody waits for it any more."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *arguments)

    def close(self, timeout_s: float) -> None:
        """Have it end, and wait for that."""
        self.soon(self.closing.set)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
