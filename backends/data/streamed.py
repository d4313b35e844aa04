"""Rows that are read when they are wanted, and the thread that reads them.

Invariants:

* What a row becomes is what it would be in memory: the code is the same, and the prompt is compared with the hash that
  the index has of it. A file that changes under a run ends it.
* Rows that were named ahead are kept until they are wanted, at most as many as ``prefetch_rows`` twice over. A row that
  was not named is read all the same.

| waits for | who ends it |
|---|---|
| the thread, for a command | the next command, or ``close`` |
| a command, for its rows | the disk; one that hangs is the watchdog's to tell, since no sample gets an engine |
"""

from __future__ import annotations

import contextlib
import queue
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from penstock.backends.data.dataset import open_template
from penstock.backends.data.duplicates import prompt_hash
from penstock.backends.data.mixture import named_sources, shares_of
from penstock.backends.data.problems import DataError, RowProblem
from penstock.backends.data.reading import RowReader, TokenLimit, teacher_tokens
from penstock.backends.data.recorded_rows import dataset_columns
from penstock.backends.data.row import BadColumnError
from penstock.backends.data.sources import parse_source
from penstock.backends.data.stream_files import open_row_file
from penstock.backends.data.stream_index import Indexing, open_index, settings_digest
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.processes.temp_folders import make_folder, remove_folder
from penstock.messages.arrays import pack_tokens
from penstock.messages.base import Metric
from penstock.messages.commands import FetchPrompts
from penstock.messages.rows import RowSource
from penstock.messages.samples import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from penstock.backends.data.images import ImageIntake
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.reading import CheckedRow
    from penstock.backends.data.stream_index import Index
    from penstock.backends.protocol import Backend, Emit, Fail

PREFETCH_BATCH: Final = 32


class _Stretch:
    """The rows of one source."""

    def __init__(self, indexing: Indexing, index: Index, share: int) -> None:
        self.indexing = indexing
        self.index = index
        self.row_source = RowSource(
            name=indexing.source.name,
            num_rows=index.facts.num_rows,
            share=share,
            block_rows=indexing.file.block_rows,
        )

    def checked(self, number: int) -> CheckedRow:
        """A row as the text that is tokenised."""
        record = self.index.rows[number]
        row = self.indexing.file.read(int(record["offset"]), int(record["length"]), int(record["number"]))
        if isinstance(row, RowProblem):
            raise DataError(f"{row.place}: {row.message}. {_CHANGED}")
        try:
            return self.indexing.reader.checked(row)
        except BadColumnError as error:
            raise DataError(f"{row.place}: {error.message}. {_CHANGED}") from error


_CHANGED: Final = "It was good when the rows were indexed, so the file has changed since; begin a new run"


