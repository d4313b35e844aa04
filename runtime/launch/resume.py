"""Going on with a run after the death of anything: of its launcher, its driver, the machine.

Invariants:

* At most one process drives a run. Whoever wants to holds the run's lock, and ends what is left of the last drive.
* What must not change within a run cannot be overridden: the ledger's groups, and the batches that are trained again
  after the last checkpoint, would mean something else.
* What decides which prompt comes next and who generates it may: rows that were chosen stand in the ledger, and so does
  what has come of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from rich.markup import escape

from penstock.backends.learners.checkpoints.names import CHECKPOINTS, checkpoint_in, is_of_a_run
from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.processes.process_facts import is_stopped
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.hosts.processes.leftovers import clear_leftovers, end_process
from penstock.runtime.launch.launch import Ended, check, drive, write_scenario
from penstock.runtime.launch.runs import SCENARIO_NAME, check_own, hold_run, read_record
from penstock.runtime.launch.status import state_of
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.keys import show, unknown_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from rich.console import Console

    from penstock.runtime.launch.runs import RunRecord
    from penstock.runtime.scenario import Scenario
    from penstock.runtime.scenario.source import Plain

TAKE_OVER_S: Final = 5.0
"""A process that was just killed lets go of the lock within this time."""
NUM_STEPS: Final = "run.num_steps"
FREE_KEYS: Final = (
    NUM_STEPS, "episode.max_images_gb", "reward.timeout_s", "reward.num_retries", "reward.num_workers",
    "reward.alarms.stop_after", "weights.transport", "weights.fan_out", "weights.bucket_size_bytes",
    "weights.stage_timeout_s", "weights.commit_timeout_s", "weights.drain_timeout_s", "learner.save_every",
    "learner.rank_timeout_s", "learner.step_timeout_s", "learner.num_ranks", "learner.critic_ranks",
    "learner.parallel", "learner.shard_size", "learner.tensor_parallel", "learner.backend", "learner.optimizer",
    "learner.megatron.distributed_optimizer", "learner.megatron.tensor_parallel",
    "learner.megatron.sequence_parallel", "learner.megatron.pipeline_parallel", "learner.megatron.virtual_pipeline",
    "learner.megatron.context_parallel", "learner.megatron.expert_parallel",
    "learner.megatron.expert_tensor_parallel", "learner.megatron.recompute",
)  # fmt: skip
"""Checkpoints are read by any number of ranks, divided in any way. How full the disk may get, how long something may
take and which way weights go change no sample, and a time-out that was too short is what many a run ends with."""
FREE_BLOCKS: Final = ("prompt_source", "engines", "runtime", "observability")
REASONS: Final = {
    "run": "the run keeps its name, its seed and its folder",
    "data": "its groups were drawn from this dataset, in this order",
    "model": "its checkpoints are of this model",
    "sampling": "groups that were granted are completed as they were begun",
    "staleness": "groups that were granted were promised this policy",
    "learner": "batches since the last checkpoint are trained again, and would come out otherwise",
}
SWITCHED: Final = ", and then switch the policy of the run that goes on: penstock policy"
OTHER_REASON: Final = "samples before and after would not be alike"


def resume(
    folder: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    beside: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> Ended:
    """Go on with a run.

    Args:
        folder: of the run.
        overrides: of keys that may change, ``key=value``.
        console: the terminal.
        beside: what is there while the run is driven, made with its folder, in which the changed scenario is by then.

    Raises:
        UserFault: there is no such run, it is alive, or it cannot be resumed like this.
    """
    folder = folder.expanduser().absolute()
    record = read_record(folder)
    _check_num_steps(folder, overridden(folder, overrides))  # refused before anything is ended
    _take_from(folder, record)
    with hold_run(folder, TAKE_OVER_S):
        record = read_record(folder)  # anew: who held the lock may have changed it
        before = load_scenario(folder / SCENARIO_NAME)
        scenario = overridden(folder, overrides)
        is_raised = scenario.run.num_steps > before.run.num_steps
        if record.state == "completed" and not is_raised:
            console.print(f"{escape(str(folder))}: completed; to train more, raise {NUM_STEPS}")
            return Ended(folder, 0)
        _clear(folder, record, console)
        _check_num_steps(folder, scenario)
        _check_checkpoint(folder)
        check(scenario, folder.parent, console)
        if overrides:
            write_scenario(folder, scenario)
        console.print(f"run folder: {escape(str(folder))}")
        path = folder / SCENARIO_NAME
        return drive(folder, scenario, path, console, before=record, overrides=tuple(overrides), beside=beside)


def overridden(folder: Path, overrides: Sequence[str]) -> Scenario:
    """The scenario of a run with these overrides.

    Raises:
        UserFault: one of them cannot be used, or not in a run that goes on.
    """
    for text in overrides:
        check_may_change(folder / SCENARIO_NAME, text)
    return load_scenario(folder / SCENARIO_NAME, overrides)


def check_may_change(before: Path, override: str) -> None:
    """Whether this key may change in a run that goes on; ``before`` is the file with its scenario so far.

    Raises:
        UserFault: it may not.
    """
    key, _, given = (part.strip() for part in override.partition("="))
    block = key.partition(".")[0]
    if key not in FREE_KEYS and block not in FREE_BLOCKS:
        raise UserFault(
            f"override '{override}': cannot change in a run that goes on: {REASONS.get(block, OTHER_REASON)}. "
            f"{_had(before, key, given)}Leave it out to go on{SWITCHED if block == 'staleness' else ''}. "
            f"What can change: {', '.join((*FREE_KEYS, *(f'{free}.*' for free in FREE_BLOCKS)))}; for another run: "
            f"penstock run, which may begin with this one's model (docs/resume.md){_unknown(key)}"
        )


def _unknown(key: str) -> str:
    """Of a key that no scenario has, the nearest one."""
    written: Plain = None
    for part in reversed(key.split(".")):
        written = {part: written}
    found = unknown_key(written)
    return f". {key}: {found[1]}" if found else ""


def _had(before: Path, key: str, given: str) -> str:
    """What the run has there, and what was given; nothing for a key that no scenario has."""
    value: object = msgspec.to_builtins(load_scenario(before))
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return ""
        value = cast("dict[str, object]", value)[part]
    return f"The run has {key}={show(value)}, given was {given or 'nothing'}. "


def _take_from(folder: Path, record: RunRecord) -> None:
    """Refuse a run that is driven; end the process of one that is stopped, and would hold the lock for ever."""
    check_own(folder, record)
    if state_of(folder, record) != "running":
        return
    if not is_stopped(record.pid):
        raise UserFault(
            f"{folder}: is running, driven by process {record.pid}; to end it first: penstock stop {folder}"
        )
    if not end_process(record.pid, record.start_ticks):
        raise UserFault(f"{folder}: process {record.pid} drives this run, is stopped, and cannot be killed")


def _clear(folder: Path, record: RunRecord, console: Console) -> None:
    num_killed, left = clear_leftovers(folder.name, folder, record.temp_folder)
    if left:
        raise UserFault(f"{folder}: processes of the last drive cannot be killed: {', '.join(map(str, left))}")
    if num_killed:
        console.print(f"ended {counted(num_killed, 'process')} left of the last drive")


def _check_num_steps(folder: Path, scenario: Scenario) -> None:
    begun = num_begun(folder)
    if scenario.run.num_steps < begun:
        raise UserFault(f"{NUM_STEPS}: {scenario.run.num_steps} is below the {begun} steps that are trained or begun")


def num_begun(folder: Path) -> int:
    """How many batches the ledger of a run has leased, the trained ones included.

    Raises:
        UserFault: it cannot be read, or is gone: a new one would have the run begin anew among what it has done.
    """
    path = folder / LEDGER_FILE
    if not path.exists():
        if steps := read_steps(folder):
            raise UserFault(
                f"{path}: the ledger is not there, and the run has trained "
                f"{counted(steps[-1].version, 'step')}: what they were "
                f"trained on, and so what comes next, stands nowhere else. Put it back, with {LEDGER_FILE}-wal where "
                "there was one; or begin a new run from a checkpoint: penstock run SCENARIO "
                f"model.path={folder}/checkpoints/…"
            )
        return 0
    (version,) = _row(path, "SELECT coalesce(max(version), 0) FROM batches") or (0,)
    return int(version)


def _check_checkpoint(folder: Path) -> None:
    """Whether the checkpoint that the run goes on from is in its folder, which may be a copy, or have been moved."""
    path = folder / LEDGER_FILE
    if not path.exists():
        return  # there is no receipt either
    newest = _row(path, "SELECT version, path FROM checkpoints ORDER BY version DESC LIMIT 1")
    version, recorded = newest or (0, "")
    found, own = checkpoint_in(folder / CHECKPOINTS, recorded), folder / CHECKPOINTS / Path(recorded).name
    if is_of_a_run(recorded) and found != own:
        elsewhere = f"; {found} belongs to another run's folder" if found.is_dir() else ""
        raise UserFault(
            f"{own}: the run goes on from its checkpoint of version {version}, which is not there{elsewhere}. Copy "
            f"{CHECKPOINTS}/ here whole, or start a new run from a model (model.path)"
        )


def _row(ledger: Path, query: str) -> tuple[Any, ...] | None:
    """The first row that a query of the ledger gives; None where there is none.

    Raises:
        UserFault: the ledger cannot be read.
    """
    with asked_ledger(ledger) as database:
        return cast("tuple[Any, ...] | None", database.execute(query).fetchone())
