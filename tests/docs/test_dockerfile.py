"""The Dockerfile does what the repository can do: its files are there, its commands are known, and the steps of its
stage ``run`` make an environment in which Penstock starts. No image is built, as there is no Docker."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from calls import parse

ROOT = Path(__file__).parents[2]
BUILDS_WITHIN_S = 1500


class Instruction(NamedTuple):
    """One of the Dockerfile."""

    name: str
    value: str
    stage: str


def instructions() -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[Instruction] = []
    stage = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        name, value = line.split(maxsplit=1)
        stage = value.split()[2] if name == "FROM" else stage
        found.append(Instruction(name, value, stage))
    return found


def values(name: str, stage: str = "run") -> list[str]:
    return [each.value for each in instructions() if each.name == name and each.stage == stage]


def set_variables() -> dict[str, str]:
    return dict(pair.split("=", 1) for value in values("ENV") for pair in shlex.split(value))


def test_it_has_two_stages_of_a_python_that_is_tested_and_named_exactly() -> None:
    assert {each.name for each in instructions()} <= {
        "FROM", "RUN", "ARG", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"
    }  # fmt: skip
    first, second = (each.value for each in instructions() if each.name == "FROM")
    assert re.fullmatch(r"python:3\.1[12]-slim-\w+ AS run", first)
    assert second == "run AS sglang"


def test_what_it_calls_is_there() -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    own = [step for step in values("RUN") if not step.startswith("apt-get ")]
    assert [shlex.split(step)[0] for step in own] == ["make"]
    assert {target for step in own for target in shlex.split(step)[1:]} <= targets
    (sglang,) = values("RUN", "sglang")
    assert parse(tuple(shlex.split(sglang)[1:])).command == "env sglang"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,), (default,) = values("ENTRYPOINT"), values("CMD")
    assert json.loads(entry) == list(scripts)
    assert json.loads(default) == ["--help"]


def test_the_environments_that_it_names_are_where_the_set_up_puts_them() -> None:
    given = set_variables()
    installed, work = values("WORKDIR")
    assert given["PATH"].split(":")[0] == f"{installed}/.venv/bin"
    assert not Path(given["PENSTOCK_ENVS"]).is_relative_to(work), "a volume would hide it"


def test_nothing_that_the_set_up_needs_is_left_out() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    needed = ("pyproject.toml", "constraints.txt", "Makefile", ".ci/set_up", ".ci/python", "src/penstock", "README.md")
    for path in (*needed, "scenarios/quickstart.yaml", "benchmarks/engine.py"):
        assert (ROOT / path).exists()
        parts = Path(path).parts
        heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        assert not [rule for rule in left_out for head in heads if fnmatch(head, rule)]
    assert {".git", ".venv", "runs"} <= set(left_out)


@pytest.mark.slow
@pytest.mark.timeout(BUILDS_WITHIN_S)
def test_its_steps_make_an_environment_in_which_a_dry_run_passes(tmp_path: Path) -> None:
    folder, work = tmp_path / "penstock", tmp_path / "work"
    work.mkdir()
    listed = subprocess.run(("git", "ls-files"), cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    own = (step for step in values("RUN") if not step.startswith("apt-get "))
    for step in own:
        subprocess.run(("bash", "-ec", step), cwd=folder, env=environment, check=True, timeout=BUILDS_WITHIN_S)
    (entry,) = values("ENTRYPOINT")
    command = [str(folder / ".venv/bin" / json.loads(entry)[0]), "run", "quickstart", "--dry-run"]
    dry = subprocess.run(command, cwd=work, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert dry.returncode == 0, dry.stdout + dry.stderr
