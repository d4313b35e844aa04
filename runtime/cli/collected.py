"""What ``penstock run --only rollout`` shows in the end: the collected groups, summed up."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.markup import escape

from penstock.messages.texts import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

COLLECTED: Final = Path("samples") / "collected.parquet"
"""In the folder of a run with ``only: rollout``."""


def show_collected(folder: Path, console: Console) -> None:
    """What was collected comes to, and how to train it.

    Raises:
        UserFault: the file that was just written cannot be read.
    """
    from rich.table import Table

    from penstock.backends.learners.training.metrics import batch_metrics, pass_at_k
    from penstock.backends.ledger.archived_groups import read_archived

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
    table.add_row("collected", f"{counted(len(groups), 'group')}, {counted(len(every), 'sample')}")
    table.add_row("reward", f"mean {statistics.fmean(every):.3f}, {_quantiles(every)}")
    spread = sum(len(set(group)) > 1 for group in rewards)
    table.add_row("", f"{counted(spread, 'group')} with different rewards, from which a group estimator learns")
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
