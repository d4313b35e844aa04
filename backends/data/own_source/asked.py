"""The process with a user's source of rows, as the thread that asks it sees it.

| waits for | who ends it |
|---|---|
| an answer | the process; its end; ``data.source_timeout_s``; ``close`` |
"""

from __future__ import annotations

import os
import selectors
import time
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.data.own_source.wire import SAID, Close, Done, Opened, Raised
from penstock.backends.processes.function_process import FunctionProcess
from penstock.backends.processes.user_code import UserCodeError

if TYPE_CHECKING:
    from penstock.backends.data.own_source.wire import Order, Said
    from penstock.backends.processes.frames import Ready

MODULE: Final = "penstock.backends.data.own_source.child"
START_TIMEOUT_S: Final = 120.0


class AskedSource:
    """Starts the process, and asks it one thing at a time. Used by the thread that made it."""

    def __init__(self, opened: Opened, timeout_s: float) -> None:
        """
        Raises:
            UserCodeError: the class cannot be loaded.
        """
        self._spec, self._timeout_s = opened.spec, timeout_s
        self._process = FunctionProcess["Said"](
            MODULE, msgspec.json.encode(opened).decode(), said=SAID, name="data.source"
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.socket, selectors.EVENT_READ)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ)
        try:
            self._heard(START_TIMEOUT_S, "its class was loaded")
        except BaseException:
            self._process.end()
            raise

    def ask(self, order: Order) -> Done:
        """
        Raises:
            UserCodeError: the class has raised, has returned what cannot be used, hangs, or has ended its process.
        """
        said = self._answer(order, self._timeout_s)
        if isinstance(said, Raised):
            raise UserCodeError(f"data.source: {self._spec}: {said.message}")
        return said

    def close(self, timeout_s: float) -> str:
        """Let the class close, and end the process; what went wrong with that in words, empty: nothing."""
        try:
            said = self._answer(Close(), timeout_s)
            return said.message if isinstance(said, Raised) else ""
        except UserCodeError as error:
            return str(error)
        finally:
            self._selector.close()
            self._process.end()

    def stop_waiting(self) -> None:
        """Whoever waits for an answer gets an error now. From any thread."""
        os.eventfd_write(self._bell, 1)

    def end(self) -> None:
        """End the process. Again has no further effect."""
        self._process.end()

    def _answer(self, order: Order, timeout_s: float) -> Said:
        self._process.send([order])
        said = self._heard(timeout_s, f"{type(order).__name__.lower()} was done")
        assert said is not None, "it is ready"
        return said

    def _heard(self, timeout_s: float, what: str) -> Said | None:
        """The next answer; None: it has become ready."""
        until_s = time.monotonic() + timeout_s
        was_ready = self._process.ready is not None
        while True:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._process.wants_to_write else 0)
            self._selector.modify(self._process.socket, events)
            found = self._selector.select(max(0.0, until_s - time.monotonic()))
            if not found:
                self._process.end()
                raise UserCodeError(
                    f"data.source: {self._spec}: {timeout_s:g} s went by before {what} (data.source_timeout_s)"
                )
            if any(key.fd == self._bell for key, _ in found):
                raise UserCodeError(f"data.source: {self._spec}: the run ended before {what}")
            self._process.flush()
            if answers := list(self._process.heard()):  # one, as one thing is asked at a time
                return answers[0]
            ready: Ready | None = self._process.ready
            if ready is not None and not was_ready:
                return None
            if self._process.is_gone:
                how = self._process.end()
                raise UserCodeError(f"data.source: {self._spec}: its process {how} before {what}")
