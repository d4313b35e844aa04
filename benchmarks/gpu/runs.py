"""Whole runs on the device: each staleness policy, learner and engine in turns on it, and one whose engine is killed.

A model of Qwen3-0.6B's size with the alphabet of a task that Penstock makes itself learns from nothing: imitation
first, then GRPO. All seven actors are processes of the local host; learner and engine share the device, each with
half of it, but for ``colocate``, where they take turns. What is claimed: every run ends, its ledger balances, no
token is beyond the bound, and the engine drew by the log-probs that the learner computes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.benchmarks._harness import Measured, fact, plain_figure
from penstock.benchmarks._progress import in_turn
from penstock.benchmarks._runs import FinishedRun, run
from penstock.benchmarks.gpu._stage import made_model_of_letters, stage, stand_of
from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity
from penstock.runtime.chaos.verdict import CHAOS_FILE, Verdict

if TYPE_CHECKING:
    import argparse

    from penstock.benchmarks._results import Figure

SCENARIO: Final = """\
run: {{name: gpu, num_steps: {num_steps}}}
runtime: {{host: local}}
model: {{path: {model}, dtype: {dtype}}}
data: {{path: "lines:4000"}}
sampling: {{samples_per_group: 8, max_response_tokens: 128}}
reward: {{function: lines}}
filter: {{drop_zero_spread: false}}
engines: {{device: {device}, slots: 256}}
learner:
  device: {device}
  groups_per_batch: 32
  learning_rate: 1.0e-5
  max_tokens_per_micro_batch: 8192
  warm_start: {{path: "lines:4000", num_steps: {warm_steps}, learning_rate: 3.0e-4}}
"""
ARMS: Final[dict[str, tuple[str, ...]]] = {
    "sync": ("staleness.policy=sync",),
    "one_step_off": ("staleness.policy=one_step_off",),
    "fully_async": ("staleness.policy=fully_async", "staleness.max_staleness=2"),
    "colocate": ("staleness.policy=one_step_off", "engines.placement=colocate"),
}
MAX_MISMATCH: Final = 0.05
"""Nats a token between engine and learner, in bfloat16, where weights are the same; mean of a run."""
CHAOS_S: Final = 300


def measure(given: argparse.Namespace) -> Measured:
    stand = stand_of(given)
    measured = Measured([], [])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenario = SCENARIO.format(
            num_steps=given.steps,
            model=made_model_of_letters(stand, folder / "model"),
            dtype=stand.dtype_name,
            device=stand.device.type,
            warm_steps=100 if stand.is_real else 10,
        )
        for arm in in_turn(list(ARMS)):
            done = run(scenario, ARMS[arm], folder / arm)
            measured.figures.extend(_figures(arm, done))
            summary = done.summary
            is_within = summary.max_staleness <= summary.staleness_bound
            measured.claims.append(fact(f"{arm}: every sample is within the bound", holds=is_within))
            is_balanced = audit_ledger(done.folder / LEDGER_FILE).is_clean
            measured.claims.append(fact(f"{arm}: the ledger balances", holds=is_balanced))
            if arm == "sync":
                mismatch = summary.mean_logprob_abs_diff or 0.0
                text = f"{arm}: engine and learner agree on log-probs, {mismatch:.2g} nats apart, to {MAX_MISMATCH:g}"
                measured.claims.append(fact(text, holds=mismatch <= MAX_MISMATCH))
        file = folder / "chaos.yaml"
        file.write_text(scenario)
        _chaos(file, ARMS["fully_async"], measured)
    return measured


def _figures(arm: str, done: FinishedRun) -> list[Figure]:
    """Over the steps after the first fifth."""
    first, last = done.steps[len(done.steps) // 5], done.steps[-1]
    num_steps, span_s = last.version - first.version, last.at_s - first.at_s
    busy = dict.fromkeys(("learner", "engine"), 0.0)
    for row in done.activity:
        if row.activity is Activity.WORKING and (row.actor == LEARNER or is_engine(row.actor)):
            overlap_s = max(0.0, min(row.end_s, last.at_s) - max(row.start_s, first.at_s))
            busy["learner" if row.actor == LEARNER else "engine"] += overlap_s
    summary = done.summary
    quantities = {
        (f"{arm}: a step", "s"): span_s / num_steps,
        (f"{arm}: trained", "tokens/s"): summary.tokens_trained / summary.training_s,
        (f"{arm}: reward of the first ten steps", ""): summary.first10_reward,
        (f"{arm}: reward of the last ten steps", ""): summary.last10_reward,
        (f"{arm}: age of a sample, mean", "versions"): summary.mean_staleness,
    } | {(f"{arm}: {who} at work", "of the time"): seconds / span_s for who, seconds in busy.items()}
    return [plain_figure(name, unit, [value]) for (name, unit), value in quantities.items() if value is not None]


def _chaos(file: Path, overrides: tuple[str, ...], into: Measured) -> None:
    """The engine is killed amid a run; the verdict is that of ``penstock chaos``."""
    runs = file.parent / "chaos"
    command = [
        sys.executable, "-m", "penstock.runtime.cli", "chaos", str(file), "--faults", "kill:engine/0", *overrides,
        f"run.folder={runs}",
    ]  # fmt: skip
    finished = subprocess.run(command, capture_output=True, text=True, timeout=CHAOS_S, check=False)
    found = next(runs.rglob(CHAOS_FILE), None)
    if found is None:
        raise RuntimeError(f"penstock chaos came to no verdict:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
    verdict = msgspec.json.decode(found.read_bytes(), type=Verdict)
    problems = f": {'; '.join(verdict.problems)}" if verdict.problems else ""
    into.claims.append(fact(f"chaos: no problem after the engine was killed{problems}", holds=not problems))
    into.claims.append(fact("chaos: the run was completed", holds=verdict.completed))
    for fault in verdict.faults:
        if fault.back_after_s is not None:
            into.figures.append(plain_figure("chaos: the engine works again after", "s", [fault.back_after_s]))


def main(argv: list[str] | None = None) -> int:
    benchmark = stage(__file__, __doc__, repetitions=1)
    benchmark.option("--steps", type=int, default=20, help="of each run (default: 20)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
