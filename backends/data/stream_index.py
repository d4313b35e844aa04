"""The index of one source: where each good row is, and what its prompt hashes to.

| file | holds |
|---|---|
| ``index.json`` | what the rows are of, so that a file that has changed is noticed |
| ``rows.bin`` | a record of 32 bytes a row |

Invariants:

* Every row has been read, rendered, tokenised and judged by the code that reads rows into memory, before the first
  group is granted; a bad one is an error, or counted and not in the index.
* An index has its name only when it is whole. It is made once, and never for a file other than the first.
* What building needs in memory does not grow with the file.
"""

from __future__ import annotations

import os
import shutil
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from penstock.backends.data.dataset import batches
from penstock.backends.data.duplicates import prompt_hash
from penstock.backends.data.problems import DataError, Problems, RowProblem
from penstock.backends.data.reading import teacher_tokens
from penstock.backends.data.row import BadColumnError
from penstock.backends.data.sources import Counted, check_selection, parse_source, sliced
from penstock.backends.durable import publish
from penstock.messages.arrays import TOKEN_BYTES, pack_tokens
from penstock.messages.base import UNREADABLE, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from penstock.backends.data.mixture import NamedSource
    from penstock.backends.data.reading import CheckedRow, RowReader, TokenLimit
    from penstock.backends.data.stream_files import Located, RowFile
    from penstock.backends.data.tokenizer import TextTokenizer

FORMAT: Final = 1
INDEX_FILE: Final = "index.json"
ROWS_FILE: Final = "rows.bin"
TOKENIZER_FILES: Final = (
    "tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "preprocessor_config.json"
)  # fmt: skip
READ_BYTES: Final = 1 << 20

ROW: Final = np.dtype([("offset", "<u8"), ("length", "<u4"), ("number", "<u8"), ("hash", "<u8"), ("tokens", "<u4")])


class FileFacts(Value, frozen=True, kw_only=True):
    """One file as it was when its rows were indexed."""

    path: str
    size: int
    mtime_ns: int
    digest: str


class IndexFacts(Value, frozen=True, kw_only=True):
    """What ``index.json`` holds."""

    format: int
    source: str
    files: tuple[FileFacts, ...]
    settings_digest: str
    """Of whatever decides what a row becomes: options, tokenizer, template."""
    num_rows: int
    skipped: dict[str, int]

    @property
    def digest(self) -> str:
        """Of the contents: the same rows have the same one, wherever their files are."""
        parts = (self.settings_digest, *(file.digest for file in self.files), str(self.num_rows))
        return blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


class Index(NamedTuple):
    """An index that can be used."""

    facts: IndexFacts
    rows: npt.NDArray[np.void]
    """Mapped, not read."""


class Indexing(NamedTuple):
    """What makes rows of a source."""

    source: NamedSource
    file: RowFile
    reader: RowReader
    tokenizer: TextTokenizer
    limit: TokenLimit
    settings_digest: str


def settings_digest(source: NamedSource, tokenizer_folder: Path, max_context: int) -> str:
    """Of whatever decides what a row of this source becomes, but for the row."""
    digest, spec = blake2b(digest_size=16), parse_source(source.path)
    fields: dict[str, object] = msgspec.to_builtins(source.options)
    for name in ("num_epochs", "shuffle", "skip_bad_rows", "skip_long_prompts", "prefetch_rows"):
        del fields[name]
    for name in ("num_retries_key", "teacher_prompt_key"):
        if fields[name] is None:
            del fields[name]  # decides nothing; an index that was made without the key fits
    fields["path"] = [spec.start, spec.stop]
    digest.update(msgspec.json.encode([FORMAT, fields, max_context], order="sorted"))
    for name in TOKENIZER_FILES:
        path = tokenizer_folder / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return digest.hexdigest()


def open_index(folder: Path, indexing: Indexing, tell: Callable[[str], None]) -> Index:
    """The index of a source, made now where there is none. ``tell`` is told how far that is.

    Raises:
        DataError: rows cannot be used, or the index that is there is one of other rows.
    """
    facts = _known(folder)
    if facts is None:
        facts = _built(folder, indexing, tell)
    else:
        check_unchanged(facts, indexing)
    if not facts.num_rows:
        return Index(facts, np.empty(0, dtype=ROW))
    return Index(facts, np.memmap(folder / ROWS_FILE, dtype=ROW, mode="r", shape=(facts.num_rows,)))


