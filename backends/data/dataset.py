"""The dataset of a run: every row read, checked and tokenised before the first group is granted.

Invariants:

* Rows are numbered from 0 in the order of the source; those that were skipped have no number.
* What the model sees is the whole prompt of the row: nothing is cut.
* Reading needs neither torch nor transformers, unless the scenario asks for a chat template.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from penstock.backends.data.columns import BytesColumn
from penstock.backends.data.problems import Problems, RowProblem
from penstock.backends.data.row import BadColumnError, label_of, metadata_of, prompt_of
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.messages.arrays import pack_tokens
from penstock.messages.samples import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.row import RawRow

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
        )

    def append(self, row: CheckedRow, ids: list[int]) -> None:
        """Add a row with its token ids; for the loader."""
        self._tokens.append(pack_tokens(ids))
        self._texts.append(row.text.encode())
        self._labels.append(row.label.encode())
        self._metadata.append(row.metadata)
        self._messages.append(row.messages)


def load_dataset(
    options: DataOptions, tokenizer_folder: Path, *, seed: int, max_context: int, keeps_messages: bool = False
) -> Dataset:
    """Read the dataset of the scenario. ``seed`` (the run's) makes generated rows; ``max_context`` is in tokens;
    ``keeps_messages``: prompts carry the chat messages they were rendered from.

    Raises:
        DataError: the source, the tokenizer, or (unless the scenario skips them) any row cannot be used.
    """
    source = parse_source(options.path)
    tokenizer = TextTokenizer(tokenizer_folder)
    template = open_template(tokenizer_folder) if options.chat_template else None
    limit = TokenLimit.of(options, max_context)
    problems = Problems(skip=options.skip_bad_rows, skip_key="data.skip_bad_rows")
    dataset = Dataset()
    raw = read_rows(source, _columns(options), seed=seed)
    for rows in batches(_checked(raw, options, template, problems, keeps_messages=keeps_messages)):
        # A template writes the begin-of-sequence token itself.
        encoded = tokenizer.encode([row.text for row in rows], special=template is None)
        for row, ids in zip(rows, encoded, strict=True):
            try:
                dataset.append(row, limit.checked(ids))
            except BadColumnError as error:
                problems.add(error.at(row.place))
    problems.settle(num_good=dataset.num_rows, source=str(source))
    dataset.skipped = problems.counts
    return dataset


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


def known_tokens(ids: list[int] | str) -> list[int]:
    """The ids that the tokenizer gave.

    Raises:
        BadColumnError: it gave a reason instead.
    """
    if isinstance(ids, str):
        raise BadColumnError(
            "the tokenizer refuses the text",
            f"the tokenizer refuses the text ({ids}); it may hold a character that the model does not know",
        )
    return ids


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


def _columns(options: DataOptions) -> list[str]:
    label = [] if options.label_key is None else [options.label_key]
    return [options.prompt_key, *label, *options.metadata_keys]


def _checked(
    raw: Iterable[RawRow | RowProblem],
    options: DataOptions,
    template: ChatTemplate | None,
    problems: Problems,
    *,
    keeps_messages: bool,
) -> Iterator[CheckedRow]:
    for row in raw:
        if isinstance(row, RowProblem):
            problems.add(row)
            continue
        try:
            text = rendered(row, options.prompt_key, template, "data")
            label = "" if options.label_key is None else label_of(row, options.label_key)
            metadata = metadata_of(row, options.metadata_keys)
            messages = _messages_of(row, options.prompt_key) if keeps_messages and template is not None else b""
        except BadColumnError as error:
            problems.add(error.at(row.place))
        else:
            yield CheckedRow(row.place, text, label, metadata, messages)


def _messages_of(row: RawRow, key: str) -> bytes:
    """What the template rendered, as JSON."""
    prompt = prompt_of(row, key, chat_template=True, block="data")
    try:
        return msgspec.json.encode([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    except (TypeError, ValueError) as error:
        raise BadColumnError("the messages have no form in JSON", f"{key!r} has no form in JSON: {error}") from None
