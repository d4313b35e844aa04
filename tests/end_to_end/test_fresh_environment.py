"""The commands of the README, in a clone of this repository with nothing but Python, make and git."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
QUICK = ("run.num_steps=2", "learner.warm_start.num_steps=5", "filter.drop_zero_spread=false")
SMALL = ("learner.groups_per_batch=4", "data.path=lines:200")
WHOLE = ("doctor", "run", "list", "explain", "data", "check", "simulate")
OWN = ("run.num_steps=2", "learner.groups_per_batch=4", "model.max_context=256", "sampling.max_response_tokens=32")

FIRST_STEP = re.compile(r"\bstep [1-9]\d*/\d+|completed")

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(3600)]


def outside_environment() -> dict[str, str]:
    """The environment without what an active virtual environment has put there."""
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    folders = environment["PATH"].split(os.pathsep)
    environment["PATH"] = os.pathsep.join(f for f in folders if not (Path(f).parent / "pyvenv.cfg").exists())
    return environment


def shell(clone: Path, command: str, *, timeout_s: float = 600) -> str:
    """Run one line of the README in the clone; what it printed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=clone,
        env=outside_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "penstock"
    subprocess.run(["git", "clone", "--quiet", str(HOUSE), str(folder)], check=True, timeout=120)
    return folder


def readme_commands(clone: Path) -> list[str]:
    """The ``penstock`` commands of the README that end by themselves here, without their comments; tests/docs tries the
    others, which ask at a terminal, want GPUs, or the name of something that is the reader's."""
    lines = re.findall(r"^(penstock .*)$", (clone / "README.md").read_text(), flags=re.MULTILINE)
    commands = [line.partition(" #")[0].strip() for line in lines]
    return [each for each in commands if each.split()[1] in WHOLE and "--dry-run" not in each]


def test_make_demo_sets_up_trains_and_does_not_set_up_twice(clone: Path) -> None:
    overrides = " ".join(QUICK)
    first = shell(clone, f"make demo ARGS='{overrides}'", timeout_s=3000)
    trained = FIRST_STEP.search(first)
    assert trained is not None
    assert first.count("\n", 0, trained.start()) <= 40
    for phase in ("environment", "packages", "compiling"):
        assert re.search(rf"^  {phase}.*: \d+ s$", first, flags=re.MULTILINE)
    assert_compiled(clone)
    reports = list(clone.glob("runs/quickstart-*/report.html"))
    assert len(reports) == 1
    again = shell(clone, f"make demo ARGS='{overrides}'")
    assert "Setting up" not in again
    assert "completed" in shell(clone, ".venv/bin/penstock status")


def assert_compiled(clone: Path) -> None:
    """Whatever the environment says about writing bytecode, what a run imports has it."""
    (packages,) = (clone / ".venv").glob("lib/python3.*/site-packages")
    for folder in (packages / "torch", packages / "ray" / "_private", clone / "runtime" / "hosts"):
        modules = {path.stem for path in folder.glob("*.py")}
        assert modules <= {path.name.split(".")[0] for path in folder.glob("__pycache__/*.pyc")}


def test_every_command_of_the_readme_works(clone: Path) -> None:
    """On small steps; ``local_model.yaml`` gets a checkpoint, rows and a reward that are not ours."""
    if not (clone / ".venv").exists():
        shell(clone, ".ci/set_up run", timeout_s=3000)
    make_user_files(clone)
    commands = readme_commands(clone)
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command)
        if words[1] == "run":
            own = "local_model" in command
            words += list(OWN) if own else [*QUICK, *SMALL]
        elif words[1] == "simulate":
            words += ["run.num_steps=2", "learner.groups_per_batch=32", "engines.count=64"]
        shell(clone, shlex.join([".venv/bin/penstock", *words[1:]]), timeout_s=1200)
    assert list(clone.glob("runs/local_model-*/report.html"))


def make_user_files(clone: Path) -> None:
    """What ``model.path=my/model data.path=my/rows.jsonl reward.function=my.py:reward`` names."""
    make = (
        "from pathlib import Path; from penstock.backends.checkpoint.make import make_model; "
        "make_model('xs', Path('my/model'), seed=3)"
    )
    shell(clone, f".venv/bin/python -c {shlex.quote(make)}")
    rows = "".join(f'{{"prompt": "{a}+{b}=", "label": "{a + b}"}}\n' for a in range(9) for b in range(9))
    (clone / "my" / "rows.jsonl").write_text(rows)
    (clone / "my.py").write_text("def reward(prompt, response, label):\n    return len(set(response)) / 80\n")
