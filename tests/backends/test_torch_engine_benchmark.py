"""The engine benchmark runs and reports every case; what it measures is not judged here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.benchmarks import engine
from penstock.benchmarks._results import Result

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CONTINUOUS = "transformers' continuous batching"
WORDS = ("--size", "xs", "--batches", "8", "--requests", "64", "--slots", "16", "--repetitions", "1",
         "--new-tokens", "16")  # fmt: skip


def test_a_small_run_reports_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TIMED_TOKENS", 1)
    engine.main([*WORDS, "--output", str(tmp_path / "report.json"), "--history", str(tmp_path)])
    result = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Result)
    found = {figure.name: figure.estimate.median for figure in result.figures}
    cases = [[name for name in found if name.startswith(case)] for case in ("batch 8", "64 long-tailed, ", "8 × 8")]
    assert [len(names) for names in cases] == [3, 4, 5]
    arms = ("engine", "generate, 16 at once", "generate, 64 at once", "engine by transformers' layers", CONTINUOUS)
    assert all(name.endswith(tuple(f": {arm}" for arm in arms)) for name in cases[2])
    assert 18 <= int(cases[1][0].partition("mean ")[2].partition(",")[0]) <= 23  # the mean length of the task
    assert min(found.values()) > 0
    assert [claim.wanted for claim in result.claims] == ["at least 2", "at least 6", "at least 2.5"]
    (short_other, short, *_), (long_other, long, _, continuous), _ = cases
    pairs = [(short, short_other), (long, long_other), (long, continuous)]
    for claim, (over, under) in zip(result.claims, pairs, strict=True):
        assert claim.values == [found[over] / found[under]]
