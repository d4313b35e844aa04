"""Transition tables as data: which steps a state machine takes, and on what; asserted in tests and drawn in the docs.

A table says for a state and a cause (the type of the event, or of the ledger's entry, that is being taken in) which
states may be next. ``None`` as a state is "not there": before something comes, and after it has gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import NoneType
from typing import TypeAlias

State: TypeAlias = Enum | None
Transitions: TypeAlias = Mapping[tuple[State, type], tuple[State, ...]]


class Steps:
    """The different steps that a machine has taken since it was last validated: no part of its state, and never more
    than there are."""

    __slots__ = ("_taken", "cause", "table")

    def __init__(self, table: Transitions) -> None:
        self.table = table
        self.cause: type = NoneType
        """Of what the machine takes in now."""
        self._taken: dict[type, list[tuple[State, State]]] = {}
        """By cause. A list, since an ``Enum`` is hashed by Python code, and few steps have the same cause."""

    def take(self, before: State, after: State) -> None:
        """A state has changed, if it has."""
        if before is not after:
            taken, step = self._taken.get(self.cause), (before, after)
            if taken is None:
                self._taken[self.cause] = [step]
            elif step not in taken:
                taken.append(step)

    def validate(self) -> None:
        """Assert that each step is in the table."""
        for cause, taken in self._taken.items():
            for before, after in taken:
                allowed = self.table.get((before, cause), ())
                assert after in allowed, f"{before} → {after} on {cause.__name__} is no step"
        self._taken.clear()
