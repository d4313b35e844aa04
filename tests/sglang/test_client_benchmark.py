"""The benchmark of the client runs and reports every way; what it measures is not judged here."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from penstock.benchmarks.sglang_client import PENSTOCK, WAYS, Load, Target, run

if TYPE_CHECKING:
    from running_server import RunningServer

    from penstock.backends.engines.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_a_small_run_reports_every_way(server: RunningServer, environment: SglangEnvironment) -> None:
    load = Load(num_requests=4, prompt_tokens=16, new_tokens=32, concurrency=2)
    target = Target(server.address, server.admin_api_key, server.model_folder, environment)
    report = asyncio.run(run(load, repetitions=1, target=target))
    assert set(report.tokens_per_s) == {PENSTOCK, *WAYS}
    for rates in report.tokens_per_s.values():
        assert len(rates) == 1
        assert rates[0] > 0
    assert report.ratio == report.ratios[0] > 0
