"""A real run on the local host with kills, killed with its driver and resumed: all that it decided comes out again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from live_run import LiveRun
from typer.testing import CliRunner

from penstock.runtime.cli import fork
from penstock.runtime.cli.app import app
from penstock.runtime.cli.replay import Answer
from penstock.runtime.launch.runs import read_record
from penstock.runtime.run.replay import Choice, replay_run

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.timeout(540)

MODELLED = Path(__file__).parents[1] / "chaos" / "modelled.yaml"
VICTIMS = ("buffer", "filter", "learner")


def asked(folder: Path, options: Sequence[str] = ()) -> tuple[int, Answer]:
    """Exit code and answer of the command."""
    result = CliRunner().invoke(app, ["replay", str(folder), "--json", *options])
    return result.exit_code, msgspec.json.decode(result.output, type=Answer)


def test_a_run_with_kills_that_was_resumed_replays_without_a_difference(tmp_path: Path) -> None:
    options = ("observability.record=true", "run.num_steps=10", "learner.save_every=2")
    with LiveRun(MODELLED, tmp_path, options) as run:
        run.await_steps(2)
        for victim in VICTIMS:
            os.kill(run.pid_of(victim), signal.SIGKILL)
        run.await_steps(5)
        os.kill(read_record(run.folder).pid, signal.SIGKILL)
        run.process.wait(60)
    with LiveRun.resumed(run.folder) as resumed:
        summary = resumed.finish()
        folder = resumed.folder
    assert summary.version == 10
    names = {path.stem for path in (folder / "recording").glob("*.jsonl")}
    assert {f"{victim}-{epoch}" for victim in VICTIMS for epoch in (1, 2)} <= names
    assert len(names) >= 2 * 8 + len(VICTIMS), "eight actors in two drives, and the replacements"
    whole = replay_run(folder, Choice())
    assert (whole.moment, whole.notes) == (None, ())
    code, answer = asked(folder, ["--until", "4", "--actor", "buffer"])
    assert (code, answer.is_same, answer.moment) == (0, True, None)
    assert 0 < answer.num_events < whole.num_events
    code, answer = asked(folder, ["--break-on", "StepFinished", "--actor", "buffer"])
    assert code == 0
    assert answer.moment is not None
    assert answer.moment.subject.startswith("step ")
    assert any(side.recorded.startswith("Record(entries=[StepRecorded(") for side in answer.moment.commands)
    check_forks(folder)


def check_forks(folder: Path) -> None:
    """The same run, gone on with from a step before and one after it was resumed."""
    for step in (4, 8):
        words = ["replay", str(folder), "--fork", str(step), "staleness.policy=sync", "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (step, result.output, result.exception)
        forked = msgspec.json.decode(result.output, type=fork.Answer)
        futures = forked.futures
        assert forked.parting is not None
        assert forked.parting.was is not None
        assert forked.parting.was.incarnation.startswith("buffer-")
        assert futures.recorded is not None
        assert futures.was.rest_s is not None
        assert futures.other.rest_s is not None
        assert futures.was.rest_s > 0.0
        if step == 4:  # near the end nothing more is granted, and policies are alike
            assert futures.other.rest_s > futures.was.rest_s
        assert len(futures.was.step_ends_s) == len(futures.other.step_ends_s) == 10 - step
