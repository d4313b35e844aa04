"""The dataset of a run: every row read, checked and tokenised before the first group is granted.

Invariants:

* Rows are numbered from 0 in the order of the source; those that were skipped have no number.
* What the model sees is the whole prompt of the row: nothing is cut.
* Rows that hold their responses are numbered as groups of these, whoever reads them (:mod:`.recording`).
* Reading needs neither torch nor transformers, unless the scenario asks for a chat template.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from penstock.backends.data.columns import BytesColumn
from penstock.backends.data.duplicates import prompt_hash
from penstock.backends.data.mixture import named_sources, shares_of
from penstock.backends.data.problems import Problems, RowProblem
from penstock.backends.data.reading import CheckedRow, RowReader, TokenLimit, teacher_tokens
from penstock.backends.data.recorded_rows import dataset_columns, dataset_paths, is_recorded_row, recorded_row
from penstock.backends.data.recording import RecordedGroup, Recorder, pack_samples, unpack_samples
from penstock.backends.data.row import BadColumnError, Message, prompt_of, with_system
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.data.special_tokens import read_special_tokens
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.messages.arrays import TOKEN_BYTES, pack_tokens
from penstock.messages.rows import RowSource
from penstock.messages.samples import Loss, Media, Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.images import ImageIntake
    from penstock.backends.data.mixture import NamedSource
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.recorded_rows import RecordedSettings
    from penstock.backends.data.recording import RecordedSample, RenderedRow
    from penstock.backends.data.row import RawRow
    from penstock.backends.data.sources import SourceSpec

BATCH_ROWS: Final = 512
NO_RETRIES_GIVEN: Final = -1

ItemT = TypeVar("ItemT")

_ENCODER: Final = msgspec.msgpack.Encoder()
_MEDIA: Final = msgspec.msgpack.Decoder(tuple[Media, ...])


class Dataset:
    """Prompts by row number."""

    def __init__(self) -> None:
        self._tokens = BytesColumn()
        self._texts = BytesColumn()
        self._labels = BytesColumn()
        self._metadata = BytesColumn()
        self._messages = BytesColumn()
        self._responses = BytesColumn()
        self._media = BytesColumn()
        self._teacher_tokens = BytesColumn()
        self._places = BytesColumn()
        self._hashes = array("Q")
        self._losses: list[Loss | None] = []
        """Of rows that hold their responses; None for the others."""
        self._retries = array("h")
        """:data:`NO_RETRIES_GIVEN` for rows that say nothing of them."""
        self.skipped: Mapping[str, int] = {}
        """Why rows were skipped → how many."""
        self.sources: tuple[RowSource, ...] = ()
        """In the order of their rows."""

    @property
    def num_rows(self) -> int:
        """Rows that can be used."""
        return len(self._tokens)

    @property
    def digest(self) -> str:
        """None: all rows are here."""
        return ""

    @property
    def num_skipped(self) -> int:
        """Rows that could not."""
        return sum(self.skipped.values())

    def prompt(self, row: int, epoch: int) -> Prompt:
        """The prompt of a row, for the given time through the dataset.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of a dataset of {self.num_rows}")
        return Prompt(
            row=row,
            epoch=epoch,
            tokens=self._tokens[row],
            text=self._texts[row].decode(),
            label=self._labels[row].decode(),
            metadata=self._metadata[row],
            messages=self._messages[row],
            is_recorded=self._losses[row] is not None,
            loss=self._losses[row] or Loss.OBJECTIVE,
            media=_MEDIA.decode(media) if (media := self._media[row]) else (),
            num_retries=None if (retries := self._retries[row]) == NO_RETRIES_GIVEN else retries,
            teacher_tokens=self._teacher_tokens[row],
        )

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Of each prompt, for :mod:`.duplicates`."""
        return np.frombuffer(self._hashes, dtype=np.uint64)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each prompt."""
        return self._tokens.sizes // TOKEN_BYTES

    def place_of(self, row: int) -> str:
        """File and line of a row."""
        return self._places[row].decode()

    def labels(self) -> Iterator[bytes]:
        """Of all rows, in UTF-8."""
        return (self._labels[row] for row in range(self.num_rows))

    def media(self) -> Iterator[Media]:
        """Of all rows."""
        for row in range(self.num_rows):
            if packed := self._media[row]:
                yield from _MEDIA.decode(packed)

    def num_retries(self) -> Iterator[int]:
        """Of the rows that say how often a sample of theirs is issued again."""
        return (number for number in self._retries if number != NO_RETRIES_GIVEN)

    def responses(self, row: int) -> tuple[RecordedSample, ...]:
        """The responses that a row holds, one for each sample of its group; none of a row without, or of a dataset that
        was read without them.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of a dataset of {self.num_rows}")
        packed = self._responses[row]
        return unpack_samples(packed) if packed else ()

    def append(
        self,
        row: CheckedRow,
        ids: list[int],
        *,
        responses: bytes = b"",
        loss: Loss | None = None,
        teacher: bytes = b"",
    ) -> None:
        """Add a row with its token ids; for the loader. ``loss``: of the responses that it holds. ``teacher``: the
        tokens that one reads in place of these."""
        tokens = pack_tokens(ids)
        self._hashes.append(prompt_hash(tokens, row.media))
        self._places.append(row.place.encode())
        self._media.append(_ENCODER.encode(row.media) if row.media else b"")
        self._responses.append(responses)
        self._losses.append(loss)
        self._retries.append(NO_RETRIES_GIVEN if row.num_retries is None else row.num_retries)
        self._tokens.append(tokens)
        self._texts.append(row.text.encode())
        self._labels.append(row.label.encode())
        self._metadata.append(row.metadata)
        self._messages.append(row.messages)
        self._teacher_tokens.append(teacher)


def load_dataset(
    options: DataOptions,
    tokenizer_folder: Path,
    *,
    seed: int,
    max_context: int,
    keeps_messages: bool = False,
    recorded: RecordedSettings | None = None,
    keeps_responses: bool = False,
    images: ImageIntake | None = None,
) -> Dataset:
    """Read the dataset of the scenario.

    Args:
        options: the ``data:`` block.
        tokenizer_folder: with the tokenizer, and the chat template if one is asked for.
        seed: the run's; makes generated rows.
        max_context: in tokens.
        keeps_messages: prompts carry the chat messages that they were rendered from.
        recorded: of a run with engines that answer with responses of rows; None where there are none.
        keeps_responses: these responses are wanted, and not only the prompts.
        images: looks at those that engine and learner compute; None: a server does.

    Raises:
        DataError: the source, the tokenizer, or (unless the scenario skips them) any row cannot be used.
    """
    tokenizer = TextTokenizer(tokenizer_folder)
    named = named_sources(options)
    template = open_template(tokenizer_folder, named)
    dataset = Dataset()
    skipped = Counter[str]()
    sources = list[RowSource]()
    for source, share in zip(named, shares_of([source.weight for source in named]), strict=True):
        problems = Problems(
            skip=source.options.skip_bad_rows,
            skip_key="data.skip_bad_rows",
            skip_long=source.options.skip_long_prompts,
        )
        reader = RowReader(source, template, keeps_messages=keeps_messages, images=images)
        loader = _Loader(dataset, reader, tokenizer, problems, TokenLimit.of(source.options, max_context))
        if recorded is not None:
            special = read_special_tokens(tokenizer_folder)
            limit = TokenLimit.of(options, max_context)
            style = template if options.chat_template else None
            recorder = Recorder(
                tokenizer, style, special, recorded, max_context=max_context, check_prompt=limit.checked
            )
            loader.records(recorder, recorded)
            loader.keeps_responses = keeps_responses
        first = dataset.num_rows
        paths = [parse_source(path) for path in dataset_paths(source.options, recorded)]
        for index, path in enumerate(paths):
            loader.read(path, seed=seed, is_recorded=index == 1)
        loader.finish()
        problems.settle(num_good=dataset.num_rows - first, source=" and ".join(map(str, paths)))
        skipped.update(problems.counts)
        sources.append(RowSource(name=source.name, num_rows=dataset.num_rows - first, share=share))
    dataset.skipped = dict(skipped)
    dataset.sources = tuple(sources)
    return dataset


class _Loader:
    """Reads the rows of one source into a dataset."""

    def __init__(
        self, dataset: Dataset, reader: RowReader, tokenizer: TextTokenizer, problems: Problems, limit: TokenLimit
    ) -> None:
        self.dataset = dataset
        self.keeps_responses = False
        self._reader = reader
        self._options = reader.options
        self._tokenizer = tokenizer
        self._problems = problems
        self._limit = limit
        self._recorder: Recorder | None = None
        self._recorded: RecordedSettings | None = None

    def records(self, recorder: Recorder, settings: RecordedSettings) -> None:
        """Rows may hold their responses."""
        self._recorder, self._recorded = recorder, settings

    def read(self, source: SourceSpec, *, seed: int, is_recorded: bool) -> None:
        """Add the rows of a source, in batches, so that the tokenizer can work on several at once."""
        must, may = dataset_columns(self._options, self._recorded, source=int(is_recorded))
        for rows in batches(read_rows(source, must, seed=seed, optional=may)):
            self._add(rows, source=int(is_recorded))

    def finish(self) -> None:
        """Add what was waiting for more rows."""
        if self._recorder is not None:
            for group in self._recorder.last_group():
                self._append(group)

    def _add(self, rows: Sequence[RawRow | RowProblem], *, source: int) -> None:
        live: list[CheckedRow] = []
        recorded: list[RenderedRow] = []
        for row in rows:
            if isinstance(row, RowProblem):
                self._problems.add(row)
                continue
            try:
                if self._recorder is not None and is_recorded_row(row, self._options, self._recorded, source=source):
                    assert self._recorded is not None
                    recorded.append(self._recorder.rendered(recorded_row(row, self._options, self._recorded)))
                else:
                    checked = self._reader.checked(row)
                    self._limit.check_text(checked.text, self._tokenizer)
                    live.append(checked)
            except BadColumnError as error:
                self._problems.add(error.at(row.place))
        self._add_live(live)
        if self._recorder is not None:
            for found in self._recorder.groups(recorded):
                if isinstance(found, RecordedGroup):
                    self._append(found)
                else:
                    bad, reason = found
                    self._problems.add(reason.at(bad.place))

    def _add_live(self, rows: Sequence[CheckedRow]) -> None:
        special = self._reader.adds_special
        encoded = self._tokenizer.encode([row.text for row in rows], special=special)
        for row, ids in zip(rows, encoded, strict=True):
            try:
                teacher = teacher_tokens(row, self._tokenizer, self._limit, special=special)
                seen, tokens = self._reader.seen(row, ids)
                self.dataset.append(seen, self._limit.checked(tokens), teacher=teacher)
            except BadColumnError as error:
                self._problems.add(error.at(row.place))

    def _append(self, group: RecordedGroup) -> None:
        row = CheckedRow(group.place, group.text, group.label, group.metadata, b"", num_retries=group.num_retries)
        responses = pack_samples(group.samples) if self.keeps_responses else b""
        self.dataset.append(row, group.prompt_ids, responses=responses, loss=group.loss)


def open_template(folder: Path, sources: Sequence[NamedSource]) -> ChatTemplate | None:
    """The folder's chat template, if a source wants one; imported late because it brings transformers."""
    if not any(source.options.chat_template for source in sources):
        return None
    from penstock.backends.data.chat import ChatTemplate

    return ChatTemplate(folder, sources[0].options.template_arguments)


def batches(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    """The items in lists of :data:`BATCH_ROWS`, so that the tokenizer can work on several at once."""
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH_ROWS)):
        yield batch


def rendered(row: RawRow, key: str, template: ChatTemplate | None, block: str, system_prompt: str | None = None) -> str:
    """The prompt of a row as the text that is tokenised.

    Raises:
        BadColumnError: it is missing, empty, of a wrong type, or the template refuses it.
    """
    prompt = prompt_of(row, key, chat_template=template is not None, option=f"{block}.prompt_key")
    if template is not None:
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return template.render_messages(with_system(messages, system_prompt))
    assert isinstance(prompt, str)  # prompt_of refuses messages where there is no template
    return prompt
