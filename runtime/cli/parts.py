"""What ``penstock run --only`` does before and after the run itself: recorded batches come in, collected groups are
summed up."""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.markup import escape

from penstock.backends.stores.protocol import LedgerStoreError
from penstock.backends.stores.tables import LEDGER_FILE
from penstock.runtime.cli.runs import is_alive, read_record
from penstock.runtime.errors import RunFolderError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from rich.console import Console

    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.scenario import Scenario

COLLECTED: Final = Path("samples") / "collected.parquet"
"""In the folder of a run with ``only: rollout``."""


@contextmanager
def recorded_batches(scenario: Scenario, console: Console) -> Generator[Iterator[Sequence[LedgerEntry]]]:
    """What the ledger of this run begins with: the batches that it trains again, or nothing.

    Raises:
        RunFolderError: there is no such run, it goes on, or its batches cannot be trained again.
    """
    if scenario.run.batches_from is None:
        yield iter(())
        return
    from penstock.backends.stores.recorded_batches import RecordedBatches, RecordedError

    folder = Path(scenario.run.batches_from)
    record = read_record(folder)
    if record.state == "running" and is_alive(record):
        raise RunFolderError(f"{folder}: this run goes on; wait for its end, or: penstock stop {folder}")
    if not (folder / LEDGER_FILE).is_file():
        raise RunFolderError(f"{folder}: the run has no {LEDGER_FILE}; it ended before anything was recorded")
    try:
        with console.status("reading what was recorded …"):
            batches = RecordedBatches(
                folder,
                num_steps=scenario.run.num_steps,
                groups_per_batch=scenario.learner.groups_per_batch,
                vocab_size=_vocab_size(scenario),
            )
    except (RecordedError, LedgerStoreError) as error:
        raise RunFolderError(str(error)) from None
    try:
        if batches.run.samples_per_group != scenario.sampling.samples_per_group:
            raise RunFolderError(
                f"sampling.samples_per_group is {scenario.sampling.samples_per_group}, and the groups of {folder} have "
                f"{batches.run.samples_per_group} samples; set it to that"
            )
        console.print(
            f"{len(batches.batches)} batches of {batches.num_groups} groups from {escape(str(folder))}", soft_wrap=True
        )
        yield batches.entries()
    finally:
        batches.close()


class _TextConfig(msgspec.Struct):
    vocab_size: int | None = None


class _Config(_TextConfig):
    """Of ``config.json``; of models with images the text part has a block of its own."""

    text_config: _TextConfig | None = None


def _vocab_size(scenario: Scenario) -> int | None:
    """Token ids that the model knows; None for one that is made here, with the same tokenizer each time."""
    if scenario.model.path is None:
        return None
    config = msgspec.json.decode((Path(scenario.model.path) / "config.json").read_bytes(), type=_Config)
    return config.text_config.vocab_size if config.text_config is not None else config.vocab_size


def show_collected(folder: Path, console: Console) -> None:
    """What was collected comes to, and how to train it.

    Raises:
        ArchiveError: the file that was just written cannot be read.
    """
    from rich.table import Table

    from penstock.backends.learners.metrics import batch_metrics, pass_at_k
    from penstock.backends.stores.archived_groups import read_archived

    file = folder / COLLECTED
    groups = list(read_archived(file))
    rewards = [[sample.reward or 0.0 for sample in group.samples] for group in groups]
    every = [reward for group in rewards for reward in group]
    if not every:
        return
    found = batch_metrics(groups)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("collected", f"{len(groups):,} groups, {len(every):,} samples")
    table.add_row("reward", f"mean {statistics.fmean(every):.3f}, {_quantiles(every)}")
    spread = sum(len(set(group)) > 1 for group in rewards)
    table.add_row("", f"{spread:,} groups with different rewards, from which a group estimator learns")
    chances = pass_at_k([[reward == 1.0 for reward in group] for group in rewards])
    if chances:
        table.add_row("pass@k", ", ".join(f"{k}: {chance:.3f}" for k, chance in chances.items()))
    lengths = (found[f"rollout/response_len/{name}"] for name in ("mean", "median", "max"))
    mean, median, largest = lengths
    truncated = f"{100 * found['rollout/truncated_ratio']:.1f} % truncated"
    table.add_row("response tokens", f"mean {mean:.1f}, median {median:.0f}, largest {largest:.0f}; {truncated}")
    table.add_row("samples", escape(str(file)))
    table.add_row("to train them", escape(f"penstock run SCENARIO --only learner --from {folder}"))
    console.print(table, soft_wrap=True)


def _quantiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return f"10 % at most {low:.3f}, median {middle:.3f}, 90 % at most {high:.3f}"
