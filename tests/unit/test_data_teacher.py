"""Rows with a prompt of its own for the teacher: tokenised like the prompt, in memory and streamed, and looked at."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from data_cases import make_tokenizer, write_lines

from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import DataOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import known_tokens
from penstock.backends.data.streamed import StreamedRows
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.evaluation.rows import load_evaluation_rows
from penstock.messages.arrays import pack_tokens
from penstock.messages.errors import UserFault
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from penstock.messages.samples import Prompt

SCENARIOS = Path(__file__).parents[2] / "scenarios"
ROWS = ({"prompt": "ab", "hint": "ab: it is c"}, {"prompt": "d", "hint": "d: it is e"})


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prompts(options: DataOptions, tokenizer_folder: Path, *, stream: bool, max_context: int = 64) -> list[Prompt]:
    if not stream:
        dataset = load_dataset(options, tokenizer_folder, seed=0, max_context=max_context)
        return [dataset.prompt(row, 0) for row in range(dataset.num_rows)]
    with closing(StreamedRows(options, tokenizer_folder, max_context=max_context)) as rows:
        return [rows.prompt(row, 0) for row in range(rows.num_rows)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_teacher_reads_another_column(tmp_path: Path, tokenizer_folder: Path, *, stream: bool) -> None:
    path = write_lines(tmp_path / "rows.jsonl", *ROWS)
    options = DataOptions(path=path, label_key=None, teacher_prompt_key="hint")
    found = prompts(options, tokenizer_folder, stream=stream)
    wanted = TextTokenizer(tokenizer_folder).encode([row["hint"] for row in ROWS], special=True)
    assert [prompt.teacher_tokens for prompt in found] == [pack_tokens(known_tokens(ids)) for ids in wanted]
    assert [prompt.text for prompt in found] == ["ab", "d"]
    plain = prompts(DataOptions(path=path, label_key=None), tokenizer_folder, stream=stream)
    assert [prompt.teacher_tokens for prompt in plain] == [b"", b""]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a"}, "'hint' is missing"),
        ({"prompt": "a", "hint": " "}, "'hint' is empty"),
        ({"prompt": "a", "hint": 3}, "'hint' is a number \\(3\\); expected a text"),
        ({"prompt": "a", "hint": "b" * 60}, r"for the teacher: the prompt has \d+ tokens; at most 31 fit"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_row_without_one_is_a_bad_row(
    tmp_path: Path, tokenizer_folder: Path, row: dict[str, object], problem: str, *, stream: bool
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "hint": "b"}, row)
    options = DataOptions(path=path, label_key=None, teacher_prompt_key="hint")
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {problem}"):
        prompts(options, tokenizer_folder, stream=stream, max_context=32)


def test_it_takes_a_teacher_and_is_nothing_to_evaluation(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(UserFault, match=r"data\.teacher_prompt_key: has no effect without a block teacher"):
        load_scenario(SCENARIOS / "quickstart.yaml", ["data.teacher_prompt_key=hint"])
    path = write_lines(tmp_path / "held.jsonl", {"prompt": "a", "label": "b"})
    scenario = load_scenario(
        SCENARIOS / "distill.yaml",
        ["data.teacher_prompt_key=hint", f"evaluation.datasets=[{{name: held, path: {path}}}]"],
    )
    (rows,) = load_evaluation_rows(sets_of(scenario), tokenizer_folder, seed=0, max_context=64)
    assert rows.prompt(0).teacher_tokens == b""
