"""``penstock samples``: what the model was asked, what it wrote, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.markup import escape
from rich.rule import Rule
from rich.text import Text

from penstock.backends.ledger.kept_samples import clipped
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted
from penstock.runtime.launch.runs import read_record
from penstock.runtime.observability.samples import chosen_samples, shown_samples
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.runtime.observability.samples import ShownSample

SHOWN_CHARACTERS: Final = 2000
"""Of a prompt and of a response, without ``--full``."""


def show_samples(
    folder: Path,
    console: Console,
    *,
    step: int | None,
    failed: bool,
    dropped: bool,
    worst: bool,
    grep: str,
    limit: int,
    full: bool,
) -> None:
    """Print them.

    Raises:
        UserFault: the folder holds no run, the run has kept no samples, or they cannot be read.
    """
    read_record(folder)
    samples = shown_samples(folder)
    if not samples:
        raise UserFault(
            f"{folder}: no samples are kept. Nothing has come to its end yet, or observability.samples is 0"
        )
    found = chosen_samples(samples, step=step, failed=failed, dropped=dropped, worst=worst, grep=grep)
    for sample in found[:limit]:
        show_sample(sample, console, SHOWN_CHARACTERS if not full else None)
    shown = min(limit, len(found))
    these = f"{shown:,} of {len(found):,} that were asked for" if found else "none is what was asked for"
    console.print(f"{these}; {counted(len(samples), 'sample')} kept", style="dim")


def show_sample(sample: ShownSample, console: Console, limit: int | None) -> None:
    """One of them; of long texts so many characters."""
    kept = sample.kept
    console.print(Rule(f"[bold]{sample.name}[/]  {escape(terminal_text(sample.fate))}", align="left", style="dim"))
    facts = [sample.rewarded, counted(kept.num_tokens, "token"), f"row {kept.row}"]
    facts += [f"{kept.outcome}: {kept.detail}" if kept.detail else kept.outcome] if kept.outcome else []
    facts += [f"from version {kept.oldest_version}"] if kept.oldest_version is not None else []
    console.print(Text(terminal_text(" · ".join(facts)), style="cyan"), soft_wrap=True)
    for image in kept.media:
        is_gone = bool(image.digest) and not Path(image.reference).is_file()
        line = f"image {terminal_text(image.reference)}{' (not there any more)' if is_gone else ''}"
        console.print(Text(line, style="dim"), soft_wrap=True)
    if kept.reason:
        console.print(Text(terminal_lines(kept.reason), style="red"), soft_wrap=True)
    for title, text in (("prompt", kept.prompt), ("label", kept.label), ("response", kept.response)):
        if text:
            console.print(Text(title, style="bold dim"))
            console.print(Text(terminal_lines(text if limit is None else clipped(text, limit))), soft_wrap=True)
    console.print()
