"""Files that rows are read from: compressed ones, folders that Hugging Face datasets has saved, slices from the end."""
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.backends.data import jsonl, parquet, stream_files
from penstock.backends.data.arrow_rows import rows_in
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.data.stream_files import open_row_file

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from penstock.backends.data.stream_files import Located


def prompts(path: object) -> list[object]:
    rows = list(read_rows(parse_source(str(path)), ["prompt"], seed=0, optional=["label"]))
    return [row.columns["prompt"] if isinstance(row, RawRow) else row for row in rows]


def refusal(path: object) -> str:
    with pytest.raises(DataError) as caught:
        prompts(path)
    return str(caught.value)


def streamed(path: Path) -> list[Located]:
    return [located for _, located in open_row_file(str(path), ["prompt"]).scan()]


def lines(count: int) -> bytes:
    return "".join(json.dumps({"prompt": index, "other": "x" * 50}) + "\n" for index in range(count)).encode()


def compress(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    else:
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(data)
    return path


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_lines_are_those_of_the_file(tmp_path: Path, ending: str) -> None:
    path = compress(tmp_path / f"rows.jsonl{ending}", lines(5000))
    assert prompts(path) == list(range(5000))
    places = [row.place for row in read_rows(parse_source(f"{path}@[-1:]"), ["prompt"], seed=0)]
    assert places == [f"{path}:5000"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_files_compressed_one_after_the_other_are_read_to_the_end(tmp_path: Path, ending: str) -> None:
    parts = [compress(tmp_path / f"{part}{ending}", lines(3)).read_bytes() for part in range(2)]
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(b"".join(parts))
    assert prompts(path) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_or_none_is_refused(tmp_path: Path, ending: str) -> None:
    path = compress(tmp_path / f"rows.jsonl{ending}", lines(5000))
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:-3], b"no such thing" * 100):
        path.write_bytes(damaged)
        assert f"{path} cannot be read: " in refusal(path)


def test_a_compressed_file_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    assert "cannot tell what kind of file" in refusal(compress(tmp_path / "rows.csv.gz", b"prompt\n"))
    assert "data files beside it: rows.jsonl.zst" in refusal(
        compress(tmp_path / "rows.jsonl.zst", lines(1)).with_name("x.jsonl")
    )


