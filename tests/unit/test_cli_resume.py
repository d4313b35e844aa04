"""What ``penstock resume`` refuses and clears away, before anything is started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.backends.learners.checkpoints.names import checkpoint_in
from penstock.backends.ledger.protocol import StaleEpochError
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.weights.segments import SHARED_FOLDER, segment_name
from penstock.messages.errors import UserFault
from penstock.messages.ledger import BatchLeased, CheckpointRecorded, StepRecorded
from penstock.messages.training import Balance, UpdateMode
from penstock.runtime.cli.app import app
from penstock.runtime.hosts.processes.job import RUN_FOLDER_VARIABLE, RUN_ID_VARIABLE, run_variables
from penstock.runtime.hosts.processes.leftovers import clear_leftovers, end_process, processes_of
from penstock.runtime.launch.again import begin_or_go_on
from penstock.runtime.launch.launch import claim_drive, has_entries, resume_command, what_is_left, with_remedy
from penstock.runtime.launch.resume import num_begun, overridden, resume
from penstock.runtime.launch.runs import close_record, hold_run, open_record, read_record, start_ticks
from penstock.runtime.observability.trackers import METRICS_FILE, StepRow
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Generator

Child = subprocess.Popen[bytes]

SCENARIO = """
run: {name: example, num_steps: 10}
data: {path: lines:100}
engines: {backend: simulated, count: 2}
learner: {backend: simulated}
"""
MEGATRON_SCENARIO = """
run: {name: example, num_steps: 10}
model: {make: m}
data: {path: lines:100}
learner: {backend: megatron, num_ranks: 4, megatron: {tensor_parallel: 2}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that was stopped after three steps, with a fourth one begun."""
    made = tmp_path / "example-1"
    made.mkdir()
    (made / "scenario.yaml").write_text(SCENARIO)
    close_record(made, open_record(made, "example"), 143)
    store = SqliteStore(made / LEDGER_FILE)
    store.claim(claim_drive(made) + 1)
    for version in range(1, 5):
        lease = BatchLeased(
            version=version, group_ids=(version,), max_staleness=0, mask_stale=False, update_mode=UpdateMode.DRAIN
        )
        receipt = StepRecorded(version=version, group_ids=(version,), num_trained_tokens=1, max_staleness=0)
        store.commit([lease] if version == 4 else [lease, receipt])
    store.close()
    return made


def refused(folder: Path, *overrides: str) -> str:
    """Why the run is not resumed."""
    with pytest.raises(UserFault) as caught:
        resume(folder, overrides, Console(file=StringIO()))
    return str(caught.value)


@contextmanager
def child(**variables: str) -> Generator[Child]:
    """A process that does nothing, with these variables in its environment."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdin is not None
        process.stdin.close()


# --- overrides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("run.seed=3", "keeps its name, its seed and its folder"),
        ("data.path=lines:5", "drawn from this dataset"),
        ("sampling.samples_per_group=4", "completed as they were begun"),
        ("staleness.max_staleness=4", "were promised this policy"),
        ("learner.learning_rate=1.0", "would come out otherwise"),
        ("filter.drop_zero_spread=false", "would not be alike"),
        ("data.shuffle=false", "The run has data.shuffle=true, given was false. Leave it out to go on."),
        ("data.sources=[{path: 'lines:5', weight: 2}]", "given was [{path: 'lines:5', weight: 2}]. Leave it out"),
        ("engines_count=3", "would not be alike. Leave it out to go on. What can change: run.num_steps, "),
        ("engines_count=3", "learner.megatron.tensor_parallel, "),
        ("engines_count=3", "learner.megatron.recompute, prompt_source.*, engines.*, runtime.*, observability.*; for "),
        ("learner.megatron.precision=bfloat16", "would come out otherwise"),
        ("learner.num_updates=2", "would come out otherwise"),
        ("run.num_step=5", "(docs/resume.md). run.num_step: no such key; did you mean 'num_steps'?"),
        ("staleness.policy=sync", "and then switch the policy of the run that goes on: penstock policy. What can"),
    ],
)
def test_what_a_run_cannot_change_is_refused_with_the_reason(folder: Path, override: str, reason: str) -> None:
    assert reason in refused(folder, override)


def test_what_a_run_can_change_is_changed(folder: Path) -> None:
    before = load_scenario(folder / "scenario.yaml")
    overrides = ("run.num_steps=20", "engines.count=3", "runtime.encrypt=false", "observability.report=false")
    patient = ("reward.timeout_s=60", "learner.step_timeout_s=9000", "weights.transport=disk", "learner.save_every=3")
    after = overridden(folder, (*overrides, *patient, "episode.max_images_gb=200"))
    assert (after.reward.timeout_s, after.learner.step_timeout_s, after.learner.save_every) == (60, 9000, 3)
    assert after.weights.transport == "disk"
    assert after.episode.max_images_gb == 200, "as the message says whose folder of images is full"
    assert (after.run.num_steps, after.engines.count) == (20, 3)
    assert (after.runtime.encrypt, after.observability.report) == (False, False)
    assert after.staleness == before.staleness


