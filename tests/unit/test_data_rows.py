"""Reading datasets: what comes out of good rows, and what a user is told about bad ones."""
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from penstock.backends.data.backend import DatasetBackend
from penstock.backends.data.dataset import BATCH_ROWS, load_dataset
from penstock.backends.data.generated import lines_rows
from penstock.backends.data.jsonl import parsed_line
from penstock.backends.data.lines import lines_row
from penstock.backends.data.options import DataOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow
from penstock.backends.data.sources import parse_source, read_rows
from penstock.messages.arrays import tokens_view
from penstock.messages.commands import FetchPrompts, PromptRequest
from penstock.messages.local import PromptsFetched

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.data.dataset import Dataset
    from penstock.messages.local import LocalEvent

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 =+?"
SPECIAL = ("<pad>", "<eos>", "<bos>")
MAX_CONTEXT = 64


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a character; begin-of-sequence is put before a text, and the file asks to cut at 5 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel(vocab={s: i for i, s in enumerate((*SPECIAL, *CHARACTERS))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_lines(path: Path, *rows: object) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: str, folder: Path, **options: object) -> Dataset:
    document = {"path": path, **options}
    return load_dataset(msgspec.convert(document, DataOptions), folder, seed=3, max_context=MAX_CONTEXT)


def refusal(path: str, folder: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        load(path, folder, **options)
    return str(caught.value)


def test_a_row_becomes_a_prompt_with_everything_the_reward_needs(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"q": "ab=", "a": 4.5, "level": {"x": [1, None]}, "other": 1})
    dataset = load(rows, tokenizer_folder, prompt_key="q", label_key="a", metadata_keys=["level"])
    prompt = dataset.prompt(0, epoch=7)
    assert (prompt.row, prompt.epoch, prompt.text, prompt.label) == (0, 7, "ab=", "4.5")
    assert msgspec.json.decode(prompt.metadata) == {"level": {"x": [1, None]}}
    assert list(tokens_view(prompt.tokens)) == [2, 3, 4, 3 + CHARACTERS.index("=")]


def test_limits_in_the_tokenizer_file_never_cut_or_pad_a_prompt(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "a" * 40}, {"prompt": "b"})
    dataset = load(rows, tokenizer_folder, label_key=None)
    assert [dataset.prompt(row, 0).num_tokens for row in range(2)] == [41, 2]


def test_rows_keep_their_order_over_many_batches(tmp_path: Path, tokenizer_folder: Path) -> None:
    num_rows = 2 * BATCH_ROWS + 3
    rows = write_lines(tmp_path / "rows.jsonl", *({"prompt": f"{i}=", "label": i} for i in range(num_rows)))
    dataset = load(rows, tokenizer_folder)
    assert dataset.num_rows == num_rows
    assert [dataset.prompt(row, 0).label for row in range(num_rows)] == [str(i) for i in range(num_rows)]


def test_blank_lines_crlf_and_a_byte_order_mark_do_no_harm(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b"}')
    dataset = load(str(path), tokenizer_folder, label_key=None)
    assert [dataset.prompt(row, 0).text for row in range(2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("part", "expected"), [("@[1:3]", "bc"), ("@[2:]", "cd"), ("@[:1]", "a"), ("@[0:99]", "abcd"), ("", "abcd")]
)
def test_a_slice_takes_its_rows_in_jsonl_and_parquet(
    tmp_path: Path, tokenizer_folder: Path, part: str, expected: str
) -> None:
    jsonl = write_lines(tmp_path / "rows.jsonl", *({"prompt": letter} for letter in "abcd"))
    pq.write_table(pa.table({"prompt": list("abcd")}), tmp_path / "rows.parquet")
    for path in (jsonl, str(tmp_path / "rows.parquet")):
        dataset = load(path + part, tokenizer_folder, label_key=None)
        assert "".join(dataset.prompt(row, 0).text for row in range(dataset.num_rows)) == expected


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("@[4:]", r"selects no row: there are 4"),
        ("@[2:2]", r"the slice \[2:2\] is empty"),
        ("@[-1:-1]", r"the slice \[-1:-1\] is empty"),
        ("@[a:]", r"expected a slice like @\[0:1000\]"),
        ("@[0:4:2]", r"no step"),
    ],
)
def test_a_slice_that_selects_nothing_or_is_none_is_refused(
    tmp_path: Path, tokenizer_folder: Path, part: str, message: str
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", *({"prompt": letter} for letter in "abcd"))
    with pytest.raises(DataError, match=message):
        load(rows + part, tokenizer_folder, label_key=None)


def test_skipping_bad_rows_does_not_move_a_slice(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "a"}, "{bad}\n", {"prompt": "c"}, {"prompt": "d"})
    dataset = load(f"{rows}@[1:3]", tokenizer_folder, label_key=None, skip_bad_rows=True)
    assert [dataset.prompt(row, 0).text for row in range(dataset.num_rows)] == ["c"]
    assert dataset.num_skipped == 1


