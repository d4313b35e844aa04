"""Kept samples with what became of them: ``penstock samples``, the report and the terminal show the same.

What a sample says is in ``samples.sqlite``; what became of it is in the ledger alone, and is looked up there.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.ledger.kept_samples import KeptSample, clipped, read_kept
from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.messages.reasons import ReasonCount
from penstock.messages.samples import TerminalState, group_name
from penstock.messages.texts import counted
from penstock.runtime.observability.texts import number_text
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

IN_THE_SYSTEM: Final = "in the system"
DROPPED: Final = (TerminalState.FILTERED.value, TerminalState.STALE.value, TerminalState.CANCELLED.value)
LINE_CHARACTERS: Final = 300
"""Of a prompt and of a response, where a sample takes a line or two."""
MAX_REPORTED: Final = 12
_FATE: Final = (
    "SELECT coalesce(state, ''), coalesce(cause, ''), version FROM samples WHERE group_id = ? AND sample_index = ?"
)


class ShownSample(NamedTuple):
    """A kept sample and its fate."""

    kept: KeptSample
    state: str
    """Terminal state, or ``in the system``."""
    cause: str
    version: int | None
    """Policy version that training on it made."""

    @property
    def name(self) -> str:
        return f"{group_name(self.kept.group_id)}/{self.kept.index}"

    @property
    def has_failed(self) -> bool:
        return self.state == TerminalState.FAILED or bool(self.kept.reason)

    @property
    def fate(self) -> str:
        """In words: ``trained at step 4``, ``filtered: zero_spread``."""
        return fate_text(self.state, self.cause, self.version)

    @property
    def rewarded(self) -> str:
        """In words: ``reward 0.25 (format 1, answer 0)``."""
        if self.kept.reward is None:
            return "no reward"
        parts = ", ".join(f"{name} {number_text(value)}" for name, value in self.kept.components.items())
        return f"reward {number_text(self.kept.reward)}" + (f" ({parts})" if parts else "")


def shown_samples(run_folder: Path, limit: int | None = None) -> list[ShownSample]:
    """Every sample that the run has kept, or the newest so many; newest first.

    Raises:
        UserFault: its files cannot be read.
    """
    try:
        kept = read_kept(run_folder, limit)
        return list(_with_fates(run_folder / LEDGER_FILE, kept))
    except (sqlite3.Error, *UNREADABLE) as error:
        raise UserFault(f"{run_folder}: its samples cannot be read: {error}") from None


def fate_text(state: str, cause: str, version: int | None) -> str:
    """``trained at step 4``, ``filtered: zero_spread``."""
    if version is not None:
        return f"{state} at step {version}"
    return f"{state}: {cause}" if cause else state


def _with_fates(ledger: Path, kept: Sequence[KeptSample]) -> Iterable[ShownSample]:
    if not ledger.is_file():
        return [_without_end(one) for one in kept]
    with asked_ledger(ledger) as database:
        fates = [database.execute(_FATE, (one.group_id, one.index)).fetchone() for one in kept]
    return [
        _without_end(one) if fate is None or not fate[0] else ShownSample(one, fate[0], fate[1], fate[2])
        for one, fate in zip(kept, fates, strict=True)
    ]


def _without_end(kept: KeptSample) -> ShownSample:
    """Of a sample whose group has not ended, or not by the time when the ledger was last written."""
    has_failed = bool(kept.reason) and kept.reward is None
    return ShownSample(kept, TerminalState.FAILED.value if has_failed else IN_THE_SYSTEM, kept.cause, None)


def chosen_samples(
    samples: Iterable[ShownSample],
    *,
    step: int | None = None,
    failed: bool = False,
    dropped: bool = False,
    worst: bool = False,
    grep: str = "",
    limit: int | None = None,
) -> list[ShownSample]:
    """Those that pass every condition; ``failed`` and ``dropped`` together: those that pass either."""
    needle = grep.casefold()

    def passes(sample: ShownSample) -> bool:
        if step is not None and sample.version != step:
            return False
        if (failed or dropped) and not (failed and sample.has_failed) and not (dropped and sample.state in DROPPED):
            return False
        kept = sample.kept
        return any(needle in text.casefold() for text in (kept.prompt, kept.response, kept.label, kept.reason))

    found = [sample for sample in samples if passes(sample)]
    if worst:
        found = sorted((s for s in found if s.kept.reward is not None), key=lambda s: s.kept.reward or 0.0)
    return found[:limit]


def reported_samples(run_folder: Path) -> list[ShownSample]:
    """A few of each kind, for the report: some of the newest, of the worst and of those that failed or were dropped."""
    samples = shown_samples(run_folder)
    kinds: tuple[Callable[[], list[ShownSample]], ...] = (
        lambda: chosen_samples([s for s in samples if s.version is not None], limit=4),
        lambda: chosen_samples(samples, failed=True, limit=3),
        lambda: chosen_samples(samples, dropped=True, limit=3),
        lambda: chosen_samples(samples, worst=True, limit=2),
        lambda: chosen_samples(samples, limit=2),
    )
    found = {(s.kept.group_id, s.kept.index): s for kind in kinds for s in kind()}
    return list(found.values())[:MAX_REPORTED]


def reason_counts(folder: Path) -> list[ReasonCount]:
    """Why samples of this run failed, most frequent first, as far as its ledger knows by now.

    Raises:
        UserFault: the ledger cannot be read.
    """
    file = folder / LEDGER_FILE
    if not file.is_file():
        return []
    with asked_ledger(file) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'reason_counts'").fetchone():
            return []  # an older penstock wrote it
        rows = database.execute("SELECT cause, kind, example, num_samples FROM reason_counts").fetchall()
    return [ReasonCount(cause=row[0], kind=row[1], example=row[2], num_samples=row[3]) for row in rows]


def sample_lines(kept: KeptSample) -> str:
    """A sample for the terminal while the run goes on, in two lines."""
    name = f"{group_name(kept.group_id)}/{kept.index}"
    reward = "no reward" if kept.reward is None else f"reward {number_text(kept.reward)}"
    prompt = terminal_text(clipped(kept.prompt, LINE_CHARACTERS).replace("\n", " "))
    answer = terminal_text((kept.response or kept.reason)[:LINE_CHARACTERS].replace("\n", " "))
    return f"sample {name}, {reward}, {counted(kept.num_tokens, 'token')}\n         > {prompt}\n         < {answer}"
