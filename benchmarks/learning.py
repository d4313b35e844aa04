"""Time to a reward: the staleness policies and TRL's ``GRPOTrainer``, on the quickstart's model, task and batch.

Fully asynchronous, start included, Penstock is there three times as fast as TRL with the same cores.

How it is measured:

* The scenario is ``quickstart.yaml``; ``--steps`` decides the schedule of its learning rate. Each seed has its own
  model and its own warm start, made once before the arms take turns and in none of their times: all arms of a seed
  begin with the same weights, and are given the same rows in the same order.
* TRL has the same reward function, objective (DAPO's loss and clips, no KL), optimizer, schedule and length limit, as
  many threads as there are cores, and the Python of an environment of its own.
* The reward is the mean over the samples that a step was trained on, and is reached where its mean over the last
  ``WINDOW`` steps is. "With start" counts from the launch of the command; "without" from when the model is loaded and
  training can begin. A run of Penstock also ends (report, checkpoint) within the time that is taken for its start.
* CPU seconds are those of the whole tree of processes, read once a second and interpolated in between.
* ``--curves`` writes every step of every run: seconds, CPU seconds, tokens, reward.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from bisect import bisect_left
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
import psutil

from penstock.actors.prompt_source.order import row_of
from penstock.backends.checkpoint.make import make_model
from penstock.backends.data.lines import lines_row
from penstock.backends.engines.served.sglang.environment import environments_folder, python_of
from penstock.benchmarks._aged_training import warm_started
from penstock.benchmarks._harness import Benchmark, Measured, claim, plain_figure
from penstock.benchmarks._progress import say, wait_for
from penstock.benchmarks._runs import run
from penstock.messages.errors import UserFault
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Sequence

    from penstock.benchmarks._results import Claim, Figure
    from penstock.runtime.scenario import Scenario

QUICK: Final = ("--repetitions", "1", "--steps", "6", "--reward", "0.25", "--arms", "fully_async")
QUICK_S: Final = 45
QUICKSTART: Final = Path(str(files("penstock.scenarios"))) / "quickstart.yaml"
POLICIES: Final = ("sync", "one_step_off", "fully_async")
TRL: Final = "trl"
OURS: Final = "fully_async"
REQUIRED_SPEED_UP: Final = 3.0
LARGEST_STEP_CPU_S: Final = 0.6
WINDOW: Final = 5
NUM_ROWS: Final = 20_000
"""Of the quickstart's data."""
SAMPLING_S: Final = 1.0
TRL_TIMEOUT_S: Final = 3600.0
TRL_MICRO_BATCH: Final = 64
"""Samples of one pass; 256 at once are no faster here, since all are padded to the longest."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run, when it was over."""

    at_s: float
    """Since the launch of the command."""
    cpu_s: float
    """Of all its processes, since then."""
    tokens: int
    """Generated so far."""
    reward: float
    """Mean over the samples of the step."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    arm: str
    seed: int
    start_s: float
    """From the launch until training could begin."""
    start_cpu_s: float
    points: list[Point]

    def reached(self, reward: float) -> Point | None:
        """The first step with that mean over the last :data:`WINDOW`, or over all where there are fewer."""
        rewards = [point.reward for point in self.points]
        for end, point in enumerate(self.points, start=1):
            if end >= min(WINDOW, len(rewards)) and statistics.fmean(rewards[max(0, end - WINDOW) : end]) >= reward:
                return point
        return None

    @property
    def step(self) -> Point:
        """A step of the second half of the run, with what it takes and makes in the mean."""
        first, last = self.points[(len(self.points) - 1) // 2], self.points[-1]
        num = max(1, len(self.points) - 1 - (len(self.points) - 1) // 2)
        return Point(
            at_s=(last.at_s - first.at_s) / num,
            cpu_s=(last.cpu_s - first.cpu_s) / num,
            tokens=(last.tokens - first.tokens) // num,
            reward=last.reward,
        )


class CpuSamples:
    """CPU seconds of the processes that this one has started, and theirs, while the block runs."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._at_s: list[float] = []
        self._cpu_s: list[float] = []

    def __enter__(self) -> Self:
        self.began_s, self._own_cpu_s = time.time(), self._ended()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._take()

    @property
    def wall_s(self) -> float:
        """Of the block."""
        return self._at_s[-1]

    def at(self, at_s: float) -> float:
        """Used until so many seconds after the block began."""
        place = min(max(1, bisect_left(self._at_s, at_s)), len(self._at_s) - 1)
        before_s, after_s = self._at_s[place - 1 : place + 1]
        share = (min(at_s, after_s) - before_s) / (after_s - before_s)
        return self._cpu_s[place - 1] + share * (self._cpu_s[place] - self._cpu_s[place - 1])

    def _sample(self) -> None:
        while not self._over.wait(SAMPLING_S):
            self._take()

    def _take(self) -> None:
        used = self._ended() - self._own_cpu_s
        for process in self._own.children(recursive=True):
            try:
                used += sum(process.cpu_times()[:4])  # its own, and of its children that it has waited for
            except psutil.NoSuchProcess:
                continue
        self._at_s.append(time.time() - self.began_s)
        self._cpu_s.append(max(used, *self._cpu_s[-1:], 0.0))  # one that ends while it is read is in neither

    def _ended(self) -> float:
        """Of children that ended."""
        return sum(self._own.cpu_times()[2:4])


