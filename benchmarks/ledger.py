"""What the length of a ledger costs: from the snapshot of its books a replaced Buffer is ready within 2 s, and an audit
of a million groups takes less than two minutes.

How it is measured:

* The ledger is a made one of groups of 8 short samples in batches of 32, written by the store's own commits: each
  batch granted, recorded, leased and trained, a checkpoint every 50 steps, the newest batch out.
* The new Buffer reads it in turn from the snapshot and, as if there were none, from the first entry on. The time is
  that of opening the file, claiming it and making the actor; a new process and its imports come on top.
* The audit is ``penstock audit`` in a process of its own, whose memory is the most that it held at any time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.actors.buffer.books import Books, recorded
from penstock.actors.buffer.snapshots import snapshot_of
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.benchmarks._harness import Benchmark, Measured, claim, figures, interleaved, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks.control_plane import SCENARIO
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.flow import GrantSpan
from penstock.messages.ledger import (
    BatchLeased,
    CheckpointRecorded,
    GroupsGranted,
    PayloadsReleased,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.names import BUFFER
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan
from penstock.messages.training import UpdateMode
from penstock.runtime.run.plan import RunPlan
from penstock.runtime.run.wiring import build_machine, staleness_policy
from penstock.runtime.scenario.load import load_scenario

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from penstock.actors.buffer.machine import Buffer
    from penstock.messages.ledger import LedgerEntry

QUICK: Final = ("--groups", "64000", "--repetitions", "2")
QUICK_S: Final = 30
NUM_GROUPS: Final = 1_000_000
GROUP_SIZE: Final = 8
GROUPS_A_STEP: Final = 32
STEPS_A_CHECKPOINT: Final = 50
RESPONSE: Final = range(16)
MOST_READY_S: Final = 2.0
MOST_AUDIT_S: Final = 120.0


class Ready(NamedTuple):
    """A new Buffer of this ledger."""

    wall_s: float
    cpu_s: float


def measure(given: argparse.Namespace) -> Measured:
    """Make a ledger, begin Buffers from it, audit it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = _plan(folder)
        made_s = make_ledger(folder / LEDGER_FILE, plan, given.groups // GROUPS_A_STEP)
        arms = {
            "from the snapshot": partial(_begin, folder, plan, keeps=True),
            "from the whole log": partial(_begin, folder, plan, keeps=False),
        }
        turns = interleaved(arms, given.repetitions, warm_up=0)
        audits = [
            _audit(folder) for _ in in_turn(list(range(given.repetitions)), lambda n: f"audit, repetition {n + 1}")
        ]
        size_mib = (folder / LEDGER_FILE).stat().st_size / 2**20
    ready = figures(turns, "s until a new Buffer is ready", lambda each: each.wall_s)
    walls, cpus, mibs = zip(*audits, strict=True)
    found = [
        *ready,
        *figures(turns, "CPU s", lambda each: each.cpu_s),
        plain_figure("audit", "s", walls),
        plain_figure("audit", "CPU s", cpus),
        plain_figure("audit, at most", "MiB of memory", mibs),
        plain_figure("the ledger", "MiB", [size_mib]),
        plain_figure("writing it", "groups/s", [given.groups / made_s]),
    ]
    claims = [
        claim("s until a new Buffer is ready", ready[0].values, at_most=MOST_READY_S),
        claim(f"s of an audit of {given.groups:,} groups", walls, at_most=MOST_AUDIT_S),
    ]
    return Measured(found, claims)


def _plan(folder: Path) -> RunPlan:
    file = folder / "scenario.yaml"
    file.write_text(SCENARIO)
    return RunPlan(
        scenario=load_scenario(file, [f"run.folder={folder}", "observability.tracing=false"]),
        run_id="ledger",
        run_folder=str(folder),
        model_folder="",
        num_rows=100_000,
    )


def _begin(folder: Path, plan: RunPlan, *, keeps: bool) -> Ready:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with closing(SqliteStore(folder / LEDGER_FILE)) as store:
        store.claim(time.time_ns())
        kept = store.kept_books() if keeps else None
        build_machine(BUFFER, plan, records=store.entries(), kept=kept)
        return Ready(time.perf_counter() - began_s, time.process_time() - began_cpu_s)


def _audit(folder: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds, and MiB."""
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "penstock.runtime.cli", "audit", str(folder)]
    with (folder / "audit.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if process_failed := os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"the audit ended with {process_failed}: {(folder / 'audit.txt').read_text()[-2000:]}")
    return time.perf_counter() - began_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


# --- a ledger of so many groups --------------------------------------------------------------------------------------


def make_ledger(file: Path, plan: RunPlan, num_steps: int) -> float:
    """Write it, with snapshots as a run makes them; how many seconds it took."""
    machine: Buffer = build_machine(BUFFER, plan)  # type: ignore[assignment]
    books = Books(machine.settings, staleness_policy(plan.scenario))
    assert machine.settings.identity is not None
    began_s = time.perf_counter()
    with closing(SqliteStore(file)) as store:
        store.claim(1)
        first: list[LedgerEntry] = [machine.settings.identity, VersionRecorded(version=0)]
        hundredths = [range(n * num_steps // 100, (n + 1) * num_steps // 100) for n in range(100)]
        for steps in in_turn(hundredths, lambda steps: f"writing step {steps.start:,}"):
            for step in steps:
                entries = [*first, *_step(step, is_out=step == num_steps - 1)]
                first = []
                for entry in entries:
                    books.apply(entry)
                store.commit(entries, lambda: snapshot_of(books))
    return time.perf_counter() - began_s


def _step(step: int, *, is_out: bool) -> Iterator[LedgerEntry]:
    """All entries of a step; where its batch is out, up to that."""
    group_ids = tuple(range(step * GROUPS_A_STEP, (step + 1) * GROUPS_A_STEP))
    span = GrantSpan(group_ids[0], GROUPS_A_STEP, group_ids[0], step, step + 1)
    yield GroupsGranted(span=span, total=group_ids[-1] + 1, max_staleness=1)
    for group_id in group_ids:
        yield recorded(_group(group_id, step), step + 1)
    version = step + 1
    yield BatchLeased(version=version, group_ids=group_ids, max_staleness=8, update_mode=UpdateMode.IN_FLIGHT)
    if is_out:
        return
    tokens = GROUPS_A_STEP * GROUP_SIZE * len(RESPONSE)
    yield StepRecorded(version=version, group_ids=group_ids, num_trained_tokens=tokens, max_staleness=0)
    yield VersionRecorded(version=version)
    if version % STEPS_A_CHECKPOINT == 0:
        yield CheckpointRecorded(version=version, path=f"simulated/checkpoint-{version}")
        yield PayloadsReleased(through_version=version)


def _group(group_id: int, version: int) -> Group:
    prompt = Prompt(row=group_id % 1000, epoch=group_id // 1000, tokens=pack_tokens([1, 2, 3]))
    samples = (
        Sample(
            key=SampleKey(group_id, index),
            engine=f"engine/{index % 2}",
            parts=(
                Part(
                    tokens=pack_tokens(RESPONSE),
                    logprobs=pack_floats([-0.5] * len(RESPONSE)),
                    spans=(VersionSpan(version, len(RESPONSE)),),
                ),
            ),
            outcome=Completed(reward=Reward(value=float(index % 2))),
        )
        for index in range(GROUP_SIZE)
    )
    return Group(group_id=group_id, prompt=prompt, samples=tuple(samples))


def main(argv: list[str] | None = None) -> int:
    """Measure and judge; returns the exit code."""
    benchmark = Benchmark(__file__, __doc__, repetitions=3)
    benchmark.option("--groups", type=int, default=NUM_GROUPS, help=f"in the ledger (default: {NUM_GROUPS:,})")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
