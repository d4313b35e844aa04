"""Every sample of a ledger, counted by what became of it, in one reading: of a million samples it takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.training import Balance, CauseCount

if TYPE_CHECKING:
    import sqlite3

_SAMPLES: Final = """
SELECT coalesce(g.state, ''), s.state, s.cause, count(*), sum(s.num_tokens), sum(s.num_given_tokens) FROM samples s
    LEFT JOIN groups g USING (group_id) GROUP BY 1, 2, 3 ORDER BY 2, 3
"""
_COMING: Final = """
SELECT coalesce((SELECT samples_per_group FROM run), 0) * (SELECT count(*) FROM groups WHERE state = 'granted'),
    coalesce((SELECT samples_per_group FROM run), 0)
        * (SELECT count(*) FROM groups WHERE state IN ('admitted', 'leased')),
    (SELECT coalesce(sum(num_samples), 0) FROM evaluation_groups WHERE state = 'granted')
"""
_OPEN: Final = ("admitted", "leased")


class SampleCount(NamedTuple):
    """Samples that have come, of one fate, in groups of one state."""

    group_state: str
    """Empty of evaluations."""
    state: str | None
    """None: they have not ended."""
    cause: str
    num_samples: int
    num_tokens: int
    num_given_tokens: int


class LedgerCounts(NamedTuple):
    """Every sample of a ledger, counted in one reading of it."""

    samples: list[SampleCount]
    num_granted: int
    """Samples of groups that have not come."""
    num_open: int
    """Of groups that came and did not end, as a whole."""
    num_evaluating: int
    """Of evaluations, that have not come."""

    def balance(self) -> Balance:
        """A group ends as a whole: what failed of one that waits to be trained is in the system with it, as for the
        Buffer."""
        ended: dict[tuple[str | None, str], list[SampleCount]] = {}
        for count in self.samples:
            if count.group_state not in _OPEN:
                ended.setdefault((count.state, count.cause), []).append(count)
        causes = tuple(
            CauseCount(
                state=state or "",
                cause=cause,
                num_samples=sum(count.num_samples for count in counts),
                num_tokens=sum(count.num_tokens for count in counts),
                num_given_tokens=sum(count.num_given_tokens for count in counts),
            )
            for (state, cause), counts in ended.items()
        )
        waiting = [count for count in self.samples if count.group_state in _OPEN]
        in_system_tokens = sum(count.num_tokens - count.num_given_tokens for count in waiting)
        in_system = self.num_granted + self.num_open + self.num_evaluating
        return Balance(
            issued=in_system + sum(count.num_samples for count in causes),
            in_system=in_system,
            ended=causes,
            generated_tokens=in_system_tokens + sum(count.num_made_tokens for count in causes),
            in_system_tokens=in_system_tokens,
        )


def ledger_counts(database: sqlite3.Connection) -> LedgerCounts:
    """What the tables of a ledger have, at one moment.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    database.execute("BEGIN")
    try:
        samples = [SampleCount(*row) for row in database.execute(_SAMPLES)]
        return LedgerCounts(samples, *database.execute(_COMING).fetchone())
    finally:
        database.execute("ROLLBACK")
