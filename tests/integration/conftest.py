"""Fixtures of the integration tests."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the harness beside the tests

import host_harness
import host_launched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from host_echo import RunPlan

    from penstock.runtime.hosts.processes.ports import ProcessHost


@pytest.fixture(scope="session")
def host() -> Iterator[ProcessHost]:
    """One host for all tests of a session; Ray takes seconds to start."""
    started = host_harness.start_host()
    yield started
    started.stop()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., host_launched.Launched]]:
    """Starts ``penstock run`` with echo actors, and clears away what a failed test leaves."""
    runs: list[host_launched.Launched] = []

    def start(plan: RunPlan, scenario: str = "{}") -> host_launched.Launched:
        runs.append(host_launched.Launched(tmp_path / f"echo-{uuid.uuid4().hex[:12]}", plan, scenario))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()
        for pid in run.members():  # only of a run that this very test started, and only if the test failed
            os.kill(pid, signal.SIGKILL)
