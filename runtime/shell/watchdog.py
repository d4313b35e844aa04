"""Which waits last too long. Pure: what an actor waits for and the time come in, what to report goes out.

Invariants:

* A wait is the same one as long as what, subject, on whom and its mark are the same; its age counts from when it was
  first seen like this.
* A wait is reported when it becomes overdue, then whenever its age has doubled; with it everything else that is overdue
  at that moment, so that one report says all. When nothing is overdue any more, that is reported once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.waits import OverdueWait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.messages.waits import Wait

LOOKS_PER_PERIOD: Final = 8
"""How often waits are looked at within the time after which they are overdue."""


class _Known(msgspec.Struct):
    mark: int
    since_s: float
    report_at_s: float


class Watchdog:
    """The waits of one actor."""

    def __init__(self, overdue_after_s: float) -> None:
        self._overdue_after_s = overdue_after_s
        self._known: dict[tuple[str, str, str], _Known] = {}
        self._has_told = False

    @property
    def pause_s(self) -> float:
        """Between two looks; infinite when waits are never overdue."""
        return self._overdue_after_s / LOOKS_PER_PERIOD

    def look(self, waits: Iterable[Wait], now_s: float) -> tuple[OverdueWait, ...] | None:
        """These are there now. What is to be reported; None: nothing is new."""
        known: dict[tuple[str, str, str], _Known] = {}
        overdue: list[OverdueWait] = []
        is_due = False
        for wait in waits:
            key = (wait.what, wait.subject, wait.on)
            entry = self._known.get(key)
            if entry is None or entry.mark != wait.mark:
                entry = _Known(wait.mark, now_s, now_s + self._overdue_after_s)
            known[key] = entry
            if now_s - entry.since_s >= self._overdue_after_s:
                overdue.append(OverdueWait(wait, entry.since_s))
            if now_s >= entry.report_at_s:
                is_due = True
                entry.report_at_s = entry.since_s + 2 * (now_s - entry.since_s)
        self._known = known
        is_over = self._has_told and not overdue
        if not is_due and not is_over:
            return None
        self._has_told = bool(overdue)
        return tuple(overdue)


NEVER: Final = math.inf
"""As ``overdue_after_s``: nobody looks."""
