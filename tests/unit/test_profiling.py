"""Which snapshots of memory there are beside traces, and which files of a run are profiles."""

from __future__ import annotations

import gzip
import json
import logging
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.backends.engines.options import EngineProfileOptions
from penstock.backends.engines.served.sglang.profile import activities_of
from penstock.backends.engines.torch.profile import EngineProfile
from penstock.backends.profiling import NO_SNAPSHOT, ThreadProfiler, profile_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_snapshot_of_memory_is_of_cuda_alone(memory: bool, is_cuda: bool, tmp_path: Path) -> None:
    profiler = ThreadProfiler(tmp_path, stacks=False, memory=memory, is_cuda=is_cuda)
    assert profiler.writes_snapshots == (memory and is_cuda)
    wanted = ("CPU", "GPU", "MEM") if memory and is_cuda else ("CPU", "GPU") if is_cuda else ("CPU",)
    assert activities_of("cuda" if is_cuda else "cpu", memory=memory) == wanted


@pytest.mark.parametrize("memory", [True, False])
def test_an_engine_on_a_cpu_has_allocations_in_its_traces_and_says_once_that_there_is_no_snapshot(
    memory: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = EngineProfileOptions(first_step=1, last_step=2, max_passes=2, memory=memory)
    profile = EngineProfile(options, tmp_path, "engine/0", is_cuda=False)
    for version in (0, 1):
        profile.serve(version)
        for _ in range(2):
            with profile.step():
                torch.ones(8, 8).mm(torch.ones(8, 8))
    files = profile_files(tmp_path)
    assert [path.name for path in files] == [f"engine-0-step-000000{step}.json.gz" for step in (1, 2)]
    for path in files:
        events = json.loads(gzip.decompress((tmp_path / path).read_bytes()))["traceEvents"]
        assert ("[memory]" in {event.get("name") for event in events}) == memory
    assert caplog.text.count(NO_SNAPSHOT) == memory


def test_snapshots_are_listed_as_other_profiles_once_they_are_whole(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    (folder / "engine-0-step-0000002").mkdir(parents=True)
    whole = ["engine-0-step-0000002/1-TP-0-memory.pickle", "learner-step-0000002-rank-0.json.gz",
             "learner-step-0000002-rank-0.pickle"]  # fmt: skip
    for name in (*whole, ".learner-step-0000003-rank-0.pickle", "notes.txt"):
        (folder / name).touch()
    assert [path.as_posix() for path in profile_files(tmp_path)] == [f"profiles/{name}" for name in whole]
