"""What a scenario and a ledger say about the choice of rows, for those who choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.data.row_chooser import ChoosingSettings
from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.ledger import RowsRecorded

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.run.plan import RunPlan


_HAS_ROWS: Final = "SELECT EXISTS (SELECT 1 FROM entries WHERE kind = ?)"


def choosing_settings(plan: RunPlan) -> ChoosingSettings | None:
    """How rows are chosen; None where each follows from its place in the stream of prompts."""
    options = plan.scenario.prompt_source
    if not plan.chooses_rows:
        return None
    return ChoosingSettings(
        seed=plan.scenario.run.seed,
        num_rows=plan.num_rows,
        has_priority=options.priority is not None,
        num_candidates=options.priority_candidates,
        replay=options.replay,
    )


def has_recorded_rows(folder: Path) -> bool:
    """Whether rows of the run in this folder were chosen so far.

    Raises:
        UserFault: its ledger cannot be read.
    """
    path = folder / LEDGER_FILE
    if not path.exists():
        return False
    with asked_ledger(path) as database:
        (found,) = database.execute(_HAS_ROWS, (RowsRecorded.__name__,)).fetchone()
    return bool(found)
