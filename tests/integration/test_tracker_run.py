"""Trackers in a whole run: one that is well, one that fails and one that hangs; the run does not notice."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import FEW_LINES

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.evaluations import read_evaluations
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.nightly_on_ray, pytest.mark.timeout(300)]

TRACKERS = """
import json, threading


class Notes:
    def __init__(self, run):
        self.file = run.folder / "notes.jsonl"

    def add(self, *words):
        with self.file.open("a") as file:
            file.write(json.dumps(words) + chr(10))

    def metrics(self, version, metrics):
        self.add("metrics", version, metrics)

    def samples(self, version, samples):
        self.add("samples", version, [each.fate for each in samples])

    def finish(self, summary, files):
        self.add("finish", summary["version"], [file.name for file in files])


class Fails(Notes):
    def metrics(self, version, metrics):
        raise ValueError("no room")


class Hangs(Notes):
    def metrics(self, version, metrics):
        threading.Event().wait()
"""
SHORT = (
    *FEW_LINES, "run.num_steps=3", "model.make=xs", "learner.warm_start=null", "evaluation.every=2",
    "evaluation.datasets=[{name: sums, path: 'lines:4'}]", "observability.report=true",
)  # fmt: skip


def test_trackers_of_a_run_cost_their_own_lines_only(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TRACKERS)
    wanted = [
        f"{{name: '{file}:Notes', timeout_s: 120, samples_every: 1, samples: 1000}}",
        f"{{name: '{file}:Fails', timeout_s: 120}}",
    ]
    wanted += [f"{{name: '{file}:Hangs', timeout_s: 5}}"]
    wanted += ["{name: tensorboard, timeout_s: 120}"] if find_spec("tensorboard") else []
    with LiveRun("fully_async.yaml", tmp_path, [*SHORT, f"observability.trackers=[{', '.join(wanted)}]"]) as run:
        summary = run.finish()
        folder, output = run.folder, run.output
    assert summary.completed
    assert summary.restarts == ()
    assert audit_ledger(folder / LEDGER_FILE).findings == ()
    said = [text for text in summary.warnings if text.startswith("tracker ")]
    assert [any(f"{name}: " in text and why in text for text in said) for name, why in (
        ("Fails", "ValueError: no room (mine.py:"),
        ("Hangs", "was not done 5 s after the run"),
    )] == [True, True], said  # fmt: skip
    assert not [text for text in said if "Notes" in text or "tensorboard" in text]
    assert "no room" in " ".join(output.split()), "as soon as it happens"
    assert "no room" in (folder / "logs" / "driver.log").read_text()
    notes = [json.loads(line) for line in (folder / "trackers" / "mine.Notes" / "notes.jsonl").read_text().splitlines()]
    versions = [row.version for row in read_steps(folder)] + [row.version for row in read_evaluations(folder)]
    assert len(versions) > 3
    assert sorted(version for kind, version, _ in notes if kind == "metrics") == sorted(versions)
    # All that are kept: the newest few may be those that the engines were ahead by when the run ended.
    last = [fates for kind, _, fates in notes if kind == "samples"][-1]
    assert sum(fate.startswith("trained at step") for fate in last) == 3 * 4 * 4
    assert notes[-1] == ["finish", 3, ["report.html", "lanes.png", "summary.json"]]
