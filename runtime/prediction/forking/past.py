"""What a recorded run was at one of its steps: the incarnations that lived then, and what they were built from.

A fork is taken where the Buffer has handled the receipt of the step (``StepFinished``): whatever any actor handled up
to that time is the past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from msgspec.structs import replace

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.messages.base import Options
from penstock.messages.errors import UserFault
from penstock.messages.ledger import EPOCHS_PER_DRIVE
from penstock.messages.names import BUFFER, is_engine, is_reward_model
from penstock.messages.training import UpdateMode
from penstock.runtime.observability.recording import Began, LedgerRead
from penstock.runtime.run.collecting import collected_groups
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.replay import (
    checked_rules,
    merged_rows,
    recorded_files,
    recorded_steps,
    time_of_step,
    unpacked,
)
from penstock.runtime.run.wiring import actor_names, build_machine, recorded_engines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.prediction.forking.changes import Change

REPLAY_FIRST: Final = "penstock replay says where"
BlockT = TypeVar("BlockT", bound=Options)


class Past(NamedTuple):
    """A recorded run up to a step."""

    folder: Path
    step: int
    at_s: float
    """When the Buffer had heard of it, in seconds since the start of the run."""
    began: dict[str, Began]
    """How the last incarnation of each actor up to then was built."""
    files: dict[str, Path]
    """Its recording."""
    absent: dict[str, int]
    """Epochs below which an actor of the run that had not begun will be: it is about to."""
    plan: RunPlan
    """Of the Buffer's incarnation."""
    ledger: LedgerRead
    """What that Buffer had read of its ledger."""
    notes: tuple[str, ...]


def read_past(folder: Path, step: int, *, anyway: bool) -> Past:
    """Find out who lived when the Buffer heard of a step.

    Args:
        folder: of a recorded run.
        step: that was trained.
        anyway: also where other rules recorded the run.

    Raises:
        UserFault: the step is not in the recording, or the run is of a kind that cannot be gone on with.
    """
    if (at_s := time_of_step(folder, step)) is None:
        raise UserFault(f"--fork: step {step} is not in the recording of {folder}; {recorded_steps(folder)}")
    began: dict[str, Began] = {}
    files: dict[str, Path] = {}
    notes: dict[str, None] = {}
    for path in recorded_files(folder):
        row = next((row for _, _, row in merged_rows([path])), None)
        if not isinstance(row, Began) or row.at_s > at_s or is_reward_model(row.actor):
            continue
        notes.update(checked_rules(path, row, anyway=anyway))
        if row.actor not in began or began[row.actor].epoch < row.epoch:
            began[row.actor], files[row.actor] = row, path
    buffer = began[BUFFER]
    plan: RunPlan = unpacked(buffer.plan, RunPlan, f"{files[BUFFER]}: the plan of the run")
    ledger = unpacked(buffer.ledger, LedgerRead, f"{files[BUFFER]}: the ledger") if buffer.ledger else LedgerRead()
    _check(plan)
    first_epoch = buffer.epoch // EPOCHS_PER_DRIVE * EPOCHS_PER_DRIVE  # what is below died with the last drive
    here = {name: each for name, each in began.items() if each.epoch >= first_epoch}
    names = [name for name in (*actor_names(plan.scenario), *began) if not is_reward_model(name)]
    absent = {name: first_epoch - 1 for name in names if name not in here}
    return Past(folder, step, at_s, here, files, absent, plan, ledger, tuple(notes))


def _check(plan: RunPlan) -> None:
    """That models can take the place of every backend of the run.

    Raises:
        UserFault: of one they cannot, with the reason.
    """
    scenario = plan.scenario
    cases = (
        (
            scenario.run.only is not None or collected_groups(scenario) is not None,
            f"run.only: {scenario.run.only} does not train what it generates, and only such runs are predicted",
        ),
        (
            scenario.data.source is not None,
            "data.source: what makes the rows has a state of its own, which is not recorded",
        ),
        (bool(recorded_engines(scenario)), "data: engines that answer from rows are not modelled"),
    )
    for is_so, why in cases:
        if is_so:
            raise UserFault(f"--fork: this run cannot be gone on with by simulation: {why}")


def check_update_modes(past: Past, change: Change) -> None:
    """That modelled engines can take weights as the policy says, with and without the change.

    Raises:
        UserFault: they cannot: the engines of the run retract what runs, which is not modelled.
    """
    if all(each.staleness.update_mode is not UpdateMode.INTERRUPT for each in (change.before, change.after)):
        return
    for name, began in past.began.items():
        machine = build_machine(name, past.plan, epoch=began.epoch) if is_engine(name) else None
        if isinstance(machine, EngineWorker) and machine.settings.retracts:
            raise UserFault(
                "--fork: staleness.update_mode: interrupt on engines that retract what runs is not modelled; "
                "in_flight is nearest to it"
            )


def changed_plan(plan: RunPlan, change: Change) -> RunPlan:
    """The plan of a run for who takes an actor's place, with what is asked for. All else is as it was then: a later
    drive may have been given other keys. The number of engines is no part of it where the Buffer is asked for them."""
    own = plan.scenario
    run, staleness, engines = (
        _with_changes(getattr(own, block), getattr(change.before, block), getattr(change.after, block), keys)
        for block, keys in (
            ("run", ("num_steps",)),
            ("staleness", ("target_outstanding", "max_concurrent")),
            ("engines", ("slots", "progress_tokens", *(() if change.is_elastic else ("count",)))),
        )
    )
    is_same = change.before.prompt_source == change.after.prompt_source
    prompts = own.prompt_source if is_same else change.after.prompt_source
    scenario = replace(own, run=run, staleness=staleness, engines=engines, prompt_source=prompts)
    return replace(plan, scenario=scenario)


def _with_changes(own: BlockT, before: BlockT, after: BlockT, keys: Sequence[str]) -> BlockT:
    changed = {key: getattr(after, key) for key in keys if getattr(before, key) != getattr(after, key)}
    return replace(own, **changed)
