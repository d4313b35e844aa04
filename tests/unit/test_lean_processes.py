"""What a process imports: start-up is paid ten times over in each run, and at each replacement of an actor."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.messages.names import Role
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.scenario import Scenario
from penstock.runtime.scenario.resolve import resolve

if TYPE_CHECKING:
    from pathlib import Path

NUMERIC = {"torch", "transformers", "numpy", "pyarrow", "tokenizers", "safetensors", "peft", "accelerate"}
HEAVY = NUMERIC | {"ray", "aiohttp", "jinja2", "yaml", "rich", "typer", "huggingface_hub", "math_verify"}
OF_COMMANDS = {"penstock.runtime.scenario.rules", "penstock.runtime.scenario.load", "penstock.runtime.cli"}

HELP = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from penstock.runtime.cli import app

runner = CliRunner()


def ask(command, words):
    shown = runner.invoke(app.app, [*words, "--help"])
    assert shown.exit_code == 0, (words, shown.output)
    for name, inner in getattr(command, "commands", {}).items():
        ask(inner, [*words, name])


ask(get_command(app.app), [])
"""
ACTOR = """
import sys
from pathlib import Path
import penstock.runtime.hosts.processes.actor_process
from penstock.backends.ledger.sqlite import open_ledger
from penstock.runtime.hosts.processes.boot import load_wiring
import msgspec

wiring = load_wiring("penstock.runtime.run.wiring")
plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=wiring.RunPlan)
name = sys.argv[1]
wiring.inbox_union(name)
store = open_ledger(Path(plan.run_folder)) if name == "buffer" else None
wiring.build_machine(name, plan, epoch=1)
places = {"host": "127.0.0.1", "remote_ranks": None, "takes_over": False}
wiring.open_backend(name, plan, epoch=1, timers=None, store=store, **places)
"""
TELL = """
print("IMPORTED", *sorted(sys.modules))
"""


def imported(program: str, *arguments: str, given: bytes = b"") -> set[str]:
    """The modules of a fresh process that has run the program."""
    command = [sys.executable, "-c", program + TELL, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    [last] = [line for line in done.stdout.decode().splitlines() if line.startswith("IMPORTED ")]
    return set(last.split()[1:])


def plan_of(folder: Path) -> bytes:
    blocks = {"run": {"name": "lean"}, "data": {"path": "lines:9"}, "model": {"make": "xs"}}
    scenario = resolve(msgspec.convert(blocks, Scenario))
    plan = RunPlan(
        scenario=scenario, run_id="lean", run_folder=str(folder), model_folder=str(folder), num_rows=9, transport="disk"
    )
    return msgspec.msgpack.encode(plan)


def test_no_help_of_a_command_imports_what_the_command_runs_on() -> None:
    assert imported(HELP) & ((HEAVY | {"zmq", "msgspec"}) - {"rich", "typer"}) == set()


@pytest.mark.parametrize("role", [Role.SCORER, Role.FILTER, Role.BUFFER, Role.WEIGHT_PUBLISHER])
def test_a_light_actor_imports_nothing_that_is_heavy(role: Role, tmp_path: Path) -> None:
    modules = imported(ACTOR, role.value, given=plan_of(tmp_path))
    assert f"penstock.actors.{role.value}.machine" in modules
    reads_text = {"tokenizers"} if role is Role.FILTER else set[str]()  # of the samples that it keeps
    assert modules & (HEAVY | OF_COMMANDS) == reads_text


DRIVER = """
import sys
import penstock.runtime.hosts.driver.main, penstock.runtime.hosts.driver.session
import penstock.runtime.hosts.local.local_host, penstock.runtime.hosts.local.warm
"""
COMMAND = """
import sys
import penstock.runtime.launch.launch, penstock.runtime.hosts.driver.launcher
"""
NOT_YET = (NUMERIC - {"tokenizers"}) | {"aiohttp", "jinja2", "prometheus_client", "ray", "resvg_py"}
"""Until the zygote has been told to import torch: all of that delays the first token."""


@pytest.mark.parametrize("program", [DRIVER, COMMAND])
def test_a_run_starts_its_zygote_before_it_imports_what_it_ends_with(program: str) -> None:
    assert imported(program) & NOT_YET == set()


WITHOUT_PILLOW = """
import sys
sys.modules["PIL"] = None  # as where the extra of images is not installed
from pathlib import Path
from penstock.backends.checkpoint.make import make_model
import penstock.backends.data.backend, penstock.backends.engines.torch.factory, penstock.backends.learners.torch.backend
make_model("xs", Path(sys.argv[1]), 0)
"""


def test_a_model_of_text_is_made_and_trained_without_pillow(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITHOUT_PILLOW, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "config.json").is_file()
