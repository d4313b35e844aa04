"""Parts by their names: how they are found, what is said where they are not, and that nobody else asks for a name."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

import pytest
from test_house import HOUSE, sources

from penstock.backends.engines.spec import ENGINES, EngineSpec
from penstock.backends.learners.objectives.spec import OBJECTIVES
from penstock.backends.learners.spec import LEARNERS, LearnerSpec
from penstock.backends.protocol import Capability
from penstock.backends.registry import PartError, Registry
from penstock.backends.weights.spec import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TORCH = "penstock.backends.engines.torch.spec:TORCH"
OWN = (
    *("backends/engines/torch/", "backends/engines/served/", "backends/engines/recorded/", "backends/engines/spec.py"),
    *("backends/learners/torch/", "backends/learners/megatron/", "backends/learners/spec.py"),
    *("backends/simulated/", "backends/weights/", "runtime/slime/"),
)
"""Where parts, their registries, and the converter of slime's flags are."""
ELSEWHERE = {
    "backends/engines/options.py": {"torch"},  # the default
    "backends/engines/teacher_options.py": {"torch"},  # the default
    "backends/engines/reward_model_options.py": {"torch"},  # the default
    "backends/learners/options.py": {"torch"},  # the default
    "backends/learners/checkpoints/record.py": {"torch", "megatron"},  # who wrote a checkpoint: a form of files
    "backends/learners/convert_model.py": {"megatron"},  # a form of files
    "runtime/cli/prepare_commands.py": {"torch", "sglang"},  # `init` writes one, `env` builds the other's environment
    "runtime/cli/doctor.py": {"torch", "disk"},  # the library; the machine's disk
    "runtime/preflight/gpu_memory.py": {"sglang"},  # the key of its options
    "runtime/launch/evaluate.py": {"recorded"},  # data.recorded
    "runtime/cli/megatron_plan.py": {"tensor"},  # parallelism
    "runtime/hosts/virtual/simulate.py": {"simulated"},  # the name of a run
    "runtime/observability/facts.py": {"torch"},  # the library
    "runtime/scenario/megatron_rules.py": {"megatron"},
    "runtime/scenario/modelled.py": {"sglang", "megatron", "simulated"},  # keys; and what a simulation is made of
    "runtime/scenario/recorded_rules.py": {"recorded"},  # data.recorded
}
"""Names of parts as whole strings, file by file. A file may leave this table; none comes into it."""


def bring(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> Registry[EngineSpec]:
    """A registry, with these entry points installed."""
    found = [EntryPoint(name=name, value=value, group="g") for name, value in points]

    def entry_points(*, group: str) -> list[EntryPoint]:
        return found if group == "g" else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    return Registry("engine", "g", EngineSpec, {"torch": TORCH})


def any_part(_: object) -> bool:
    return True


def test_a_name_that_is_built_in_is_found_without_a_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = bring(monkeypatch, ("torch", "elsewhere:SPEC"))
    monkeypatch.setattr("importlib.metadata.entry_points", None)
    assert registry.unknown("torch", (), any_part) is None
    assert registry.spec("torch") is registry.spec("torch") is ENGINES.spec("torch")


def test_what_is_installed_comes_after_and_cannot_take_a_builtin_name(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = bring(monkeypatch, ("mine", TORCH), ("torch", "elsewhere:SPEC"))
    assert registry.names == ("torch", "mine")
    assert registry.spec("mine") is ENGINES.spec("torch")
    assert registry.unknown("no", ("auto",), any_part) == "must be auto, torch or mine; found 'no'"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:SPEC", "cannot be imported: ModuleNotFoundError"),
        ("penstock.backends.registry:SPEC", "cannot be imported: AttributeError"),
        ("penstock.backends.registry:Registry", "is no EngineSpec, found a type"),
    ],
)
def test_a_part_that_cannot_be_used_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    registry = bring(monkeypatch, ("broken", value))
    with pytest.raises(PartError, match=reason):
        registry.spec("broken")
    assert reason in str(registry.unknown("no", (), any_part))
    assert registry.having(any_part) == ("torch",)


def test_two_packages_with_one_name_are_both_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PartError, match="all bring one of this name"):
        bring(monkeypatch, ("mine", TORCH), ("mine", "elsewhere:SPEC")).spec("mine")


def test_looking_at_every_part_loads_nothing_heavy() -> None:
    program = """
import sys
from penstock.backends.engines.spec import ENGINES
from penstock.backends.learners.objectives.spec import OBJECTIVES
from penstock.backends.learners.spec import LEARNERS
from penstock.backends.rewards.spec import REWARDS
from penstock.backends.weights.spec import TRANSPORTS
for registry in (ENGINES, LEARNERS, OBJECTIVES, REWARDS, TRANSPORTS):
    assert all(registry.spec(name) for name in registry.builtin)
print(sorted({"torch", "transformers", "numpy", "aiohttp", "importlib.metadata"} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize("name", LEARNERS.builtin)
def test_every_builtin_learner_is_there(name: str) -> None:
    assert isinstance(LEARNERS.spec(name), LearnerSpec)


def test_every_capability_is_asked_for_and_had_by_somebody() -> None:
    had = frozenset[Capability]().union(*(ENGINES.spec(name).capabilities for name in ENGINES.builtin))
    assert had == frozenset(Capability)


def names_in(file: Path) -> Iterator[str]:
    """Whole strings that are the name of a part."""
    names = {*ENGINES.builtin, *LEARNERS.builtin, *TRANSPORTS.builtin} - {"none"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and node.value in names:
            yield str(node.value)


def test_nobody_outside_asks_for_the_name_of_a_part() -> None:
    files = [file for folder in ("actors", "backends", "messages", "runtime") for file in sources(folder)]
    found = {str(file.relative_to(HOUSE)): set(names_in(file)) for file in files}
    assert {path: names for path, names in found.items() if names and not path.startswith(OWN)} == ELSEWHERE


def test_a_name_that_is_asked_for_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text('if group.backend == "sglang" or kind in ("disk", "other"):\n    pass\n')
    assert set(names_in(file)) == {"sglang", "disk"}


def test_a_function_of_a_file_needs_no_package_and_a_file_alone_is_no_name() -> None:
    assert OBJECTIVES.problem("mine.py:loss") is None
    assert OBJECTIVES.spec("mine.py:loss").open is not None
    assert OBJECTIVES.problem("mine.py") == (
        "'mine.py' names a file and no function in it; expected file.py:function, such as mine.py:objective"
    )
    assert "there are grpo, dapo" in (OBJECTIVES.problem("xyz") or "")


def test_nobody_outside_asks_for_the_name_of_an_objective() -> None:
    """The names of what ``sft`` and its kind stand for are looked up, and compared with nothing."""
    asked = {
        f"{file.relative_to(HOUSE)}: {ast.unparse(node)}"
        for folder in ("actors", "backends", "messages", "runtime")
        for file in sources(folder)
        if not str(file.relative_to(HOUSE)).startswith("backends/learners/objectives/")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare)
        and ast.unparse(node.left).endswith((".policy_loss", ".estimator", "objective.name"))
    }
    assert not asked
