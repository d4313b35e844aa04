"""Which failures people have been told of: the first of each kind, and no more kinds than a terminal can take."""

from __future__ import annotations

from typing import Final

from penstock.messages.commands import Send
from penstock.messages.names import SUPERVISOR
from penstock.messages.reasons import reason_kind
from penstock.messages.training import NoticeGiven

MAX_KINDS: Final = 5


class FirstFailures:
    """Of one incarnation of an actor; its successor says the first ones again."""

    def __init__(self, name: str) -> None:
        """``name``: of the actor that speaks."""
        self._name = name
        self._told: set[str] = set()

    def hear(self, what: str, reason: str) -> list[Send]:
        """Something has failed for this reason: a line for people, where it is the first of its kind."""
        if len(self._told) >= MAX_KINDS or (kind := reason_kind(reason)) in self._told:
            return []
        self._told.add(kind)
        return [Send(SUPERVISOR, NoticeGiven(name=self._name, text=f"{what} failed: {reason}"))]
