"""*Explain*: what ``penstock explain`` says. It reads the traces, so it is asked when a person looks, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.runtime.dashboard.routes import Query, Route, View
from penstock.runtime.observability.summary import SUMMARY_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.observability.explain import Explanation

LIMIT_S: Final = 60.0


def answer_explain(folder: Path, query: Query) -> Explanation:
    """What binds a run."""
    from penstock.runtime.observability.explain import explain

    return explain(folder)


EXPLAIN: Final = View(
    name="explain",
    title="Explain",
    files=(SUMMARY_FILE,),
    routes=(Route(path="explain", query=Query, answer=answer_explain, limit_s=LIMIT_S),),
)
