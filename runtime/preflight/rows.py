"""Whether every row that a run will read can be used: its columns, the chat template, its length in tokens.

Invariants:

* Rows are read, rendered and measured by the code that a run uses.
* Of a large source the first :data:`NUM_MEASURED` rows are measured, and behind them those whose text is so long that
  it may not fit: the run itself counts the tokens of all.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.checkpoint.options import SEEING_MODEL
from penstock.backends.data.mixture import named_sources
from penstock.backends.data.problems import DataError, Problems, RowProblem
from penstock.backends.data.reading import RowReader, TokenLimit
from penstock.backends.data.recorded_rows import dataset_columns, dataset_paths, is_recorded_row, recorded_row
from penstock.backends.data.row import BadColumnError, prompt_of, text_of
from penstock.backends.data.sources import parse_source, read_rows
from penstock.backends.data.tokenizer import FILE_NAME, TextTokenizer
from penstock.backends.learners.spec import is_modelled
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.named import MADE_DATA
from penstock.runtime.scenario.recorded_rules import recorded_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.mixture import NamedSource
    from penstock.backends.data.options import DataOptions
    from penstock.backends.data.reading import ParsedRow
    from penstock.backends.data.recorded_rows import RecordedSettings
    from penstock.backends.data.row import RawRow
    from penstock.backends.learners.options import WarmStartOptions
    from penstock.runtime.scenario.structure import Scenario

NUM_MEASURED: Final = 2048
TEMPLATE_TOKENS: Final = 256
"""That a chat template may put around a text."""


def check_data(scenario: Scenario) -> None:
    """Every row of the files can be read and has its columns. (Tokens are for the run itself to count.)"""
    if is_modelled(scenario.learner):
        return
    data, warm_start = scenario.data, scenario.learner.warm_start
    with _tokenizer_folder(scenario) as folder:
        if scenario.run.only != "learner":
            limit = scenario.model.max_context
            _check_prompts(data, recorded_settings(scenario), folder, max_context=limit)
            for index, each in enumerate(sets_of(scenario)):
                key = f"evaluation.datasets[{index}].path"
                _check_prompts(each.data, None, folder, max_context=limit, key=key)
        if warm_start is not None:
            _check_demonstrations(data, warm_start)


@contextmanager
def _tokenizer_folder(scenario: Scenario) -> Generator[Path | None]:
    """Where the tokenizer is; None where the model is still to be fetched."""
    path = scenario.model.path
    if scenario.model.make is None:
        yield Path(path) if path is not None and Path(path, FILE_NAME).is_file() else None
        return
    from penstock.backends.checkpoint.characters import CHAT_TEMPLATE, character_tokenizer

    with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
        sees = scenario.model.make == SEEING_MODEL
        character_tokenizer(sees=sees).save(str(Path(folder, FILE_NAME)))
        if sees:
            Path(folder, "chat_template.jinja").write_text(CHAT_TEMPLATE)
        yield Path(folder)


def _check_prompts(
    data: DataOptions, recorded: RecordedSettings | None, folder: Path | None, *, max_context: int, key: str = ""
) -> None:
    """``key``: of the path of the only source, where it is not the run's own."""
    sources = named_sources(data)
    try:
        tokenizer = None if folder is None else TextTokenizer(folder)
        template = None if folder is None else open_template(folder, sources)
        if template is not None:
            with suppress(BadColumnError):  # of rows it is asked below
                template.render("a")
    except DataError as error:
        raise UserFault(f"model.path: {error}") from None
    limit = TokenLimit.of(data, max_context)
    for named in sources:
        if named.options.source is not None:
            continue  # it has no rows before the run asks for them
        measure = None if tokenizer is None else _Measure(tokenizer, RowReader(named, template), limit)
        _check_source(named, recorded, measure, keys=(key or named.key, "data.recorded.path"))


def open_template(folder: Path, sources: Sequence[NamedSource]) -> ChatTemplate | None:
    """The folder's chat template, if a source wants one; a tokenizer of transformers is not loaded for it."""
    if not any(source.options.chat_template for source in sources):
        return None
    from penstock.backends.data.chat import ChatTemplate
    from penstock.backends.data.folder_template import FolderTemplate

    return ChatTemplate(folder, sources[0].options.template_arguments, FolderTemplate(folder))


class _Measure:
    """Renders rows and counts their tokens."""

    def __init__(self, tokenizer: TextTokenizer, reader: RowReader, limit: TokenLimit) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._limit = limit
        self._num_measured = 0

    def check(self, row: RawRow, parsed: ParsedRow) -> None:
        """
        Raises:
            BadColumnError: the template or the tokenizer refuses it, or it is too long.
        """
        size_bytes = len(str(parsed.prompt).encode(errors="replace"))  # a token is a byte or more
        if self._num_measured >= NUM_MEASURED and size_bytes + TEMPLATE_TOKENS <= self._limit.max_tokens:
            return
        self._num_measured += 1
        text = self._reader.checked(row).text
        self._limit.check_text(text, self._tokenizer)
        (ids,) = self._tokenizer.encode([text], special=self._reader.adds_special)
        self._limit.checked(ids)


def _check_source(
    named: NamedSource, recorded: RecordedSettings | None, measure: _Measure | None, *, keys: Sequence[str]
) -> None:
    data, reader = named.options, RowReader(named, None)

    def check_row(row: RawRow, source: int) -> None:
        if is_recorded_row(row, data, recorded, source=source):
            assert recorded is not None
            recorded_row(row, data, recorded)
            return
        parsed = reader.parsed(row)
        if measure is not None:
            measure.check(row, parsed)

    for source, (key, path) in enumerate(zip(keys, dataset_paths(data, recorded), strict=False)):
        columns, optional = dataset_columns(data, recorded, source=source)
        problems = Problems(skip=data.skip_bad_rows, skip_key="data.skip_bad_rows")
        num_rows = NUM_MEASURED if data.stream else None  # the rest when its index is made, by the run itself
        _check_rows(key, path, columns, partial(check_row, source=source), problems, optional, num_rows)


def _check_demonstrations(data: DataOptions, warm_start: WarmStartOptions) -> None:
    def check_demonstration(row: RawRow) -> None:
        prompt_of(row, data.prompt_key, chat_template=data.chat_template, option="learner.warm_start.prompt_key")
        text_of(row, warm_start.response_key, "Set learner.warm_start.response_key")

    columns = [data.prompt_key, warm_start.response_key]
    _check_rows(
        "learner.warm_start.path", warm_start.path, columns, check_demonstration, Problems(skip=False, skip_key="")
    )


def _check_rows(
    key: str,
    path: str,
    columns: list[str],
    check: Callable[[RawRow], None],
    problems: Problems,
    optional: Sequence[str] = (),
    num_rows: int | None = None,
) -> None:
    """``num_rows``: looked at; None: all."""
    source = parse_source(path)
    is_made = path.startswith(MADE_DATA)
    num_good = 0
    try:
        for row in islice(read_rows(source, columns, seed=0, optional=optional), num_rows):
            if isinstance(row, RowProblem):
                problems.add(row)
                continue
            try:
                check(row)
            except BadColumnError as error:
                problems.add(error.at(row.place))
            else:
                num_good += 1
                if is_made:  # one row says that they can be made
                    break
        problems.settle(num_good=num_good, source=str(source))
    except DataError as error:
        raise UserFault(f"{key}: {error}") from None
