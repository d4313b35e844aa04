"""Loading what a scenario names as ``file.py:Name``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backends.processes.user_code import UserCodeError, load_object, split_spec

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(spec: str) -> str:
    with pytest.raises(UserCodeError) as caught:
        load_object(spec)
    return str(caught.value)


def test_a_name_of_a_file_is_found_also_with_dots_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mine.py", "class Box:\n  inner = 'thing'\nvalue = 3")
    monkeypatch.chdir(tmp_path)
    assert load_object("mine.py:value") == 3
    assert load_object(f"{tmp_path}/mine.py:Box.inner") == "thing"


def test_a_file_is_run_once_and_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "twin.py", f"where = ['{folder}']\ndef get(): return where")
    assert load_object(f"{tmp_path}/a/twin.py:where") is load_object(f"{tmp_path}/a/twin.py:where")
    assert load_object(f"{tmp_path}/b/twin.py:where") == ["b"]


def test_a_file_may_import_its_neighbours_and_define_dataclasses(tmp_path: Path) -> None:
    write(tmp_path / "penstock_test_neighbour.py", "value = 7")
    text = "from __future__ import annotations\nimport dataclasses, penstock_test_neighbour as n\n"
    write(tmp_path / "mine.py", f"{text}@dataclasses.dataclass\nclass Policy:\n  x: int = n.value")
    assert load_object(f"{tmp_path}/mine.py:Policy")().x == 7  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("value = (", ":1: '(' was never closed: value = ("),
        ("a = 1\nimport nothing_of_that_name", "No module named 'nothing_of_that_name' (mine.py:2). Install"),
        ("def f():\n  raise OSError('no disk')\nf()", "cannot be imported: OSError: no disk (mine.py:2)"),
        ("raise SystemExit", "cannot be imported: SystemExit (mine.py:1)"),
        ("valued = 1", "has no 'value'; did you mean 'valued'?"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_where(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "mine.py", text)
    assert message in refusal(f"{tmp_path}/mine.py:value")


def test_a_file_that_failed_is_tried_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "value = 1 / 0")
    refusal(f"{path}:value")
    write(path, "value = 1")
    assert load_object(f"{path}:value") == 1


def test_a_missing_file_shows_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "rewards.py", "")
    assert "Python files there: rewards.py" in refusal(f"{tmp_path}/reward.py:value")


@pytest.mark.parametrize("spec", ["mine.py", "mine:value", "mine.py:", ":value", ""])
def test_another_form_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(UserCodeError, match=r"expected file\.py:name, as in"):
        split_spec(spec)
