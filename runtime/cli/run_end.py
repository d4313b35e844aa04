"""The end of a run's process, for commands that serve something until then."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.runtime.launch.runs import process_handle, read_record

if TYPE_CHECKING:
    from pathlib import Path


async def end_of(folder: Path) -> None:
    """Wait for the end of the process that drives the run of this folder, which the kernel tells."""
    with process_handle(folder, read_record(folder)) as handle:
        if handle is None:
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