def test_long_prompts_are_skipped_and_counted_where_that_is_allowed_and_nothing_else_is(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "x" * 64}, {"prompt": "c"}, {"prompt": "y" * 99})
    dataset = load(rows, tokenizer_folder, label_key=None, skip_long_prompts=True)
    assert [dataset.prompt(row, 0).text for row in range(dataset.num_rows)] == ["c"]
    assert dataset.num_skipped == 2
    bad = write_lines(tmp_path / "bad.jsonl", {"prompt": "x" * 64}, {"prompt": "c"}, {"prompt": 7})
    with pytest.raises(
        DataError, match=r"bad.jsonl:3: 'prompt' is a number .* 1 more row has .* 1 × the prompt is too long"
    ):
        load(bad, tokenizer_folder, label_key=None, skip_long_prompts=True)
    with pytest.raises(DataError, match=r"Leave long prompts out with data.skip_long_prompts: true"):
        load(rows, tokenizer_folder, label_key=None)
    none = write_lines(tmp_path / "none.jsonl", {"prompt": "x" * 64})
    with pytest.raises(DataError, match="no usable row is left"):
        load(none, tokenizer_folder, label_key=None, skip_long_prompts=True)


@pytest.mark.parametrize(
    ("label", "text"), [(["a", 1], '["a",1]'), ({"answer": {"x": None}}, '{"answer":{"x":null}}'), (2.5, "2.5")]
)
def test_a_label_that_is_no_text_is_one_in_json(
    tmp_path: Path, tokenizer_folder: Path, label: object, text: str
) -> None:
    dataset = load(write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "label": label}), tokenizer_folder)
    assert dataset.prompt(0, 0).label == text


GOOD = {"prompt": "a=", "label": "a"}


@pytest.mark.parametrize(
    ("row", "place", "message"),
    [
        (
            {"promt": "x", "label": "y"},
            "2",
            "'prompt' is missing; columns here are 'promt', 'label' (did you mean 'promt'?)",
        ),
        ({"prompt": "x"}, "2", "'label' is missing; columns here are 'prompt'. Set data.label_key"),
        ({}, "2", "'prompt' is missing; the row is empty"),
        ({"prompt": "  ", "label": ""}, "2", "'prompt' is empty"),
        ({"prompt": 7, "label": ""}, "2", "'prompt' is a number (7); expected a text or a list of chat messages"),
        ({"prompt": None, "label": ""}, "2", "'prompt' is null"),
        ({"prompt": [{"role": "user"}], "label": ""}, "2", "set data.chat_template: true"),
        ({"prompt": "x", "label": None}, "2", "'label' is null; expected a text, a number, a list or an object"),
        ({"prompt": "é", "label": ""}, "2", "a character that the model does not know"),
        (
            {"prompt": "x" * 64, "label": ""},
            "2",
            "the prompt has 65 tokens; at most 63 fit (model.max_context, 64, less",
        ),
        ('{"prompt": "x", }\n', "2:17", "malformed JSON: "),
        ('{"prompt": "x"\n', "2:15", "malformed JSON: expecting ',' delimiter, at the end of the line"),
        ('{"prompt": "x" "label": "y"}\n', "2:16", "between"),
        ('{"prompt": NaN}\n', "2", "malformed JSON: NaN is no JSON value"),
        (f'{{"prompt": {"9" * 5000}}}\n', "2", "malformed JSON: a number of 5000 digits is longer than can be read"),
        ("[1, 2]\n", "2", "expected one JSON object a line, found a list ([1, 2])"),
        ('"text"\n', "2", "found a text ('text')"),
    ],
)
def test_a_bad_row_names_file_line_and_what_was_found(
    tmp_path: Path, tokenizer_folder: Path, row: object, place: str, message: str
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", GOOD, row, GOOD)
    told = refusal(rows, tokenizer_folder)
    assert told.startswith(f"{rows}:{place}: ")
    assert message in told
    assert told.endswith("Mend the file, or set data.skip_bad_rows: true to skip and count such rows")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "a", "label": "1", "label": "2"}', "label"),
        ('{"prompt":"a","label":{"x":1,"y":[{"z":1,"z":2}]}}', "z"),
        ('{"prompt": "a", "label" : 1, "label": 2}', "label"),
        (r'{"prompt": "a", "label": "\":", "l\u0061bel": ""}', "label"),
        (r'{"prompt": "a", "b\\": "\":", "b\\": 1}', r"b\\"),
        ('{"prompt": {"a": 1}, "prompt": "a", "label": 1}', "prompt"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, tokenizer_folder: Path, line: str, key: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "label": "1"}, line + "\n")
    told = refusal(path, tokenizer_folder, prompt_key="prompt", label_key="label")
    assert told.startswith(f"{path}:2: the key '{key}' stands twice in one object, and only one of its values")
    assert load(path, tokenizer_folder, skip_bad_rows=True).skipped == {f"a key stands twice ({path}:2)": 1}


