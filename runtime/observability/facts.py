"""What is known of a run when it is started: what was typed, in which state of the project, with which software.

``starts.jsonl`` has an object for each start, so a run that was cut off says it too, and one that was resumed says it
for each of its drives.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock import __version__
from penstock.backends.engines.options import engine_groups
from penstock.backends.engines.spec import ENGINES, ONE_GPU
from penstock.backends.evaluation.sets import EvaluationSet
from penstock.messages.names import LEARNER, engine_name, reward_model_name, teacher_name
from penstock.runtime.observability.jsonl import JsonLinesWriter, read_rows
from penstock.runtime.observability.summary import MachineFacts, machine_facts
from penstock.runtime.safe_text import without_credentials
from penstock.runtime.scenario.evaluation_rules import evaluated_version, sets_of

if TYPE_CHECKING:
    from penstock.backends.engines.spec import EngineBlock
    from penstock.runtime.scenario import Scenario

STARTS_FILE: Final = "starts.jsonl"
SCENARIO_FILE: Final = "scenario.yaml"
REPORT_FILE: Final = "report.html"
LANES_FILE: Final = "lanes.png"
PACKAGES: Final = ("torch", "ray", "transformers", "megatron-core")
"""Whose versions a start names, where they are installed."""
GIT_TIMEOUT_S: Final = 5.0
_DIRTY: Final = "-dirty"
_GIT: Final = (
    # Neither a daemon of the repository's choosing nor a write to its index: we only look.
    *("git", "-c", "core.fsmonitor=false", "--no-optional-locks"),
    *("describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={_DIRTY}"),
)
_SNAPSHOT: Final = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)/?$")
"""Where huggingface_hub keeps a model, with its commit."""

_log: Final = logging.getLogger(__name__)


class Package(msgspec.Struct, frozen=True):
    """An installed package."""

    name: str
    version: str


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run before it starts."""

    scenario: str
    """``run.name``."""
    seed: int
    policy: str
    staleness_bound: int
    num_steps: int
    progress_tokens: int
    """``engines.progress_tokens``."""
    machine: MachineFacts
    model: str
    """Its path, or its name on the hub as ``ORG/NAME@COMMIT``."""
    backends: str
    """What generates and what trains, on which devices: ``engines 2 × torch on auto; learner 1 × torch on auto``."""
    command: str
    """The command that was typed, as a shell reads it."""
    git_commit: str
    """Of the folder where it was typed, 40 hexadecimal digits; empty where there is no repository."""
    git_is_dirty: bool
    """Whether files that git knows differ from that commit."""
    packages: tuple[Package, ...]
    """Penstock first."""
    report: bool = True
    """Write ``report.html`` at the end."""
    devices: dict[str, int] = {}
    """Devices that an actor has, by its name: GPUs, or processes where there are none. One where it is not named."""
    evaluation: tuple[EvaluationSet, ...] = ()
    """Datasets that are evaluated."""
    first_version: int = 0
    """That the weights have which the run begins with: of a run that only evaluates a checkpoint, the checkpoint's."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run, as it stands in ``starts.jsonl``."""

    at: str
    """ISO 8601 with the offset to UTC."""
    facts: RunFacts


class GitState(NamedTuple):
    """Of a folder: commit, empty without a repository; and whether tracked files differ from it."""

    commit: str = ""
    is_dirty: bool = False


def steps_to_train(scenario: Scenario) -> int:
    """0 for a run that only evaluates, or only generates."""
    return 0 if scenario.run.only in ("evaluate", "rollout") else scenario.run.num_steps


def facts_of(scenario: Scenario, *, command: str) -> RunFacts:
    """The facts of a run of this scenario that this process starts in its working folder, now."""
    run, staleness, engines, learner = scenario.run, scenario.staleness, scenario.engines, scenario.learner
    kinds = ", ".join(f"{each.count} × {each.backend} on {each.device}" for each in (engines, *engines.more))
    git = git_state(Path.cwd())
    return RunFacts(
        scenario=run.name,
        seed=run.seed,
        policy=staleness.policy,
        staleness_bound=staleness.max_staleness or 0,
        num_steps=steps_to_train(scenario),
        progress_tokens=engines.progress_tokens,
        machine=machine_facts(),
        model=model_name(scenario.model.path or "") or f"{scenario.model.make}, made with the run's seed",
        backends=f"engines {kinds}; learner {learner.num_ranks} × {learner.backend} on {learner.device}",
        command=command,
        git_commit=git.commit,
        git_is_dirty=git.is_dirty,
        packages=installed_packages(),
        report=scenario.observability.report,
        devices=devices_of(scenario),
        evaluation=sets_of(scenario),
        first_version=evaluated_version(scenario),
    )


def devices_of(scenario: Scenario) -> dict[str, int]:
    """How many devices the actors have that do the work of a model: GPUs of an engine, a teacher and a reward
    model, ranks of the learner. An engine on CPUs, or one that is not ours to place, counts as one."""
    learner, teacher = scenario.learner, scenario.teacher
    found = {LEARNER: learner.num_ranks}
    if scenario.run.only == "learner":
        return found
    for group in engine_groups(scenario.engines):
        found |= {engine_name(len(found) - 1 + index): _num_devices(group) for index in range(group.count)}
    if teacher is not None:
        found |= {teacher_name(index): _num_devices(teacher) for index in range(teacher.count)}
    if (model := scenario.reward_model) is not None:
        found |= {reward_model_name(index): _num_devices(model) for index in range(model.count)}
    return found


def _num_devices(options: EngineBlock) -> int:
    size = None if options.device == "cpu" else ENGINES.spec(options.backend).size(options)
    return (size or ONE_GPU).num_gpus


def command_line() -> str:
    """What started this process, as a shell reads it, without the passwords of addresses."""
    program = Path(sys.argv[0]).name
    words = ("penstock" if program == "__main__.py" else program, *sys.argv[1:])
    return without_credentials(shlex.join(words))


def model_name(path: str) -> str:
    """``ORG/NAME@COMMIT`` for a folder in the hub's cache; any other path as it is."""
    found = _SNAPSHOT.search(path)
    return path if found is None else f"{found[1]}/{found[2]}@{found[3]}"


def installed_packages() -> tuple[Package, ...]:
    """Penstock and, of :data:`PACKAGES`, those that are installed. Imports none of them."""
    found = [Package("Penstock", __version__)]
    for name in PACKAGES:
        try:
            found.append(Package(name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def git_state(folder: Path) -> GitState:
    """Which commit is checked out in a folder; nothing where it is in no repository, or has no git."""
    try:
        told = subprocess.run(
            _GIT,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except FileNotFoundError:
        return GitState()
    except subprocess.TimeoutExpired:
        _log.warning("%s: git did not say within %g s which commit this is", folder, GIT_TIMEOUT_S)
        return GitState()
    words = told.stdout.strip()
    return GitState(words.removesuffix(_DIRTY), words.endswith(_DIRTY))


def write_start(run_folder: Path, start: Start) -> None:
    """Add a start to those of the run."""
    lines = JsonLinesWriter(run_folder / STARTS_FILE)
    lines.append(start)
    lines.close()


def read_starts(run_folder: Path) -> list[Start]:
    """The starts of a run, oldest first; none in a folder of before they were written.

    Raises:
        UserFault: the file is damaged.
    """
    path = run_folder / STARTS_FILE
    return list(read_rows(path, Start)) if path.exists() else []
