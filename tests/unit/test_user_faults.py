"""Whose an error is: every class of ours says it by its base, and none loses anything on its way between processes."""

from __future__ import annotations

import builtins
import errno
import importlib
import inspect
import pickle
import re
import shlex
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from rich.console import Console

from penstock.backends.data.problems import DataError
from penstock.backends.learners.worker_group.failures import failure_of
from penstock.backends.learners.worker_group.words import FailureKind
from penstock.messages.arrays import ArrayLengthError
from penstock.messages.errors import DivergedError, UserFault
from penstock.messages.wire import TruncatedFrameError
from penstock.runtime.cli import status
from penstock.runtime.hosts.processes.actor_process import story_of
from penstock.runtime.hosts.processes.boot import EndKind
from penstock.runtime.launch.launch import begin_again
from penstock.runtime.launch.runs import RunRecord, close_record, open_record
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

HOUSE: Final = Path(__file__).parents[2]
PACKAGES: Final = ("messages", "actors", "backends", "runtime")
CLASS: Final = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)
GIVEN: Final = {"str": "text", "int": 7, "bool": True, "Section": "transformer", "KeyPath": ("model", "path")}
"""What a constructor is given for a parameter of this type."""


def modules_with_errors() -> Iterator[str]:
    """Those in whose source some class descends from an exception, as far as names tell."""
    classes = {
        file: [(name, set(re.findall(r"\w+", bases))) for name, bases in CLASS.findall(file.read_text())]
        for package in PACKAGES
        for file in (HOUSE / package).rglob("*.py")
    }
    known = vars(builtins).items()
    names, size = {name for name, kind in known if isinstance(kind, type) and issubclass(kind, BaseException)}, 0
    while size < len(names):
        size = len(names)
        names |= {name for found in classes.values() for name, bases in found if bases & names}
    for file, found in classes.items():
        if names & {name for name, _ in found}:
            yield ".".join(("penstock", *file.relative_to(HOUSE).with_suffix("").parts))


@pytest.fixture(scope="module")
def error_classes() -> list[type[BaseException]]:
    modules = sorted(modules_with_errors())
    for module in modules:
        importlib.import_module(module)
    found: list[type[BaseException]] = []
    front: list[type[BaseException]] = [BaseException]
    while front:
        subclasses = front.pop().__subclasses__()
        front += subclasses
        found += [kind for kind in subclasses if kind.__module__ in modules]
    assert {ArrayLengthError, DataError, DivergedError, TruncatedFrameError, UserFault} <= set(found)
    return found


def test_every_error_says_by_its_base_whose_it_is(error_classes: list[type[BaseException]]) -> None:
    """A ``ValueError`` might be anybody's, so a class of ours is the user's by ``UserFault`` or is none."""
    undecided = [
        f"{kind.__module__}.{kind.__name__}: a UserFault, if the user has to mend it; else no ValueError"
        for kind in error_classes
        if issubclass(kind, ValueError) and not issubclass(kind, UserFault)
        if kind is not ArrayLengthError  # msgspec takes ValueErrors alone for what is wrong with a message
    ]
    assert not undecided
    mixed = [kind for kind in error_classes if issubclass(kind, UserFault) and len(kind.__bases__) > 1]
    assert not mixed, "of one base alone: it is the user's, and nothing else"


def test_every_error_survives_the_way_to_another_process(error_classes: list[type[BaseException]]) -> None:
    for kind in error_classes:
        error = kind(*arguments_of(kind))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error)), kind


def arguments_of(kind: type[BaseException]) -> list[object]:
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    return [GIVEN[str(each.annotation)] for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] or ["text"]


@pytest.mark.parametrize(
    ("error", "of_rank", "of_process"),
    [
        (UserFault("x"), FailureKind.USERS, EndKind.USER_ERROR),
        (DataError("x"), FailureKind.USERS, EndKind.USER_ERROR),
        (DivergedError("x"), FailureKind.DIVERGED, EndKind.DIVERGED),
        (ArrayLengthError("x"), FailureKind.CRASH, EndKind.CRASHED),
        (ValueError("x"), FailureKind.CRASH, EndKind.CRASHED),
        (MemoryError("x"), FailureKind.CRASH, EndKind.CRASHED),
        (OSError(errno.ENOSPC, "x"), FailureKind.DISK_FULL, EndKind.DISK_FULL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_a_rank_and_an_actor_tell_whose_it_is(error: Exception, of_rank: FailureKind, of_process: EndKind) -> None:
    assert failure_of(error).kind is of_rank
    end = story_of(error)
    assert end.kind is of_process
    assert bool(end.traceback) == (of_process is EndKind.CRASHED)


def test_a_run_that_has_diverged_says_what_to_change_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_running(_: Path, record: RunRecord) -> bool:
        return record.state == "running"

    monkeypatch.setattr(status, "is_alive", is_running)
    file = tmp_path / "scenario.yaml"
    file.write_text(
        "run: {name: example, num_steps: 10}\ndata: {path: lines:100}\nmodel: {make: xs}\n"
        "engines: {backend: torch}\n"
        "learner: {backend: torch, learning_rate: 3.0e-4, warm_start: {path: lines:8, learning_rate: 0.5}}\n"
    )
    close_record(tmp_path, open_record(tmp_path, "example"), 2, has_diverged=True)
    scenario = load_scenario(file)
    early = begin_again(tmp_path, scenario)
    assert "begin a new run from the model that this one began with:\n" in early
    assert "learner.warm_start.learning_rate (it was 0.5)" in early
    assert "learner.warm_start.learning_rate=0.25" in early
    for version in (4, 8):
        checkpoint = tmp_path / "checkpoints" / f"version-{version:07d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").touch()
    out = StringIO()
    assert status.show_status(tmp_path, Console(file=out, width=400)) == 1
    text = out.getvalue()
    assert "diverged after" in text
    assert "penstock resume" not in text
    assert "warm_start" not in text
    assert "learner.learning_rate (it was 0.0003)" in text
    assert "there are version-0000004, version-0000008" in text
    words = shlex.split(text.rstrip().splitlines()[-1])
    assert words[:2] == ["penstock", "run"]
    again = load_scenario(Path(words[2]), words[3:])
    assert again.learner.learning_rate == pytest.approx(1.5e-4)
    assert (again.model.path, again.model.make) == (str(checkpoint), None)
