"""``penstock run --run-folder``: the same command begins a run, and goes on with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from host_harness import HOST
from short_runs import NO_EVALUATION, ONE_SMALL_ENGINE

from penstock.runtime.launch.runs import audit_run, read_record
from penstock.runtime.launch.status import run_status

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.timeout(540)
MODELLED = (str(Path(__file__).parents[1] / "chaos" / "modelled.yaml"), *NO_EVALUATION)
"""Nothing here asks what is trained, nor by whom."""
REAL = ("quickstart", *ONE_SMALL_ENGINE)


def run_in(folder: Path, scenario: Sequence[str], *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.runtime.cli", "run", *scenario, "--run-folder", str(folder)]
    return subprocess.run(
        [*command, f"runtime.host={HOST}", *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_the_same_command_begins_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    begun = run_in(folder, MODELLED, "run.num_steps=2")
    assert begun.returncode == 0, begun.stderr
    assert run_status(folder).version == 2
    again = run_in(folder, MODELLED, "run.num_steps=2")
    assert (again.returncode, "completed; to train more" in again.stdout) == (0, True)
    assert read_record(folder).earlier == ()
    refused = run_in(folder, MODELLED, "run.num_steps=3", "run.seed=5")
    assert refused.returncode == 2
    assert "run.seed=5': cannot change in a run that goes on" in refused.stderr.replace("\n", " ")
    more = run_in(folder, MODELLED, "run.num_steps=3", "engines.slots=3")
    assert more.returncode == 0, more.stderr
    assert run_status(folder).version == 3
    assert sorted(read_record(folder).overrides) == ["engines.slots=3", "run.num_steps=3"]
    back = run_in(folder, MODELLED, "run.num_steps=4")  # without the key that was changed before
    assert back.returncode == 0, back.stderr
    assert "run.num_steps=4" in read_record(folder).overrides
    assert any(text.startswith("engines.slots=") for text in read_record(folder).overrides)
    assert audit_run(folder).is_clean


def test_a_folder_in_which_nothing_was_recorded_begins_anew_with_whatever_is_asked(tmp_path: Path) -> None:
    missing = run_in(tmp_path / "mine", REAL, "run.num_steps=1", f"data.path={tmp_path / 'none.jsonl'}")
    assert missing.returncode == 2
    begun = run_in(tmp_path / "mine", REAL, "run.num_steps=1")
    assert begun.returncode == 0, begun.stderr
    assert run_status(tmp_path / "mine").version == 1
