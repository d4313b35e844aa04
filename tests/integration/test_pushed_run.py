"""A real run whose groups come finished from outside, by the documentation's client; its PromptSource is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest
from live_run import LiveRun

from penstock.backends.episodes.registry import read_push_address, run_token
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.ledger import GroupRecorded, RowsRecorded, StepRecorded
from penstock.runtime.observability.report import render_report
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.ledger import LedgerEntry

HOUSE = Path(__file__).parents[2]
NUM_STEPS = 8
OVERRIDES = (
    f"run.num_steps={NUM_STEPS}",
    "model.make=xs",
    "data.path=null",
    "data.source=pushed",
    "engines.backend=recorded",
    "engines.count=1",
    "sampling.samples_per_group=2",
    "sampling.max_response_tokens=32",
    "learner.warm_start=null",
    "learner.groups_per_batch=2",
    "learner.objective.old_logprobs=recompute",
    "learner.objective.correction=none",
    "learner.objective.allow_unbounded=true",
)

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]


def client_of_the_documentation(folder: Path) -> Path:
    page = (HOUSE / "docs" / "gateway.md").read_text()
    code = re.search(r"```text\n(# push\.py.*?)```", page, re.DOTALL)
    assert code is not None
    file = folder / "push.py"
    file.write_text(code[1])
    return file


def entries_of(folder: Path) -> list[LedgerEntry]:
    reader = SqliteReader(folder / LEDGER_FILE)
    entries = list(reader.entries())
    reader.close()
    return entries


def penstock(*arguments: Path | str) -> str:
    command = [sys.executable, "-m", "penstock.runtime.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_what_is_pushed_is_trained_once_with_its_age_whatever_is_killed(tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    parent.mkdir()
    with LiveRun("quickstart.yaml", parent, OVERRIDES) as run:
        run.await_file("gateway/pushes.url")
        folder = run.folder
        door = subprocess.Popen(
            [sys.executable, "-m", "penstock.runtime.cli", "gateway", str(folder), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert door.stdout is not None
        found = re.search(r"(http://\S+)", door.stdout.readline())
        assert found
        key = run_token(folder)
        client = subprocess.Popen([sys.executable, str(client_of_the_documentation(tmp_path)), found[1], key])
        run.await_steps(1)
        os.kill(client.pid, signal.SIGSTOP)  # at most three more batches are trained without it
        (folder / "gateway" / "pushes.url").unlink()
        os.kill(run.pid_of("prompt_source"), signal.SIGKILL)
        run.await_file("gateway/pushes.url")
        again = {
            "key": "group 0",
            "version": 0,
            "prompt": "dbC=",
            "label": "AbdBbdCbd",
            "samples": [{"text": "AbdBbdCbd", "reward": 1.0}, {"text": "AbBb"}],
        }
        headers = {"Authorization": f"Bearer {key}"}
        reply = httpx.post(f"{read_push_address(folder)}/trajectories", json=again, headers=headers, timeout=60)
        assert reply.json() == {"key": "group 0", "row": 0, "version": 0}, "the successor's word is the first one's"
        os.kill(client.pid, signal.SIGCONT)
        assert run.finish().completed
    assert client.wait(60) == 0
    assert door.wait(60) == 0
    check_ledger(folder, entries_of(folder))
    assert f"{2 * NUM_STEPS} groups that came in were made outside" in render_report(folder)
    assert "made outside, and pushed as group 3" in penstock("trace", folder, "--sample", "3/0")
    last = read_steps(folder)[-1]
    figures = last.metrics
    assert figures["train/unknown_logprobs"] == 1.0
    assert not any("rollout_logprob" in name for name in figures), "nothing is compared with what nobody knows"


def check_ledger(folder: Path, entries: Sequence[LedgerEntry]) -> None:
    report = audit_ledger(folder / LEDGER_FILE)
    assert report.findings == ()
    admitted = [entry for entry in entries if isinstance(entry, GroupRecorded)]
    assert report.num_pushed == len(admitted) >= 2 * NUM_STEPS
    rows = {row.group_id: row.row for entry in entries if isinstance(entry, RowsRecorded) for row in entry.rows}
    assert {entry.group_id: f"group {rows[entry.group_id]}" for entry in admitted} == {
        entry.group_id: entry.pushed for entry in admitted
    }, "each was pushed under the number that it has"
    versions = {entry.group_id: {note.oldest_version or 0 for note in entry.samples} for entry in admitted}
    steps = [entry for entry in entries if isinstance(entry, StepRecorded)]
    ages = [step.version - 1 - version for step in steps for group in step.group_ids for version in versions[group]]
    assert len(ages) == 2 * NUM_STEPS
    assert max(ages) > 0, "fresh ages would be the engine's, which serves what is newest"
    assert max(ages) <= 2
