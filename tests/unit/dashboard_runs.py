"""Run folders for the tests of the dashboard, as the driver's own book writes them, and a server that shows them."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from test_observability_report import FACTS, balance, run, spans, step

from penstock.messages.base import Metric
from penstock.messages.training import ActorReported, RunFinished
from penstock.messages.waits import OverdueWait, Wait, WaitsReported
from penstock.runtime.dashboard.server import Dashboard
from penstock.runtime.dashboard.views import VIEWS
from penstock.runtime.launch.runs import RECORD_NAME, RunRecord
from penstock.runtime.observability.recorder import RunRecorder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from penstock.runtime.dashboard.routes import View

SCENARIO = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
MARKUP = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
FINISHED = RunFinished(
    completed=True, story=f"25 batches trained {MARKUP}", version=25, max_staleness=2, balance=balance(25)
)


def write_record(folder: Path, *, state: str = "completed") -> None:
    """``run.json``; a run that is said to be running was killed, or is a copy from another machine."""
    record = RunRecord(name="made", pid=1, start_ticks=1, boot_id="of another machine", started_at=time.time())
    if state != "running":
        record = msgspec.structs.replace(record, state=state, exit_code=0, ended_at=time.time())
    (folder / RECORD_NAME).write_bytes(msgspec.json.encode(record))


def finished_run(folder: Path) -> Path:
    """25 steps; an engine was lost once."""
    run(folder, 25, FINISHED)
    shutil.copy(SCENARIO, folder / "scenario.yaml")
    write_record(folder)
    return folder


def crashed_run(folder: Path) -> Path:
    """5 steps; then the driver was killed, while a line was written."""
    run(folder, 5, None)
    shutil.copy(SCENARIO, folder / "scenario.yaml")
    write_record(folder, state="running")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"version":6,"at_')
    return folder


def recorder_of(folder: Path) -> RunRecorder:
    """Of a run that begins now; its record says that it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCENARIO, folder / "scenario.yaml")
    recorder = RunRecorder(folder, FACTS, started_at=datetime.now(UTC).astimezone())
    recorder.training.everyone_is_up(0.0)
    write_record(folder, state="running")
    return recorder


def report_actors(recorder: RunRecorder, num_engines: int, version: int) -> None:
    """Every actor says what it does; the engines wait for the Scorer for too long."""
    at_s = float(version)
    figures = (
        Metric("engine/generated_tokens", 100.0 * version),
        Metric("engine/running", 3.0),
        Metric("engine/queued", 9.0),
    )
    for name in ("prompt_source", "scorer", "filter", "buffer", "weight_publisher", f"teacher/{MARKUP}"):
        recorder.actor(ActorReported(name=name, epoch=1, state=f"busy {MARKUP}"), at_s)
    recorder.actor(ActorReported(name="learner", epoch=1, state="t", activities=spans(version, at_s - 1)), at_s)
    for number in range(num_engines):
        report = ActorReported(
            name=f"engine/{number}", epoch=1, state="g", activities=spans(version, at_s - 1), metrics=figures
        )
        recorder.actor(report, at_s)
    wait = OverdueWait(Wait("reward of", f"12/3 {MARKUP}", "scorer"), 0.0)
    recorder.waits(WaitsReported(name="engine/0", epoch=1, at_s=at_s, waits=(wait,)))


def report_step(recorder: RunRecorder, version: int) -> None:
    """A step is recorded."""
    recorder.step(step(version), float(version))


class Asker:
    """A client of the dashboard that has its token."""

    def __init__(self, session: aiohttp.ClientSession, port: int, token: str) -> None:
        self.session, self.port, self.token = session, port, token
        self.url = f"http://127.0.0.1:{port}"

    async def get(self, path: str, *, status: int = 200, headers: dict[str, str] | None = None) -> Any:  # noqa: ANN401
        """The JSON of an answer, which has to have this status."""
        given = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        async with self.session.get(f"{self.url}{path}", headers=given) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()


@asynccontextmanager
async def served(folders: Sequence[Path], views: Sequence[View] = VIEWS) -> AsyncGenerator[Asker]:
    """Serve these runs within the block."""
    dashboard = Dashboard(folders, views)
    listener = await dashboard.open(0)
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            yield Asker(session, listener.port, dashboard.token)
    finally:
        await listener.close()
