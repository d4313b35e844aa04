"""A dashboard beside the test that looks at it, on a thread of its own, and the browser that is installed here."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self

from penstock.runtime.dashboard.server import HOST, Dashboard
from penstock.runtime.dashboard.views import VIEWS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
STARTED_S = 30.0


def browser_path() -> str:
    """Of ``PENSTOCK_BROWSER``, or of what is installed; empty where there is none."""
    return os.environ.get("PENSTOCK_BROWSER") or next(filter(None, map(shutil.which, NAMES)), "")


class Serving:
    """Serves these runs within the block."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.dashboard = Dashboard(folders, VIEWS)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._port: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    async def _serve(self) -> None:
        listener = await self.dashboard.open(0)
        self._port.set_result(listener.port)
        await self._closing.wait()
        await listener.close()

    def __enter__(self) -> Self:
        self._thread.start()
        self._port.result(STARTED_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(STARTED_S)

    def link(self, view: str = "") -> str:
        """As the command prints it; with a view: for a page that has the token already."""
        url = f"http://{HOST}:{self._port.result(STARTED_S)}/"
        return f"{url}#/{view}" if view else f"{url}#token={self.dashboard.token}"
