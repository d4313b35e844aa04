"""The engine benchmark runs and reports every case; what it measures is not judged here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.benchmarks.engine import EngineReport, run

if TYPE_CHECKING:
    from pathlib import Path


def test_a_small_run_reports_every_case(tmp_path: Path) -> None:
    report = run(size="xs", batches=(8,), num_requests=64, num_slots=16, repetitions=1, output=tmp_path / "report.json")
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=EngineReport) == report
    equal, long_tailed, quickstart = report.cases
    assert (equal.num_requests, equal.num_tokens, list(equal.generate_cpu_s)) == (8, 512, ["8"])
    assert (long_tailed.num_requests, list(long_tailed.generate_cpu_s)) == (64, ["64"])
    assert 18 <= long_tailed.num_tokens / 64 <= 23  # the mean length of the task
    assert (quickstart.num_requests, list(quickstart.generate_cpu_s)) == (64, ["16", "64"])
    assert (equal.required_ratio, long_tailed.required_ratio, quickstart.required_ratio) == (2, 5, None)
    for case in report.cases:
        assert min(case.engine_cpu_s, case.engine_wall_s, *case.generate_cpu_s.values()) > 0
        assert case.ratio == min(case.generate_cpu_s.values()) / case.engine_cpu_s
