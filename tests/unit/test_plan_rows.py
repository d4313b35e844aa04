"""Whether rows of a run are chosen: by its scenario, or because the ledger says that they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ledger_entries as make
import pytest

from penstock.actors.buffer.machine import Buffer
from penstock.actors.prompt_source.machine import PromptSource
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.commands import Record
from penstock.messages.errors import UserFault
from penstock.messages.flow import GroupRow
from penstock.messages.ledger import RowsRecorded, VersionRecorded
from penstock.messages.local import Started
from penstock.runtime.run.choosing import choosing_settings, has_recorded_rows
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import build_machine
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.ledger import LedgerEntry

SCENARIO = """
run: {name: example}
data: {path: 'lines:100'}
engines: {backend: simulated}
learner: {backend: simulated}
"""
REPLAY = "prompt_source.replay={fraction: 0.5, below_reward: 0.3}"


def plan(folder: Path, *overrides: str, has_rows: bool = False) -> RunPlan:
    file = folder / "example.yaml"
    file.write_text(SCENARIO)
    scenario = load_scenario(file, overrides)
    return RunPlan(
        scenario=scenario, run_id="x", run_folder="", model_folder="", num_rows=100, has_recorded_rows=has_rows
    )


def test_a_ledger_says_whether_rows_were_chosen(tmp_path: Path) -> None:
    assert not has_recorded_rows(tmp_path), "there is no ledger yet"
    store = SqliteStore(tmp_path / LEDGER_FILE)
    store.claim(0)
    first: list[LedgerEntry] = [make.run(), VersionRecorded(version=0), make.granted(0, 2)]
    store.commit(first)
    assert not has_recorded_rows(tmp_path)
    store.commit([RowsRecorded(rows=(GroupRow(0, 5, 0, -1),))])
    store.close()
    assert has_recorded_rows(tmp_path)


def test_a_ledger_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / LEDGER_FILE).write_bytes(b"this is no database" * 1000)
    with pytest.raises(UserFault, match=LEDGER_FILE):
        has_recorded_rows(tmp_path)


def test_rows_that_were_chosen_once_are_recorded_for_good(tmp_path: Path) -> None:
    plain, idle, chosen = plan(tmp_path), plan(tmp_path, has_rows=True), plan(tmp_path, REPLAY)
    for each, expected in ((plain, False), (idle, True), (chosen, True)):
        buffer, source = build_machine("buffer", each), build_machine("prompt_source", each)
        assert isinstance(buffer, Buffer)
        assert isinstance(source, PromptSource)
        assert (buffer.settings.chooses_rows, source.settings.chooses_rows) == (expected, expected)
        assert (choosing_settings(each) is not None) == expected
    settings = choosing_settings(idle)
    assert settings is not None
    assert (settings.replay, settings.has_priority) == (None, False), "it goes on through the dataset"


def test_batches_of_another_run_are_trained_without_drawing_any_row(tmp_path: Path) -> None:
    shape = ("sampling.samples_per_group=2", "learner.groups_per_batch=2")
    given = plan(tmp_path, REPLAY, "run.only=learner", f"run.batches_from={tmp_path}", *shape)
    records: list[LedgerEntry] = [make.run(), VersionRecorded(version=0), make.granted(0, 2), make.admitted(0)]
    buffer = build_machine("buffer", given, records=records)
    assert isinstance(buffer, Buffer)
    buffer.validate()
    told = [
        entry for command in buffer.handle(Started(epoch=1)) if isinstance(command, Record) for entry in command.entries
    ]
    assert not [entry for entry in told if isinstance(entry, RowsRecorded)]
    assert (given.chooses_rows, choosing_settings(given)) == (False, None)