def measure(given: argparse.Namespace) -> Measured:
    """All arms with each seed in turn."""
    python = peers_python(given.peers_python)
    arms, absent = runnable(dict.fromkeys(given.arms), given.peers_python)
    if not arms:
        raise UserFault(f"nothing to measure: {'; '.join(absent)}")
    curves: list[Curve] = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(given.repetitions):
            folder = Path(name) / str(seed)
            say(f"seed {seed}: its warm start")
            start = _warm_start(folder, seed)
            for arm in arms[seed % len(arms) :] + arms[: seed % len(arms)]:
                say(f"seed {seed} of {given.repetitions}: {arm}")
                scenario = _scenario(seed, start, arm if arm != TRL else OURS, given.steps)
                if arm == TRL:
                    curve = _trl(scenario, start, folder / arm, python, given.trl_threads)
                else:
                    curve = _penstock(arm, scenario, folder / arm)
                curves.append(curve)
                if given.curves is not None:
                    given.curves.write_bytes(msgspec.json.format(msgspec.json.encode(curves)))
    return _judged(curves, arms, given.reward, absent)


def peers_python(given: Path | None) -> Path:
    """That has what we compare with."""
    return given or python_of(environments_folder() / "peers")


def runnable(arms: Collection[str], given: Path | None) -> tuple[list[str], list[str]]:
    """Those of the arms that can be run here, and why the others cannot."""
    if TRL not in arms or peers_python(given).exists():
        return list(arms), []
    why = "TRL, skipped: the peers' environment is not built: .ci/set_up peers (in a checkout of Penstock)"
    return [arm for arm in arms if arm != TRL], [why]


def _judged(curves: Sequence[Curve], arms: Sequence[str], reward: float, absent: list[str]) -> Measured:
    """Seeds in which an arm did not get there are in no figure of the time to the reward."""
    by_arm = {arm: [curve for curve in curves if curve.arm == arm] for arm in arms}
    missed = {curve.seed for curve in curves if curve.reached(reward) is None}
    absent += [
        f"seed {c.seed}, {c.arm}: a reward of {reward:g} was not reached in {len(c.points)} steps"
        for c in curves if c.reached(reward) is None
    ]  # fmt: skip
    found: list[Figure] = []

    def add(text: str, unit: str, value: Callable[[Curve, Point], float]) -> dict[str, list[float]]:
        values = {
            arm: [value(c, point) for c in of if c.seed not in missed and (point := c.reached(reward))]
            for arm, of in by_arm.items()
        }
        found.extend(plain_figure(f"{arm}: {text}", unit, each) for arm, each in values.items() if each)
        return values

    with_start = add(f"to {reward:g}, with start", "s", lambda _, point: point.at_s)
    add(f"to {reward:g}, with start", "CPU-s", lambda _, point: point.cpu_s)
    add(f"to {reward:g}, without", "s", lambda c, point: point.at_s - c.start_s)
    add(f"to {reward:g}, without", "CPU-s", lambda c, point: point.cpu_s - c.start_cpu_s)
    add(f"to {reward:g}", "tokens", lambda _, point: point.tokens)
    steps: dict[str, list[Point]] = {arm: [curve.step for curve in of] for arm, of in by_arm.items()}
    for arm, of in steps.items():
        found.append(plain_figure(f"{arm}: a step, second half", "s", [step.at_s for step in of]))
        found.append(plain_figure(f"{arm}: a step, second half", "CPU-s", [step.cpu_s for step in of]))
        found.append(plain_figure(f"{arm}: second half", "tokens/s", [step.tokens / step.at_s for step in of]))
    claims: list[Claim] = []
    if with_start.get(TRL) and with_start.get(OURS):
        ratios = [trl / ours for trl, ours in zip(with_start[TRL], with_start[OURS], strict=True)]
        claims.append(claim(f"TRL ÷ {OURS}, s to {reward:g}, with start", ratios, at_least=REQUIRED_SPEED_UP))
    if steps.get(OURS):
        cpu_s = [step.cpu_s for step in steps[OURS]]
        claims.append(claim(f"{OURS}: CPU-s a step", cpu_s, at_most=LARGEST_STEP_CPU_S))
    return Measured(found, claims, tuple(absent))


def _scenario(seed: int, model: Path, policy: str, num_steps: int, *overrides: str) -> Scenario:
    return load_scenario(QUICKSTART, (*_overrides(seed, model, policy, num_steps), *overrides))


