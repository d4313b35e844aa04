"""*Samples*: a table of all samples of a run with filters and orders, reward against length, groups without spread, and
a page of each sample.

Asking how far the index is works on it (:mod:`penstock.runtime.dashboard.sample_index`): the one thing that the
dashboard ever writes, in a file of its own that may be deleted.
"""

from __future__ import annotations

from typing import Final

from penstock.backends.ledger.kept_samples import SAMPLES_FILE
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.dashboard.routes import Query, Route, View
from penstock.runtime.dashboard.sample_page import SampleQuery, answer_life, answer_sample
from penstock.runtime.dashboard.sample_rows import CountQuery, TableQuery, count, progress, table
from penstock.runtime.dashboard.sample_sums import bins, choices

INDEX_S: Final = 60.0
"""An order of very many samples is sorted in one go."""
LIFE_S: Final = 30.0
"""Spans are looked for in the files of all actors."""

SAMPLES: Final = View(
    name="samples",
    title="Samples",
    files=(LEDGER_FILE, f"{LEDGER_FILE}-wal", SAMPLES_FILE),
    routes=(
        Route(path="samples/index", query=Query, answer=progress, limit_s=INDEX_S),
        Route(path="samples/table", query=TableQuery, answer=table),
        Route(path="samples/count", query=CountQuery, answer=count),
        Route(path="samples/choices", query=Query, answer=choices),
        Route(path="samples/bins", query=CountQuery, answer=bins),
        Route(path="samples/sample", query=SampleQuery, answer=answer_sample),
        Route(path="samples/life", query=SampleQuery, answer=answer_life, limit_s=LIFE_S),
    ),
)
