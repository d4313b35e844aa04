"""The dataset of a run: every row read, checked and tokenised before the first group is granted.

Invariants:

* Rows are numbered from 0 in the order of the source; those that were skipped have no number.
* What the model sees is the whole prompt of the row: nothing is cut.
* Rows that hold their responses are numbered as groups of these, whoever reads them (:mod:`.recording`).
* Reading needs neither torch nor transformers, unless the scenario asks for a chat template.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from penstock.backends.data.columns import BytesColumn
from penstock.backends.data.problems import Problems, RowProblem
from penstock.backends.data.recorded_rows import dataset_columns, dataset_paths, is_recorded_row, recorded_row
from penstock.backends.data.recording import RecordedGroup, Recorder, pack_samples, unpack_samples
from penstock.backends.data.row import BadColumnError, known_tokens, label_of, metadata_of, prompt_of
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.data.special_tokens import read_special_tokens
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.messages.arrays import pack_tokens
from penstock.messages.samples import Loss, Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.recorded_rows import RecordedSettings
    from penstock.backends.data.recording import RecordedSample, RenderedRow
    from penstock.backends.data.row import RawRow
    from penstock.backends.data.sources import SourceSpec

BATCH_ROWS: Final = 512

ItemT = TypeVar("ItemT")


class CheckedRow(NamedTuple):
    """A row that is right but for its length in tokens."""

    place: str
    text: str
    label: str
    metadata: bytes
    messages: bytes
    """JSON; empty where nobody asks for them."""


class Dataset:
    """Prompts by row number."""

    def __init__(self) -> None:
        self._tokens = BytesColumn()
        self._texts = BytesColumn()
        self._labels = BytesColumn()
        self._metadata = BytesColumn()
        self._messages = BytesColumn()
        self._responses = BytesColumn()
        self._losses: list[Loss | None] = []
        """Of rows that hold their responses; None for the others."""
        self.skipped: Mapping[str, int] = {}
        """Why rows were skipped → how many."""

    @property
    def num_rows(self) -> int:
        """Rows that can be used."""
        return len(self._tokens)

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
        )

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

    def append(self, row: CheckedRow, ids: list[int], *, responses: bytes = b"", loss: Loss | None = None) -> None:
        """Add a row with its token ids; for the loader. ``loss``: of the responses that it holds."""
        self._responses.append(responses)
        self._losses.append(loss)
        self._tokens.append(pack_tokens(ids))
        self._texts.append(row.text.encode())
        self._labels.append(row.label.encode())
        self._metadata.append(row.metadata)
        self._messages.append(row.messages)


def load_dataset(
    options: DataOptions,
    tokenizer_folder: Path,
    *,
    seed: int,
    max_context: int,
    keeps_messages: bool = False,
    recorded: RecordedSettings | None = None,
    keeps_responses: bool = False,
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

    Raises:
        DataError: the source, the tokenizer, or (unless the scenario skips them) any row cannot be used.
    """
    tokenizer = TextTokenizer(tokenizer_folder)
    template = open_template(tokenizer_folder) if options.chat_template else None
    problems = Problems(skip=options.skip_bad_rows, skip_key="data.skip_bad_rows")
    loader = _Loader(options, tokenizer, template, problems, max_context=max_context, keeps_messages=keeps_messages)
    if recorded is not None:
        special = read_special_tokens(tokenizer_folder)
        limit = TokenLimit.of(options, max_context)
        recorder = Recorder(tokenizer, template, special, recorded, max_context=max_context, check_prompt=limit.checked)
        loader.records(recorder, recorded)
        loader.keeps_responses = keeps_responses
    sources = [parse_source(path) for path in dataset_paths(options, recorded)]
    for index, source in enumerate(sources):
        loader.read(source, seed=seed, is_recorded=index == 1)
    loader.finish()
    problems.settle(num_good=loader.dataset.num_rows, source=" and ".join(map(str, sources)))
    loader.dataset.skipped = problems.counts
    return loader.dataset


