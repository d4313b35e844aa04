"""Every sample of a ledger, counted by what became of it, in one scan: of a million samples it takes half a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.training import Balance, CauseCount

if TYPE_CHECKING:
    import sqlite3

_COUNTS: Final = "SELECT s.state, s.cause, count(*), sum(s.num_tokens), sum(s.num_given_tokens)"
_SAMPLES: Final = f"{_COUNTS} FROM samples s GROUP BY 1, 2 ORDER BY 1, 2"
_OPEN: Final = f"""
{_COUNTS} FROM groups g CROSS JOIN samples s USING (group_id) WHERE g.state IN ('admitted', 'leased') GROUP BY 1, 2
"""
_COMING: Final = """
SELECT coalesce((SELECT samples_per_group FROM run), 0) * (SELECT count(*) FROM groups WHERE state = 'granted'),
    coalesce((SELECT samples_per_group FROM run), 0)
        * (SELECT count(*) FROM groups WHERE state IN ('admitted', 'leased')),
    (SELECT coalesce(sum(num_samples), 0) FROM evaluation_groups WHERE state = 'granted')
"""


class FateCount(NamedTuple):
    """Samples that have come, of one fate."""

    state: str | None
    """None: they have not ended."""
    cause: str
    num_samples: int
    num_tokens: int
    num_given_tokens: int


class LedgerCounts(NamedTuple):
    """What the tables of a ledger say at one moment."""

    samples: list[FateCount]
    """All that have come."""
    open: list[FateCount]
    """Those among them whose groups have come and not ended."""
    num_granted: int
    """Samples of groups that have not come."""
    num_open: int
    """Of groups that have come and not ended, as they were granted."""
    num_evaluating: int
    """Of evaluations, that have not come."""

    def balance(self) -> Balance:
        """A group ends as a whole: what failed of one that waits to be trained is in the system with it, as for the
        Buffer."""
        waiting = {(count.state, count.cause): count for count in self.open}
        nothing = FateCount(None, "", 0, 0, 0)
        ended = [(count, waiting.get((count.state, count.cause), nothing)) for count in self.samples]
        causes = tuple(
            CauseCount(
                state=count.state or "",
                cause=count.cause,
                num_samples=count.num_samples - still.num_samples,
                num_tokens=count.num_tokens - still.num_tokens,
                num_given_tokens=count.num_given_tokens - still.num_given_tokens,
            )
            for count, still in ended
            if count.num_samples > still.num_samples
        )
        in_system_tokens = sum(count.num_tokens - count.num_given_tokens for count in self.open)
        in_system = self.num_granted + self.num_open + self.num_evaluating
        return Balance(
            issued=in_system + sum(count.num_samples for count in causes),
            in_system=in_system,
            ended=causes,
            generated_tokens=in_system_tokens + sum(count.num_made_tokens for count in causes),
            in_system_tokens=in_system_tokens,
        )


def ledger_counts(database: sqlite3.Connection) -> LedgerCounts:
    """Count the samples of a ledger.

    Raises:
        sqlite3.Error: it cannot be read.
    """
    database.execute("BEGIN")
    try:
        samples, still = ([FateCount(*row) for row in database.execute(query)] for query in (_SAMPLES, _OPEN))
        return LedgerCounts(samples, still, *database.execute(_COMING).fetchone())
    finally:
        database.execute("ROLLBACK")
