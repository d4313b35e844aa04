"""``penstock data check``: the rows of a scenario as a run would read them, before any run.

Invariants:

* Rows are read, rendered, tokenised and refused by the code that a run uses.
* Nothing is written; a model that the scenario has made is made in a folder that goes again.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from penstock.backends.data.dataset import Dataset
from penstock.backends.data.mixture import named_sources
from penstock.backends.data.streamed import StreamedRows
from penstock.backends.learners.spec import is_modelled
from penstock.messages.arrays import tokens_view
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.launch.hub import with_hub
from penstock.runtime.observability.texts import count_text
from penstock.runtime.run.rows import read_dataset, read_evaluation, row_notices

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from rich.console import Console

    from penstock.backends.data.rows import Rows
    from penstock.backends.evaluation.rows import EvaluationRows
    from penstock.messages.samples import Prompt
    from penstock.runtime.scenario import Scenario

MAX_SHOWN_LENGTH = 2000
"""Characters of a prompt that are shown; what is cut is said."""
MAX_REFERENCE_LENGTH = 120
NUM_BARS = 10
BAR_LENGTH = 40


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
        UserFault: the rows cannot be used; the message says which and why.
    """
    if is_modelled(scenario.learner):
        raise UserFault("the scenario is simulated: it has a number of rows and no data to check")
    if scenario.data.source is not None:
        raise UserFault("data.source: its rows come as the run asks for them, so there are none to check before")
    scenario = with_hub(scenario, console)
    with _tokenizer_folder(scenario) as folder:
        with console.status("reading the rows …") as status:
            rows = read_dataset(scenario, folder, tell=status.update)
            notices = row_notices(scenario, folder, rows)
            evaluated = read_evaluation(scenario, folder)
        console.print(_overview(scenario, rows, notices))
        if len(rows.sources) > 1:
            console.print(_sources(scenario, rows))
        console.print(histogram(rows.lengths.tolist()))
        for row in _first_rows(rows, num_shown):
            console.print(_shown(rows.prompt(row, 0)))
        if evaluated:
            console.print(_evaluated(evaluated))
        for each in evaluated:
            for row in range(min(num_shown, 1, each.num_prompts)):
                console.print(_shown(each.prompt(row), f"{each.each.name} · "))
        if isinstance(rows, StreamedRows):
            rows.close()
    return 0


