"""``penstock data check``: what people see of their rows before a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from penstock.runtime.cli.app import app
from penstock.runtime.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

SCENARIO = """
run: {{name: x}}
data: {{path: {rows}, {options}}}
model: {{make: xs}}
"""


def check(folder: Path, *rows: object, options: str = "skip_bad_rows: false", arguments: tuple[str, ...] = ()) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO.format(rows=path, options=options))
    result = CliRunner().invoke(app, ["data", "check", str(scenario), *arguments], env={"COLUMNS": "200"})
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_are_counted_and_the_first_prompts_are_shown_with_their_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}+1=", "label": str(index + 1)} for index in range(5)]
    shown = check(tmp_path, *rows, rows[0], arguments=("--show", "2"))
    assert "6 of" in shown
    assert "1 rows are the same as an earlier one" in shown
    assert "4 to 4, median 4" in shown
    assert "row 0 · 4 tokens" in shown
    assert "1+1=" in shown
    assert "row 2" not in shown


def test_what_is_skipped_is_said_with_its_reason(tmp_path: Path) -> None:
    shown = check(
        tmp_path, {"prompt": "1+1=", "label": "2"}, {"prompt": "", "label": "2"}, options="skip_bad_rows: true"
    )
    assert "skipped" in shown
    assert "'prompt' is empty" in shown


def test_prompts_that_leave_too_little_room_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "1" * length, "label": "2"} for length in (4, 400)]
    assert "1 prompts leave less than the 256 tokens" in check(tmp_path, *rows)


def test_a_bad_row_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:2: 'label' is missing"):
        check(tmp_path, {"prompt": "1+1=", "label": "2"}, {"prompt": "x"})
