"""Runs whose reward is the word of their own embedded engines, with real actors, real backends and a ledger in a file.

The model's weights are random, so that it says digits among much else, and the last one before the text ends is the
verdict. Some answers have none: their samples have no reward.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, Final

import yaml
from one_process_run import OneProcessRun

from penstock.backends.engines.run_endpoints import FOLDER
from penstock.backends.episodes.judge_endpoint.backend import JudgingEngine
from penstock.backends.ledger.audit import audit_ledger
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

RUN_TIMEOUT_S: Final = 120.0
NUM_STEPS: Final = 3
SCENARIO: Final[dict[str, Any]] = {
    "run": {"name": "judged", "num_steps": NUM_STEPS},
    "model": {"make": "xs", "max_context": 256},
    "data": {"path": "lines:100"},
    "sampling": {"samples_per_group": 4, "max_response_tokens": 8},
    "reward": {
        "function": "judge",
        "judge": {
            "engine": "self", "template": "ask.txt", "score": r".*(\d).*", "lowest": 0, "highest": 9,
            "temperature": 1.0, "max_tokens": 200, "body": {"stop": "="},
        },
        "num_retries": 0,
    },
    "filter": {"drop_zero_spread": False, "max_refills": 8},
    "learner": {"groups_per_batch": 2},
    "engines": {"slots": 8, "judge_slots": 4, "device": "cpu"},
}  # fmt: skip
REGIMES: Final[dict[str, dict[str, Any]]] = {
    "asynchronous": {"staleness": {"policy": "fully_async", "max_staleness": 2}, "engines": {"count": 2}},
    "colocated": {"staleness": {"policy": "sync", "max_staleness": 0}, "engines": {"placement": "colocate"}},
}


class Judged(OneProcessRun):
    """A run, and what its engines say of their judging in the end."""

    def figures(self) -> list[dict[str, float]]:
        engines = [each for each in self._opened if isinstance(each, JudgingEngine)]
        return [{metric.name: metric.value for metric in engine.gauges()} for engine in engines]


def run_of(folder: Path, regime: str) -> Judged:
    folder.mkdir()
    (folder / "ask.txt").write_text("{{response}}?")
    changed = REGIMES[regime]
    scenario = {**SCENARIO, **changed, "engines": {**SCENARIO["engines"], **changed["engines"]}}
    (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    run = Judged(load_scenario(folder / "scenario.yaml"), folder)
    ending = run.run(RUN_TIMEOUT_S)
    assert ending.completed, ending
    return run


def samples_of(run: OneProcessRun) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run.ledger) as ledger:
        query = "SELECT group_id, sample_index, state, cause, num_tokens, reward FROM samples ORDER BY 1, 2"
        return [tuple(row) for row in ledger.execute(query)]


def check(run: Judged) -> None:
    """It was trained by the verdicts, and what its engines said as a judge is in no account."""
    trained = [sample for sample in samples_of(run) if sample[2] == "trained"]
    assert len(trained) == NUM_STEPS * 2 * 4
    rewards = {reward for *_, reward in trained}
    assert rewards <= {number / 9 for number in range(10)}
    assert len(rewards) > 1
    assert {cause for _, _, state, cause, *_ in samples_of(run) if state == "failed"} <= {"scoring_failed"}
    assert audit_ledger(run.ledger).is_clean
    figures = run.figures()
    assert len(figures) == run.plan.scenario.engines.count
    assert sum(each["judge/answered"] for each in figures) >= len(trained)
    num_made = sum(each["engine/generated_tokens"] for each in figures)
    assert sum(tokens for *_, tokens, _ in trained) <= num_made < sum(each["judge/tokens"] for each in figures)
    assert not list((run.ledger.parent / FOLDER).iterdir())


def test_a_run_is_trained_by_the_verdicts_of_its_own_engines(tmp_path: Path) -> None:
    check(run_of(tmp_path / "run", "asynchronous"))


def test_colocated_engines_judge_in_their_turns_and_say_the_same_twice(tmp_path: Path) -> None:
    """Answers are drawn at temperature 1."""
    first, second = (run_of(tmp_path / name, "colocated") for name in ("one", "two"))
    check(first)
    assert samples_of(first) == samples_of(second)
