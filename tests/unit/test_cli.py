"""The commands as a user meets them: what is printed where, and the exit codes."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.runtime.cli import doctor
from penstock.runtime.cli.app import PARTS, app, main
from penstock.runtime.cli.benches import benchmark_docs
from penstock.runtime.run.process_table import placement
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.source import read_source

SCENARIOS = Path(__file__).parents[2] / "scenarios"


def penstock(*arguments: str | Path, folder: Path | None = None, width: int = 200) -> subprocess.CompletedProcess[str]:
    """Run the command as users do, in a process of its own."""
    command = [sys.executable, "-c", "from penstock.runtime.cli import main; main()", *map(str, arguments)]
    environment = os.environ | {"TERM": "dumb", "COLUMNS": str(width)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment)


def test_help_begins_with_run_and_breaks_no_sentence_where_the_source_does() -> None:
    _, commands = penstock("--help", width=80).stdout.split("─ Run ─")
    assert commands.splitlines()[1].split()[1] == "run"
    assert max(map(len, commands.splitlines())) <= 80
    for shown, whole in (
        (commands, "│             for every group that is granted from then on; what is under way  │"),
        (
            penstock("replay", "--help", width=80).stdout,
            " by simulation, twice: as it was and with the overrides; it prints both         ",
        ),
    ):
        assert whole.rstrip() in [line.rstrip() for line in shown.splitlines()]


COMMAND = [sys.executable, "-c", "from penstock.runtime.cli import main; main()"]


def test_an_output_that_is_full_is_told_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "schema"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    told = "penstock: a file or the output cannot be written: no space left on device; make room\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_a_current_folder_that_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/na\xefve"))
    odd.mkdir()
    done = penstock("list", folder=odd)
    assert (done.returncode, done.stderr) == (
        2, f"penstock: {tmp_path}/na\\udcefve: expected UTF-8; give what is named so another name\n"
    )  # fmt: skip
    gone = tmp_path / "gone"
    gone.mkdir()
    inside = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); {COMMAND[-1]}"
    done = subprocess.run([sys.executable, "-c", inside, "list"], capture_output=True, text=True, timeout=120)
    told = "penstock: the current folder was removed; change to one that exists\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_home_folder_that_nobody_has_is_told(tmp_path: Path) -> None:
    done = penstock("data", "check", "local_model", "model.path=~no-such-user/m", "data.path=lines:1", folder=tmp_path)
    assert done.returncode == 2
    assert f"no tokenizer in {tmp_path}/~no-such-user/m: there is no such folder" in done.stderr
    done = penstock("resume", "~no-such-user/run", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: a path begins with ~, or is in the home folder where nothing else is said")


def test_where_the_locale_has_no_such_sign_another_one_stands_there(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    command = [*COMMAND, "list", "läufe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    told = "penstock: l?ufe: no such folder; name the folder that runs are in, as run.folder does in a scenario\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_policy_that_is_not_named_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    done = penstock("policy", "mine", "max_staleness=4", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("penstock policy mine fully_async max_staleness=4\n")


def test_help_lists_every_command() -> None:
    done = penstock("--help")
    assert done.returncode == 0
    for command in ("run", "simulate", "status", "stop", "doctor", "bench", "report", "compare", "schema"):
        assert command in done.stdout
    headings = re.findall(r"^╭─ (.+?) ─", done.stdout, re.MULTILINE)
    assert headings == ["Options", *PARTS.values()], "each under a heading of its own kind, none under Commands"


@pytest.mark.parametrize(
    "command", [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
)
def test_every_command_explains_itself(command: str) -> None:
    done = penstock(*command.split(), "--help")
    assert done.returncode == 0
    assert re.search(rf"Usage: .*{command} \[OPTIONS\]", done.stdout)
    assert "<bool>" not in done.stdout, "flags take no value"


def test_help_after_a_benchmark_is_its_own() -> None:
    shown = CliRunner().invoke(app, ["bench", "engine", "--help"]).output
    assert "usage: " in shown
    assert "Measure a claim on this machine" not in shown


HINT = "penstock list shows the runs that are there"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "absent.yaml"], "penstock: absent.yaml: cannot read this scenario: no such file or directory\n"),
        (
            ["run", SCENARIOS / "sync.yaml", "staleness.max_stalenes=1"],
            "penstock: override 'staleness.max_stalenes=1': staleness.max_stalenes: no such key; did you mean "
            "'max_staleness'?\n",
        ),
        (["simulate", SCENARIOS / "sync.yaml", "engines.count=0"], "must be a whole number from 1 to 65536; found 0"),
        (["run", "quickstrat"], "no scenario of this name comes with Penstock; did you mean quickstart?\n"),
        (["run", "scenarios/quickstart.yaml"], "no such file; the scenario that comes with Penstock is run by name"),
        (["run", "."], "penstock: .: a folder, and no scenario; name the YAML file\n"),
        (["run", SCENARIOS / "local_model.yaml"], "model.path: "),
        (["status", "."], f"penstock: .: not a run's folder: it has no run.json; {HINT}\n"),
        (["status"], "penstock: runs: no run is there; name the run's folder\n"),
        (["stop", "absent"], f"penstock: absent: no such folder; {HINT}\n"),
        (["report", "absent"], f"penstock: absent: no such folder; {HINT}\n"),
        (["bench", "no_such_claim"], "penstock: no benchmark is called 'no_such_claim'; "),
        (["run", SCENARIOS / "sync.yaml", "model.make=null", "model.path=nowhere"], "nowhere: no such folder"),
    ],
)
def test_what_the_user_has_to_change_is_one_message_and_exit_code_2(
    arguments: list[str | Path], said: str, tmp_path: Path
) -> None:
    done = penstock(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_a_scenario_that_loads_again_and_starts_nothing(tmp_path: Path) -> None:
    done = penstock("run", SCENARIOS / "fully_async.yaml", "--dry-run", "staleness.max_staleness=5", folder=tmp_path)
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "again.yaml").write_text(done.stdout)
    expected = load_scenario(SCENARIOS / "fully_async.yaml", ["staleness.max_staleness=5"])
    assert load_scenario(tmp_path / "again.yaml") == expected
    assert "# learner " in done.stdout


def test_the_placement_has_every_actor_once() -> None:
    rows = placement(load_scenario(SCENARIOS / "quickstart.yaml"))
    names = [row.name for row in rows]
    assert names == [
        "prompt_source", "engine/0 … engine/1", "scorer", "filter", "buffer", "learner", "weight_publisher"
    ]  # fmt: skip
    assert [row.num_processes for row in rows] == [1, 2, 2, 1, 1, 1, 1]


def test_the_schema_describes_every_key_and_accepts_the_shipped_scenarios() -> None:
    schema = cast("dict[str, Any]", json.loads(penstock("schema").stdout))
    assert "how many versions old" in schema["$defs"]["StalenessOptions"]["properties"]["max_staleness"]["description"]
    jsonschema: Any = importlib.import_module("jsonschema")  # Ray brings it; it has no types
    validator = jsonschema.Draft202012Validator(schema)
    for file in SCENARIOS.glob("*.yaml"):
        validator.validate(read_source(file).data)
    assert not validator.is_valid({"run": {"name": "x"}, "data": {"path": "lines:9", "pathh": 1}})


def test_an_error_of_usage_is_exit_code_2() -> None:
    done = penstock("run")
    assert done.returncode == 2
    assert "SCENARIO" in done.stderr


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.runtime.scenario.load_scenario", interrupted)
    monkeypatch.setattr(sys, "argv", ["penstock", "run", "sync"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "penstock: interrupted\n", "or nobody knows what became of it"


def test_the_doctor_finds_this_machine_fit_and_names_what_it_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENVS", str(tmp_path))  # importing SGLang there takes ten seconds
    out = StringIO()
    assert doctor.examine(Console(file=out, width=120), tmp_path)
    for subject in (
        "Python",
        "torch",
        "ray",
        "shared memory",
        "disk",
        "file descriptors",
        "SGLang",
        "Megatron",
        "ranks",
    ):
        assert subject in out.getvalue()


def test_the_doctor_says_what_to_do_where_something_is_missing() -> None:
    finding = doctor.check_package("no-such-package")
    assert (finding.verdict, finding.found) == ("bad", "not installed")
    assert "pip install" in finding.fix


def test_the_doctor_says_what_a_megatron_learner_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda: None)
    finding = doctor.check_megatron()
    assert finding.verdict == "absent"
    assert 'pip install -e ".[megatron]"' in finding.fix
    monkeypatch.setattr(doctor, "installed_version", lambda: "0.16.9")
    monkeypatch.setattr(doctor, "has_transformer_engine", lambda: False)
    assert doctor.check_megatron(has_gpu=False).verdict == "ok"
    finding = doctor.check_megatron(has_gpu=True)
    assert (finding.verdict, finding.found) == (
        "bad", "megatron-core 0.16.9, tried with 0.16.1, without Transformer Engine",
    )  # fmt: skip
    monkeypatch.setattr(doctor, "has_transformer_engine", lambda: True)
    assert doctor.check_megatron(has_gpu=True).verdict == "ok"
    assert doctor.check_ranks(tmp_path / "absent", num_gpus=1).verdict == "ok"
    finding = doctor.check_ranks(tmp_path / "absent", num_gpus=8)
    assert (finding.verdict, finding.found) == ("bad", "0 MiB of shared memory free, 512 wanted for 8 GPUs")
    assert "--shm-size" in finding.fix


def test_benchmarks_are_found_without_importing_them() -> None:
    before = set(sys.modules)
    docs = benchmark_docs()
    assert all(docs.values())
    assert not {f"penstock.benchmarks.{name}" for name in docs} & (set(sys.modules) - before)
