"""The package of ``docs/extending.md``: built, installed and used as a stranger would, with nothing changed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_steps

HOUSE = Path(__file__).parents[2]
EXTENSION = Path(__file__).parent / "extension"
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
SHOWN = [
    path for path in sorted(EXTENSION.rglob("*")) if path.suffix in (".py", ".toml", ".yaml") and path.stem[0] != "_"
]
TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed in it; that of the tests' own packages is left alone."""
    source, target = tmp_path_factory.mktemp("source") / "extension", tmp_path_factory.mktemp("site")
    shutil.copytree(EXTENSION, source)  # a build writes beside the sources
    ask(sys.executable, *PIP, target, source, folder=target)
    return target


def ask(*command: str | Path, folder: Path, site: Path | None = None) -> str:
    """What it prints, with the package on the path where it is given."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if site is None else {"PYTHONPATH": str(site)})
    ended = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout + ended.stderr


@pytest.mark.long_run
def test_its_parts_pass_the_suites(site: Path, tmp_path: Path) -> None:
    pytest_ = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "penstock.backends.contracts",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
    )
    said = ask(sys.executable, *pytest_, EXTENSION / "check_bigram.py", folder=tmp_path, site=site)
    assert "22 passed, 2 skipped" in said, said


@pytest.mark.long_run
def test_a_run_with_its_parts_comes_to_its_end(site: Path, tmp_path: Path) -> None:
    shutil.copy(EXTENSION / "scenario.yaml", tmp_path)
    scratch = tmp_path / "scratch"
    overrides = (f"weights.options.folder={scratch}", "observability.report=false")
    ask(sys.executable, "-m", "penstock", "run", "scenario.yaml", *overrides, folder=tmp_path, site=site)
    assert scratch.is_dir(), "weights went by the transport's own folder"
    (run,) = (tmp_path / "runs").iterdir()
    summary = read_summary(run)
    assert summary is not None
    assert summary.completed
    assert summary.balance.issued >= 16
    assert summary.balance.in_system == 0
    assert all("train/moved" in step.metrics for step in read_steps(run)), "the objective is the package's"
    assert all("rollout/reward/num_tokens" in step.metrics for step in read_steps(run)), "and so is the reward"


REFUSED = {
    "engines.options.smoothing=2": "engines.options.smoothing: must be a number, at least 0 and below 1; found 2",
    "engines.options.smooth=0.1": "engines.options.smooth: no such key; did you mean 'smoothing'?",
    "weights.options={}": "weights.options.folder: missing; it has no default",
    "weights.canary=true": "bigram engines cannot return log-probs",
    "engines.backend=torch": "engines.options: is for parts of other packages, and torch has none; remove it",
    "engines.backend=trigram": "must be torch, sglang, recorded, simulated or bigram; found 'trigram'",
    "learner.objective=tanhh": "learner.objective.name: no objective is called 'tanhh'; did you mean 'tanh'?",
    "learner.objective.options.scale=0": "learner.objective.options.scale: must be a number, above 0; found 0",
    "learner.objective.name=grpo": "learner.objective.options: is for parts of other packages, and grpo has none",
    "reward.function=brevty": "reward.function: no reward function is called 'brevty'; did you mean 'brevity'?",
    "reward.key=score": "reward.key: what 'brevity' returns has reward and num_tokens, and no 'score'",
    "reward.per_group=true": "reward.per_group: 'brevity' sees one sample; set it to false, or remove it",
    "teacher.backend=bigram": "teacher.backend: must be torch, sglang or simulated; found 'bigram'",
    "weights.transport=nccl": "auto, shared_memory, disk, distributed, tensor, network or scratch; found 'nccl'",
}
LOAD = """
import sys
from pathlib import Path
from penstock.messages.errors import UserFault
from penstock.runtime.scenario import load_scenario
for override in sys.argv[1:]:
    try:
        load_scenario(Path("scenario.yaml"), [override])
    except UserFault as error:
        print(error)
    else:
        print("loads")
"""


def loaded(*overrides: str, folder: Path, site: Path | None = None) -> list[str]:
    """What is said of the scenario with each of the overrides."""
    shutil.copy(EXTENSION / "scenario.yaml", folder)
    return ask(sys.executable, "-c", LOAD, *overrides, folder=folder, site=site).splitlines()


@pytest.mark.long_run
def test_options_are_checked_against_its_structs(site: Path, tmp_path: Path) -> None:
    first, *said = loaded("run.seed=1", *REFUSED, folder=tmp_path, site=site)
    assert first == "loads"
    for message, expected in zip(said, REFUSED.values(), strict=True):
        assert expected in message


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    (said,) = loaded("run.seed=1", folder=tmp_path)
    assert said.endswith("engines.backend: must be torch, sglang, recorded or simulated; found 'bigram'")


@pytest.mark.long_run
def test_a_package_that_cannot_be_imported_is_named_with_the_reason(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(site, broken)
    (broken / "bigram_parts" / "spec.py").write_text("import no_such_library\n")
    (said,) = loaded("run.seed=1", folder=tmp_path, site=broken)
    assert "found 'bigram'; engine bigram, of the package bigram-parts, cannot be imported: ModuleNotFoundError" in said


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_the_page_shows_what_is_tested(path: Path) -> None:
    assert path.read_text().rstrip() in (HOUSE / "docs" / "extending.md").read_text()
