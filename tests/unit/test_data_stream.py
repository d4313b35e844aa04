"""Rows that are read when they are wanted: the same prompts as in memory, an index that knows its file."""

# pyarrow has types in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import queue
import random
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import make_tokenizer, write_lines

from penstock.backends.data.backend import DatasetBackend
from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import DataOptions, SourceOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow
from penstock.backends.data.stream_files import KEPT_GROUPS, ParquetRows
from penstock.backends.data.streamed import BackgroundRows, StreamedRows
from penstock.messages.commands import FetchPrompts, PromptRequest
from penstock.messages.local import LocalEvent, PromptsFetched

MAX_CONTEXT = 64
NUM_ROWS = 1300
WAIT_S = 30.0


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=True)


def columns(index: int) -> dict[str, object]:
    tries = None if index % 4 else index % 9
    return {"prompt": f"{index} + {index % 7}=", "label": index, "level": {"number": index % 3}, "tries": tries}


def written(folder: Path, kind: str) -> str:
    rows = [columns(index) for index in range(NUM_ROWS)]
    if kind == "jsonl":
        return write_lines(folder / "rows.jsonl", "\n", *rows[:5], "\n", *rows[5:])
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, folder / "rows.parquet", row_group_size=100)
        return str(folder / "rows.parquet")
    arrow = folder / "saved"
    arrow.mkdir()
    halves = [table.slice(0, 700), table.slice(700)]
    for number, half in enumerate(halves):
        with pa.OSFile(str(arrow / f"data-{number}.arrow"), "wb") as file, pa.ipc.new_stream(file, half.schema) as out:
            out.write_table(half, max_chunksize=90)
    files = [{"filename": f"data-{number}.arrow"} for number in range(2)]
    (arrow / "state.json").write_text(json.dumps({"_data_files": files}))
    return str(arrow)


def stream(options: DataOptions, tokenizer_folder: Path, folder: Path | None = None) -> StreamedRows:
    return StreamedRows(options, tokenizer_folder, max_context=MAX_CONTEXT, folder=folder)


def options_of(path: str, **changes: object) -> DataOptions:
    chosen = DataOptions(
        path=path, stream=True, metadata_keys=("level", "tries"), num_retries_key="tries", prefetch_rows=16
    )
    return msgspec.structs.replace(chosen, **changes)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("cut", ["", "@[3:900]", "@[-50:-3]"])
def test_streamed_prompts_are_those_in_memory(tmp_path: Path, tokenizer_folder: Path, kind: str, cut: str) -> None:
    options = options_of(written(tmp_path, kind) + cut)
    memory = load_dataset(options, tokenizer_folder, seed=0, max_context=MAX_CONTEXT)
    rows = stream(options, tokenizer_folder, tmp_path / "index")
    assert (rows.num_rows, rows.num_skipped) == (memory.num_rows, 0)
    order = random.Random(3).sample(range(rows.num_rows), k=min(200, rows.num_rows))
    rows.name_ahead(order[:10])
    assert rows.prefetch()
    for row in order:
        assert rows.prompt(row, 2) == memory.prompt(row, 2)
        assert rows.place_of(row) == memory.place_of(row)
    assert rows.num_ready == 10
    assert list(rows.hashes) == list(memory.hashes)
    rows.close()


