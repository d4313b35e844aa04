"""The environment that ``penstock env sglang`` builds, and what the server in it says about its options."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.backends.engines.sglang.environment import SGLANG_VERSION, find_environment, pins
from penstock.backends.engines.sglang.environment_build import build_environment
from penstock.backends.engines.sglang.server_options import supports_seeded_sampling
from penstock.runtime.cli.doctor import check_sglang

if TYPE_CHECKING:
    from running_server import RunningServer

    from penstock.backends.engines.sglang.environment import SglangEnvironment

pytestmark = pytest.mark.sglang

HERE = Path(__file__).parent
LIST = HERE.parents[1] / "backends" / "engines" / "sglang" / "server_options.json"


def test_the_environment_has_exactly_what_its_lock_says(environment: SglangEnvironment) -> None:
    listed = subprocess.run(
        [environment.python, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    installed = {line.lower().replace("_", "-") for line in listed.stdout.splitlines()}
    extra = {"pip"}  # which venv puts there
    assert {pin for pin in installed if pin.partition("==")[0] not in extra} == set(pins(is_cpu=True))


def test_a_ready_environment_is_left_alone(environment: SglangEnvironment) -> None:
    built = build_environment(stand_ins=HERE / "stand_ins")
    assert (built.environment, built.was_ready) == (environment, True)
    assert built.environment == find_environment(is_cpu=True)


def test_the_doctor_imports_the_pinned_server_with_torch_for_the_cpu(environment: SglangEnvironment) -> None:
    finding = check_sglang(is_cpu=environment.is_cpu)
    assert finding.verdict == "ok", finding
    assert finding.found.startswith(f"{SGLANG_VERSION} for the CPU with torch ")
    assert "+cpu, " in finding.found


def test_the_committed_list_of_options_is_that_of_the_installed_server(environment: SglangEnvironment) -> None:
    listed = subprocess.run(
        [environment.python, "-W", "ignore", HERE / "list_server_options.py"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert listed.stdout == LIST.read_text(encoding="utf-8")


def test_a_server_has_the_options_that_it_was_given(server: RunningServer) -> None:
    request = urllib.request.Request(
        f"{server.address}/server_info", headers={"Authorization": f"Bearer {server.admin_api_key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        info = json.load(answer)
    assert info["version"] == SGLANG_VERSION
    assert {name: info[name] for name in ("device", "dtype", "attention_backend", "sleep_on_idle")} == {
        "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sleep_on_idle": True,
    }  # fmt: skip
    assert info["max_total_tokens"] == 16384


def test_without_determinism_a_server_ignores_the_seed_as_is_declared(server: RunningServer) -> None:
    prompt = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 24, "sampling_seed": 7, "ignore_eos": True},
    }

    def draw() -> list[int]:
        request = urllib.request.Request(
            f"{server.address}/generate", json.dumps(prompt).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["output_ids"]

    assert not supports_seeded_sampling({}, is_cpu=True)
    assert draw() != draw()
