"""A run in a folder that is known beforehand: it begins there, or goes on where it has begun. For a job that may be
started again with the same command, by a scheduler or by hand.

Invariants:

* What was asked for stands in ``asked.yaml`` beside the run's scenario (which holds what has come of it, such as models
  fetched from a hub). What is asked for again is compared with it, and every difference is an override of the
  resumption: so none is dropped, and what may not change is refused.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.launch.launch import Ended, has_entries, launch
from penstock.runtime.launch.resume import check_may_change, resume
from penstock.runtime.launch.runs import RECORD_NAME, read_record
from penstock.runtime.launch.status import state_of
from penstock.runtime.scenario import dump_scenario, load_scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.scenario import Scenario

ASKED_NAME: Final = "asked.yaml"


def begin_or_go_on(
    scenario: Scenario,
    origin: Path | None,
    console: Console,
    folder: Path,
    *,
    beside: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> Ended:
    """Run a scenario in this very folder: from the beginning where nothing of a run is recorded, or else onwards.

    Args:
        scenario: resolved.
        origin: the file it came from.
        console: the terminal.
        folder: of the run; is made where it is not there.
        beside: as for :func:`~penstock.runtime.launch.launch.launch`.

    Raises:
        UserFault: it runs already, was begun with a scenario that differs where it must not, something is missing, or
            its ledger cannot be read.
    """
    folder = folder.expanduser().absolute()
    run = msgspec.structs.replace(scenario.run, folder=str(folder.parent))
    scenario = msgspec.structs.replace(scenario, run=run)

    @contextmanager
    def noted(of_run: Path) -> Generator[None]:
        write_asked(folder / ASKED_NAME, scenario)
        with beside(of_run):
            yield

    if (folder / RECORD_NAME).is_file() and (state_of(folder, read_record(folder)) == "running" or has_entries(folder)):
        return resume(folder, changes_since(folder / ASKED_NAME, scenario), console, beside=noted)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserFault(f"{folder}: cannot be the folder of a run: {(error.strerror or str(error)).lower()}") from None
    return launch(scenario, origin, console, folder=folder, beside=noted)


def write_asked(file: Path, scenario: Scenario) -> None:
    """Keep what is asked for, whole or not at all, for :func:`changes_since`; readable for its owner only."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.touch(mode=0o600)
    scratch.write_text(dump_scenario(scenario), encoding="utf-8")
    scratch.replace(file)


def changes_since(asked: Path, scenario: Scenario) -> list[str]:
    """What of a scenario differs from the one that was asked for before, as overrides ``key=value``.

    Raises:
        UserFault: a difference cannot be made in a run that goes on, or the file is not there.
    """
    if not asked.is_file():
        raise UserFault(f"{asked}: not there, so the run was begun in another way; go on with: penstock resume RUN")
    before: object = msgspec.to_builtins(load_scenario(asked))
    changes = [f"{key}={json.dumps(value)}" for key, value in _differences(before, msgspec.to_builtins(scenario))]
    for change in changes:
        check_may_change(asked, change)
    return changes


def _differences(before: object, after: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Dotted keys that differ, with the later value; a block whose keys are others counts as one value."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        former, latter = cast("dict[str, Any]", before), cast("dict[str, Any]", after)
        for key in former:
            yield from _differences(former[key], latter[key], (*path, key))
    elif before != after:
        yield ".".join(path), after
