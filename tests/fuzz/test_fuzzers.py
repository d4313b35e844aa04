"""The fuzzers of this folder: each for a moment with the same cases every time, and each night with new ones for
``PENSTOCK_FUZZ_MINUTES`` (10)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUM_RUNS = {
    "fuzz_http": 40,
    "fuzz_judge": 600,
    "fuzz_maths": 60,
    "fuzz_rewards": 120,
    "fuzz_terminal": 120,
    "fuzz_wire": 10_000,
}
MINUTES = float(os.environ.get("PENSTOCK_FUZZ_MINUTES", "10"))
SPARE_S = 600
"""For imports, and for a machine that is busy."""


def fuzzed(name: str, *limit: str, timeout_s: float) -> int:
    """How many cases it has tried."""
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 only")
    command = [sys.executable, str(HERE / f"{name}.py"), *limit]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (found,) = re.findall(r"^Done (\d+) runs", done.stderr, re.MULTILINE)
    return int(found)


def test_every_fuzzer_is_run() -> None:
    assert sorted(path.stem for path in HERE.glob("fuzz_*.py")) == sorted(NUM_RUNS)


@pytest.mark.long_run
@pytest.mark.parametrize("name", NUM_RUNS)
def test_a_fuzzer_finds_nothing_in_a_moment(name: str) -> None:
    assert fuzzed(name, "--runs", str(NUM_RUNS[name]), timeout_s=240) >= NUM_RUNS[name]


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 2 * SPARE_S)
@pytest.mark.parametrize("name", NUM_RUNS)
def test_a_fuzzer_finds_nothing_at_length(name: str) -> None:
    assert fuzzed(name, "--minutes", str(MINUTES), timeout_s=MINUTES * 60 + SPARE_S) > NUM_RUNS[name]
