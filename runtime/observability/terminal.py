"""A console on a terminal that is not the process's standard output any more."""

from __future__ import annotations

import logging
import os
from typing import IO, TYPE_CHECKING

from rich.console import ConsoleDimensions

from penstock.runtime.terminal import TerminalConsole

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger(__name__)


class DetachedConsole(TerminalConsole):
    """Rich asks the descriptors 0, 1 and 2 for the size of the terminal. In a process whose output goes to a log these
    lead elsewhere, and every terminal would be 80 by 25; this one asks the file that it writes to, at each drawing, so
    that the view follows a window that changes."""

    def __init__(self, file: IO[str], *, environment: Mapping[str, str] | None = None) -> None:
        """``environment``: in place of that of the process; ``COLUMNS`` and ``LINES`` in it overrule the terminal."""
        super().__init__(file=file, _environ=environment)

    @property
    def size(self) -> ConsoleDimensions:
        """Of the terminal behind the file; what Rich takes where there is none."""
        usual = super().size
        if self.is_dumb_terminal or not self.is_terminal:
            return usual
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):  # no terminal, or no descriptor at all
            return usual
        width = usual.width if "COLUMNS" in self._environ else columns
        height = usual.height if "LINES" in self._environ else lines
        return ConsoleDimensions(width or usual.width, height or usual.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self.width, self.height = new_size

    def on_broken_pipe(self) -> None:
        """Whoever read has gone, as ``head`` does and a ``tee`` that is killed. What is shown goes nowhere from then
        on, and the run goes on: a display is no reason to end it."""
        _log.warning("nobody reads what is shown any more: it is in the run's folder alone from here on")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