@pytest.mark.parametrize(
    "line",
    [
        r'{"prompt": "say \"a\": b", "label": "\\"}',
        '{"prompt" : "a : b", "label":{"x":[{"y":1},{"y":2}],"label":3}}',
        r'{"prompt": "a", "label": {"b\\": "\":", "b": 1, "huge": 1%s}}' % ("0" * 4000),
    ],
)
def test_a_text_that_looks_like_keys_is_none(line: str) -> None:
    row = parsed_line("rows.jsonl:1", line.encode(), is_first=True)
    assert isinstance(row, RawRow)
    assert row.columns == json.loads(line)


def test_a_line_that_is_not_utf8_names_its_column(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "label": ""}\n{"prompt": "\xe9"}\n')
    assert f"{path}:2:13: not UTF-8" in refusal(str(path), tokenizer_folder)


def test_the_first_bad_row_is_told_and_the_others_are_counted(tmp_path: Path, tokenizer_folder: Path) -> None:
    bad = ({"prompt": ""}, "oops\n", {"q": 1}, {"q": 2}, {"prompt": ""})
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "a"}, *bad)
    told = refusal(rows, tokenizer_folder, label_key=None)
    assert told.startswith(f"{rows}:2: 'prompt' is empty. 4 more rows have problems: 2 × 'prompt' is missing ")
    assert f"2 × 'prompt' is missing (the first at {rows}:4)" in told
    assert f"1 × malformed JSON ({rows}:3:1)" in told
    assert "1 × 'prompt' is empty, " in told, "its first is told already"


def test_bad_rows_are_skipped_and_counted_only_when_allowed(tmp_path: Path, tokenizer_folder: Path) -> None:
    bad = ({"prompt": ""}, "oops\n", {"q": 1}, {"prompt": "x" * 100}, {"prompt": "é"}, {"prompt": " "})
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "a"}, *bad, {"prompt": "b"})
    dataset = load(rows, tokenizer_folder, label_key=None, skip_bad_rows=True)
    assert [dataset.prompt(row, 0).text for row in range(dataset.num_rows)] == ["a", "b"]
    assert dataset.skipped == {
        f"'prompt' is empty (the first at {rows}:2)": 2,
        f"malformed JSON ({rows}:3:1)": 1,
        f"'prompt' is missing ({rows}:4)": 1,
        f"the prompt is too long ({rows}:5)": 1,
        f"the tokenizer refuses the text ({rows}:6)": 1,
    }
    assert dataset.num_skipped == 6


def test_a_file_in_which_every_row_is_bad_stops_the_run_even_if_skipping(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"question": "a"}, {"question": "b"})
    told = refusal(rows, tokenizer_folder, label_key=None, skip_bad_rows=True)
    assert "no usable row is left" in told
    assert "'prompt' is missing; columns here are 'question'. Set data.prompt_key" in told


def test_no_skipping_is_suggested_where_it_would_leave_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"question": "a"})
    assert "skip_bad_rows" not in refusal(rows, tokenizer_folder, label_key=None)


def test_a_shorter_limit_of_the_scenario_is_the_one_that_counts(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "abcd"})
    told = refusal(rows, tokenizer_folder, label_key=None, max_prompt_tokens=4)
    assert "the prompt has 5 tokens; at most 4 fit (data.max_prompt_tokens)" in told
    assert load(rows, tokenizer_folder, label_key=None, max_prompt_tokens=5).num_rows == 1


