"""The decoders of every inbox under a coverage-guided fuzzer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).with_name("fuzz_wire.py")
NUM_RUNS = 20_000


def test_no_bytes_make_a_decoder_raise_anything_but_a_wire_error(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 only")
    done = subprocess.run(
        [sys.executable, str(FUZZER), f"-runs={NUM_RUNS}", "-seed=1", "-max_len=600", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # where libFuzzer writes what crashes
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Done {NUM_RUNS} runs" in done.stderr
