"""What a dashboard that is open costs the run that it shows.

How it is measured:

* The run of ``penstock bench control_plane``, whose actors have nothing to do but to pass groups on as fast as they
  can, in turn without a dashboard and with one: the server as ``penstock run --dashboard`` starts it, and a page that
  listens and asks for *Flow*, *Devices* and *Learning* in turn, once a second.
* The cost is 1 − rate with it ÷ rate without, over pairs of runs, one after the other. It needs a quiet
  machine; the CPU time of the server holds on a busy one too. What the browser draws is its own: the page that asks
  here throws the answers away, and its CPU time is told apart.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
import psutil

from penstock.benchmarks._harness import Benchmark, Measured, claim, figures, in_folders, pairs, plain_figure
from penstock.benchmarks._runs import run
from penstock.benchmarks.control_plane import SCENARIO, rate_of
from penstock.runtime.launch.runs import RECORD_NAME

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

QUICK: Final = ("--repetitions", "1", "--steps", "100")
QUICK_S: Final = 30
MOST_COST: Final = 0.02
VIEWS: Final = ("flow", "devices", "learning")
LOOK_S: Final = 0.1
EACH_S: Final = 1.0


class Page(threading.Thread):
    """The server of a run that is about to begin, and a page that looks at it, until ``end``."""

    def __init__(self, parent: Path) -> None:
        super().__init__(daemon=True)
        self.num_answers = 0
        self.slowest_s = self.start_cpu_s = self.cpu_s_per_minute = self.page_cpu_s_per_minute = 0.0
        self._parent = parent
        self._over = threading.Event()

    def run(self) -> None:
        """Start the server when the run has its record, and look."""
        records: list[Path] = []
        while not records:
            if self._over.wait(LOOK_S):
                return
            records = list(self._parent.glob(f"*/{RECORD_NAME}"))
        command = [sys.executable, "-m", "penstock.runtime.cli", "dashboard", str(records[0].parent), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
            assert server.stdout is not None
            url, _, token = next(line for line in server.stdout if "#token=" in line).strip().partition("#token=")
            process, began_s = psutil.Process(server.pid), time.monotonic()
            self.start_cpu_s, page_s = sum(process.cpu_times()[:2]), time.thread_time()
            asyncio.run(self._look(url, token))
            minutes = (time.monotonic() - began_s) / 60
            self.cpu_s_per_minute = (sum(process.cpu_times()[:2]) - self.start_cpu_s) / minutes
            self.page_cpu_s_per_minute = (time.thread_time() - page_s) / minutes
            server.terminate()

    async def _look(self, url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}api/changes") as changes:
            for view in itertools.cycle(VIEWS):
                asked_s = time.monotonic()
                async with session.get(f"{url}api/{view}", raise_for_status=True) as answer:
                    await answer.read()
                self.num_answers += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - asked_s)
                try:
                    async with asyncio.timeout(EACH_S):
                        while not self._over.is_set():
                            await changes.content.readline()
                except TimeoutError:
                    pass
                if self._over.is_set():
                    return

    def end(self) -> None:
        """The run is over."""
        self._over.set()
        self.join(60)


class Watched(NamedTuple):
    """One run, and the page that looked at it."""

    groups_per_s: float
    page: Page | None


def measure(given: argparse.Namespace) -> Measured:
    """Both in turn."""
    overrides = (f"run.num_steps={given.steps}", "runtime.host=local")

    def watched(folder: Path, *, is_open: bool) -> Watched:
        page = Page(folder) if is_open else None
        if page is not None:
            page.start()
        finished = run(SCENARIO, overrides, folder)
        if page is not None:
            page.end()
        return Watched(rate_of(finished).groups_per_s, page)

    arms = {"without": partial(watched, is_open=False), "with": partial(watched, is_open=True)}
    turns = in_folders(arms, given.repetitions)
    rates = figures(turns, "groups/s", lambda each: each.groups_per_s)
    pages = [turn.value.page for turn in turns["with"] if turn.value.page is not None]
    of_pages = [
        plain_figure("the server until it said where its page is", "CPU s", [page.start_cpu_s for page in pages]),
        plain_figure("the server from then on", "CPU s a minute", [page.cpu_s_per_minute for page in pages]),
        plain_figure("what asks in the browser's place", "CPU s a minute", [p.page_cpu_s_per_minute for p in pages]),
        plain_figure("answers", "a run", [page.num_answers for page in pages]),
        plain_figure("the answer that took longest", "s", [page.slowest_s for page in pages]),
    ]
    losses = [1 - ratio for ratio in pairs(rates[1], rates[0])]
    claims = [claim("share of groups/s that a dashboard costs", losses, at_most=MOST_COST)]
    return Measured(rates + of_pages, claims, ("what the browser draws",))


def main(argv: list[str] | None = None) -> int:
    """Measure and judge; 1 when it costs more than it may."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--steps", type=int, default=600)
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
