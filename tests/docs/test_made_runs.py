"""What the pages do with a run that was made before: looked at, asked, evaluated, converted, trained again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from blocks import Block, blocks, inline_code
from calls import calls_in
from reader import filled_in
from test_python import play, reads_a_run
from typer.testing import CliRunner

from penstock.runtime.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(600)]

QUICK = (
    "runtime.host=local",
    "learner.groups_per_batch=8",
    "learner.warm_start.num_steps=10",
    "sampling.max_response_tokens=32",
    "observability.report=false",
)
OF_THE_RUN = (
    "run.num_steps=4",
    "run.keep_samples=true",
    "observability.trace_fraction=1",
    "evaluation.every=2",
    "evaluation.before_first=true",
    "evaluation.datasets=[{name: gsm8k, path: 'lines:16'}]",
)
LOOKS = ("audit", "explain", "ledger", "list", "report", "samples", "status", "trace")
"""Commands that only look at a run."""


def penstock(folder: Path, *words: str) -> None:
    """As a user calls it, who has the time."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.runtime.cli", *words],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, f"penstock {' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def run(readers_folder: Path) -> Path:
    """A run's folder, from the reader's."""
    penstock(readers_folder, "run", "scenarios/mine.yaml", "run.name=made", *QUICK, *OF_THE_RUN)
    (made,) = readers_folder.glob("runs/made-*")
    return made.relative_to(readers_folder)


def all_calls(run: Path) -> set[tuple[str, ...]]:
    """What the pages call, with this run in place of theirs."""
    texts = [block.text for block in blocks("sh")] + [text for _, text in inline_code()]
    texts = [filled_in(text, run) for text in texts if text.startswith("penstock ") or "\npenstock " in text]
    return {words for text in texts for words in calls_in(text)}


@pytest.mark.usefixtures("in_readers_folder")
def test_what_only_looks_at_a_run_is_answered(run: Path) -> None:
    looked = {words for words in all_calls(run) if words[0] in LOOKS and "…" not in " ".join(words)}
    assert {words[0] for words in looked} == set(LOOKS)
    named = {words for words in looked if str(run) in words or words[0] == "list"}
    for words in sorted(named | {(words[0], str(run), *words[1:]) for words in looked - named}):
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, f"penstock {' '.join(words)}\n{result.output}\n{result.exception}"


@pytest.mark.usefixtures("in_readers_folder")
def test_runs_are_compared(run: Path, tmp_path: Path) -> None:
    """The pages name several; here the second one is a copy of the first."""
    other = str(shutil.copytree(run, tmp_path / "other"))
    compared = [words for words in all_calls(run) if words[0] == "compare" and str(run) in words]
    assert compared
    for words in compared:
        first = words.index(str(run)) + 1
        given = [*words[:first], *(other if word == str(run) else word for word in words[first:])]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 0, f"penstock {' '.join(given)}\n{result.output}\n{result.exception}"


@pytest.mark.usefixtures("in_readers_folder")
@pytest.mark.parametrize("block", blocks("sql"), ids=lambda block: block.place)
def test_a_question_to_the_ledger_is_answered(block: Block, run: Path) -> None:
    result = CliRunner().invoke(app, ["ledger", str(run), "--sql", block.text])
    assert result.exit_code == 0, f"{block.text}\n{result.output}\n{result.exception}"


@pytest.mark.usefixtures("in_readers_folder")
@pytest.mark.parametrize("block", [one for one in blocks("python") if reads_a_run(one)], ids=lambda block: block.place)
def test_a_block_of_python_reads_a_run(block: Block, run: Path) -> None:
    play(filled_in(block.text, run), block.place)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["convert", "evaluate", "run"])
def test_what_works_on_a_run_is_done(wanted: str, run: Path, in_readers_folder: Path, tmp_path: Path) -> None:
    """A folder for a model, which must not be there yet, is another one each time."""
    done = 0
    for words in sorted(all_calls(run)):
        if words[0] != wanted or str(run) not in " ".join(words[1:]) or "data.path" in " ".join(words):
            continue
        absent = tuple(f"{word.removesuffix('=null')}." for word in words if word.endswith("=null"))
        quick = tuple(key for key in QUICK if not key.startswith(absent))
        started = () if wanted == "convert" else quick if wanted == "run" else quick[:1]
        given = (str(tmp_path / f"model-{done}") if word == "my/model" else word for word in words)
        penstock(in_readers_folder, *given, *started)
        done += 1
    assert done > 1
