"""Fixtures of the integration tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the harness beside the tests

import host_harness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.hosts.ray.cluster import RayCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """One Ray for all tests of a session; it takes seconds to start."""
    started = host_harness.start_ray()
    yield started
    assert started.stop() == []
