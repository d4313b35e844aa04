"""What a dashboard that is open costs the run that it shows.

How it is measured:

* The run of ``penstock bench control_plane``, whose actors have nothing to do but to pass groups on as fast as they
  can, in turn without a dashboard and with one: the server as ``penstock run --dashboard`` starts it, and a page that
  listens and asks for *Flow*, *Devices* and *Learning* in turn, once a second.
* The cost is 1 − rate with it ÷ rate without, the median over pairs of runs, one after the other. It needs a quiet
  machine; the CPU time of the server holds on a busy one too. What the browser draws is its own: the page that asks
  here throws the answers away, and its CPU time is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import psutil
from rich.console import Console

from penstock.benchmarks._progress import repeated
from penstock.benchmarks._runs import run
from penstock.benchmarks.control_plane import SCENARIO, rate_of
from penstock.runtime.launch.runs import RECORD_NAME

MOST_COST: Final = 0.02
VIEWS: Final = ("flow", "devices", "learning")
LOOK_S: Final = 0.1
EACH_S: Final = 1.0


class DashboardCostReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the pairs."""

    cost: float
    """1 − rate with a dashboard ÷ rate without."""
    all_costs: list[float]
    groups_per_s: dict[str, float]
    start_cpu_s: float
    """CPU time of the server until it said where its page is."""
    cpu_s_per_minute: float
    """CPU time of the server from then on, for each minute of the run."""
    page_cpu_s_per_minute: float
    """Likewise of what asks in the browser's place."""
    num_answers: float
    slowest_s: float
    """The answer that took longest."""
    most_cost: float = MOST_COST


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


def measure(*, repetitions: int, num_steps: int) -> DashboardCostReport:
    """Run both in turn."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    pages: list[Page] = []
    overrides = (f"run.num_steps={num_steps}", "runtime.host=local")
    with tempfile.TemporaryDirectory() as parent:
        for repetition, name in repeated(repetitions, rates):
            folder = Path(parent) / f"{repetition}-{name}"
            page = Page(folder)
            if name == "with":
                pages.append(page)
                page.start()
            finished = run(SCENARIO, overrides, folder)
            if name == "with":
                page.end()
            rates[name].append(rate_of(finished).groups_per_s)
    costs = [1 - there / without for without, there in zip(rates["without"], rates["with"], strict=True)]
    return DashboardCostReport(
        cost=statistics.median(costs),
        all_costs=costs,
        groups_per_s={name: statistics.median(found) for name, found in rates.items()},
        start_cpu_s=statistics.median(page.start_cpu_s for page in pages),
        cpu_s_per_minute=statistics.median(page.cpu_s_per_minute for page in pages),
        page_cpu_s_per_minute=statistics.median(page.page_cpu_s_per_minute for page in pages),
        num_answers=statistics.median(page.num_answers for page in pages),
        slowest_s=max(page.slowest_s for page in pages),
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON; 1 when it costs more than it may."""
    parser = argparse.ArgumentParser(prog="penstock bench dashboard_cost", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path, default=None, help="write the report here as JSON")
    options = parser.parse_args(argv)
    report = measure(repetitions=options.repetitions, num_steps=options.steps)
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in report.groups_per_s.items())
    pairs = ", ".join(f"{100 * cost:.1f}" for cost in report.all_costs)
    Console().print(
        f"a dashboard costs {100 * report.cost:.1f} % (pairs: {pairs}); "
        f"groups/s: {rates}; the server used {report.start_cpu_s:.2f} s of CPU to start and "
        f"{report.cpu_s_per_minute:.2f} s a minute, what asked it {report.page_cpu_s_per_minute:.2f} s a minute; "
        f"{report.num_answers:.0f} answers, the slowest after {report.slowest_s:.2f} s"
    )
    return 0 if report.cost <= report.most_cost else 1


if __name__ == "__main__":
    raise SystemExit(main())
