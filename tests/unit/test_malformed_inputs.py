"""What users bring along and is wrong: each is a clear message, or a row that is counted as skipped; none is a stack
trace, and what is good beside it stays.

A clear message is one sentence or a few, that say where: the file (and, for a row, its line) or the scenario's key. An
exception of ours is one; any other would reach the user as a stack trace.
"""

# pyarrow has types in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import gzip
import json
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import make_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.backends.data.dataset import load_dataset
from penstock.backends.data.options import DataOptions, MediaKeys, RecordedOptions
from penstock.backends.data.problems import DataError
from penstock.backends.data.recorded_rows import RecordedSettings
from penstock.backends.data.streamed import StreamedRows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_CONTEXT = 48
GOOD = {"prompt": "1+1=", "label": "2"}
GOOD_LINE = json.dumps(GOOD).encode() + b"\n"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=True)


def is_clear(error: DataError, *, names: str) -> bool:
    """Whether the message says where, in one line of plain text."""
    text = str(error)
    return names in text and "\n" not in text and "Traceback" not in text and len(text) < 900


# --- rows ---------------------------------------------------------------------------------------------------------


class BadRow(NamedTuple):
    """One line that is no good row."""

    name: str
    line: bytes
    message: str
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to


def row(**columns: object) -> bytes:
    return json.dumps(columns).encode() + b"\n"


def said(role: str, content: object = "a") -> list[object]:
    return [{"role": role, "content": content}]


CHAT = {"chat_template": True}
TOOLS = {"chat_template": True, "tools_key": "tools"}
IMAGES = {"chat_template": True, "multimodal_keys": MediaKeys(image="images")}
METADATA = {"metadata_keys": ("more",)}
RETRIES = {"metadata_keys": ("tries",), "num_retries_key": "tries"}
NO_RETRIES = "'tries' is a {} {}; expected a whole number from 0 to 1000, or nothing (data.num_retries_key names it)"


def tries(number: object) -> bytes:
    return row(prompt="a", label="2", tries=number)


BAD_ROWS = (
    BadRow("no JSON", b"oops\n", "malformed JSON"),
    BadRow("half a row", b'{"prompt": "a", "label"\n', "malformed JSON"),
    BadRow("two rows in a line", GOOD_LINE[:-1] + GOOD_LINE, "malformed JSON"),
    BadRow("a list", b"[1, 2]\n", "expected one JSON object a line"),
    BadRow("a number", b"7\n", "expected one JSON object a line"),
    BadRow("null", b"null\n", "expected one JSON object a line"),
    BadRow("NaN", b'{"prompt": "a", "label": NaN}\n', "malformed JSON"),
    BadRow("a null byte", b'{"prompt": "a\x00", "label": "2"}\n', "malformed JSON"),
    BadRow("Latin-1", '{"prompt": "é", "label": "2"}\n'.encode("latin-1"), "not UTF-8"),
    BadRow("half a surrogate", b'{"prompt": "\\ud800", "label": "2"}\n', "malformed JSON"),
    BadRow("very deep", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "malformed JSON"),
    BadRow("a huge number", b'{"prompt": "a", "label": 1' + b"0" * 5000 + b"}\n", ""),
    BadRow("no columns", b"{}\n", "'prompt' is missing; the row is empty"),
    BadRow("another name", row(prompts="a", label="2"), "did you mean 'prompts'?"),
    BadRow("an empty prompt", row(prompt=" \n", label="2"), "'prompt' is empty"),
    BadRow("a prompt that is null", row(prompt=None, label="2"), "'prompt' is null"),
    BadRow("a prompt that is a number", row(prompt=3, label="2"), "'prompt' is a number"),
    BadRow("messages without a template", row(prompt=[{"role": "user", "content": "a"}], label="2"), "chat_template"),
    BadRow("unknown characters", row(prompt="\u4f60\u597d", label="2"), "the tokenizer refuses the text"),
    BadRow("too long", row(prompt="x" * 100, label="2"), "at most 47 fit"),
    BadRow("no label", row(prompt="a"), "'label' is missing"),
    BadRow("a label that is null", row(prompt="a", label=None), "'label' is null"),
    BadRow("no metadata", row(prompt="a", label="2"), "'more' is missing", METADATA),
    BadRow("no retries", row(prompt="a", label="2"), "'tries' is missing", RETRIES),
    BadRow("a negative number of retries", tries(-1), NO_RETRIES.format("number", "(-1)"), RETRIES),
    BadRow("half a retry", tries(1.5), NO_RETRIES.format("number", "(1.5)"), RETRIES),
    BadRow("a number of retries with a point", tries(2.0), NO_RETRIES.format("number", "(2.0)"), RETRIES),
    BadRow("retries: yes", tries(True), NO_RETRIES.format("boolean", "(True)"), RETRIES),
    BadRow("retries in words", tries("3"), NO_RETRIES.format("text", "('3')"), RETRIES),
    BadRow("a list of retries", tries([3]), NO_RETRIES.format("list", "([3])"), RETRIES),
    BadRow("too many retries", tries(1001), NO_RETRIES.format("number", "(1001)"), RETRIES),
    BadRow("more retries than anybody can count", tries(10**60), "'tries' is a number (1000000", RETRIES),
    BadRow("no messages", row(prompt=[], label="2"), "an empty list of messages", CHAT),
    BadRow("a message that is none", row(prompt=["a"], label="2"), "message 0 of 'prompt'", CHAT),
    BadRow("a message without content", row(prompt=[{"role": "user"}], label="2"), "'role' and 'content'", CHAT),
    BadRow("an answer at the end", row(prompt=said("assistant"), label="2"), "nothing left", CHAT),
    BadRow("a role that the template refuses", row(prompt=said("tool"), label="2"), "no tools", CHAT),
    BadRow("content that is a number", row(prompt=said("user", 3), label="2"), "", CHAT),
    BadRow("tools that are text", row(prompt="a", label="2", tools="x"), "which is no JSON", TOOLS),
    BadRow("tools without names", row(prompt="a", label="2", tools=[{}]), "tool 0 of 'tools'", TOOLS),
    BadRow("no tools", row(prompt="a", label="2"), "'tools' is missing", TOOLS),
    BadRow("an image without a place", row(prompt="a", label="2", images=["data:;base64,QUJD"]), "0 places", IMAGES),
    BadRow("an image of anybody's", row(prompt="<image>", label="2", images=["http://x/y"]), "media_hosts", IMAGES),
    BadRow("an image that is nowhere", row(prompt="<image>", label="2", images=["y.png"]), "there is no file", IMAGES),
    BadRow(
        "an image that is a number", row(prompt="<image>", label="2", images=[1]), "'images' holds a number", IMAGES
    ),
    BadRow("base64 that is none", row(prompt="<image>", label="2", images="data:;base64,*"), "base64", IMAGES),
)


