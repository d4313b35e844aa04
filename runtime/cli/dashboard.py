"""``penstock dashboard``: serve the page until Ctrl-C, or until what it belongs to has ended."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.messages.errors import UserFault
from penstock.runtime.dashboard.server import HOST, Dashboard
from penstock.runtime.dashboard.views import VIEWS
from penstock.runtime.launch.runs import read_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console


def show_dashboard(folders: Sequence[Path], console: Console, *, port: int) -> int:
    """Serve until it is interrupted.

    Raises:
        UserFault: a folder holds no run, or the port cannot be had.
    """
    for folder in folders:
        read_record(folder)
    asyncio.run(_serve([folder.absolute() for folder in folders], console, port))
    return 0


async def _serve(folders: Sequence[Path], console: Console, port: int) -> None:
    dashboard = Dashboard(folders, VIEWS)
    try:
        listener = await dashboard.open(port)
    except OSError as error:
        raise UserFault(
            f"--port {port}: cannot listen there: {error.strerror}; choose another one, or 0 for any that is free"
        ) from None
    try:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        names = ", ".join(folder.name for folder in folders)
        console.print(f"dashboard of {escape(names)}; Ctrl-C ends it\n", soft_wrap=True)
        console.print(f"  http://{HOST}:{listener.port}/#token={dashboard.token}", soft_wrap=True, highlight=False)
        await ended.wait()
    finally:
        await listener.close()