def _overrides(seed: int, model: Path, policy: str, num_steps: int) -> tuple[str, ...]:
    return (
        f"run.seed={seed}",
        f"run.num_steps={num_steps}",
        "runtime.host=local",
        "model.make=null",
        f"model.path={model.absolute()}",
        "learner.warm_start=null",
        f"staleness.policy={policy}",
        *(() if policy == OURS else ("staleness.max_staleness=null",)),
    )


def _warm_start(folder: Path, seed: int) -> Path:
    made = folder / "made"
    make_model("s", made, seed)
    scenario = load_scenario(QUICKSTART, (f"run.seed={seed}", "model.make=null", f"model.path={made}"))
    return warm_started(scenario, made, folder / "warm_start").rename(folder / "start")


def _penstock(arm: str, scenario: Scenario, folder: Path) -> Curve:
    overrides = _overrides(scenario.run.seed, Path(str(scenario.model.path)), arm, scenario.run.num_steps)
    with CpuSamples() as cpu:
        finished = run(QUICKSTART, overrides, folder)
    # What is not of the driver's own time: Python's start before it, and the little after its end.
    launch_s = cpu.wall_s - finished.summary.wall_s
    points = [
        Point(
            at_s=launch_s + row.at_s,
            cpu_s=cpu.at(launch_s + row.at_s),
            tokens=row.tokens_generated,
            reward=row.metrics["rollout/raw_reward"] or 0.0,
        )
        for row in finished.steps
    ]
    first = finished.steps[0]
    start_s = launch_s + first.at_s - first.training_s
    return Curve(arm=arm, seed=scenario.run.seed, start_s=start_s, start_cpu_s=cpu.at(start_s), points=points)


def _trl(scenario: Scenario, model: Path, folder: Path, python: Path, num_threads: int) -> Curve:
    """See :mod:`._trl_peer`."""
    folder.mkdir(parents=True)
    learner, seed = scenario.learner, scenario.run.seed
    numbers = range(scenario.run.num_steps * learner.groups_per_batch)
    order = [row_of(n, num_rows=NUM_ROWS, seed=seed, shuffle=scenario.data.shuffle)[0] for n in numbers]
    job = {
        "model": str(model),
        "rows": [lines_row(seed, row)._asdict() for row in order],
        "num_steps": scenario.run.num_steps,
        "groups_per_batch": learner.groups_per_batch,
        "samples_per_group": scenario.sampling.samples_per_group,
        "max_response_tokens": scenario.sampling.max_response_tokens,
        "learning_rate": learner.learning_rate,
        "warmup_steps": learner.warmup_steps,
        "schedule": learner.lr_schedule,
        "betas": learner.betas,
        "max_grad_norm": learner.max_grad_norm,
        "clip_low": learner.objective.clip_low,
        "clip_high": learner.objective.clip_high,
        "micro_batch": TRL_MICRO_BATCH,
        "num_threads": num_threads,
        "seed": seed,
        "folder": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job))
    source = Path(__file__).with_name("_trl_peer.py")
    # Penstock alone, not what is installed beside it.
    (folder / "path").mkdir()
    (folder / "path" / "penstock").symlink_to(Path(str(files("penstock"))).resolve())
    variables = {"PYTHONPATH": str(folder / "path"), "OMP_NUM_THREADS": str(num_threads)}
    with (folder / "output.jsonl").open("w+") as output, (folder / "errors.txt").open("w+") as errors:
        began_s = time.time()
        with CpuSamples() as cpu:
            command = [str(python), str(source), str(folder / "job.json")]
            process = subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **variables})
            code = wait_for(process, TRL_TIMEOUT_S, "TRL")
        errors.seek(0)
        if code:
            raise RuntimeError(f"TRL: exit code {code}\n{errors.read()[-4000:]}")
        output.seek(0)
        began, *rows = [json.loads(line) for line in output if line.startswith('{"at_s"')]
    points: list[Point] = []
    tokens = 0
    for row in rows:
        tokens += round(row["mean_tokens"] * learner.groups_per_batch * scenario.sampling.samples_per_group)
        at_s = row["at_s"] - began_s
        points.append(Point(at_s=at_s, cpu_s=cpu.at(at_s), tokens=tokens, reward=row["reward"]))
    start_s = began["at_s"] - began_s
    return Curve(arm=TRL, seed=seed, start_s=start_s, start_cpu_s=cpu.at(start_s), points=points)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--seeds", type=int, dest="repetitions", default=5, help="the same as --repetitions")
    benchmark.option("--steps", type=int, default=120, help="of each run, the quickstart's 120 by default")
    benchmark.option("--reward", type=float, default=0.75, help="to be reached (default: 0.75)")
    benchmark.option("--arms", nargs="+", choices=(*POLICIES, TRL), default=(*POLICIES, TRL), metavar="ARM")
    cores = len(os.sched_getaffinity(0))
    benchmark.option("--trl-threads", type=int, default=cores, help=f"of TRL (default: the {cores} cores there are)")
    benchmark.option("--peers-python", type=Path, default=None, help="that has TRL; of .ci/set_up peers by default")
    benchmark.option("--curves", type=Path, default=None, metavar="FILE", help="write every step of every run here")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