def save_folder(folder: Path, *tables: pa.Table, indices: bool = False) -> Path:
    """As ``datasets.Dataset.save_to_disk`` does."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{len(tables):05d}.arrow" for index in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    files = [{"filename": name} for name in names]
    state = {"_data_files": files, "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state | ({"_indices_data_files": files} if indices else {})))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_folder_is_read_in_the_order_of_its_files(tmp_path: Path) -> None:
    tables = [pa.table({"prompt": [0, 1, 2], "label": ["a", "b", "c"]}), pa.table({"prompt": [3], "label": ["d"]})]
    folder = save_folder(tmp_path / "saved", *tables)
    assert prompts(folder) == [0, 1, 2, 3]
    (row,) = read_rows(parse_source(f"{folder}@[3:]"), ["prompt"], seed=0, optional=["label", "nothing"])
    assert row == RawRow(f"{folder}: row 3", {"prompt": 3, "label": "d"})


def test_what_is_wrong_with_a_saved_folder_is_said(tmp_path: Path) -> None:
    table = pa.table({"question": ["a"]})
    folder = save_folder(tmp_path / "dictionary" / "train", table)
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"several splits; name one of them: {folder}, {folder.parent}/test" in refusal(folder.parent)
    assert "'prompt' is missing; columns here are 'question'" in refusal(folder)
    assert "flatten_indices" in refusal(save_folder(tmp_path / "selected", table, indices=True))
    (folder / "data-00000-of-00001.arrow").write_bytes(b"nonsense")
    assert "cannot be read as a stream of Arrow batches" in refusal(folder)
    (folder / "data-00000-of-00001.arrow").unlink()
    assert "cannot be read as a stream of Arrow batches" in refusal(folder)
    (folder / "state.json").write_text("{}")
    assert "state.json cannot be read" in refusal(folder)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_offset_in_a_saved_folder_leads_nowhere_else(tmp_path: Path, is_streamed: bool) -> None:
    table = pa.table({"prompt": ["one", "three"]})
    folder = save_folder(tmp_path / "saved", table)
    (file,) = folder.glob("*.arrow")
    offsets = b"".join(end.to_bytes(4, "little") for end in (0, 3, 8))
    data = file.read_bytes()
    assert data.count(offsets) == 1
    file.write_bytes(data.replace(offsets, offsets[:8] + (64).to_bytes(4, "little")))
    with pytest.raises(DataError, match=f"{file.name}: its data are damaged"):
        streamed(folder) if is_streamed else prompts(folder)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["no UTF-8", "year 292277"])
def test_values_that_python_does_not_have_are_said(tmp_path: Path, kind: str, is_streamed: bool) -> None:
    text = pa.array([b"\xff\xfe"], type=pa.binary()).view(pa.string())
    table = pa.table({"prompt": text if kind == "no UTF-8" else pa.array([2**62], type=pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: a value cannot be read"):
        streamed(tmp_path / "rows.parquet") if is_streamed else prompts(tmp_path / "rows.parquet")


def repeating(path: Path, text: str, num_rows: int) -> Path:
    """A file in which a text stands once, and in so many rows."""
    indices = pa.array([0] * num_rows, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array([text]))
    pq.write_table(pa.table({"prompt": column}), path, store_schema=False)
    return path


@pytest.mark.parametrize("module", [parquet, stream_files], ids=["read", "streamed"])
def test_a_text_that_stands_once_for_many_rows_is_unpacked_for_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    sizes: list[int] = []

    def noted(batch: pa.RecordBatch, file: Path) -> list[dict[str, object]]:
        sizes.append(batch.nbytes)
        return rows_in(batch, file)

    monkeypatch.setattr(module, "rows_in", noted)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1 << 20)
    path = repeating(tmp_path / "rows.parquet", "x" * 100_000, 200)
    assert path.stat().st_size < 100_000
    found = streamed(path) if module is stream_files else prompts(path)
    assert len(found) == 200
    assert max(sizes) <= 1 << 20


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_row_that_is_too_long_is_refused_by_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1 << 20)
    path = repeating(tmp_path / "rows.parquet", "x" * (2 << 20), 4)
    with pytest.raises(
        DataError, match=r"rows\.parquet: row group 0: column 'prompt' has more than 1 MiB in each of 4"
    ):
        streamed(path) if is_streamed else prompts(path)


def test_a_row_group_that_is_far_larger_than_in_its_file_is_not_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = repeating(tmp_path / "rows.parquet", "x" * 100_000, 200)
    assert len(streamed(path)) == 200
    monkeypatch.setattr(stream_files, "GROUP_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"row group 0: column 'prompt' takes more than .* with smaller row groups"):
        streamed(path)


@pytest.mark.parametrize("name", ["../rows.arrow", "/etc/rows.arrow", "more/rows.arrow"])
def test_a_saved_folder_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    table = pa.table({"prompt": ["a"]})
    folder = save_folder(tmp_path / "saved", table)
    (file,) = folder.glob("*.arrow")
    file.rename(tmp_path / "rows.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "which is no file of this folder" in refusal(folder)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_packed_line_without_an_end_is_not_unpacked(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 10_000)
    path = compress(tmp_path / f"rows.jsonl{ending}", lines(3) + b" " * 30_000 + lines(1))
    assert f"{path}:4: a line of more than 10000 bytes" in refusal(path)


BOUNDS = [None, -12, -10, -3, -1, 0, 1, 4, 9, 10, 12]


@pytest.mark.parametrize("start", BOUNDS)
@pytest.mark.parametrize("stop", BOUNDS)
def test_slices_are_those_of_python(tmp_path: Path, start: int | None, stop: int | None) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(10))
    wanted = list(range(10))[start:stop]
    written = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    if wanted:
        assert prompts(written) == wanted
    else:
        assert "is empty" in (told := refusal(written)) or "selects no row: there are" in told
