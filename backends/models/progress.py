"""Transformers draws a progress bar for every file it reads or writes; the terminal belongs to the run."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Within the block transformers draws none. Process-wide while it lasts."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
