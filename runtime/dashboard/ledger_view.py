"""*Ledger*: where every sample and every token went, why samples failed, and a box for questions in SQL."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE, TABLES, VIEWS
from penstock.runtime.dashboard.routes import Query, Route, View
from penstock.runtime.dashboard.sql_box import LIMIT_S, START_S, SqlQuery, ask
from penstock.runtime.observability.accounting import Waste, read_accounts
from penstock.runtime.observability.ledger_counts import ledger_counts
from penstock.runtime.observability.samples import reason_counts
from penstock.runtime.observability.trackers import ACTIVITY_FILE
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.observability.ledger_counts import LedgerCounts

BALANCE_S: Final = 8.0
INSTRUCTIONS_A_CHECK: Final = 10_000
MAX_REASONS: Final = 50
IN_SYSTEM: Final = "in the system"


class BalanceRow(msgspec.Struct, frozen=True):
    """Samples of one fate."""

    state: str
    cause: str
    num_samples: int
    num_tokens: int


class ReasonRow(msgspec.Struct, frozen=True):
    """Samples that failed for one kind of reason."""

    cause: str
    kind: str
    num_samples: int
    example: str


class TokenRow(msgspec.Struct, frozen=True):
    """Tokens of the model by what became of them."""

    name: str
    num_tokens: int


class LedgerPage(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything went."""

    balance: list[BalanceRow]
    tokens: list[TokenRow]
    """They add up to those that were generated."""
    num_generated: int
    waste: list[Waste]
    """Dearest first."""
    reasons: list[ReasonRow]
    took_s: float
    """To find out."""


class ColumnRow(msgspec.Struct, frozen=True):
    """A column that can be asked for."""

    name: str
    kind: str
    meaning: str


class TableRow(msgspec.Struct, frozen=True):
    """A table that can be asked."""

    name: str
    meaning: str
    columns: list[ColumnRow]


class Tables(msgspec.Struct, frozen=True):
    """All of them."""

    tables: list[TableRow]


def answer_ledger(run_folder: Path, _query: Query) -> LedgerPage:
    """Where everything went, as the ledger has it now; nothing is in the balance where there is none yet.

    Raises:
        UserFault: a file cannot be read, or not in time.
    """
    began_s = time.monotonic()
    counts = _counts(run_folder / LEDGER_FILE)
    accounts = read_accounts(run_folder, balance=None if counts is None else counts.balance())
    tokens = accounts.tokens
    return LedgerPage(
        balance=[] if counts is None else _rows(counts),
        tokens=[
            TokenRow("trained", tokens.trained),
            TokenRow("evaluated", tokens.evaluated),
            TokenRow("wasted", tokens.num_wasted),
            TokenRow("in the system", tokens.in_system),
        ],
        num_generated=tokens.generated,
        waste=[replace(one, cause=terminal_text(one.cause)) for one in accounts.waste],
        reasons=[
            ReasonRow(one.cause, terminal_text(one.kind), one.num_samples, terminal_text(one.example, max_chars=500))
            for one in reason_counts(run_folder)[:MAX_REASONS]
        ],
        took_s=time.monotonic() - began_s,
    )


def _counts(file: Path) -> LedgerCounts | None:
    if not file.is_file():
        return None
    ends_s = time.monotonic() + BALANCE_S
    with asked_ledger(file) as database:
        database.set_progress_handler(lambda: time.monotonic() > ends_s, INSTRUCTIONS_A_CHECK)
        return ledger_counts(database)


def _rows(counts: LedgerCounts) -> list[BalanceRow]:
    """Those of the ledger's view ``balance``, which would read all samples twice more."""
    ended = [count for count in counts.samples if count.state is not None]
    come = [count for count in counts.samples if count.state is None]
    rows = [BalanceRow(one.state or "", terminal_text(one.cause), one.num_samples, one.num_tokens) for one in ended]
    rows += [BalanceRow(IN_SYSTEM, "admitted", one.num_samples, one.num_tokens) for one in come]
    rows.append(BalanceRow(IN_SYSTEM, "granted", counts.num_granted, 0))
    rows.append(BalanceRow(IN_SYSTEM, "evaluation", counts.num_evaluating, 0))
    return [row for row in rows if row.num_samples]


def answer_tables(_run_folder: Path, _query: Query) -> Tables:
    """What can be asked."""
    return Tables(
        [
            TableRow(
                table.name,
                table.meaning,
                [ColumnRow(c.name, c.declaration.partition(" ")[0].lower(), c.meaning) for c in table.columns],
            )
            for table in (*TABLES, *VIEWS)
        ]
    )


LEDGER: Final = View(
    name="ledger",
    title="Ledger",
    files=(LEDGER_FILE, f"{LEDGER_FILE}-wal", ACTIVITY_FILE),
    routes=(
        Route(path="ledger/balance", query=Query, answer=answer_ledger),
        Route(path="ledger/tables", query=Query, answer=answer_tables),
        Route(path="ledger/sql", query=SqlQuery, answer=ask, limit_s=LIMIT_S + START_S + 1.0),
    ),
)