def test_bad_rows_are_refused_before_the_run_or_counted_and_left_out(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write_lines(
        tmp_path / "rows.jsonl", columns(0), "oops\n", {"q": 1}, {**columns(1), "prompt": "x" * 100}, columns(2)
    )
    with pytest.raises(DataError, match=r"rows.jsonl:2:1: malformed JSON.* 2 more rows have problems"):
        stream(options_of(path), tokenizer_folder, tmp_path / "strict")
    rows = stream(options_of(path, skip_bad_rows=True), tokenizer_folder, tmp_path / "lenient")
    assert rows.num_rows == 2
    assert rows.skipped == {
        f"malformed JSON ({path}:2:1)": 1,
        f"'prompt' is missing ({path}:3)": 1,
        f"the prompt is too long ({path}:4)": 1,
    }
    assert [rows.prompt(row, 0).label for row in range(2)] == ["0", "2"]
    assert rows.place_of(1) == f"{path}:5"
    rows.close()
    assert not list(tmp_path.glob("*.partial/index.json"))


def test_an_index_is_made_once_and_used_again(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = written(tmp_path, "jsonl")
    told: list[str] = []
    first = StreamedRows(
        options_of(path), tokenizer_folder, max_context=MAX_CONTEXT, folder=tmp_path / "index", tell=told.append
    )
    assert told[0] == "indexing rows: 0 %"
    assert len(told) > 1
    again: list[str] = []
    second = StreamedRows(
        options_of(path), tokenizer_folder, max_context=MAX_CONTEXT, folder=tmp_path / "index", tell=again.append
    )
    assert not again
    assert second.digest == first.digest
    (tmp_path / "rows.jsonl").touch()  # another time and the same contents
    assert stream(options_of(path), tokenizer_folder, tmp_path / "index").digest == first.digest


def test_a_run_does_not_go_on_with_other_rows(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_lines(path, columns(0), columns(1))
    stream(options_of(str(path)), tokenizer_folder, tmp_path / "index").close()
    with pytest.raises(DataError, match="the options of its rows, the tokenizer or the chat template have changed"):
        stream(options_of(str(path), label_key=None), tokenizer_folder, tmp_path / "index")
    with pytest.raises(DataError, match="the options of its rows, the tokenizer or the chat template have changed"):
        stream(options_of(str(path), num_retries_key=None), tokenizer_folder, tmp_path / "index")
    write_lines(path, columns(0), columns(2))
    with pytest.raises(DataError, match=r"rows.jsonl has changed since the run was begun \(other contents of the same"):
        stream(options_of(str(path)), tokenizer_folder, tmp_path / "index")
    write_lines(path, columns(0), columns(1), columns(2))
    with pytest.raises(DataError, match=r"rows.jsonl has changed since the run was begun \(\d+ bytes then, \d+ now\)"):
        stream(options_of(str(path)), tokenizer_folder, tmp_path / "index")


def test_a_file_that_changes_under_a_run_ends_it(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_lines(path, columns(0), columns(1))
    rows = stream(options_of(str(path)), tokenizer_folder)
    with path.open("r+b") as file:
        file.write(b'{"prompt": "9')
    with pytest.raises(DataError, match=r"rows.jsonl:1: the prompt is not the one that was indexed"):
        rows.prompt(0, 0)
    rows.close()


def test_sources_of_several_kinds_are_one_dataset(tmp_path: Path, tokenizer_folder: Path) -> None:
    one, two = written(tmp_path, "jsonl"), written(tmp_path, "parquet")
    options = DataOptions(
        stream=True,
        sources=(SourceOptions(path=f"{one}@[:9]", name="a", weight=2), SourceOptions(path=two, name="b", weight=1)),
    )
    rows = stream(options, tokenizer_folder)
    assert [(s.name, s.num_rows, s.share, s.block_rows) for s in rows.sources] == [
        ("a", 9, 2, 4096),
        ("b", NUM_ROWS, 1, 100),
    ]
    assert rows.prompt(8, 0).label == "8"
    assert rows.prompt(9, 0).label == "0"
    assert len(rows.hashes) == 9 + NUM_ROWS
    rows.close()


def test_few_row_groups_are_kept(tmp_path: Path) -> None:
    file = ParquetRows(Path(written(tmp_path, "parquet")), ["prompt"], [])
    for row in range(0, NUM_ROWS, 50):
        found = file.read(row, 0, row)
        assert isinstance(found, RawRow)
        assert found.columns == {"prompt": columns(row)["prompt"]}
    assert file.num_kept == KEPT_GROUPS
    file.close()


def test_the_backend_answers_in_order_and_reads_ahead_when_it_is_idle(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = stream(options_of(written(tmp_path, "jsonl")), tokenizer_folder)
    answers, failures = queue.Queue[LocalEvent](), queue.Queue[BaseException]()
    backend = BackgroundRows(DatasetBackend(rows), rows)
    backend.start(answers.put, failures.put)
    backend.execute(FetchPrompts((PromptRequest(0, 5, 0), PromptRequest(1, 3, 0)), ahead=tuple(range(10, 30))))
    first = answers.get(timeout=WAIT_S)
    assert isinstance(first, PromptsFetched)
    assert [(each.group_id, each.prompt.row) for each in first.prompts] == [(0, 5), (1, 3)]
    for group, row in enumerate(range(10, 30), start=2):
        backend.execute(FetchPrompts((PromptRequest(group, row, 1),)))
    fetched = [answers.get(timeout=WAIT_S) for _ in range(20)]
    assert [each.prompts[0].prompt.row for each in fetched if isinstance(each, PromptsFetched)] == list(range(10, 30))
    backend.execute(FetchPrompts((PromptRequest(99, NUM_ROWS, 0),)))
    assert isinstance(failures.get(timeout=WAIT_S), IndexError)
    backend.close(1.0)
