"""The stop-watch of ``penstock bench tracing_cost --runs``: it counts in processes that know nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from penstock.benchmarks._stop_watch import environment, read

if TYPE_CHECKING:
    from pathlib import Path

WATCHED = """
import os, sys, time
from pathlib import Path
from penstock.messages.local import TimerFired
from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.span_file import SpanFile
from penstock.runtime.observability.spans import SpanRecorder
from penstock.runtime.observability.trackers import EventLog

if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
observer = EventObserver(EventLog(), name="scorer", epoch=1, now_s=time.monotonic)
for _ in range(100):
    observer.handled(TimerFired(key="t"), None, [])
if len(sys.argv) > 1:
    recorder = SpanRecorder()
    recorder.record(bytes(16), bytes(8), "score", 1, 2)
    SpanFile(Path(sys.argv[1]), {}).write(recorder.take(1))
os._exit(0)  # as an actor's process may end
"""


def watch(folder: Path, *arguments: str) -> None:
    variables = {**os.environ, **environment(folder)}
    subprocess.run([sys.executable, "-c", WATCHED, *arguments], env=variables, check=True, timeout=60)


def test_what_an_observer_takes_is_counted_in_a_forked_process_also_when_it_ends_at_once(tmp_path: Path) -> None:
    watch(tmp_path / "untraced")
    assert 0 < read(tmp_path / "untraced").observers_s < 1
    assert read(tmp_path / "untraced").exporters_s == 0


def test_what_writing_spans_takes_is_counted(tmp_path: Path) -> None:
    watch(tmp_path / "traced", str(tmp_path / "spans.jsonl"))
    assert 0 < read(tmp_path / "traced").exporters_s < 60


def test_a_run_in_which_nothing_was_counted_is_no_result(tmp_path: Path) -> None:
    environment(tmp_path / "unwatched")
    with pytest.raises(RuntimeError, match="no process has counted"):
        read(tmp_path / "unwatched")