@pytest.mark.parametrize("bad", BAD_ROWS, ids=[bad.name for bad in BAD_ROWS])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["memory", "stream"])
def test_a_bad_row_is_refused_by_its_line_or_counted(
    tmp_path: Path, tokenizer_folder: Path, bad: BadRow, monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    path, left_behind = tmp_path / "rows.jsonl", tmp_path / "temporary"
    left_behind.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(left_behind))
    others = {"tools": [], "more": 1, "tries": 3}
    good = json.dumps({**GOOD, **others}).encode() + b"\n"
    path.write_bytes(good + bad.line + good)

    def read(*, skip: bool) -> tuple[list[str], int]:
        options = DataOptions(path=str(path), skip_bad_rows=skip, stream=is_streamed, **bad.options)
        if is_streamed:
            rows = StreamedRows(options, tokenizer_folder, max_context=MAX_CONTEXT)
            found = [rows.prompt(number, 0).label for number in range(rows.num_rows)], rows.num_skipped
            rows.close()
            return found
        dataset = load_dataset(options, tokenizer_folder, seed=0, max_context=MAX_CONTEXT)
        return [dataset.prompt(number, 0).label for number in range(dataset.num_rows)], dataset.num_skipped

    with pytest.raises(DataError) as caught:
        read(skip=False)
    assert is_clear(caught.value, names=f"{path}:2")
    assert bad.message in str(caught.value)
    assert "data.skip_bad_rows" in str(caught.value)
    assert read(skip=True) == (["2", "2"], 1)
    assert not list(left_behind.iterdir())


# --- files --------------------------------------------------------------------------------------------------------


def parquet_without_label(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), path)


def arrow_of_splits(path: Path) -> None:
    path.mkdir()
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def arrow_of_indices(path: Path) -> None:
    path.mkdir()
    state = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "b.arrow"}]}
    (path / "state.json").write_text(json.dumps(state))