@pytest.mark.parametrize(
    ("overrides", "replays", "priority"),
    [
        (("prompt_source.replay={fraction: 0.5, below_reward: 0.3}",), 0.5, None),
        (("prompt_source.replay.fraction=0.5", "prompt_source.replay.below_reward=0.3"), 0.5, None),
        (("prompt_source.priority=mine.py:prefer",), None, "mine.py:prefer"),
        (("prompt_source.replay=null", "prompt_source.priority=null", "prompt_source.num_retries=5"), None, None),
    ],
)
def test_a_run_goes_on_with_another_choice_of_rows(
    folder: Path, overrides: tuple[str, ...], replays: float | None, priority: str | None
) -> None:
    (folder / "mine.py").write_text("def prefer(history):\n    return history.seen\n")
    after = overridden(folder, overrides).prompt_source
    assert (after.replay.fraction if after.replay else None) == replays
    assert (after.priority is None) == (priority is None)


def test_what_fits_no_scenario_is_refused_though_the_key_may_change(folder: Path) -> None:
    sources = "sources: [{path: 'lines:50', name: a, weight: 1}, {path: 'lines:60', name: b, weight: 2}]"
    (folder / "scenario.yaml").write_text(SCENARIO.replace("path: lines:100", sources))
    assert "the weights of data.sources would mean nothing" in refused(folder, "prompt_source.priority=mine.py:prefer")


def test_a_run_that_megatron_trains_goes_on_in_another_layout(folder: Path) -> None:
    (folder / "scenario.yaml").write_text(MEGATRON_SCENARIO)
    wanted = ("num_ranks=2", "megatron.tensor_parallel=1", "megatron.pipeline_parallel=2")
    after = overridden(folder, [f"learner.{text}" for text in wanted])
    assert (after.learner.num_ranks, after.learner.megatron.pipeline_parallel) == (2, 2)


def test_steps_that_are_begun_are_finished(folder: Path) -> None:
    assert num_begun(folder) == 4
    assert "run.num_steps: 3 is below the 4 steps that are trained or begun" in refused(folder, "run.num_steps=3")
    assert load_scenario(folder / "scenario.yaml").run.num_steps == 10  # as it was


