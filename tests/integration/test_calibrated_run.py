"""``penstock calibrate`` reads what a real run leaves: ledger, traces, lanes."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_run import LiveRun
from typer.testing import CliRunner

from penstock.runtime.cli.app import app
from penstock.runtime.prediction.models import read_models
from penstock.runtime.prediction.recorded import read_recording

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

MODELLED = Path(__file__).parents[1] / "chaos" / "modelled.yaml"
NUM_STEPS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder."""
    keys = (f"run.num_steps={NUM_STEPS}", "observability.tracing=true", "observability.trace_fraction=1")
    with LiveRun(MODELLED, tmp_path_factory.mktemp("calibrated"), keys) as live:
        live.finish()
        return live.folder


def test_everything_that_calibration_fits_is_in_the_folder(run: Path) -> None:
    found = read_recording(run)
    assert found.num_steps == NUM_STEPS
    assert {"step", "publish", "fetch_weights", "apply_weights"} <= set(found.work)
    assert min(work.version for work in found.work["step"]) > NUM_STEPS // 5 + 1, "those before the steady part"
    assert NUM_STEPS - 4 <= len(found.work["step"]) < NUM_STEPS - 2
    assert all(work.size > 0 for work in found.work["step"])
    whole = [each for each in found.generations if each.is_whole]
    assert len(whole) > len(found.generations) // 2
    assert all(each.sample is not None and each.sample.num_tokens == each.num_tokens for each in whole)
    assert found.num_scored >= sum(sample.reward is not None for sample in found.samples) > 0
    assert len(found.scores_s) > 0
    assert found.steady is not None
    assert sum(found.steady.engines.values()) == pytest.approx(1.0)
    assert sum(found.steady.learner.values()) == pytest.approx(1.0)


def test_the_command_writes_models_and_checks_them_on_the_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "models.yaml"
    shown = CliRunner().invoke(app, ["calibrate", str(run), "-o", str(out)])
    assert shown.exit_code == 0, f"{shown.output}\n{shown.exception}"
    said = " ".join(shown.output.split())  # however wide the terminal is
    for words in ("fitted to 12 steps", "decode", "prefill", "played with these models", "not learnt"):
        assert words in said, words
    models = read_models(out)
    assert models.engines.token_s > 0
    assert models.learner.step_s > 0
    assert [check.folder for check in models.checks] == [str(run)]
    assert [source.num_steps for source in models.runs] == [NUM_STEPS]
    assert models.expected_error is not None
