"""``penstock data check``: the rows of a scenario as a run would read them, before any run.

Invariants:

* Rows are read, rendered, tokenised and refused by the code that a run uses.
* Nothing is written; a model that the scenario has made is made in a folder that goes again.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from penstock.backends.data.problems import DataError
from penstock.messages.arrays import tokens_view
from penstock.runtime.errors import UserError
from penstock.runtime.observability.texts import count_text
from penstock.runtime.rows import read_dataset

if TYPE_CHECKING:
    from collections.abc import Generator

    from rich.console import Console

    from penstock.backends.data.dataset import Dataset
    from penstock.messages.samples import Prompt
    from penstock.runtime.scenario import Scenario

MAX_SHOWN_LENGTH = 2000
"""Characters of a prompt that are shown; what is cut is said."""


class Lengths(NamedTuple):
    """Of the prompts of a dataset, in tokens."""

    shortest: int
    median: float
    long: int
    """95 of 100 prompts are not longer."""
    longest: int

    @classmethod
    def of(cls, num_tokens: list[int]) -> Lengths:
        """Of prompts of these lengths, at least one."""
        ordered = sorted(num_tokens)
        long = ordered[min(len(ordered) - 1, 95 * len(ordered) // 100)]
        return cls(ordered[0], statistics.median(ordered), long, ordered[-1])


def check_data(scenario: Scenario, console: Console, *, num_shown: int) -> int:
    """Read all rows, and show what came of them and the first prompts; the exit code.

    Raises:
        UserError: the rows cannot be used; the message says which and why.
    """
    if scenario.learner.backend == "simulated":
        raise UserError("the scenario is simulated: it has a number of rows and no data to check")
    with _tokenizer_folder(scenario) as folder, console.status("reading the rows …"):
        try:
            dataset = read_dataset(scenario, folder)
        except DataError as error:
            raise UserError(str(error)) from None
    prompts = [dataset.prompt(row, 0) for row in range(dataset.num_rows)]
    console.print(_overview(scenario, dataset, prompts))
    for prompt in prompts[:num_shown]:
        console.print(_shown(prompt))
    return 0


def num_duplicates(prompts: list[Prompt]) -> int:
    """Prompts that came before with the same label."""
    return len(prompts) - len({(prompt.tokens, prompt.label) for prompt in prompts})


def _overview(scenario: Scenario, dataset: Dataset, prompts: list[Prompt]) -> Table:
    lengths = Lengths.of([len(tokens_view(prompt.tokens)) for prompt in prompts])
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_row("rows", f"{count_text(dataset.num_rows)} of {escape(scenario.data.path)}")
    for reason, count in sorted(dataset.skipped.items()):
        table.add_row("skipped", f"[yellow]{count_text(count)}[/]: {escape(reason)}")
    repeated = num_duplicates(prompts)
    if repeated:
        table.add_row(
            "duplicates", f"[yellow]{count_text(repeated)}[/] rows are the same as an earlier one, label and all"
        )
    unlabelled = sum(not prompt.label for prompt in prompts)
    if unlabelled and scenario.data.label_key is not None:
        table.add_row(
            "without label", f"[yellow]{count_text(unlabelled)}[/] rows have an empty {scenario.data.label_key!r}"
        )
    spread = f"{lengths.shortest} to {lengths.longest}, median {lengths.median:g}, 95 % up to {lengths.long}"
    room = f"{count_text(scenario.model.max_context)} with the response"
    table.add_row("prompt tokens", f"{spread}; at most {room}")
    response_tokens = scenario.sampling.max_response_tokens
    cut = sum(len(tokens_view(prompt.tokens)) + response_tokens > scenario.model.max_context for prompt in prompts)
    if cut:
        table.add_row(
            "short of room",
            f"[yellow]{count_text(cut)}[/] prompts leave less than the {count_text(response_tokens)} tokens of "
            "sampling.max_response_tokens",
        )
    return table


def _shown(prompt: Prompt) -> Panel:
    text = prompt.text
    if len(text) > MAX_SHOWN_LENGTH:
        text = f"{text[:MAX_SHOWN_LENGTH]} … ({count_text(len(text) - MAX_SHOWN_LENGTH)} more characters)"
    parts = [escape(text)]
    if prompt.label:
        parts.append(f"[dim]label[/] {escape(prompt.label[:MAX_SHOWN_LENGTH])}")
    if prompt.metadata and prompt.metadata != b"{}":
        parts.append(f"[dim]metadata[/] {escape(prompt.metadata.decode()[:MAX_SHOWN_LENGTH])}")
    title = f"row {prompt.row} · {len(tokens_view(prompt.tokens))} tokens"
    return Panel("\n".join(parts), title=title, title_align="left", border_style="dim")


@contextmanager
def _tokenizer_folder(scenario: Scenario) -> Generator[Path]:
    """The model's folder, or for a while one that is made as the run would make it."""
    if scenario.model.path is not None:
        yield Path(scenario.model.path)
        return
    assert scenario.model.make is not None, "a scenario's rules ask for one of them"
    from penstock.backends.models.make import make_model
    from penstock.backends.models.terminal import quiet_transformers

    with tempfile.TemporaryDirectory(prefix="penstock-data-") as folder:
        with quiet_transformers():
            make_model(scenario.model.make, Path(folder), scenario.run.seed)
        yield Path(folder)
