"""What a run says of its own start: the command, the state of the project, the software, the model."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock import __version__
from penstock.runtime.observability import facts
from penstock.runtime.observability.facts import (
    GitState,
    Package,
    command_line,
    facts_of,
    git_state,
    installed_packages,
    model_name,
    steps_to_train,
)
from penstock.runtime.scenario import load_scenario

SCENARIOS = Path(__file__).parents[2] / "scenarios"


@pytest.fixture
def git(tmp_path: Path) -> Path:
    """A repository with one commit of one file."""
    (tmp_path / "mine.py").write_text("1\n")
    for words in (["init", "--quiet"], ["add", "mine.py"], ["commit", "--quiet", "--message", "one"], ["tag", "v1"]):
        run_git(tmp_path, *words)
    return tmp_path


def run_git(folder: Path, *words: str) -> str:
    who = {f"GIT_{role}_{part}": "x@example.org" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    told = subprocess.run(
        ["git", *words], cwd=folder, env=os.environ | who | own, check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(git: Path) -> None:
    head = run_git(git, "rev-parse", "HEAD")
    assert len(head) == 40
    assert git_state(git) == GitState(head, is_dirty=False)
    (git / "new.py").write_text("git does not know this one, nor does it know the folders of runs")
    (git / "inner").mkdir()
    assert git_state(git / "inner") == GitState(head, is_dirty=False)
    (git / "mine.py").write_text("2\n")
    assert git_state(git) == GitState(head, is_dirty=True)


def test_no_program_of_the_repository_is_run(git: Path) -> None:
    run_git(git, "config", "core.fsmonitor", "touch ran; false")
    assert git_state(git).commit
    assert not (git / "ran").exists()


def test_a_folder_without_a_repository_a_commit_or_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == GitState()
    run_git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) == GitState()
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == GitState()


def test_a_git_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(facts, "GIT_TIMEOUT_S", 0.05)
    assert git_state(tmp_path) == GitState()
    assert "did not say within 0.05 s" in caplog.text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["/x/bin/penstock", "run", "a b.yaml", "x=1"], "penstock run 'a b.yaml' x=1"),
        (["/x/penstock/__main__.py", "run"], "penstock run"),
        (["train.py"], "train.py"),
        (
            ["penstock", "run", "o.otlp_endpoint=http://me:secret@host/"],
            "penstock run o.otlp_endpoint=http://***@host/",
        ),
    ],
)
def test_the_command_is_what_a_shell_reads_without_passwords(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == line


def test_a_model_of_the_hub_has_its_name_and_its_commit() -> None:
    commit = "c1899de289a04d12100db370d81485cdf75e47ca"
    cached = f"/cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{commit}"
    assert model_name(cached) == f"Qwen/Qwen3-0.6B@{commit}"
    assert model_name("/models/mine") == "/models/mine"


def test_software_is_named_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "PACKAGES", ("torch", "no-such-package"))
    assert installed_packages() == (Package("Penstock", __version__), Package("torch", version("torch")))


def test_the_facts_of_a_scenario(git: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(git)
    scenario = load_scenario(SCENARIOS / "quickstart.yaml", ["learner.num_ranks=2", "engines.device=cpu"])
    found = facts_of(scenario, command="penstock run quickstart")
    assert (found.command, found.git_commit) == ("penstock run quickstart", run_git(git, "rev-parse", "HEAD"))
    assert (found.scenario, found.policy, found.staleness_bound) == ("quickstart", "fully_async", 2)
    assert found.backends == "engines 2 × torch on cpu; learner 2 × torch on auto"
    assert found.model == "s, made with the run's seed"
    assert found.num_steps == scenario.run.num_steps > 0
    assert steps_to_train(load_scenario(SCENARIOS / "quickstart.yaml", ["run.only=rollout"])) == 0
