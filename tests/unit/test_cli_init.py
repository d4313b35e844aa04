"""``penstock init``: what it writes loads, and means what was asked for."""
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import shlex
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.cli.init import SCHEMA, Wanted, write_new_scenario
from penstock.runtime.scenario import load_scenario

WANTED = Wanted("Qwen/Qwen3-0.6B", "rows.jsonl", "mine.py:reward", "one_step_off", "sglang")


def written(file: Path, wanted: Wanted = WANTED) -> str:
    out = StringIO()
    write_new_scenario(file, wanted, Console(file=out, width=300))
    return out.getvalue()


def test_the_scenario_has_what_was_asked_for_with_paths_as_its_folder_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "mine.py"):
        (tmp_path / name).touch()
    (tmp_path / "inner").mkdir()
    file = Path("inner/own: scenario.yaml")
    said = written(file, WANTED._replace(data="rows.jsonl@[0:10]"))
    scenario = load_scenario(file)
    assert scenario.run.name == "own__scenario"
    assert scenario.model.path == WANTED.model
    assert scenario.data.path == f"{tmp_path}/inner/../rows.jsonl@[0:10]"
    assert scenario.reward.function == f"{tmp_path}/inner/../mine.py:reward"
    assert (scenario.staleness.policy, scenario.engines.backend) == ("one_step_off", "sglang")
    assert file.read_text().startswith(f"# yaml-language-server: $schema={SCHEMA}\n")
    assert (file.parent / SCHEMA).is_file()
    assert said.count("penstock ") == 3


@pytest.mark.parametrize(
    ("row", "is_chat"),
    [
        ('{"prompt": [{"role": "user", "content": "2 + 2"}], "label": "4"}', True),
        ('{"prompt": "2 + 2", "label": "4"}', False),
        ('{"messages": []}', False),
        ("no JSON", False),
        (None, False),
    ],
)
def test_rows_of_chat_messages_get_their_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str | None, is_chat: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if row is not None:
        (tmp_path / "rows.jsonl").write_text(row + "\n")
    written(tmp_path / "scenario.yaml")
    assert load_scenario(tmp_path / "scenario.yaml").data.chat_template is is_chat


@pytest.mark.parametrize(
    ("row", "keys", "is_chat"),
    [
        ({"question": "2 + 2", "answer": "4"}, ("question", "answer"), False),
        ({"prompt": "2 + 2", "answer": "4", "question": "other"}, ("prompt", "answer"), False),
        ({"problem": "2 + 2", "solution": "so 4", "answer": "4"}, ("problem", "answer"), False),
        (
            {"prompt": [{"role": "user", "content": "2 + 2"}], "reward_model": {"ground_truth": "4"}},
            ("prompt", "reward_model.ground_truth"),
            True,
        ),
        ({"text": "2 + 2", "reward_model": "some"}, ("prompt", "label"), False),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_columns_are_known_by_the_names_that_datasets_give_them(
    tmp_path: Path, row: dict[str, object], keys: tuple[str, str], is_chat: bool, name: str
) -> None:
    if name == "rows.jsonl":
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / name)
    said = written(tmp_path / "scenario.yaml", WANTED._replace(data=str(tmp_path / name)))
    data = load_scenario(tmp_path / "scenario.yaml").data
    assert ((data.prompt_key, data.label_key), data.chat_template) == (keys, is_chat)
    assert (f"data.prompt_key is {keys[0]}, data.label_key is {keys[1]}" in said) is (keys != ("prompt", "label"))


@pytest.mark.parametrize(("stem", "name"), [("scén é", "sc_n"), ("実験", "run"), (".x", "x"), ("a" * 90, "a" * 64)])
def test_a_file_of_any_name_gives_a_run_a_name_and_commands_to_paste(tmp_path: Path, stem: str, name: str) -> None:
    file = tmp_path / f"{stem}.yaml"
    said = written(file)
    assert load_scenario(file).run.name == name
    assert f"penstock run {shlex.quote(str(file))}  train" in said


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (WANTED._replace(engine="vllm"), "engines.backend: must be"),
        (WANTED._replace(policy="sometimes"), "staleness.policy"),
        (WANTED._replace(data="lines:9\nmodel: {make: xs}"), "scenario.yaml"),
    ],
)
def test_what_makes_no_scenario_is_refused_and_leaves_nothing(wanted: Wanted, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=said) as caught:
        written(tmp_path / "scenario.yaml", wanted)
    assert f".{'scenario.yaml'}." not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text("mine")
    with pytest.raises(UserFault, match="is there already"):
        written(tmp_path / "scenario.yaml")
    assert (tmp_path / "scenario.yaml").read_text() == "mine"


def test_without_a_terminal_what_is_needed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init", "--model", "my/model"])
    assert isinstance(result.exception, UserFault)
    assert str(result.exception).startswith("--data is needed")
    assert CliRunner().invoke(app, ["init", "--model", "my/model", "--data", "lines:9"]).exit_code == 0
    assert load_scenario(tmp_path / "scenario.yaml").reward.function == "math"