def histogram(num_tokens: Sequence[int]) -> Table:
    """How many prompts are how long, in at most :data:`NUM_BARS` steps of the same width."""
    shortest, longest = min(num_tokens), max(num_tokens)
    width = max(1, -(-(longest - shortest + 1) // NUM_BARS))
    counts = Counter((length - shortest) // width for length in num_tokens)
    most = max(counts.values())
    table = Table(box=None, show_header=False, pad_edge=False)
    for step in range((longest - shortest) // width + 1):
        start, count = shortest + step * width, counts[step]
        bounds = f"{start}" if width == 1 else f"{start}\u2013{start + width - 1}"
        bar = "\u2588" * -(-BAR_LENGTH * count // most)
        table.add_row(f"{bounds} {'token' if bounds == '1' else 'tokens'}", f"[cyan]{bar}[/] {count_text(count)}")
    return table


def _overview(scenario: Scenario, rows: Rows, notices: Sequence[str]) -> Table:
    num_tokens = rows.lengths.tolist()
    lengths = Lengths.of(num_tokens)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    paths = ", ".join(source.path for source in named_sources(scenario.data))
    table.add_row("rows", f"{count_text(rows.num_rows)} of {escape(paths)}")
    for notice in notices:
        table.add_row("notice", f"[yellow]{escape(notice)}[/]")
    if isinstance(rows, Dataset):  # of a stream, labels and references are in the file
        unlabelled = sum(not label for label in rows.labels())
        if unlabelled and scenario.data.label_key is not None:
            table.add_row("without label", f"[yellow]{count_text(unlabelled)}[/] rows have no label, or an empty one")
        if retries := list(rows.num_retries()):
            bounds = f"{min(retries)} to {max(retries)}"
            table.add_row("own retries", f"{count_text(len(retries))} rows say how often, {bounds}")
        media = Counter(each.kind for each in rows.media())
        if media:
            table.add_row("references", ", ".join(f"{count_text(count)} {kind}" for kind, count in media.items()))
    spread = f"{lengths.shortest} to {lengths.longest}, median {lengths.median:g}, 95 % up to {lengths.long}"
    room = f"{count_text(scenario.model.max_context)} with the response"
    table.add_row("prompt tokens", f"{spread}; at most {room}")
    response_tokens = scenario.sampling.max_response_tokens
    cut = sum(length + response_tokens > scenario.model.max_context for length in num_tokens)
    if cut:
        table.add_row(
            "short of room",
            f"[yellow]{count_text(cut)}[/] prompts leave less than the {count_text(response_tokens)} tokens of "
            "sampling.max_response_tokens",
        )
    return table


def _evaluated(datasets: Sequence[EvaluationRows]) -> Table:
    """What is evaluated, and with which settings."""
    table = Table("evaluation", "path", "prompts", "answers", "reward", "prompt tokens", box=box.SIMPLE, pad_edge=False)
    for rows in datasets:
        lengths = Lengths.of([rows.prompt(row).num_tokens for row in range(rows.num_prompts)])
        table.add_row(
            escape(rows.each.name),
            escape(rows.each.data.path or ""),
            count_text(rows.num_prompts),
            count_text(rows.num_prompts * rows.each.samples_per_prompt),
            escape(rows.each.reward.function),
            f"{lengths.shortest} to {lengths.longest}, median {lengths.median:g}",
        )
    return table


def _sources(scenario: Scenario, rows: Rows) -> Table:
    table = Table("source", "path", "rows", "share", box=box.SIMPLE, pad_edge=False)
    total = sum(source.share or source.num_rows for source in rows.sources)
    for named, source in zip(named_sources(scenario.data), rows.sources, strict=True):
        share = f"{100 * (source.share or source.num_rows) / total:.4g} %"
        table.add_row(source.name, escape(named.path), count_text(source.num_rows), share)
    return table


def _first_rows(rows: Rows, number: int) -> Iterator[int]:
    """The first ones of each source."""
    start = 0
    for source in rows.sources:
        yield from range(start, start + min(number, source.num_rows))
        start += source.num_rows


def _shown(prompt: Prompt, where: str = "") -> Panel:
    text = prompt.text
    if len(text) > MAX_SHOWN_LENGTH:
        text = f"{text[:MAX_SHOWN_LENGTH]} … ({count_text(len(text) - MAX_SHOWN_LENGTH)} more characters)"
    parts = [escape(text)]
    if prompt.label:
        parts.append(f"[dim]label[/] {escape(prompt.label[:MAX_SHOWN_LENGTH])}")
    if prompt.metadata and prompt.metadata != b"{}":
        parts.append(f"[dim]metadata[/] {escape(prompt.metadata.decode()[:MAX_SHOWN_LENGTH])}")
    if prompt.num_retries is not None:
        parts.append(f"[dim]retries[/] {prompt.num_retries}")
    parts += [f"[dim]{each.kind}[/] {escape(each.reference[:MAX_REFERENCE_LENGTH])}" for each in prompt.media]
    title = f"{where}row {prompt.row} · {counted(len(tokens_view(prompt.tokens)), 'token')}"
    return Panel("\n".join(parts), title=title, title_align="left", border_style="dim")


@contextmanager
def _tokenizer_folder(scenario: Scenario) -> Generator[Path]:
    """The model's folder, or for a while one that is made as the run would make it."""
    if scenario.model.path is not None:
        yield Path(scenario.model.path)
        return
    assert scenario.model.make is not None, "a scenario's rules ask for one of them"
    from penstock.backends.checkpoint.make import make_model
    from penstock.backends.checkpoint.terminal import quiet_transformers

    with tempfile.TemporaryDirectory(prefix="penstock-data-") as folder:
        with quiet_transformers():
            make_model(scenario.model.make, Path(folder), scenario.run.seed)
        yield Path(folder)