def arrow_without_file(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')


BAD_FILES: dict[str, tuple[str, Callable[[Path], object] | None, str]] = {
    "not there": ("rows.jsonl", None, "there is no file"),
    "a folder": ("rows.jsonl", lambda path: path.mkdir(), "is a folder"),
    "empty": ("rows.jsonl", lambda path: path.touch(), "has no rows"),
    "only blank lines": ("rows.jsonl", lambda path: path.write_text("\n \n"), "has no rows"),
    "an array over lines": ("rows.json", lambda path: path.write_text("[\n{}\n]"), "spread over several lines"),
    "an array in a line": ("rows.json", lambda path: path.write_text('[{"prompt": "a"}]'), "jq -c '.[]'"),
    "of no known kind": ("rows.csv", lambda path: path.write_text("prompt\na\n"), "cannot tell what kind of file"),
    "gzip that is none": ("rows.jsonl.gz", lambda path: path.write_bytes(GOOD_LINE), "cannot be read"),
    "gzip cut off": ("rows.jsonl.gz", lambda path: path.write_bytes(gzip.compress(GOOD_LINE)[:-9]), "cannot be read"),
    "zstd that is none": ("rows.jsonl.zst", lambda path: path.write_bytes(GOOD_LINE), "cannot be read"),
    "Parquet that is none": ("rows.parquet", lambda path: path.write_bytes(GOOD_LINE), "cannot be read as Parquet"),
    "Parquet without a column": ("rows.parquet", parquet_without_label, "'label' is missing"),
    "several splits": ("saved", arrow_of_splits, "has several splits"),
    "a selection by indices": ("saved", arrow_of_indices, "flatten_indices"),
    "an Arrow file that is gone": ("saved", arrow_without_file, "cannot be read"),
    "a slice past the end": ("rows.jsonl@[7:]", lambda path: path.write_bytes(GOOD_LINE), "selects no row"),
    "a slice with a step": ("rows.jsonl@[::2]", lambda path: path.write_bytes(GOOD_LINE), "expected a slice"),
    "an empty slice": ("rows.jsonl@[5:5]", lambda path: path.write_bytes(GOOD_LINE), "is empty"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["memory", "stream"])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, tokenizer_folder: Path, name: str, *, is_streamed: bool
) -> None:
    path, write, message = BAD_FILES[name]
    if write is not None:
        write(tmp_path / path.partition("@")[0])
    options = DataOptions(path=str(tmp_path / path), stream=is_streamed)
    load = partial(StreamedRows) if is_streamed else partial(load_dataset, seed=0)
    with pytest.raises(DataError) as caught:
        load(options, tokenizer_folder, max_context=MAX_CONTEXT)
    assert is_clear(caught.value, names=path.partition("@")[0])
    if not is_streamed:
        assert message in str(caught.value)


# --- rows that nobody has thought of ------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=True) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["prompt", "label", "tools", "images", "more", "role", "content", "response", "chosen"])
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "system", "tool"]) | JSON, "content": JSON}
)
COLUMN = JSON | st.lists(MESSAGE, max_size=3) | st.text("ab<image>", max_size=20)
ROWS = st.dictionaries(NAMES, COLUMN, max_size=5).map(lambda found: json.dumps(found).encode())
LINES = ROWS | st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" ").replace(b"\r", b" "))

FORMS: tuple[dict[str, Any], ...] = (
    {},
    {**TOOLS, "system_prompt": "x"},
    {**IMAGES, "label_key": None},
    {"metadata_keys": ("more",), "label_key": None},
    {"recorded": RecordedOptions(), "label_key": None},
)


@given(lines=st.lists(LINES, max_size=6), form=st.sampled_from(range(len(FORMS))))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_whatever_a_file_holds_is_a_prompt_or_counted(
    tmp_path: Path, tokenizer_folder: Path, lines: list[bytes], form: int
) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({**GOOD, "tools": [], "more": 1, "response": "2"}).encode()
    path.write_bytes(b"\n".join([good, *lines, good]) + b"\n")
    options = DataOptions(path=str(path), skip_bad_rows=True, **FORMS[form])
    recorded = None
    if "recorded" in FORMS[form]:
        recorded = RecordedSettings(group_size=1, max_response_tokens=16, are_all_recorded=True, imitates=True)
    dataset = load_dataset(options, tokenizer_folder, seed=0, max_context=MAX_CONTEXT, recorded=recorded)
    given_rows = 2 + sum(bool(line.strip()) for line in lines)
    assert dataset.num_rows + dataset.num_skipped == given_rows
    assert dataset.num_rows >= 2
    for number in range(dataset.num_rows):
        prompt = dataset.prompt(number, 0)
        assert 0 < prompt.num_tokens < MAX_CONTEXT
        msgspec.msgpack.encode(prompt)
    strict = msgspec.structs.replace(options, skip_bad_rows=False)
    if dataset.num_skipped:
        with pytest.raises(DataError) as caught:
            load_dataset(strict, tokenizer_folder, seed=0, max_context=MAX_CONTEXT, recorded=recorded)
        assert is_clear(caught.value, names=f"{path}:")
