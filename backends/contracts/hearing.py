"""A backend that a suite drives: commands in, what it says read one by one."""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.messages.local import LocalEvent

if TYPE_CHECKING:
    from penstock.backends.protocol import Backend

EventT = TypeVar("EventT", bound=LocalEvent)


class Driven:
    """A started backend. What it says of other kinds than is waited for is kept, in order."""

    def __init__(self, backend: Backend[Any], timeout_s: float) -> None:
        self.backend = backend
        self._timeout_s = timeout_s
        self._said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        self._passed: deque[LocalEvent] = deque()
        backend.start(self._said.put, self._said.put)

    def tell(self, *commands: object) -> None:
        """Have these carried out."""
        for command in commands:
            self.backend.execute(command)

    def ask(self, command: object, answer: type[EventT]) -> EventT:
        """Have this carried out, and wait for an answer of this kind."""
        self.tell(command)
        return self.hear(answer)

    def hear(self, kind: type[EventT]) -> EventT:
        """The next event of this kind. A failure of the backend is raised; silence ends with AssertionError."""
        for event in self._passed:
            if isinstance(event, kind):
                self._passed.remove(event)
                return event
        while not isinstance(event := self._next(kind), kind):
            self._passed.append(event)
        return event

    def failure(self) -> BaseException:
        """The error that the backend fails with; what it says before is passed over."""
        while True:
            try:
                event = self._said.get(timeout=self._timeout_s)
            except Empty:
                raise AssertionError(f"no failure within {self._timeout_s:g} s") from None
            if isinstance(event, BaseException):
                return event

    def left_over(self, kind: type[EventT]) -> list[EventT]:
        """What was said of this kind until now and is not yet heard; now it is."""
        while not self._said.empty():
            self._passed.append(self._next(kind))
        found = [event for event in self._passed if isinstance(event, kind)]
        self._passed = deque(event for event in self._passed if not isinstance(event, kind))
        return found

    def close(self) -> None:
        """As a host does."""
        self.backend.close(self._timeout_s)

    def _next(self, kind: type[LocalEvent]) -> LocalEvent:
        try:
            event = self._said.get(timeout=self._timeout_s)
        except Empty:
            passed = ", ".join(type(each).__name__ for each in self._passed) or "nothing"
            raise AssertionError(f"no {kind.__name__} within {self._timeout_s:g} s; said {passed}") from None
        if isinstance(event, BaseException):
            raise event
        return event
