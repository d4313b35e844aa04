"""A benchmark says what it is at, on stderr, and its result alone is on stdout."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import benchmarks
from penstock.benchmarks import _progress, advantages
from penstock.benchmarks._harness import NOT_TOLD
from penstock.benchmarks._progress import in_turn, repeated, wait_for
from penstock.runtime.cli.benches import benchmark_docs


def test_each_part_is_told_when_its_turn_comes(capsys: pytest.CaptureFixture[str]) -> None:
    parts = in_turn(["a", "b"], "arm {}".format)
    assert next(parts) == "a"
    assert capsys.readouterr().err.endswith("1 of 2: arm a\n")
    assert next(parts) == "b"
    assert capsys.readouterr().err.endswith("2 of 2: arm b\n")
    assert list(repeated(2, ["x", "y"])) == [(0, "x"), (0, "y"), (1, "x"), (1, "y")]
    said = capsys.readouterr()
    assert "4 of 4: y, repetition 2" in said.err
    assert said.out == ""


def test_a_wait_is_told_again_and_again_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "STILL_S", 0.01)
    process = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(3)"], stdin=subprocess.PIPE)
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            process.communicate(b"go on\n")

    monkeypatch.setattr(_progress, "say", say)
    assert wait_for(process, 60.0, "the run") == 3
    assert told[:2] == ["the run, for 0 s"] * 2
    endless = subprocess.Popen(["sleep", "60"])
    with pytest.raises(subprocess.TimeoutExpired):
        wait_for(endless, 0.0, "the run")
    assert endless.returncode


@pytest.mark.parametrize("name", benchmark_docs())
def test_no_benchmark_is_silent(name: str) -> None:
    stem = Path(benchmarks.__path__[0]) / name
    tree = ast.parse((stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")).read_text())
    used = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert used & {"penstock.benchmarks._harness", "penstock.benchmarks._progress", "rich.progress"}


def test_a_benchmark_prints_its_result_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lengths", "8", "--samples", "2", "--repetitions", "1", "--history", str(tmp_path)]
    assert advantages.main(words) == NOT_TOLD  # one repetition
    said = capsys.readouterr()
    assert "4 of 4: scan, repetition 1" in said.err
    assert " of 4:" not in said.out
    assert "scan, 2" in said.out
    assert "too few" in said.out
