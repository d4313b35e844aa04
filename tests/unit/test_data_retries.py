"""Rows that say how often their samples are issued again: where they say it, and what a scenario may ask for.

What a row may not say is with the other bad rows in ``test_malformed_inputs.py``; rows of a stream are compared with
those in memory in ``test_data_stream.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from data_cases import make_tokenizer, write_lines

from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import DataOptions, SourceOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.recorded_rows import RecordedSettings
from penstock.backends.evaluation.rows import load_evaluation_rows
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.rows import check_data
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.dataset import Dataset

RECORDED = RecordedSettings(2, 24, are_all_recorded=True, imitates=True)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def retries(dataset: Dataset) -> list[int | None]:
    return [dataset.prompt(row, 0).num_retries for row in range(dataset.num_rows)]


def test_a_row_says_how_often_and_an_empty_one_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    says = (0, 3, 1000, None, "")
    path = write_lines(tmp_path / "rows.jsonl", *({"prompt": "a", "tries": tries} for tries in says))
    options = DataOptions(path=path, label_key=None, metadata_keys=("tries",), num_retries_key="tries")
    dataset = load_dataset(options, tokenizer_folder, seed=0, max_context=64)
    assert retries(dataset) == [0, 3, 1000, None, None]
    assert list(dataset.num_retries()) == [0, 3, 1000]
    plain = DataOptions(path=path, label_key=None, metadata_keys=("tries",))
    assert retries(load_dataset(plain, tokenizer_folder, seed=0, max_context=64)) == [None] * 5


def test_a_source_says_it_for_all_its_rows_and_the_column_goes_before_that(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    one = write_lines(tmp_path / "one.jsonl", {"prompt": "a", "tries": 9})
    two = write_lines(tmp_path / "two.jsonl", {"prompt": "b", "tries": 7}, {"prompt": "c", "tries": None})
    options = DataOptions(
        label_key=None,
        metadata={"tries": 1},
        num_retries_key="tries",
        sources=(
            SourceOptions(path=one),
            SourceOptions(path=one, name="own", metadata={"tries": 5}),
            SourceOptions(path=two, metadata={"tries": 5}, metadata_keys=("tries",)),
        ),
    )
    assert retries(load_dataset(options, tokenizer_folder, seed=0, max_context=64)) == [1, 5, 7, None]


def test_rows_with_responses_say_it_too_and_of_those_put_together_the_first(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = [{"prompt": "a", "response": "b", "tries": tries} for tries in (4, 1, None, 2)]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    options = DataOptions(path=path, label_key=None, metadata_keys=("tries",), num_retries_key="tries")
    assert retries(load_dataset(options, tokenizer_folder, seed=0, max_context=64, recorded=RECORDED)) == [4, None]
    bad = write_lines(tmp_path / "bad.jsonl", rows[0], {**rows[1], "tries": -1})
    with pytest.raises(DataError, match=r"bad.jsonl:2: 'tries' is a number \(-1\)"):
        load_dataset(
            DataOptions(path=bad, label_key=None, metadata_keys=("tries",), num_retries_key="tries"),
            tokenizer_folder,
            seed=0,
            max_context=64,
            recorded=RECORDED,
        )


# --- scenarios ----------------------------------------------------------------------------------------------------

BASE = """
run: {{name: trial, num_steps: 4}}
model: {{make: xs}}
data: {{path: rows.jsonl, label_key: null, num_retries_key: tries, {data}}}
evaluation: {{datasets: [{{name: a, path: rows.jsonl, {evaluation}}}]}}
"""


def written(tmp_path: Path, *tries: object, data: str, evaluation: str = "max_prompts: 1") -> Path:
    write_lines(tmp_path / "rows.jsonl", *({"prompt": "1+1=", "tries": each} for each in tries or (3,)))
    (tmp_path / "scenario.yaml").write_text(BASE.format(data=data, evaluation=evaluation))
    return tmp_path / "scenario.yaml"


@pytest.mark.parametrize(
    ("data", "evaluation", "key", "said"),
    [
        ("shuffle: true", "max_prompts: 1", "data.num_retries_key", "'tries' is neither among data.metadata_keys nor"),
        ("metadata: {tries: -1}", "max_prompts: 1", "data.metadata.tries", "is a number (-1); expected a whole number"),
        ("metadata: {tries: true}", "max_prompts: 1", "data.metadata.tries", "is a boolean (True)"),
        ("metadata: {tries: 0.5}", "max_prompts: 1", "data.metadata.tries", "from 0 to 1000"),
        (
            "metadata_keys: [tries]",
            "metadata: {tries: 1001}",
            "evaluation.datasets[0].metadata.tries",
            "is a number (1001)",
        ),
    ],
)
def test_a_scenario_that_cannot_mean_it_is_refused_with_what_to_do(
    tmp_path: Path, data: str, evaluation: str, key: str, said: str
) -> None:
    with pytest.raises(UserFault) as caught:
        load_scenario(written(tmp_path, data=data, evaluation=evaluation))
    assert f": {key}: " in str(caught.value)
    assert said in str(caught.value)


def test_what_rows_say_is_looked_at_before_the_run(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path, 3, 0, -2, data="metadata_keys: [tries]"))
    with pytest.raises(UserFault, match=r"data.path: .*rows.jsonl:3: 'tries' is a number \(-2\)"):
        check_data(scenario)


def test_an_evaluation_says_it_as_the_run_does_or_of_its_own(tmp_path: Path, tokenizer_folder: Path) -> None:
    for evaluation, expected in (("max_prompts: 9", 4), ("metadata_keys: [], metadata: {tries: 6}", 6)):
        scenario = load_scenario(written(tmp_path, 4, data="metadata_keys: [tries]", evaluation=evaluation))
        (rows,) = load_evaluation_rows(sets_of(scenario), tokenizer_folder, seed=0, max_context=64)
        assert rows.prompt(0).num_retries == expected