def test_an_empty_file_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    assert refusal(write_lines(tmp_path / "rows.jsonl", "\n \n"), tokenizer_folder).endswith("has no rows")


@pytest.mark.parametrize(
    ("text", "hint"), [('[{"prompt": "a"}]', "jq -c '.[]'"), ('{\n  "prompt": "a"\n}', "spread over several lines")]
)
def test_a_json_file_that_is_not_one_object_a_line_says_how_to_convert(
    tmp_path: Path, tokenizer_folder: Path, text: str, hint: str
) -> None:
    (tmp_path / "rows.json").write_text(text)
    assert hint in refusal(str(tmp_path / "rows.json"), tokenizer_folder)


def test_a_missing_file_shows_what_is_there(tmp_path: Path, tokenizer_folder: Path) -> None:
    write_lines(tmp_path / "train.jsonl", GOOD)
    told = refusal(str(tmp_path / "trian.jsonl"), tokenizer_folder)
    assert "there is no file" in told
    assert "data files beside it: train.jsonl" in told
    assert "does not exist either" in refusal(str(tmp_path / "nowhere" / "x.jsonl"), tokenizer_folder)
    assert "is a folder; name one file in it (train.jsonl)" in refusal(str(tmp_path), tokenizer_folder)


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = tmp_path / "of mine's é"
    folder.mkdir()
    (folder / "rows.csv").write_text('\ufeffprompt,label\n"a\nb",007\n')
    told = refusal(str(folder / "rows.csv"), tokenizer_folder)
    assert "cannot tell what kind of file" in told
    program = told.partition("Its rows as JSON: python ")[2]
    subprocess.run(f"{sys.executable} {program}", shell=True, check=True, timeout=60)
    (row,) = read_rows(parse_source(str(folder / "rows.jsonl")), ["prompt"], seed=0)
    assert isinstance(row, RawRow)
    assert row.columns == {"prompt": "a\nb", "label": "007"}


def test_parquet_rows_carry_types_and_nested_columns(tmp_path: Path, tokenizer_folder: Path) -> None:
    table = pa.table(
        {"prompt": ["a", "b"], "label": [1, 2], "extra": [{"k": [1.5]}, {"k": []}], "unused": [b"", b"\xff"]}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    dataset = load(str(tmp_path / "rows.parquet"), tokenizer_folder, metadata_keys=["extra"])
    assert dataset.prompt(0, 0).label == "1"
    assert msgspec.json.decode(dataset.prompt(0, 0).metadata) == {"extra": {"k": [1.5]}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_key_may_lead_into_an_object(tmp_path: Path, tokenizer_folder: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    rows = [{"prompt": "a=", "reward_model": {"style": "rule", "ground_truth": "b"}, "extra": {"at": {"index": 7}}}]
    write_lines(path, *rows) if kind == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), path)
    keys = {"label_key": "reward_model.ground_truth", "metadata_keys": ["extra.at.index"]}
    prompt = load(str(path), tokenizer_folder, **keys).prompt(0, 0)
    assert (prompt.label, msgspec.json.decode(prompt.metadata)) == ("b", {"extra.at.index": 7})
    for label_key, found in (
        ("reward_model.groundtruth", "there is no 'groundtruth' in an object ({'style': 'rule'"),
        ("prompt.x", "there is no 'x' in a text ('a=')"),
        ("rewardmodel.ground_truth", "columns here are "),
    ):
        told = refusal(str(path), tokenizer_folder, label_key=label_key)
        assert f"'{label_key}' is missing" in told
        assert found in told


def test_a_column_of_a_name_with_dots_comes_before_an_object(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "a=", "a.b": "column", "a": {"b": "object"}})
    assert load(rows, tokenizer_folder, label_key="a.b").prompt(0, 0).label == "column"


def test_columns_of_one_name_are_refused_where_they_are_wanted(tmp_path: Path, tokenizer_folder: Path) -> None:
    columns = [pa.array(["a", "b"]), pa.array(["1", "2"]), pa.array(["3", "4"])]
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table(columns, names=["prompt", "label", "label"]), path)
    told = refusal(path, tokenizer_folder, label_key="label")
    assert told == f"{path}: 2 columns are called 'label', and only one could count; leave one"
    assert load(path, tokenizer_folder, label_key=None).num_rows == 2


