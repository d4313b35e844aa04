"""``penstock dashboard``: serve the page until Ctrl-C, or until what it belongs to has ended."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.markup import escape

from penstock.messages.errors import UserFault
from penstock.runtime.cli.run_end import end_of
from penstock.runtime.dashboard.server import HOST, Dashboard
from penstock.runtime.dashboard.views import VIEWS
from penstock.runtime.launch.runs import read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from rich.console import Console

LINK_S: Final = 30.0
"""For the process beside a run to say where its page is."""
STOP_S: Final = 5.0
LOG_FILE: Final = "logs/dashboard.log"


def show_dashboard(
    folders: Sequence[Path],
    console: Console,
    *,
    port: int,
    until_end: bool = False,
    served: Callable[[], None] | None = None,
) -> int:
    """Serve until it is interrupted, or the first of these runs has ended.

    Args:
        folders: of the runs.
        console: is told the link.
        port: to listen at; 0 takes a free one.
        until_end: of the first run, at most.
        served: called once the link is told.

    Raises:
        UserFault: a folder holds no run, or the port cannot be had.
    """
    for folder in folders:
        read_record(folder)
    asyncio.run(_serve([folder.absolute() for folder in folders], console, port, until_end=until_end, served=served))
    return 0


async def _serve(
    folders: Sequence[Path], console: Console, port: int, *, until_end: bool, served: Callable[[], None] | None
) -> None:
    dashboard = Dashboard(folders, VIEWS)
    try:
        listener = await dashboard.open(port)
    except OSError as error:
        raise UserFault(
            f"--port {port}: cannot listen there: {error.strerror}; choose another one, or 0 for any that is free"
        ) from None
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    names = ", ".join(folder.name for folder in folders)
    link = f"http://{HOST}:{listener.port}/#token={dashboard.token}"
    console.print(f"dashboard of {escape(names)}; Ctrl-C ends it\n\n  {link}", soft_wrap=True, highlight=False)
    if served is not None:
        served()
    ends: list[asyncio.Task[object]] = [asyncio.create_task(interrupted.wait())]
    if until_end:
        ends.append(asyncio.create_task(end_of(folders[0])))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in ends:
            task.cancel()
        await listener.close()


@contextmanager
def dashboard_beside(folder: Path, console: Console) -> Generator[None]:
    """Serve the page of a run within the block, from a process of its own, which the run never waits for again. It
    ends with this process, however that ends."""
    command = [sys.executable, "-m", "penstock.runtime.cli", "dashboard", str(folder), "--port", "0", "--until-end"]
    (folder / LOG_FILE).parent.mkdir(exist_ok=True)
    with (
        (folder / LOG_FILE).open("ab") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        ) as process,
    ):
        link = _link(process)
        told = f"dashboard: {link}" if link else f"the dashboard did not start; {LOG_FILE} in the run's folder says why"
        console.print(escape(told), soft_wrap=True, highlight=False)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _link(process: subprocess.Popen[bytes]) -> str:
    """What the process prints; empty when it ends, or does not say so in time."""
    assert process.stdout is not None
    said, until_s = b"", time.monotonic() + LINK_S
    while not said.endswith(b"\n") or b"#token=" not in said:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until_s - time.monotonic()))
        more = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not more:
            return ""
        said += more
    return said.split()[-1].decode()
