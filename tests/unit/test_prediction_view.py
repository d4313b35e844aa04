"""What ``penstock calibrate`` prints, on a terminal of 80 columns."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from penstock.runtime.cli.prediction import checks_table, fits_table
from penstock.runtime.prediction.models import Check, FitResult


def test_names_and_figures_of_the_runs_played_again_are_whole() -> None:
    check = Check(
        folder="runs/fully_async-20261128-003943",
        policy="fully_async",
        step_s=0.2393,
        step_error=-0.369,
        engines_busy=0.8,
        engines_busy_predicted=0.941,
        learner_busy=0.609,
        learner_busy_predicted=0.594,
    )
    out = StringIO()
    Console(file=out, width=80).print(checks_table([check]))
    shown = out.getvalue()
    assert "…" not in shown
    whole = ("fully_async-20261128-003943", "239.3 ms", "-36.9 %", "80.0 %", "94.1 %", "60.9 %", "59.4 %", "predicted")
    assert [text for text in whole if text not in shown] == []


def test_names_of_fitted_values_are_whole() -> None:
    values = {"engines.response_tokens_correlation": 0.028, "decode.passes.fewest_running": 5.78}
    fit = FitResult(what="decode passes by their requests", values=values, count=4_928, error=0.524, bias=-0.15)
    out = StringIO()
    Console(file=out, width=80).print(fits_table([fit], "fitted"))
    shown = out.getvalue()
    assert "…" not in shown
    for text in ("response_tokens_correlation 0.028", "passes.fewest_running 5.78", "52.4 %", "-15.0 %", "4,928"):
        assert text in shown
