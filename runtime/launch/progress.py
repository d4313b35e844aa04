"""What a program sees of its run while it goes on: one line on a terminal, a small picture in a notebook's cell."""

from __future__ import annotations

import re
import shutil
import sys
import time
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.runtime.launch.runs import RECORD_NAME, read_record
from penstock.runtime.launch.status import RunState, state_of
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.following import StepFollower
from penstock.runtime.observability.texts import clock_text, fixed
from penstock.runtime.safe_text import terminal_text, without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PLAIN_EVERY_S: Final = 30.0
"""Between two lines where nothing can be drawn over, as in a log."""
_CLOCK: Final = re.compile(r"^ *[\d:-]+  ")
"""The time that each of a run's own lines begins with."""
CHART_WIDTH: Final = 480
CHART_HEIGHT: Final = 120


class RunPicture:
    """A run at this moment, as text and for a notebook."""

    def __init__(self, folder: Path, newest_line: Callable[[], str] = str) -> None:
        """
        Args:
            folder: of the run.
            newest_line: what the run says, before its first step.
        """
        self._folder = folder
        self._newest_line = newest_line
        self._steps = StepFollower(folder)
        self._rewards: list[float] = []
        self._version = self._num_steps = 0

    def text(self) -> str:
        """Of one line."""
        for row in self._steps.more():
            self._version, self._num_steps = row.version, row.num_steps
            if (value := row.metrics.get(REWARD)) is not None:
                self._rewards.append(value)
        if not self._version:
            if (state := self.state()) not in (None, "running"):
                return str(state)
            said = _CLOCK.sub("", self._newest_line())
            return terminal_text(without_credentials(said or "starting"))
        reward = f" · reward {fixed(self._rewards[-1], 3)}" if self._rewards else ""
        return f"step {self._version} of {self._num_steps}{reward}"

    def state(self) -> RunState | None:
        """None before it has begun."""
        return state_of(self._folder, read_record(self._folder)) if (self._folder / RECORD_NAME).is_file() else None

    def __repr__(self) -> str:
        return f"{terminal_text(self._folder.name)}: {self.text()}"

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """For a cell: a line, and the course of the reward."""
        head = f"<b>{escape(terminal_text(self._folder.name))}</b> {self.state() or 'starting'}"
        return f"<div>{head} · {escape(self.text())}<br>{_chart(self._rewards)}</div>"


def _chart(values: Sequence[float]) -> str:
    """The mean reward of each step, with its smallest and largest value."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    across, up = CHART_WIDTH / (len(values) - 1), CHART_HEIGHT / ((high - low) or 1.0)
    points = " ".join(f"{place * across:.1f},{(high - value) * up:.1f}" for place, value in enumerate(values))
    return (
        f'<svg width="{CHART_WIDTH}" height="{CHART_HEIGHT}" viewBox="-2 -4 {CHART_WIDTH + 4} {CHART_HEIGHT + 8}" '
        f'role="img" aria-label="mean reward of each step"><polyline points="{points}" fill="none" '
        f'stroke="currentColor" stroke-width="1.5"/></svg><br><small>mean reward of each step, from {low:.3g} to '
        f"{high:.3g}</small>"
    )


class Progress:
    """Shows a run as it goes on, on standard error or in the cell that is being executed. A context manager."""

    def __init__(self, picture: RunPicture, *, is_shown: bool) -> None:
        self._picture = picture
        self._is_shown = is_shown
        self._cell: Any = None
        self._shown = ""
        self._began_s = self._shown_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._is_shown and _is_notebook():
            self._cell = import_module("IPython.display").display(self._picture, display_id=True)
        return self

    def look(self) -> None:
        """Show what there is now."""
        if not self._is_shown:
            return
        if self._cell is not None:
            self._cell.update(self._picture)
            return
        text = f"{clock_text(time.monotonic() - self._began_s)}  {self._picture.text()}"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r{text[:width]:<{width}}")
        elif time.monotonic() - self._shown_s < PLAIN_EVERY_S:
            return
        else:
            sys.stderr.write(f"{text}\n")
        self._shown_s = time.monotonic()
        sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._shown_s = -PLAIN_EVERY_S  # the last word is always said
            self.look()
            if self._cell is None and sys.stderr.isatty():
                sys.stderr.write("\n")


def _is_notebook() -> bool:
    """Whether a notebook's kernel runs this; without importing what only a notebook has."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
