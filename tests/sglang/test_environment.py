"""The environment that ``penstock env sglang`` builds, and what the server in it says about its options."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.backends.engines.served.sglang.environment import SGLANG_VERSION, find_environment, pins
from penstock.backends.engines.served.sglang.environment_build import build_environment
from penstock.backends.engines.served.sglang.reserved_options import RESERVED
from penstock.backends.engines.served.sglang.server_options import (
    PLACED,
    ServerOption,
    check_server_options,
    command_line,
    option_named,
    supports_seeded_sampling,
)
from penstock.runtime.cli.doctor import check_sglang

if TYPE_CHECKING:
    from running_server import RunningServer

    from penstock.backends.engines.options import OptionValue
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = pytest.mark.sglang

HERE = Path(__file__).parent
LIST = HERE.parents[1] / "backends" / "engines" / "served" / "sglang" / "server_options.json"

PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(vars(parser.parse_args(["--model-path=x", *json.load(sys.stdin)]))))
"""
UNUSUAL: dict[str, OptionValue] = {
    "cuda_graph_config": '{"decode": {"backend": "full"}}',  # it knows the keys within
    "enable_amd_monokernel": True,  # two flags set it
}

EXAMPLES: dict[str, bool | int | float | str] = {
    "bool": True, "int": 3, "size": 4096, "float": 0.25, "str": "-word", "json": '[{"a": 1}]',
}  # fmt: skip


def every_option() -> list[ServerOption]:
    """All that a scenario may set and that reach the server."""
    listed = json.loads(LIST.read_text(encoding="utf-8"))["options"]
    names = {flag.removeprefix("--").replace("-", "_"): option["name"] for option in listed for flag in option["flags"]}
    taken = {names[name] for name in RESERVED} | set(PLACED) | {"log_level", "log_level_http"}
    return [option_named(name) for name in sorted({option["name"] for option in listed} - taken)]


def example(option: ServerOption) -> OptionValue:
    """A value that it takes, and which is not its default."""
    if option.name in UNUSUAL:
        return UNUSUAL[option.name]
    if option.choices is not None:
        one: bool | int | float | str = option.choices[-1]
    else:
        one = EXAMPLES[option.type]
    if option.nargs in ("+", "*"):
        return [str(one).strip("-") if option.type == "str" else one] * 2
    return one


def is_json(name: str) -> bool:
    return option_named(name).type == "json"


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


def test_the_servers_parser_reads_every_option_as_it_was_meant(environment: SglangEnvironment) -> None:
    options = {option.name: example(option) for option in every_option()}
    check_server_options(options)
    parsed = subprocess.run(
        [environment.python, "-W", "ignore", "-c", PARSE], input=json.dumps(command_line(options)),
        env=os.environ | environment.variables, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    read = json.loads(parsed.stdout)
    meant = {name: json.loads(str(value)) if is_json(name) else value for name, value in options.items()}
    assert {name: read[name] for name in meant} == meant


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
            output_ids: list[int] = json.load(answer)["output_ids"]
        return output_ids

    assert not supports_seeded_sampling({}, is_cpu=True)
    assert draw() != draw()