def check_unchanged(facts: IndexFacts, indexing: Indexing) -> None:
    """The files are those that the index was made of, and rows are still made as they were.

    Raises:
        DataError: they are not; the message says which and how.
    """
    advice = "so its groups would mean other prompts; put back what it was begun with, or begin a new run"
    if facts.settings_digest != indexing.settings_digest:
        raise DataError(
            f"{indexing.source.path}: since the run was begun, the options of its rows, the tokenizer or the chat "
            f"template have changed, {advice}"
        )
    paths = indexing.file.files
    if len(paths) != len(facts.files):
        raise DataError(f"{indexing.source.path}: the run was begun with {len(facts.files)} files, {advice}")
    for known, path in zip(facts.files, paths, strict=True):
        status = path.stat()
        if status.st_size != known.size:
            raise DataError(
                f"{path} has changed since the run was begun ({known.size} bytes then, {status.st_size} now), {advice}"
            )
        if status.st_mtime_ns != known.mtime_ns and _file_digest(path) != known.digest:
            raise DataError(f"{path} has changed since the run was begun (other contents of the same size), {advice}")


def _known(folder: Path) -> IndexFacts | None:
    try:
        facts = msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=IndexFacts)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise DataError(f"{folder / INDEX_FILE} cannot be read: {error}") from error
    if facts.format != FORMAT:
        raise DataError(f"{folder} holds an index of the form {facts.format}, and this version writes {FORMAT}")
    return facts


def _built(folder: Path, indexing: Indexing, tell: Callable[[str], None]) -> IndexFacts:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        before = [_facts_of(path) for path in indexing.file.files]
        num_rows, skipped = _write_rows(partial / ROWS_FILE, indexing, tell)
        if [_facts_of(path)[:2] for path in indexing.file.files] != [facts[:2] for facts in before]:
            raise DataError(f"{indexing.source.path} was written to while it was read; try again when it is whole")
        facts = IndexFacts(
            format=FORMAT,
            source=indexing.source.path,
            files=tuple(
                FileFacts(path=str(path), size=size, mtime_ns=mtime_ns, digest=_file_digest(path))
                for path, (size, mtime_ns) in zip(indexing.file.files, before, strict=True)
            ),
            settings_digest=indexing.settings_digest,
            num_rows=num_rows,
            skipped=skipped,
        )
        (partial / INDEX_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
        publish(partial, folder)
    except OSError as error:
        raise DataError(f"the index of {indexing.source.path} cannot be written to {folder}: {error}") from error
    return facts


def _write_rows(path: Path, indexing: Indexing, tell: Callable[[str], None]) -> tuple[int, dict[str, int]]:
    source, spec = indexing.source, parse_source(indexing.source.path)
    problems = Problems(
        skip=source.options.skip_bad_rows,
        skip_key="data.skip_bad_rows",
        skip_long=source.options.skip_long_prompts,
    )
    counted = Counted(indexing.file.scan())
    num_found = num_good = told = 0
    tell(f"indexing {source.name}: 0 %")
    with path.open("wb") as out:
        for batch in batches(sliced(counted, spec.start, spec.stop)):
            records = _records(indexing, [located for _, located in batch], problems)
            out.write(np.array(records, dtype=ROW).tobytes())
            num_found += len(batch)
            num_good += len(records)
            if (percent := int(100 * batch[-1][0])) > told:
                told = percent
                tell(f"indexing {source.name}: {percent} %")
    check_selection(spec, num_found, counted.num_rows)
    problems.settle(num_good=num_good, source=str(spec))
    return num_good, dict(problems.counts)


def _records(
    indexing: Indexing, located: Sequence[Located], problems: Problems
) -> list[tuple[int, int, int, int, int]]:
    good = list[tuple["Located", "CheckedRow"]]()
    for each in located:
        if isinstance(each.row, RowProblem):
            problems.add(each.row)
            continue
        try:
            checked = indexing.reader.checked(each.row)
            indexing.limit.check_text(checked.text, indexing.tokenizer)
            good.append((each, checked))
        except BadColumnError as error:
            problems.add(error.at(each.row.place))
    encoded = indexing.tokenizer.encode([row.text for _, row in good], special=indexing.reader.adds_special)
    records = list[tuple[int, int, int, int, int]]()
    for (each, row), ids in zip(good, encoded, strict=True):
        try:
            tokens = pack_tokens(indexing.limit.checked(indexing.reader.seen(row, ids)[1]))
            teacher_tokens(row, indexing.tokenizer, indexing.limit, special=indexing.reader.adds_special)
        except BadColumnError as error:
            problems.add(error.at(row.place))
        else:
            records.append(
                (each.offset, each.length, each.number, prompt_hash(tokens, row.media), len(tokens) // TOKEN_BYTES)
            )
    return records


def _facts_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _file_digest(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
