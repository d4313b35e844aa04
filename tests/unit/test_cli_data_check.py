"""``penstock data check``: what people see of their rows before a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.cli.data_check import histogram

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
    if isinstance(result.exception, UserFault):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_are_counted_and_the_first_prompts_are_shown_with_their_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}+1=", "label": str(index + 1)} for index in range(5)]
    shown = check(tmp_path, *rows, rows[0], arguments=("--show", "2"))
    assert "6 of" in shown
    assert "1 row has the prompt of an earlier one" in shown
    assert "4 to 4, median 4" in shown
    assert "row 0 · 4 tokens" in shown
    assert "1+1=" in shown
    assert "row 2" not in shown


def test_what_rows_say_of_their_retries_is_counted_and_shown(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}+1=", "label": "1", "tries": tries} for index, tries in enumerate((None, 4, 0, 7))]
    options = "metadata_keys: [tries], num_retries_key: tries"
    shown = check(tmp_path, *rows, options=options, arguments=("--show", "2"))
    assert "3 rows say how often, 0 to 7" in shown
    assert shown.count("retries 4") == 1
    assert shown.count("retries ") == 2, "row 0 says nothing"
    assert "own retries" not in check(tmp_path, *rows, options="metadata_keys: [tries]")


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
    with pytest.raises(UserFault, match=r"rows.jsonl:2: 'label' is missing"):
        check(tmp_path, {"prompt": "1+1=", "label": "2"}, {"prompt": "x"})


def test_sources_have_their_shares_and_each_shows_its_first_prompts(tmp_path: Path) -> None:
    for name, prompt in (("a", "1+1="), ("b", "22+22=")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "label": "2"}) + "\n")
    scenario = tmp_path / "scenario.yaml"
    sources = "sources: [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}, {path: 'a.jsonl', name: c, weight: 1}]"
    for more in ("", ", stream: true"):
        scenario.write_text(f"run: {{name: x}}\ndata: {{{sources}{more}}}\nmodel: {{make: xs}}\n")
        result = CliRunner().invoke(app, ["data", "check", str(scenario), "--show", "1"], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        assert "60 %" in result.output
        assert result.output.count("20 %") == 2
        assert "row 1 · 6 tokens" in result.output
        assert "1 row has the prompt of an earlier one" in result.output
        assert "4 tokens" in result.output


def test_prompts_of_the_evaluation_that_are_trained_on_are_told(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}+1=", "label": "1"} for index in range(3)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*rows[1:], {"prompt": "9+9="})))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = tmp_path / "scenario.yaml"
    evaluation = "{at_end: true, datasets: [{name: held_out, path: eval.jsonl, label_key: ''}]}"
    scenario.write_text(
        f"run: {{name: x}}\ndata: {{path: rows.jsonl}}\nmodel: {{make: xs}}\nevaluation: {evaluation}\n"
    )
    told = "2 of the 3 prompts of the evaluation 'held_out' are trained on"
    for only, is_told in (("null", True), ("evaluate", False)):
        result = CliRunner().invoke(app, ["data", "check", str(scenario), f"run.only={only}"], env={"COLUMNS": "250"})
        assert result.exit_code == 0, result.output
        assert (told in result.output) == is_told, "where nothing is trained, nothing is trained on"


def test_bars_are_steps_of_one_width() -> None:
    from rich.console import Console

    console = Console(width=100, record=True)
    console.print(histogram([3] * 8 + [4] * 2 + [25]))
    lines = console.export_text().splitlines()
    assert lines[0].startswith("3–5 tokens")
    assert lines[0].endswith(" 10")
    assert lines[-1].startswith("24–26 tokens")
    assert len(lines) == 8
