"""Rows with a retry budget of their own in one run with real actors, real episodes and a ledger in a file: an episode
that always raises is played as often as its row says, and once more."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, Final

import yaml
from one_process_run import OneProcessRun

from penstock.backends.ledger.audit import audit_ledger
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from pathlib import Path

RUN_TIMEOUT_S: Final = 60.0
USUAL: Final = 1
OWN: Final = (0, 3, None, "", 1)
"""What the rows say, in their order."""
EPISODE: Final = """
async def plays(play):
    task = play.task
    with open(task.metadata["played"], "a") as file:
        file.write(f"{task.group_id} {task.index}\\n")
    await play.generate("")
    if task.index == 0:
        raise ConnectionError("the tool is down")
    return 0.5
"""


def scenario_of(folder: Path) -> Path:
    (folder / "mine.py").write_text(EPISODE)
    rows = ({"prompt": "ab=", "tries": tries, "played": str(folder / "played.txt")} for tries in OWN)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = {
        "run": {"name": "retries", "num_steps": 1},
        "model": {"make": "xs", "max_context": 64},
        "data": {
            "path": str(folder / "rows.jsonl"),
            "label_key": None,
            "metadata_keys": ["played", "tries"],
            "num_retries_key": "tries",
            "shuffle": False,
            "num_epochs": 1,
        },
        "sampling": {"samples_per_group": 2, "max_response_tokens": 4},
        "episode": {"kind": "function", "generate": f"{folder / 'mine.py'}:plays"},
        "prompt_source": {"num_retries": USUAL},
        "filter": {"drop_zero_spread": False, "min_group_size": 1, "on_failed_sample": "shrink"},
        "staleness": {"policy": "sync"},
        "engines": {"count": 1, "slots": 16},
        "learner": {"groups_per_batch": len(OWN)},
    }
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(scenario))
    return path


def test_an_episode_that_always_fails_is_played_as_often_as_its_row_says(tmp_path: Path) -> None:
    run = OneProcessRun(load_scenario(scenario_of(tmp_path)), tmp_path)
    ending = run.run(RUN_TIMEOUT_S)
    assert ending.completed, ending.story
    budgets = [own if isinstance(own, int) else USUAL for own in OWN]
    played = Counter(tuple(map(int, line.split())) for line in (tmp_path / "played.txt").read_text().splitlines())
    assert played == {
        **{(group_id, 0): budget + 1 for group_id, budget in enumerate(budgets)},
        **{(group_id, 1): 1 for group_id in range(len(budgets))},
    }
    with sqlite3.connect(run.ledger) as connection:
        causes = {cause for (cause,) in connection.execute("SELECT cause FROM samples WHERE sample_index = 0")}
        reasons = list(connection.execute("SELECT cause, num_samples, example FROM reason_counts"))
    connection.close()
    assert causes == {"generation_failed"}
    assert sum(num_samples for _, num_samples, _ in reasons) == len(OWN)
    for cause, _, example in reasons:
        assert cause == "generation_failed"
        assert re.match(r"ConnectionError: the tool is down \(mine\.py:\d+\)", example), example
    report = audit_ledger(run.ledger)
    assert report.findings == ()
    assert {(count.state, count.num_samples) for count in report.balance.ended} == {("trained", 5), ("failed", 5)}
