"""The benchmark of the client runs and reports every way; what it measures is not judged here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from penstock.benchmarks._bench_serving import WAYS, WITH_LOGPROBS, Load, Target
from penstock.benchmarks.sglang_client import PENSTOCK, run

if TYPE_CHECKING:
    from running_server import RunningServer

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_a_small_run_reports_every_way(server: RunningServer, environment: SglangEnvironment) -> None:
    load = Load(num_requests=4, prompt_tokens=16, new_tokens=32, concurrency=2)
    pid = next(process.pid for process in server.handle.processes if process.name == "main")
    target = Target(server.address, server.admin_api_key, server.model_folder, environment, pid)
    report = asyncio.run(run(load, repetitions=1, target=target))
    assert set(report.runs) == {PENSTOCK, *WAYS}
    for runs in report.runs.values():
        assert len(runs) == 1
        assert min(runs[0].tokens_per_s, runs[0].server_cpu_us) > 0
    assert report.by_cpu
    assert report.ratio == min(report.ratio_to(way, by_cpu=True) for way in WITH_LOGPROBS) > 0
