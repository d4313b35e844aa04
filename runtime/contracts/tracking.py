"""The contract of a tracker of experiments."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.backends.processes.user_code import load_object
from penstock.backends.trackers.protocol import TrackedRun, TrackedSample
from penstock.messages.errors import UserFault
from penstock.runtime.observability.evaluation_log import EvaluationLog, FinishedEvaluation

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.trackers.protocol import Tracker
    from penstock.runtime.contracts.checks import Checks

METHODS = ("metrics", "samples", "finish")
AWKWARD = TrackedSample(
    name="e0/1",
    prompt="",
    response="<script>alert(1)</script>\x1b[2J\x00 \u202e| ``` \U0001f600",
    label="",
    reward=None,
    components={},
    fate="failed: scoring_failed",
    reason="ValueError: none",
)


def check_tracker(checks: Checks) -> None:
    """It is opened without options, is told of a short run, of a run without steps, and of one that is resumed."""
    make = cast("Callable[[TrackedRun], Tracker]", load_object(checks.spec))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built: list[Tracker] = []

        def build() -> None:
            built.append(make(_run(checks.spec, folder, resumes=False)))
            missing = [method for method in METHODS if not callable(getattr(built[0], method, None))]
            if missing:
                raise UserFault(f"has no {' and no '.join(missing)}; expected metrics, samples and finish")

        if not checks.run("it is made of the run", build):
            return
        (tracker,) = built
        report = folder / "report.html"
        report.write_text("<html></html>")
        usual = AWKWARD._replace(prompt="1 + 1 =", response="2", reward=1.0, components={"answer": 1.0}, reason="")
        checks.run("metrics takes a step", lambda: tracker.metrics(1, {"rollout/raw_reward": 0.5, "mine/x y": -1e30}))
        checks.run("metrics takes an evaluation that comes late", lambda: tracker.metrics(0, {"eval/a/reward": 0.0}))
        checks.run("metrics takes a step without figures", lambda: tracker.metrics(2, {}))
        checks.run("samples takes usual and awkward texts", lambda: tracker.samples(2, [usual, AWKWARD]))
        checks.run("finish takes the summary and the files", lambda: tracker.finish({"completed": True}, [report]))
        checks.run("a resumed run has one, too", lambda: _resumed(make, _run(checks.spec, folder, resumes=True)))


def check_evaluation_log(checks: Checks) -> None:
    """It is told of an evaluation with figures, and of one without any answer."""
    found: list[EvaluationLog] = []
    with tempfile.TemporaryDirectory() as name:
        if not checks.run("it can be loaded", lambda: found.append(EvaluationLog(checks.spec, Path(name)))):
            return
        answers = Path(name) / "000-gsm8k.jsonl"
        answers.write_text('{"response": "\\u001b[2J<script>", "reward": 1.0}\n')
        usual = FinishedEvaluation(0, "gsm8k", 20, {"reward_mean": 0.4, "pass@1": 0.4, "missing": 0.0}, answers)
        empty = usual._replace(number=1, figures={"missing": 1.0, "num_answers": 0.0}, samples_file=Path(name) / "none")
        checks.run("it takes an evaluation", lambda: found[0].call(usual))
        checks.run("it takes one without any answer", lambda: found[0].call(empty))


def _resumed(make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
    make(run).finish({"completed": False}, [])


def _run(spec: str, folder: Path, *, resumes: bool) -> TrackedRun:
    own = folder / "trackers"
    own.mkdir(exist_ok=True)
    scenario = {"run": {"name": "example", "num_steps": 2}, "staleness": {"policy": "sync"}}
    return TrackedRun(
        tracker=spec, name="example-1", run_folder=folder, folder=own, scenario=scenario, options={}, resumes=resumes
    )
