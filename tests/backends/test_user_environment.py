"""Processes that run functions of the user see no secret that they were not given."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.episodes.functions import driver
from penstock.backends.episodes.functions.wire import SAID, Said
from penstock.backends.processes.function_process import FunctionProcess
from penstock.backends.processes.process_facts import environment_of
from penstock.backends.processes.user_environment import pass_variables, user_environment
from penstock.backends.rewards.options import FunctionOptions
from penstock.backends.rewards.process import WorkerProcess
from penstock.backends.rewards.service_options import JudgeOptions, RemoteOptions
from penstock.backends.rewards.wire import Answer, Launched

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRETS = (
    "RAY_AUTH_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY",
    "GITHUB_TOKEN", "HTTPS_PROXY", "PENSTOCK_SGLANG_ADMIN_KEY", "PENSTOCK_WORKER_GROUP_KEYS", "JUDGE_KEY",
    "SSH_AUTH_SOCK",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("PENSTOCK_RUN_ID", "mine")
    yield
    pass_variables(())


def seen_by(process: FunctionProcess[Any]) -> set[str]:
    """Names of the variables that it began with. (What it is to load is nothing; it is asked before it says so.)"""
    try:
        names: set[str] = set()
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:  # between fork and exec it has ours still
            names = {variable.partition(b"=")[0].decode() for variable in environment_of(process.pid) if variable}
            if "PYTHONPATH" in names and "PYTEST_CURRENT_TEST" not in names:
                return names
        raise AssertionError(f"it was never there: {names}")
    finally:
        process.end()


def reward_process(options: FunctionOptions | None = None) -> FunctionProcess[Answer]:
    launched = None if options is None else Launched(function=options, surroundings=Surroundings())
    return WorkerProcess("reward", "f1" if options is None else options.function, launched)


def player_process() -> FunctionProcess[Said]:
    return FunctionProcess[Said](driver.MODULE, said=SAID)


def test_processes_of_rewards_and_episodes_have_no_secret_and_what_finds_them() -> None:
    for process in (reward_process(), player_process()):
        names = seen_by(process)
        assert not names & set(SECRETS)
        assert {"PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS", "PENSTOCK_RUN_ID"} <= names


def test_they_have_what_the_scenario_names() -> None:
    pass_variables(["OPENAI_API_KEY", "NOT_SET"])
    for process in (reward_process(), player_process()):
        assert seen_by(process) & set(SECRETS) == {"OPENAI_API_KEY"}
    pass_variables(())
    assert "OPENAI_API_KEY" not in user_environment()


def test_a_service_has_the_key_that_it_asks_with_and_no_other() -> None:
    remote = FunctionOptions(function="remote", remote=RemoteOptions(url="http://x", auth_env="JUDGE_KEY"))
    judge = FunctionOptions(function="judge", judge=JudgeOptions(url="http://x", auth_env="JUDGE_KEY"))
    for options in (remote, judge):
        assert seen_by(reward_process(options)) & set(SECRETS) == {"JUDGE_KEY"}


def test_nothing_that_looks_like_a_secret_is_always_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL", "AUTH")
    owners = ("", "MY_", "WANDB_", "RAY_", "AWS_", "HF_", "PENSTOCK_")
    names = {f"{owner}{word}" for owner in owners for word in words}
    for name in names:
        monkeypatch.setenv(name, "secret")
    assert not names & set(user_environment())