def test_bad_parquet_files_and_rows_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["a"], "label": ["b"]}), path)
    assert f"{path}: 'prompt' is missing; columns here are 'question', 'label'" in refusal(str(path), tokenizer_folder)
    pq.write_table(pa.table({"prompt": ["a", None], "label": ["", ""]}), path)
    assert refusal(str(path), tokenizer_folder).startswith(f"{path}: row 1: 'prompt' is null")
    path.write_bytes(b"PAR1 nonsense PAR1")
    assert "cannot be read as Parquet" in refusal(str(path), tokenizer_folder)


def test_lines_are_the_rows_of_the_task_for_the_runs_seed(tokenizer_folder: Path) -> None:
    dataset = load("lines:20", tokenizer_folder)
    assert dataset.num_rows == 20
    for row in range(20):
        prompt = dataset.prompt(row, 0)
        assert (prompt.text, prompt.label) == lines_row(3, row)
        assert len(tokens_view(prompt.tokens)) == len(prompt.text) + 1


def test_of_generated_rows_the_columns_that_are_asked_for_are_made() -> None:
    source = parse_source("lines:3")
    whole = list(lines_rows("lines:3", "3", 5))
    for columns, optional, made in (
        (["prompt"], [], {"prompt"}),
        (["prompt", "response"], ["chosen", "loss"], {"prompt", "response", "chosen"}),
        (["prompt", "question"], [], {"prompt", "label", "response", "chosen", "rejected"}),
    ):
        rows = [row for row in read_rows(source, columns, seed=5, optional=optional) if isinstance(row, RawRow)]
        assert [set(row.columns) for row in rows] == [made] * 3
        assert [{name: each.columns[name] for name in made} for each in whole] == [row.columns for row in rows]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lines:many", "expected a number of rows, as in lines:256, got 'many'"),
        ("lines:0", "got '0'"),
        ("reasoning_gym:chain_sum", "expected a number of rows"),
    ],
)
def test_generated_sources_that_cannot_be_made_are_refused(tokenizer_folder: Path, path: str, message: str) -> None:
    assert message in refusal(path, tokenizer_folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:chain_summ:3", "reasoning-gym has no task 'chain_summ'; near it: chain_sum"),
        ("reasoning_gym:composite:3", "cannot make composite without further options"),
    ],
)
def test_tasks_of_reasoning_gym_that_cannot_be_made_are_refused(
    tokenizer_folder: Path, path: str, message: str
) -> None:
    pytest.importorskip("reasoning_gym")
    assert message in refusal(path, tokenizer_folder)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    assert f"no tokenizer in {tmp_path}: it has no tokenizer.json" in refusal("lines:2", tmp_path)
    assert "there is no such folder" in refusal("lines:2", tmp_path / "missing")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in refusal("lines:2", tmp_path)


def test_the_backend_answers_each_request_with_its_row_and_epoch(tokenizer_folder: Path) -> None:
    backend = DatasetBackend(load("lines:5", tokenizer_folder))
    emitted: list[LocalEvent] = []
    backend.start(emitted.append, lambda _: None)
    backend.execute(FetchPrompts((PromptRequest(10, 4, 0), PromptRequest(11, 0, 1))))
    (answer,) = emitted
    assert isinstance(answer, PromptsFetched)
    assert [(p.group_id, p.prompt.row, p.prompt.epoch) for p in answer.prompts] == [(10, 4, 0), (11, 0, 1)]
    assert {metric.name: metric.value for metric in backend.gauges()} == {"data/rows": 5, "data/skipped_rows": 0}
    with pytest.raises(IndexError, match="row 5 of a dataset of 5"):
        backend.execute(FetchPrompts((PromptRequest(12, 5, 0),)))


def test_reading_plain_prompts_imports_neither_torch_nor_transformers(tokenizer_folder: Path) -> None:
    program = (
        "import sys, pathlib; from penstock.backends.data.dataset import load_dataset; "
        "from penstock.backends.data.backend import DatasetBackend; "
        "from penstock.backends.data.options import DataOptions; "
        "load_dataset(DataOptions(path='lines:3'), pathlib.Path(sys.argv[1]), seed=0, max_context=64); "
        "print(sorted({'torch', 'transformers', 'pyarrow', 'reasoning_gym'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(tokenizer_folder)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "[]\n"