def test_a_run_whose_ledger_is_gone_does_not_begin_anew_among_what_it_has_done(folder: Path) -> None:
    (folder / LEDGER_FILE).unlink()
    assert num_begun(folder) == 0  # killed before it came to anything
    step = StepRow(
        version=3, at_s=1.0, num_steps=10, metrics={}, staleness_counts=(1,), response_lengths=(1,), group_ids=(3,),
        balance=Balance(issued=1, in_system=0, ended=()),
    )  # fmt: skip
    (folder / METRICS_FILE).write_bytes(msgspec.json.encode(step) + b"\n")
    told = refused(folder)
    assert told.startswith(f"{folder / LEDGER_FILE}: the ledger is not there, and the run has trained 3 steps")
    assert "Put it back" in told
    assert not (folder / LEDGER_FILE).exists()


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run, which has a checkpoint."""
    checkpoint = folder / "checkpoints" / "version-0000003"
    checkpoint.mkdir(parents=True)
    store = SqliteStore(folder / LEDGER_FILE)
    store.claim(claim_drive(folder) + 1)
    store.commit([CheckpointRecorded(version=3, path=str(checkpoint))])
    store.close()
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_copy_without_its_checkpoint_does_not_go_on_from_that_of_the_original(folder: Path, copied: Path) -> None:
    lost, original = copied / "checkpoints" / "version-0000003", folder / "checkpoints" / "version-0000003"
    shutil.rmtree(lost)
    told = refused(copied)
    assert told.startswith(f"{lost}: the run goes on from its checkpoint of version 3, which is not there; {original} ")
    assert "Copy checkpoints/ here whole" in told
    shutil.rmtree(original)
    assert "another run's folder" not in refused(copied)


def test_a_copy_goes_on_from_its_own_checkpoint(folder: Path, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = str(folder / "checkpoints" / "version-0000003")
    assert checkpoint_in(copied / "checkpoints", recorded) == copied / "checkpoints" / "version-0000003"
    assert checkpoint_in(copied / "checkpoints", "simulated/3") == Path("simulated/3")
    shutil.rmtree(folder)

    def next_check(*_: object) -> None:
        raise UserFault("the checkpoint was found")

    monkeypatch.setattr("penstock.runtime.launch.resume.check", next_check)
    assert refused(copied) == "the checkpoint was found"


def test_a_run_whose_reward_has_options_that_nobody_asks_goes_on_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "scenario.yaml"
    file.write_text(f"{SCENARIO}reward: {{length_penalty: {{max_tokens: 10}}}}\n")

    def next_check(*_: object) -> None:
        raise UserFault("its scenario was taken")

    monkeypatch.setattr("penstock.runtime.launch.launch.check_machine", next_check)
    told = StringIO()
    with pytest.raises(UserFault, match="its scenario was taken"):
        resume(folder, ["run.num_steps=12"], Console(file=told, width=200))
    assert "warning reward.length_penalty: has no effect, as no reward asks it\n" in told.getvalue()
    assert overridden(folder, []).reward.length_penalty.max_tokens == 10
    asked = shutil.copy(file, folder.parent)  # of a job, which goes on in this folder
    again = CliRunner().invoke(app, ["run", str(asked), "--run-folder", str(folder), "--full"])
    assert "--full are for --dry-run" in str(again.exception), "the scenario was taken"
    (folder / LEDGER_FILE).unlink()
    for new in (file, asked):  # of no run that was accepted
        refusal = CliRunner().invoke(app, ["run", str(new), "--run-folder", str(folder), "--full"]).exception
        assert "has no effect, as no reward asks it; set" in str(refusal)


# --- who drives it ----------------------------------------------------------------------------------------------


def test_a_run_that_is_alive_is_refused_with_what_to_type(folder: Path) -> None:
    open_record(folder, "example")
    assert f"driven by process {os.getpid()}; to end it first: penstock stop {folder}" in refused(folder)


def test_a_run_that_another_process_is_about_to_drive_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.launch.resume.TAKE_OVER_S", 0.05)
    with hold_run(folder):
        assert "another penstock drives this run" in refused(folder)


def test_the_lock_goes_with_the_process_that_holds_it(folder: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from penstock.runtime.launch.runs import hold_run
with hold_run(Path({str(folder)!r})):
    print("held", flush=True)
    input()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserFault, match="another penstock"), hold_run(folder):
        pass
    holder.kill()
    with hold_run(folder, timeout_s=10.0):
        pass
    holder.wait(10)
    holder.stdin.close()
    holder.stdout.close()


def test_a_completed_run_says_so(folder: Path) -> None:
    close_record(folder, open_record(folder, "example"), 0)
    out = StringIO()
    assert resume(folder, (), Console(file=out, width=200)).exit_code == 0
    assert "completed; to train more, raise run.num_steps" in out.getvalue()


def test_a_drive_claims_the_ledger_above_all_epochs_of_those_before_it(folder: Path) -> None:
    left_over = SqliteStore(folder / LEDGER_FILE)
    left_over.claim(17)  # the Buffer of the first drive was replaced a few times
    assert claim_drive(folder) == 1000
    assert claim_drive(folder) == 2000  # one that was killed before it came to anything counts as well
    with pytest.raises(StaleEpochError):
        left_over.commit([])
    left_over.close()


def test_a_ledger_that_cannot_be_opened_is_refused(folder: Path) -> None:
    (folder / LEDGER_FILE).write_bytes(b"this is no database" * 1000)
    with pytest.raises(UserFault, match=LEDGER_FILE):
        claim_drive(folder)


def test_only_a_run_with_a_ledger_to_go_on_from_can_be_resumed(folder: Path, tmp_path: Path) -> None:
    assert has_entries(folder)
    claim_drive(tmp_path)
    assert not has_entries(tmp_path)


@pytest.mark.parametrize("damage", ["header", "entry"])
def test_a_ledger_that_cannot_be_read_is_not_taken_for_an_empty_one(folder: Path, damage: str) -> None:
    file = folder / LEDGER_FILE
    if damage == "header":
        file.write_bytes(b"this is no database" * 1000)
    else:
        with sqlite3.connect(file) as database:
            database.execute("UPDATE entries SET body = x'c1'")
        database.close()
    with pytest.raises(UserFault, match=re.escape(str(file))):
        has_entries(folder)
    unread, go_on = what_is_left(folder).splitlines()
    assert unread.startswith(f"{file}: ")
    assert go_on == f"when that is mended: {resume_command(folder)}"
    scenario = load_scenario(folder / "scenario.yaml")
    with pytest.raises(UserFault, match=re.escape(str(file))):  # nothing is begun in its place
        begin_or_go_on(scenario, None, Console(file=StringIO()), folder)
    assert with_remedy(UserFault("no disk"), folder, scenario).args == (f"no disk\n{unread}",)
    assert with_remedy(UserFault(unread), folder, scenario).args == (unread,)


def test_asking_whether_there_is_anything_to_go_on_from_makes_no_ledger(tmp_path: Path) -> None:
    assert not has_entries(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_to_go_on_can_be_typed_where_one_stands(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resume_command(folder) == "penstock resume example-1"
    assert resume_command(Path("/runs/with a blank")) == "penstock resume '/runs/with a blank'"


def test_a_run_that_was_ended_before_anything_was_recorded_is_said_to_be_resumed_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "early"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    claim_drive(folder)
    early, go_on = what_is_left(folder).splitlines()
    assert early == "nothing was recorded yet: resumed, it begins from the start"
    assert go_on == "to go on: penstock resume early"


def test_the_record_names_every_drive(folder: Path) -> None:
    first = read_record(folder)
    second = open_record(folder, "example", before=first, overrides=("run.num_steps=20",), temp_folder="/tmp/ps-1")
    third = open_record(folder, "example", before=second)
    record = read_record(folder)
    assert record == third
    assert [(drive.state, drive.exit_code, drive.overrides) for drive in record.earlier] == [
        ("stopped", 143, ()),
        ("running", None, ("run.num_steps=20",)),
    ]
    assert record.began_at == first.started_at


# --- what is left -----------------------------------------------------------------------------------------------


def test_what_is_left_of_this_run_is_killed_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    mine = {RUN_ID_VARIABLE: folder.name, RUN_FOLDER_VARIABLE: str(folder)}
    namesake = {RUN_ID_VARIABLE: folder.name, RUN_FOLDER_VARIABLE: str(tmp_path / "elsewhere" / folder.name)}
    with child(**mine) as left, child(**namesake) as stranger, child() as bystander:
        os.kill(left.pid, signal.SIGSTOP)
        assert set(processes_of(folder.name, folder)) == {left.pid}
        assert clear_leftovers(folder.name, folder) == (1, [])
        assert left.wait(10) == -signal.SIGKILL
        assert (stranger.poll(), bystander.poll()) == (None, None)
    assert clear_leftovers(folder.name, folder) == (0, [])


def test_what_a_process_of_the_run_has_started_belongs_to_it(folder: Path) -> None:
    mine = {RUN_ID_VARIABLE: folder.name, RUN_FOLDER_VARIABLE: str(folder)}
    code = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60'], env={}).pid, flush=True)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | mine)
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    assert set(processes_of(folder.name, folder)) == {parent.pid, grandchild}
    assert clear_leftovers(folder.name, folder)[0] == 2
    parent.wait(10)
    parent.stdout.close()
    assert start_ticks(grandchild) is None


def test_weights_that_are_left_in_shared_memory_are_removed(folder: Path) -> None:
    run_id = f"{folder.name}-{os.getpid()}"
    segments = [SHARED_FOLDER / segment_name(run_id, 1, version, 1) for version in (1, 2)]
    for segment in segments:
        segment.touch()
    clear_leftovers(run_id, folder)
    assert not any(segment.exists() for segment in segments)


def test_but_not_while_a_run_of_the_same_name_goes_on_in_another_folder(folder: Path, tmp_path: Path) -> None:
    run_id = f"{folder.name}-{os.getpid()}"
    segment = SHARED_FOLDER / segment_name(run_id, 1, 1, 1)
    segment.touch()
    with child(**run_variables(run_id, str(tmp_path / "original"))) as original:
        assert clear_leftovers(run_id, folder) == (0, [])
        assert segment.exists()
        assert original.poll() is None
    clear_leftovers(run_id, folder)
    assert not segment.exists()


def test_only_a_temporary_folder_of_ray_is_removed(folder: Path, tmp_path: Path) -> None:
    temp = Path("/tmp") / f"ps-test-{os.getpid()}"
    temp.mkdir()
    other = tmp_path / "ps-of-somebody"
    other.mkdir()
    for path in (temp, other):
        clear_leftovers(folder.name, folder, str(path))
    assert not temp.exists()
    assert other.exists()


def test_a_pid_that_means_another_process_is_not_ended() -> None:
    with child() as stranger:
        ticks = start_ticks(stranger.pid)
        assert ticks is not None
        assert end_process(stranger.pid, ticks - 1)
        assert stranger.poll() is None


def test_a_suspended_process_that_drives_a_run_is_ended(folder: Path) -> None:
    from penstock.runtime.launch.resume import _take_from  # pyright: ignore[reportPrivateUsage]

    with child() as driver:
        ticks = start_ticks(driver.pid)
        assert ticks is not None
        record = msgspec.structs.replace(open_record(folder, "example"), pid=driver.pid, start_ticks=ticks)
        with pytest.raises(UserFault, match="is running"):
            _take_from(folder, record)
        os.kill(driver.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, driver.pid, os.WSTOPPED)
        _take_from(folder, record)
        assert driver.wait(10) == -signal.SIGKILL
