"""Transformers draws progress bars and prints tables while it reads and writes; the terminal belongs to the run."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Within the block transformers prints errors only and draws nothing. Process-wide while it lasts."""
    drew_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if drew_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
