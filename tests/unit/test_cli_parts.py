"""What ``penstock run --only`` refuses before anything is started, and what it leaves."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

import ledger_entries as make
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.backends.ledger.archive import archive_groups
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.ledger import VersionRecorded
from penstock.runtime.cli.app import app
from penstock.runtime.cli.collected import show_collected
from penstock.runtime.launch.launch import claim_drive, has_entries
from penstock.runtime.launch.parts import recorded_batches
from penstock.runtime.launch.runs import close_record, open_record
from penstock.runtime.run.wiring import actor_names
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.messages.ledger import LedgerEntry

SCENARIO = """
run: {name: example, num_steps: 10}
data: {path: lines:100}
sampling: {samples_per_group: 2}
engines: {backend: simulated, count: 2}
learner: {backend: simulated, groups_per_batch: 2}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "example.yaml"
    file.write_text(SCENARIO)
    return file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A run of two batches, of the first of which the samples are gone."""
    folder = tmp_path / "source"
    folder.mkdir()
    close_record(folder, open_record(folder, "source"), 0)
    store = SqliteStore(folder / LEDGER_FILE)
    store.claim(0)
    store.commit(make.whole_run())
    store.close()
    return folder


def refusal(scenario: Path, source: Path, *overrides: str) -> str:
    loaded = load_scenario(scenario, ["run.only=learner", f"run.batches_from={source}", *overrides])
    with pytest.raises(UserFault) as error, recorded_batches(loaded, Console(file=StringIO())):
        pass
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.only=learner"], "run.batches_from: with run.only: learner nobody generates"),
        (["run.batches_from=runs/x"], "run.batches_from: has no effect without run.only: learner"),
        (["run.only=rollout", "run.batches_from=runs/x"], "run.batches_from: has no effect without"),
        (["run.num_groups=5"], "run.num_groups: has no effect without run.only: rollout"),
        (["run.only=scorer"], "run.only: must be"),
    ],
)
def test_keys_of_a_part_go_together(scenario: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserFault, match=said):
        load_scenario(scenario, overrides)


def test_recorded_batches_need_nobody_who_makes_any(scenario: Path) -> None:
    only = ["run.only=learner", "run.batches_from=runs/x"]
    assert actor_names(load_scenario(scenario, only)) == ("learner", "buffer")
    assert set(actor_names(load_scenario(scenario, ["run.only=rollout"]))) == set(actor_names(load_scenario(scenario)))


def test_what_is_no_run_is_said(scenario: Path, source: Path) -> None:
    assert "absent: no such folder; " in refusal(scenario, source.parent / "absent")
    (source / LEDGER_FILE).unlink()
    assert "the run has no ledger.sqlite" in refusal(scenario, source)


def test_a_run_that_goes_on_is_not_read(scenario: Path, source: Path) -> None:
    open_record(source, "source")
    assert "this run goes on; wait for its end, or: penstock stop" in refusal(scenario, source)


def test_samples_that_are_gone_are_said_to_be(scenario: Path, source: Path) -> None:
    assert "the samples of batch 1 are gone" in refusal(scenario, source)


def test_groups_of_another_size_are_refused(scenario: Path, source: Path) -> None:
    (source / LEDGER_FILE).unlink()
    store = SqliteStore(source / LEDGER_FILE)
    store.claim(0)
    store.commit([make.run(), VersionRecorded(version=0), make.granted(0, 2), make.admitted(0), make.admitted(1)])
    store.close()
    said = refusal(scenario, source, "sampling.samples_per_group=4")
    assert "sampling.samples_per_group is 4, and the groups of" in said
    assert "have 2 samples" in said


def test_a_part_is_not_simulated(scenario: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", str(scenario), "run.only=rollout"])
    assert isinstance(result.exception, UserFault)
    assert "a part of a run is not simulated" in str(result.exception)


def test_a_ledger_that_could_not_be_begun_whole_is_not_there(tmp_path: Path) -> None:
    def parts() -> Iterator[Sequence[LedgerEntry]]:
        yield [make.run()]
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        claim_drive(tmp_path, parts())
    assert list(tmp_path.iterdir()) == []
    assert claim_drive(tmp_path, [[make.run()], [VersionRecorded(version=0)]]) == 0
    assert has_entries(tmp_path)


def test_what_was_collected_is_summed_up(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / LEDGER_FILE)
    store.claim(0)
    store.commit([make.run(), VersionRecorded(version=0), make.granted(0, 2), make.admitted(0), make.admitted(1)])
    archive_groups(store, tmp_path / "samples", [1, 0])
    store.close()
    out = StringIO()
    show_collected(tmp_path, Console(file=out, width=400))
    text = out.getvalue()
    assert "2 groups, 4 samples" in text
    assert "mean 0.500" in text
    assert "0 groups with different rewards" in text
    assert "mean 3.0, median 3, largest 3; 0.0 % truncated" in text
    assert f"--only learner --from {tmp_path}" in text
