"""What is wrong with rows: collected while everything is read, told once, with the first in full.

Invariants:

* A bad row is either an error of the whole dataset or, where the scenario allows it, skipped and counted. Nothing is
  dropped without one of the two.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.errors import UserFault
from penstock.messages.texts import counted, does

if TYPE_CHECKING:
    from collections.abc import Mapping


LONG_PROMPT: Final = "the prompt is too long"
"""The kind of a row that has no other fault."""


class DataError(UserFault):
    """A dataset, or a tokenizer beside it, that cannot be used. The message says where and what to do."""


class RowProblem(NamedTuple):
    """Why one row cannot be used."""

    place: str
    """``rows.jsonl:17``"""
    kind: str
    """The sort of problem in a few words, for counting."""
    message: str
    """The whole story of this row, without the place."""


class Problems:
    """The bad rows of one dataset."""

    def __init__(self, *, skip: bool, skip_key: str, skip_long: bool = False) -> None:
        """``skip_key``: the scenario's key that allows skipping; empty where there is none. ``skip_long``: rows whose
        prompts are too long are skipped, whatever becomes of others."""
        self._skip = skip
        self._skip_key = skip_key
        self._skip_long = skip_long
        self._first: RowProblem | None = None
        """Of those that may not be skipped, where there are any."""
        self._counts: Counter[str] = Counter()
        self._places: dict[str, str] = {}
        """Of the first row of each kind."""

    def add(self, problem: RowProblem) -> None:
        """Take note of a bad row."""
        if self._first is None or (self._may_skip(self._first.kind) and not self._may_skip(problem.kind)):
            self._first = problem
        self._counts[problem.kind] += 1
        self._places.setdefault(problem.kind, problem.place)

    def _may_skip(self, kind: str) -> bool:
        return self._skip or (self._skip_long and kind == LONG_PROMPT)

    @property
    def counts(self) -> Mapping[str, int]:
        """Kind, with the place of the first such row → number of rows."""
        return {self._placed(kind): count for kind, count in self._counts.items()}

    def _placed(self, kind: str) -> str:
        first = "" if self._counts[kind] == 1 else "the first at "
        return f"{kind} ({first}{self._places[kind]})"

    def settle(self, *, num_good: int, source: str) -> None:
        """Call at the end.

        Raises:
            DataError: there are bad rows and they may not be skipped, or no good row is left.
        """
        if self._first is None:
            if not num_good:
                raise DataError(f"{source} has no rows")
            return
        is_skipped = self._may_skip(self._first.kind)
        if is_skipped and num_good:
            return
        first = f"{self._first.place}: {self._first.message}"
        rest = self._counts.copy()
        rest[self._first.kind] -= 1
        rest += Counter()  # drops what has reached zero
        if rest:
            told = self._first.kind  # with its place, above
            listed = ", ".join(
                f"{count} × {kind if kind == told else self._placed(kind)}" for kind, count in rest.most_common()
            )
            more = rest.total()
            first += f". {counted(more, 'more row')} {does(more, 'have')} problems: {listed}"
        if is_skipped:
            raise DataError(f"no usable row is left in {source}. The first of {self._counts.total()}: {first}")
        if self._skip_key and num_good:
            if self._first.kind == LONG_PROMPT:
                first += ". Leave long prompts out with data.skip_long_prompts: true"
            first += f". Mend the file, or set {self._skip_key}: true to skip and count such rows"
        raise DataError(first)
