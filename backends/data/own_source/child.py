"""The process that runs a user's source of rows: one order after the other, each answered once.

The class has ``next_rows(n)``, or is an (async) iterator; ``state()`` and ``restore(state)``; and, where it wants to
know, ``told(outcomes)`` and ``close()``. Each may be ``async``.

Invariants:

* What the class raises, or returns that cannot be used, is told with the user's file and line, and ends nothing here.
* The state that goes with rows was taken after they were made.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from penstock.backends.data.own_source.wire import ORDERS, Close, Done, Draw, Opened, Raised, Restore, Tell
from penstock.backends.processes.frames import Ready, frame
from penstock.backends.processes.function_child import line_to_parent, load_failure, orders_beside
from penstock.backends.processes.user_code import UserCodeError, defined_at, load_object, told
from penstock.backends.processes.user_loop import run_beside_functions
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Generator, Iterator

    from penstock.backends.data.own_source.wire import Order, Said
    from penstock.messages.flow import RowOutcome

MAX_STATE_BYTES: Final = 16_000_000
NEEDED: Final = ("state", "restore")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a row, as the user's class is told."""

    row: int
    """Counts from 0, in the order in which the class has made them."""
    fate: str
    """``admitted`` (its group came in and waits to be trained), ``rejected`` (the Filter turned it away); then
    ``trained``, ``requeued`` (it is drawn again), ``stale``, ``failed`` or ``cancelled``."""
    cause: str
    """Why, where it was not admitted or trained."""
    reward: float | None
    """Mean of its group; None: no reward came, or it was told before."""
    rewards: tuple[float, ...]
    """Of the samples of a group that was admitted."""


def main() -> None:
    """Arguments: :class:`~penstock.backends.data.own_source.wire.Opened` as JSON."""
    line, (given,) = line_to_parent()
    opened = msgspec.json.decode(given, type=Opened)
    try:
        source = load_source(opened)
    except BaseException as error:  # foreign code may raise anything while it is set up
        line.sendall(frame([load_failure(error, opened.spec)]))
        return
    line.sendall(frame([Ready()]))
    run_beside_functions(_serve(line, UserSource(source)), "data.source")


def load_source(opened: Opened) -> object:
    """An instance of the user's class.

    Raises:
        UserCodeError: it cannot be loaded, or lacks what a source has.
    """
    found = load_object(opened.spec)
    check_source(found, opened.spec)
    make = cast("type[Any]", found)
    options: dict[str, object] = dict(opened.options)
    if "seed" in inspect.signature(make).parameters:
        options.setdefault("seed", opened.seed)
    return make(**options)


def check_source(found: object, spec: str) -> None:
    """
    Raises:
        UserCodeError: this is no class of a source.
    """
    if not isinstance(found, type):
        raise UserCodeError(f"{spec}: expected a class that makes rows, found {type(found).__name__}")
    lacking = [name for name in NEEDED if not callable(getattr(found, name, None))]
    if not any(hasattr(found, name) for name in ("next_rows", "__aiter__", "__iter__")):
        lacking.insert(0, "next_rows")
    if lacking:
        raise UserCodeError(
            f"{spec}: the class has no {' and no '.join(lacking)}; a source of rows has next_rows(n), or is an (async) "
            "iterator, and has state() and restore(state)"
        )


async def _serve(line: socket.socket, source: UserSource) -> None:
    stream, writer = await asyncio.open_connection(sock=line)
    async for order in orders_beside(stream, ORDERS):
        answer: Said
        try:
            answer = await source.obey(order)
        except BaseException as error:  # foreign code may raise anything
            answer = Raised(str(error) if isinstance(error, UserFault) else told(error))
        writer.write(frame([answer]))
        await writer.drain()


class UserSource:
    """Calls the user's class."""

    def __init__(self, source: object) -> None:
        self._source: Any = source
        self._iterator: AsyncIterator[object] | Iterator[object] | None = None

    async def obey(self, order: Order) -> Done:
        """Do it.

        Raises:
            UserFault: the class returned what cannot be used. What else is raised is the class's own.
        """
        rows: tuple[bytes, ...] = ()
        match order:
            case Restore(state=state):
                await _awaited(self._source.restore(msgspec.json.decode(state)))
                self._iterator = None
            case Tell(outcomes=outcomes):
                if hasattr(self._source, "told"):
                    await _awaited(self._source.told([_outcome(each) for each in outcomes]))
            case Draw(num_rows=number):
                returned = await self._drawn(number)
                with _blamed(self._source, "next_rows"):
                    rows = _encoded(returned, number)
            case Close():
                if hasattr(self._source, "close"):
                    await _awaited(self._source.close())
                return Done((), b"null")
        found = await _awaited(self._source.state())
        with _blamed(self._source, "state"):
            return Done(rows, _state(found))

    async def _drawn(self, number: int) -> object:
        if hasattr(self._source, "next_rows"):
            return await _awaited(self._source.next_rows(number))
        rows: list[object] = []
        if hasattr(self._source, "__aiter__"):
            iterator = self._iterator = self._iterator or aiter(self._source)
            async for row in cast("AsyncIterator[object]", iterator):
                rows.append(row)
                if len(rows) == number:
                    break
        else:
            iterator = self._iterator = self._iterator or iter(self._source)
            for row in cast("Iterator[object]", iterator):
                rows.append(row)
                if len(rows) == number:
                    break
        return rows


@contextmanager
def _blamed(source: object, name: str) -> Generator[None]:
    """What is wrong with what a method has returned is told with its place."""
    try:
        yield
    except UserFault as error:
        raise UserFault(f"{error} ({defined_at(getattr(source, name, source))})") from None


async def _awaited(returned: object) -> object:
    return await returned if inspect.isawaitable(returned) else returned


def _outcome(told: RowOutcome) -> Outcome:
    fate = told.end or ("rejected" if told.is_rejected else "admitted")
    return Outcome(row=told.row, fate=fate, cause=told.cause, reward=told.reward, rewards=told.rewards)


def _encoded(returned: object, number: int) -> tuple[bytes, ...]:
    if not isinstance(returned, list | tuple):
        raise UserFault(f"next_rows({number}) returned {type(returned).__name__}; expected a list of rows")
    rows = cast("list[object]", returned)
    if len(rows) > number:
        raise UserFault(f"next_rows({number}) returned {len(rows)} rows; expected at most as many as were asked for")
    for row in rows:
        if not isinstance(row, dict):
            raise UserFault(f"next_rows({number}) returned a row that is {type(row).__name__}; expected a dict")
    try:
        return tuple(map(msgspec.json.encode, rows))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserFault(f"next_rows({number}) returned a row that has no form in JSON: {error}") from None


def _state(returned: object) -> bytes:
    try:
        state = msgspec.json.encode(returned)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserFault(f"state() returned what has no form in JSON: {error}") from None
    if len(state) > MAX_STATE_BYTES:
        raise UserFault(f"state() returned {len(state):,} bytes of JSON; at most {MAX_STATE_BYTES:,} are kept")
    return state


if __name__ == "__main__":
    main()