class StreamedRows:
    """Prompts by row number, each read from its file."""

    def __init__(
        self,
        options: DataOptions,
        tokenizer_folder: Path,
        *,
        max_context: int,
        keeps_messages: bool = False,
        folder: Path | None = None,
        tell: Callable[[str], None] | None = None,
        images: ImageIntake | None = None,
    ) -> None:
        """``folder``: where the index is kept; None: in one that goes when the rows are closed.

        Raises:
            DataError: the rows, or the tokenizer, cannot be used, or are not those that the index was made of.
        """
        self._tokenizer = TextTokenizer(tokenizer_folder)
        self._own_folder = None if folder is not None else make_folder()
        folder = folder or self._own_folder
        assert folder is not None, "one of the two"
        self._stretches: list[_Stretch] = []
        with contextlib.ExitStack() as refused:
            refused.callback(self.close)
            named = named_sources(options)
            template = open_template(tokenizer_folder, named)
            for number, (source, share) in enumerate(
                zip(named, shares_of([source.weight for source in named]), strict=True)
            ):
                must, may = dataset_columns(source.options, None, source=0)
                indexing = Indexing(
                    source,
                    open_row_file(parse_source(source.path).path, must, may),
                    RowReader(source, template, keeps_messages=keeps_messages, images=images),
                    self._tokenizer,
                    TokenLimit.of(source.options, max_context),
                    settings_digest(source, tokenizer_folder, max_context),
                )
                index = open_index(folder / f"{number}-{source.name}", indexing, tell or _silent)
                self._stretches.append(_Stretch(indexing, index, share))
            refused.pop_all()
        self._starts = [0, *accumulate(stretch.row_source.num_rows for stretch in self._stretches)]
        self._wanted = deque[int]()
        """Rows that were named and are not read yet."""
        self._ready = OrderedDict[int, Prompt]()
        self._most_ready = 2 * options.prefetch_rows
        self.num_read = 0
        self.num_ready = 0
        """Of the prompts that were asked for, those that had been read before."""

    @property
    def num_rows(self) -> int:
        """Rows that can be used."""
        return self._starts[-1]

    @property
    def sources(self) -> tuple[RowSource, ...]:
        """In the order of their rows."""
        return tuple(stretch.row_source for stretch in self._stretches)

    @property
    def skipped(self) -> Mapping[str, int]:
        """Why rows were skipped → how many."""
        counts = Counter[str]()
        for stretch in self._stretches:
            counts.update(stretch.index.facts.skipped)
        return dict(counts)

    @property
    def num_skipped(self) -> int:
        """Rows that could not be used."""
        return sum(self.skipped.values())

    @property
    def digest(self) -> str:
        """Of all rows and of what is made of them."""
        return " ".join(stretch.index.facts.digest for stretch in self._stretches)

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Of each prompt; of one source, mapped and not read."""
        columns = [stretch.index.rows["hash"] for stretch in self._stretches]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt."""
        return np.concatenate([stretch.index.rows["tokens"] for stretch in self._stretches]).astype(np.int64)

    def place_of(self, row: int) -> str:
        """File and line of a row."""
        stretch, number = self._find(row)
        path, record = parse_source(stretch.indexing.source.path).path, stretch.index.rows[number]
        return f"{path}:{int(record['number'])}" if int(record["length"]) else f"{path}: row {int(record['number'])}"

    def prompt(self, row: int, epoch: int) -> Prompt:
        """The prompt of a row, for the given time through the dataset.

        Raises:
            IndexError: there is no such row.
            DataError: the file has changed since it was indexed.
        """
        ready = self._ready.pop(row, None)
        if ready is None:
            (ready,) = self._read([row])
        else:
            self.num_ready += 1
        return replace(ready, row=row, epoch=epoch)

    def name_ahead(self, rows: Sequence[int]) -> None:
        """These will be wanted."""
        self._wanted.extend(rows)

    def prefetch(self) -> bool:
        """Read some of the rows that were named; whether there were any.

        Raises:
            DataError: the file has changed since it was indexed.
        """
        rows = list[int]()
        while self._wanted and len(rows) < PREFETCH_BATCH:
            if (row := self._wanted.popleft()) not in self._ready and row not in rows:
                rows.append(row)
        for row, prompt in zip(rows, self._read(rows), strict=True):
            self._ready[row] = prompt
        while len(self._ready) > self._most_ready:  # named and never wanted
            self._ready.popitem(last=False)
        return bool(rows)

    def close(self) -> None:
        """Let the files go."""
        for stretch in self._stretches:
            stretch.indexing.file.close()
        if self._own_folder is not None:
            remove_folder(self._own_folder)

    def _find(self, row: int) -> tuple[_Stretch, int]:
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of a dataset of {self.num_rows}")
        index = bisect_right(self._starts, row) - 1
        return self._stretches[index], row - self._starts[index]

    def _read(self, rows: Sequence[int]) -> list[Prompt]:
        self.num_read += len(rows)
        found = [self._find(row) for row in rows]
        checked = [stretch.checked(number) for stretch, number in found]
        prompts = list[Prompt]()
        for row, (stretch, number), each in zip(rows, found, checked, strict=True):
            (ids,) = self._tokenizer.encode([each.text], special=stretch.indexing.reader.adds_special)
            seen, ids = stretch.indexing.reader.seen(each, ids)
            tokens = b"" if isinstance(ids, str) else pack_tokens(ids)
            if prompt_hash(tokens, each.media) != int(stretch.index.rows[number]["hash"]):
                raise DataError(f"{each.place}: the prompt is not the one that was indexed. {_CHANGED}")
            of_teacher = teacher_tokens(
                each, self._tokenizer, stretch.indexing.limit, special=stretch.indexing.reader.adds_special
            )
            prompts.append(seen.prompt(row, tokens=tokens, teacher_tokens=of_teacher))
        return prompts


class BackgroundRows:
    """The PromptSource's backend where rows are read from files: the one for rows in memory, on a thread of its own,
    which reads ahead when it has nothing else to do."""

    def __init__(self, inner: Backend[Any], rows: StreamedRows) -> None:
        self._inner = inner
        self._rows = rows
        self._commands = queue.SimpleQueue[Any]()
        self._fail: Fail | None = None
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._fail = fail
        self._inner.start(emit, fail)
        self._thread.start()

    def execute(self, command: object, /) -> None:
        """Begin it on the thread; the order is kept."""
        self._commands.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Of the inner one, and how many rows were there before they were wanted."""
        return (
            *self._inner.gauges(),
            Metric("data/rows_read", float(self._rows.num_read)),
            Metric("data/rows_ready_before_wanted", float(self._rows.num_ready)),
        )

    def close(self, timeout_s: float) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._inner.close(timeout_s)
        if not self._thread.is_alive():
            self._rows.close()

    def _run(self) -> None:
        assert self._fail is not None, "start comes before the thread"
        try:
            while (command := self._next()) is not None:
                if isinstance(command, FetchPrompts):
                    self._rows.name_ahead(command.ahead)
                self._inner.execute(command)
        except Exception as error:
            self._fail(error)

    def _next(self) -> object:
        while True:
            try:
                return self._commands.get_nowait()
            except queue.Empty:
                if not self._rows.prefetch():
                    return self._commands.get()


def _silent(text: str) -> None:
    """Nobody asks."""
