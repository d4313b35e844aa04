"""The script of docs/evaluation.md that ends a run early, with a small model that never gets better."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock import api

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
SCENARIO = """\
run: {name: early, num_steps: 500}
data: {path: "lines:64"}
model: {make: xs, max_context: 64}
sampling: {samples_per_group: 2, max_response_tokens: 4}
filter: {drop_zero_spread: false}
learner: {groups_per_batch: 2, learning_rate: 1.0e-9}
evaluation:
  every: 1
  before_first: true
  datasets: [{name: gsm8k, path: "lines:2"}]
runtime: {host: local}
observability: {report: false}
"""

pytestmark = [pytest.mark.timeout(280), pytest.mark.long_run]


def test_the_script_of_the_page_ends_a_run_that_no_longer_gets_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"## Stopping early.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(SCENARIO)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["train_until_it_stalls"]("mine.yaml") == 0, "none was better than the first"
    run = api.open_run()
    assert run.status.state == "stopped"
    assert 3 <= run.status.version < 500