class _Loader:
    """Reads one source after the other into one dataset."""

    def __init__(
        self,
        options: DataOptions,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        problems: Problems,
        *,
        max_context: int,
        keeps_messages: bool,
    ) -> None:
        self.dataset = Dataset()
        self.keeps_responses = False
        self._options = options
        self._tokenizer = tokenizer
        self._template = template
        self._problems = problems
        self._limit = TokenLimit.of(options, max_context)
        self._keeps_messages = keeps_messages
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
                    live.append(self._checked(row))
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
        # A template writes the begin-of-sequence token itself.
        encoded = self._tokenizer.encode([row.text for row in rows], special=self._template is None)
        for row, ids in zip(rows, encoded, strict=True):
            try:
                self.dataset.append(row, self._limit.checked(ids))
            except BadColumnError as error:
                self._problems.add(error.at(row.place))

    def _append(self, group: RecordedGroup) -> None:
        row = CheckedRow("", group.text, group.label, group.metadata, b"")
        responses = pack_samples(group.samples) if self.keeps_responses else b""
        self.dataset.append(row, group.prompt_ids, responses=responses, loss=group.loss)

    def _checked(self, row: RawRow) -> CheckedRow:
        options = self._options
        keeps_messages = self._keeps_messages and self._template is not None
        return CheckedRow(
            row.place,
            rendered(row, options.prompt_key, self._template, "data"),
            "" if options.label_key is None else label_of(row, options.label_key),
            metadata_of(row, options.metadata_keys),
            _messages_of(row, options.prompt_key) if keeps_messages else b"",
        )


class TokenLimit(NamedTuple):
    """How long a prompt may be."""

    max_tokens: int
    advice: str

    @classmethod
    def of(cls, options: DataOptions, max_context: int) -> TokenLimit:
        """The smaller of what the scenario allows and what leaves room for one response token."""
        if options.max_prompt_tokens is not None and options.max_prompt_tokens < max_context:
            return cls(options.max_prompt_tokens, "data.max_prompt_tokens")
        return cls(max_context - 1, f"model.max_context, {max_context}, less one for the response")

    def checked(self, ids: list[int] | str) -> list[int]:
        """The ids of a prompt as the tokenizer gave them.

        Raises:
            BadColumnError: there are none, or too many, or the tokenizer gave a reason instead.
        """
        tokens = known_tokens(ids)
        if not tokens:
            raise BadColumnError("the prompt has no tokens", "the prompt becomes no token at all")
        if len(tokens) > self.max_tokens:
            raise BadColumnError(
                "the prompt is too long",
                f"the prompt has {len(tokens)} tokens; at most {self.max_tokens} fit ({self.advice})",
            )
        return tokens


def open_template(folder: Path) -> ChatTemplate:
    """The folder's chat template; imported late because it brings transformers."""
    from penstock.backends.data.chat import ChatTemplate

    return ChatTemplate(folder)


def batches(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    """The items in lists of :data:`BATCH_ROWS`, so that the tokenizer can work on several at once."""
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH_ROWS)):
        yield batch


def rendered(row: RawRow, key: str, template: ChatTemplate | None, block: str) -> str:
    """The prompt of a row as the text that is tokenised.

    Raises:
        BadColumnError: it is missing, empty, of a wrong type, or the template refuses it.
    """
    prompt = prompt_of(row, key, chat_template=template is not None, block=block)
    if template is not None:
        return template.render(prompt)
    assert isinstance(prompt, str)  # prompt_of refuses messages where there is no template
    return prompt


def _messages_of(row: RawRow, key: str) -> bytes:
    """What the template rendered, as JSON."""
    prompt = prompt_of(row, key, chat_template=True, block="data")
    try:
        return msgspec.json.encode([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    except (TypeError, ValueError) as error:
        raise BadColumnError("the messages have no form in JSON", f"{key!r} has no form in JSON: {error}") from None
