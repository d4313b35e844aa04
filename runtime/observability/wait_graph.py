"""Who waits for whom: the overdue waits of all actors as a graph, in words.

Invariants:

* A wait leads to the waits of the actor that it is on: to those about the same thing if it has any; otherwise to what
  others wait for about that thing; otherwise to all that this actor waits for.
* A wait that leads nowhere is a root, and so is a circle that nothing leads out of: there somebody has to act.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.waits import OPERATOR, OWN_BACKEND, OverdueWait

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.messages.waits import WaitsReported

MAX_LINES: Final = 40
COLLECT_S: Final = 2.0
"""Waits that hang together become overdue at about the same time, and are shown together."""


class WaitBoard:
    """The newest report of each actor, and when the graph of them is to be shown."""

    def __init__(self) -> None:
        self._reports: dict[str, WaitsReported] = {}
        self._due_s = math.inf

    def hear(self, report: WaitsReported, now_s: float) -> None:
        """An actor says what it has waited for too long."""
        self._reports[report.name] = report
        if report.waits:
            self._due_s = min(self._due_s, now_s + COLLECT_S)

    def forget(self, name: str) -> None:
        """This actor is gone, and waits no more."""
        self._reports.pop(name, None)

    def take(self, now_s: float) -> str:
        """The graph, if it is to be shown now; otherwise nothing."""
        if now_s < self._due_s:
            return ""
        self._due_s = math.inf
        return wait_graph(self._reports.values(), now_s)


class _Line(msgspec.Struct, eq=False):
    """What one actor waits for of one kind from one other."""

    actor: str
    what: str
    on: str
    waits: list[OverdueWait]
    leads_to: list[_Line] = []

    @property
    def since_s(self) -> float:
        return min(overdue.since_s for overdue in self.waits)


def wait_graph(reports: Iterable[WaitsReported], now_s: float) -> str:
    """The graph of the newest report of each actor: its waits, the oldest first, then circles and roots. Empty without
    any waits."""
    lines = _lines(reports)
    if not lines:
        return ""
    for line in lines:
        line.leads_to = _next(line, lines)
    told = [_sentence(line, now_s) for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        told.append(f"and {len(lines) - MAX_LINES} more")
    told += [f"in a circle: {' → '.join([*names, names[0]])}" for names in _circles(lines)]
    roots: dict[str, _Line] = {}
    for line in lines:
        if not line.leads_to:
            roots.setdefault(_place(line), line)
    told += [_root(place, line) for place, line in list(roots.items())[:MAX_LINES]]
    return "\n".join(told)


def _lines(reports: Iterable[WaitsReported]) -> list[_Line]:
    newest = {report.name: report for report in sorted(reports, key=lambda report: (report.epoch, report.at_s))}
    lines: dict[tuple[str, str, str], _Line] = {}
    for report in newest.values():
        for overdue in report.waits:
            key = (report.name, overdue.wait.what, overdue.wait.on)
            lines.setdefault(key, _Line(*key, [])).waits.append(overdue)
    return sorted(lines.values(), key=lambda line: (line.since_s, line.actor, line.what, line.on))


def _next(line: _Line, lines: Sequence[_Line]) -> list[_Line]:
    if line.on == OWN_BACKEND:
        return []
    its = [other for other in lines if other.actor == line.on]
    about_the_same = [other for other in its if _are_related(line, other)]
    if about_the_same:
        return about_the_same
    elsewhere = [other for other in lines if other.actor not in (line.actor, line.on) and _are_related(line, other)]
    ahead = [other for other in elsewhere if other.on != line.actor and other.what != line.what]
    return ahead or its


def _are_related(line: _Line, other: _Line) -> bool:
    return any(
        _is_about(one.wait.subject, two.wait.subject) for one in line.waits for two in other.waits if one.wait.subject
    )


def _is_about(subject: str, other: str) -> bool:
    """The same thing, or a part of it: ``12/3`` of the group ``12``."""
    return other == subject or other.startswith(f"{subject}/")


def _circles(lines: Sequence[_Line]) -> list[list[str]]:
    """The actors of each circle, once."""
    found: dict[frozenset[str], list[str]] = {}
    seen: set[int] = set()
    for start in lines:
        path: list[_Line] = []
        ways: list[Iterator[_Line]] = [iter([start])]
        while ways:
            line = next(ways[-1], None)
            if line is None:
                ways.pop()
                if path:
                    path.pop()
            elif line in path:
                names = list(dict.fromkeys(other.actor for other in path[path.index(line) :]))
                found.setdefault(frozenset(names), names)
            elif id(line) not in seen:
                seen.add(id(line))
                path.append(line)
                ways.append(iter(line.leads_to))
    return list(found.values())


def _place(line: _Line) -> str:
    return f"{line.actor}'s {OWN_BACKEND}" if line.on == OWN_BACKEND else line.on


def _sentence(line: _Line, now_s: float) -> str:
    return f"{line.actor} waits for {_subjects(line)} from {_place(line)}, for {now_s - line.since_s:.0f} s"


def _root(place: str, line: _Line) -> str:
    idle = "" if line.on in (OPERATOR, OWN_BACKEND) else ", which waits for nothing that is overdue"
    return f"at the root: {place} ({_subjects(line)}){idle}"


def _subjects(line: _Line) -> str:
    waits = [overdue.wait for overdue in line.waits]
    names = ", ".join(wait.subject for wait in waits if wait.subject)
    num_more = sum(wait.num - 1 for wait in waits)
    more = f" and {num_more} more" if num_more else ""
    return f"{line.what} {names}{more}".strip()
