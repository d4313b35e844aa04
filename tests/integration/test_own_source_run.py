"""A real run whose rows a class makes; its PromptSource is killed twice, and the machine once."""

from __future__ import annotations

import os
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from live_run import LiveRun

from penstock.backends.data.own_source.journal import FOLDER, ROWS_FILE, STATE_FILE
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.ledger import RowsRecorded, StepRecorded

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

MINE = textwrap.dedent(
    """
    import random

    class Harder:
        # Longer texts when the last ones were easy.
        def __init__(self, seed):
            self.draw, self.length, self.made, self.fates = random.Random(seed), 2, 0, []

        async def next_rows(self, n):
            rows = []
            for _ in range(n):
                text = "".join(self.draw.choices("abcd", k=self.length))
                label = chr(10).join("".join(sorted(text)) for _ in text)
                rows.append({"prompt": f"{text}=", "label": label, "number": self.made})
                self.made += 1
            return rows

        def told(self, outcomes):
            for outcome in outcomes:
                self.fates.append([outcome.row, outcome.fate])
                if outcome.reward is not None:
                    self.length = 3 if outcome.reward > 0.5 else 2

        def state(self):
            version, numbers, gauss = self.draw.getstate()
            draw = [version, list(numbers), gauss]
            return {"draw": draw, "made": self.made, "fates": self.fates, "length": self.length}

        def restore(self, state):
            version, numbers, gauss = state["draw"]
            self.draw.setstate((version, tuple(numbers), gauss))
            self.made, self.fates, self.length = state["made"], state["fates"], state["length"]
    """
)


def test_no_row_is_lost_or_made_twice_whatever_becomes_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    overrides = (
        "run.num_steps=8",
        "learner.groups_per_batch=4",
        "learner.save_every=2",
        "learner.warm_start.num_steps=10",
        "engines.count=1",
        "sampling.max_response_tokens=32",
        "data.path=null",
        f"data.source={tmp_path}/mine.py:Harder",
        "data.metadata_keys=[number]",
    )
    (tmp_path / "runs").mkdir()
    with LiveRun("quickstart.yaml", tmp_path / "runs", overrides) as run:
        for step in (1, 3):
            run.await_steps(step)
            os.kill(run.pid_of("prompt_source"), signal.SIGKILL)
        run.await_steps(5)
        run.process.kill()
        run.process.wait(30)
        folder = run.folder
    with LiveRun.resumed(folder) as resumed:
        summary = resumed.finish()
    assert summary.completed
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    store = SqliteStore(folder / LEDGER_FILE)
    entries = list(store.entries())
    store.close()
    recorded = [row for entry in entries if isinstance(entry, RowsRecorded) for row in entry.rows]
    assert sorted(row.row for row in recorded) == list(range(len(recorded))), "each row of the source for one group"
    lines = (folder / FOLDER / ROWS_FILE).read_bytes().splitlines()
    made = [msgspec.json.decode(line)["number"] for line in lines]
    assert made == list(range(len(made)))
    assert len(made) >= 32
    standing: dict[str, Any] = msgspec.json.decode((folder / FOLDER / STATE_FILE).read_bytes())
    fates = [tuple(fate) for fate in standing["state"]["fates"]]
    assert len(set(fates)) == len(fates), "nothing is told twice"
    rows = {row.group_id: row.row for row in recorded}
    trained = [rows[group] for entry in entries if isinstance(entry, StepRecorded) for group in entry.group_ids]
    told = [row for row, fate in fates if fate == "trained"]
    assert told == trained[: len(told)]
    assert told
