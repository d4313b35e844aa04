"""All sessions of one gateway. Everything here belongs to one event loop.

Invariants:

* A session here is open or taken; one that is over is remembered by its name and the reason, up to ``MAX_REMEMBERED``.
* Open ones are taken in the order in which they came; those whose engine takes new weights are left out meanwhile.

| waits for | who ends it |
|---|---|
| an agent for an open session | the next sample; the time it gave |
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from penstock.backends.episodes.sessions import GoneError

if TYPE_CHECKING:
    from penstock.backends.episodes.sessions import Session

MAX_REMEMBERED: Final = 10_000
"""Sessions that are over and whose agents still hear why."""


class SessionTable:
    """All sessions of a gateway."""

    def __init__(self, prefix: str) -> None:
        """``prefix`` begins the name of every session of this very gateway."""
        self.prefix = prefix
        self.sessions: dict[str, Session] = {}
        """Open and taken."""
        self._open: deque[Session] = deque()
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._changed = asyncio.Event()

    @property
    def num_open(self) -> int:
        """That can be taken now."""
        return sum(1 for session in self._open if not session.episode.is_paused)

    @property
    def num_taken(self) -> int:
        return len(self.sessions) - len(self._open)

    def new_name(self) -> str:
        return f"{self.prefix}{secrets.token_hex(8)}"

    def add(self, session: Session) -> None:
        """A new one, open."""
        self.sessions[session.name] = session
        self._open.append(session)
        self._changed.set()

    def note_change(self) -> None:
        """A session that could not be taken can be now."""
        self._changed.set()

    def remove(self, session: Session) -> None:
        """It is over."""
        if self.sessions.pop(session.name, None) is None:
            return
        if not session.is_taken:
            self._open.remove(session)
        self._reasons[session.name] = session.over_because
        if len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)

    def by_name(self, name: str) -> Session:
        """A session that is taken.

        Raises:
            GoneError: it is over, or went with the engine that had it.
            KeyError: there never was one.
        """
        session = self.sessions.get(name)
        if session is not None and session.is_taken:
            return session
        if name in self._reasons:
            raise GoneError(self._reasons[name])
        if not name.startswith(self.prefix):
            raise GoneError("its engine was replaced, and its conversation is lost; the sample is issued again")
        raise KeyError(name)

    def take(self) -> Session | None:
        """The next open session, which its agent has from now on."""
        session = next((session for session in self._open if not session.episode.is_paused), None)
        if session is not None:
            self._open.remove(session)
            session.take()
        return session

    async def has_open(self, wait_s: float) -> bool:
        """Wait until one can be taken, at most so long."""
        try:
            async with asyncio.timeout(wait_s):
                while not self.num_open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
