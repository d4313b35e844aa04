"""What a run of the learner alone begins with: the batches that another run has recorded."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.launch.runs import read_record
from penstock.runtime.launch.status import state_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from rich.console import Console

    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.scenario import Scenario


@contextmanager
def recorded_batches(scenario: Scenario, console: Console) -> Generator[Iterator[Sequence[LedgerEntry]]]:
    """What the ledger of this run begins with: the batches that it trains again, or nothing.

    Raises:
        UserFault: there is no such run, it goes on, or its batches cannot be trained again.
    """
    if scenario.run.batches_from is None:
        yield iter(())
        return
    from penstock.backends.ledger.recorded_batches import RecordedBatches

    folder = Path(scenario.run.batches_from)
    record = read_record(folder)
    if state_of(folder, record) == "running":
        raise UserFault(f"{folder}: this run goes on; wait for its end, or: penstock stop {folder}")
    if not (folder / LEDGER_FILE).is_file():
        raise UserFault(f"{folder}: the run has no {LEDGER_FILE}; it ended before anything was recorded")
    try:
        with console.status("reading what was recorded …"):
            batches = RecordedBatches(
                folder,
                num_steps=scenario.run.num_steps,
                groups_per_batch=scenario.learner.groups_per_batch,
                vocab_size=_vocab_size(scenario),
            )
    except LedgerStoreError as error:
        raise UserFault(str(error)) from None
    try:
        if batches.run.samples_per_group != scenario.sampling.samples_per_group:
            raise UserFault(
                f"sampling.samples_per_group is {scenario.sampling.samples_per_group}, and the groups of {folder} have "
                f"{batches.run.samples_per_group} samples; set it to that"
            )
        console.print(
            f"{counted(len(batches.batches), 'batch')} of {counted(batches.num_groups, 'group')} "
            f"from {escape(str(folder))}",
            soft_wrap=True,
        )
        yield batches.entries()
    finally:
        batches.close()


def _vocab_size(scenario: Scenario) -> int | None:
    """Token ids that the model knows; None for one that is made here, with the same tokenizer each time."""
    if scenario.model.path is None:
        return None
    return read_config(Path(scenario.model.path), HfConfig).vocab_size or None
