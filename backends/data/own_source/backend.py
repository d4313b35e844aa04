"""The PromptSource's backend where a class of the user's makes the rows.

The row at a place of the stream of prompts is the one that the class has made as number so many, for good: a place is
granted and recorded as any other, and what a group is drawn from when PromptSource, or the whole run, comes back is
read from the :mod:`.journal`.

Invariants:

* No row is made twice and none is left out: what is not in the journal is made again from the state before it, and
  nothing is issued that is not in it.
* An outcome is told once, as far as the class's state goes: one that was told after the last state is told again to a
  class that is put back to that state.
* Nothing of the user's runs in this process. What it does wrong ends the run as the user's fault.

| waits for | who ends it |
|---|---|
| the thread, for a command | the next command, or ``close`` |
| the class | ``data.source_timeout_s``; ``close``, which ends its process |
"""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.data.dataset import open_template
from penstock.backends.data.mixture import named_sources
from penstock.backends.data.own_source.asked import AskedSource
from penstock.backends.data.own_source.journal import Journal
from penstock.backends.data.own_source.wire import Draw, Opened, Restore, Tell
from penstock.backends.data.reading import RowReader, TokenLimit, teacher_tokens
from penstock.backends.data.row import BadColumnError, RawRow
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.processes.user_code import UserCodeError
from penstock.messages.arrays import pack_tokens
from penstock.messages.base import Metric
from penstock.messages.commands import ChooseRows, FetchPrompts
from penstock.messages.flow import GroupRow
from penstock.messages.local import FetchedPrompt, PromptsFetched, RowsDrawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.data.images import ImageIntake
    from penstock.backends.data.options import DataOptions
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import PromptCommand
    from penstock.messages.flow import RowOutcome
    from penstock.messages.samples import Prompt

MAX_DRAWN: Final = 256
"""Rows that are asked for at once."""

_log: Final = logging.getLogger(__name__)
_COLUMNS: Final = msgspec.json.Decoder(dict[str, object])


class PromptMaker:
    """Makes prompts of rows, as those of files are made."""

    def __init__(
        self,
        options: DataOptions,
        tokenizer_folder: Path,
        *,
        max_context: int,
        keeps_messages: bool = False,
        images: ImageIntake | None = None,
    ) -> None:
        """
        Raises:
            DataError: the tokenizer or its chat template cannot be used.
        """
        (named,) = named_sources(options)
        self._tokenizer = TextTokenizer(tokenizer_folder)
        template = open_template(tokenizer_folder, (named,))
        self._reader = RowReader(named, template, keeps_messages=keeps_messages, images=images)
        self._limit = TokenLimit.of(options, max_context)
        self._place = f"data.source: {Path(named.path).name}:{named.name}"

    def prompt(self, number: int, row: bytes) -> Prompt:
        """
        Raises:
            UserCodeError: the row cannot be used.
        """
        place = f"{self._place}: row {number}"
        try:
            checked = self._reader.checked(RawRow(place, _COLUMNS.decode(row)))
            self._limit.check_text(checked.text, self._tokenizer)
            special = self._reader.adds_special
            (ids,) = self._tokenizer.encode([checked.text], special=special)
            checked, ids = self._reader.seen(checked, ids)
            tokens = pack_tokens(self._limit.checked(ids))
            of_teacher = teacher_tokens(checked, self._tokenizer, self._limit, special=special)
        except BadColumnError as error:
            raise UserCodeError(f"{place}: {error.message}") from None
        return checked.prompt(number, tokens=tokens, teacher_tokens=of_teacher)


class OwnSourceBackend:
    """Implements ``penstock.backends.protocol.Backend``."""

    def __init__(self, opened: Opened, timeout_s: float, run_folder: Path, maker: PromptMaker) -> None:
        self._opened, self._timeout_s, self._run_folder, self._maker = opened, timeout_s, run_folder, maker
        self._commands: queue.SimpleQueue[PromptCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)
        self._source: AskedSource | None = None
        self._is_closing = False
        self._close_timeout_s = 0.0
        self._num_heard = 0
        """Outcomes of the run's list that have come here."""
        self._num_told = 0
        """Of these, that the class knows."""
        self._num_rows = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A class that cannot be loaded comes to ``fail``."""
        self._emit, self._fail = emit, fail
        self._thread.start()

    def execute(self, command: PromptCommand, /) -> None:
        """Begin it on the thread; the order is kept."""
        self._commands.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Rows that the class has made, and outcomes that it was told."""
        return (
            Metric("data/rows_made", float(self._num_rows)),
            Metric("data/outcomes_told", float(self._num_told)),
        )

    def close(self, timeout_s: float) -> None:
        """Let the class close, and end its process; one that is busy is killed."""
        self._is_closing, self._close_timeout_s = True, timeout_s / 2
        self._commands.put(None)
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s / 2)
        if self._thread.is_alive() and self._source is not None:
            self._source.stop_waiting()
            self._thread.join(timeout_s / 2)

    def _run(self) -> None:
        journal: Journal | None = None
        try:
            journal = Journal(self._run_folder)
            source = self._source = AskedSource(self._opened, self._timeout_s)
            standing = journal.standing
            if bytes(standing.state):
                source.ask(Restore(bytes(standing.state)))
            self._num_told, self._num_rows = standing.num_told, standing.num_rows
            while (command := self._commands.get()) is not None:
                if isinstance(command, ChooseRows):
                    self._choose(command, source)
                else:
                    self._fetch(command, source, journal)
            if problem := source.close(self._close_timeout_s):
                _log.warning("data.source: its close(): %s", problem)
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            if not self._is_closing:
                self._fail(error)
        finally:
            if self._source is not None:
                self._source.end()
            if journal is not None:
                journal.close()

    def _choose(self, command: ChooseRows, source: AskedSource) -> None:
        """The row of each group is the next one of the stream, whatever it will be."""
        self._tell(command.outcomes, source)
        places = zip(command.group_ids, command.stream, strict=True)
        rows = (GroupRow(group_id, place.row, place.epoch, place.position) for group_id, place in places)
        self._emit(RowsDrawn(rows=tuple(rows)))

    def _tell(self, outcomes: Sequence[RowOutcome], source: AskedSource) -> None:
        """A PromptSource that was replaced hears the list from its beginning; the class was told some of it."""
        news = outcomes[max(0, self._num_told - self._num_heard) :]
        self._num_heard += len(outcomes)
        if news:
            source.ask(Tell(tuple(news)))
            self._num_told += len(news)

    def _fetch(self, command: FetchPrompts, source: AskedSource, journal: Journal) -> None:
        wanted = 1 + max((request.row for request in command.requests), default=-1)
        while journal.standing.num_rows < wanted:
            self._draw(wanted - journal.standing.num_rows, source, journal)
        prompts = (
            FetchedPrompt(request.group_id, self._maker.prompt(request.row, journal.row(request.row)))
            for request in command.requests
        )
        self._emit(PromptsFetched(prompts=tuple(prompts)))

    def _draw(self, number: int, source: AskedSource, journal: Journal) -> None:
        first = journal.standing.num_rows
        drawn = source.ask(Draw(min(number, MAX_DRAWN)))
        if not drawn.rows:
            raise UserCodeError(
                f"data.source: {self._opened.spec} has ended after {first} rows, and the run wants more; let it make "
                "more and resume the run, or set run.num_steps lower"
            )
        for place, row in enumerate(drawn.rows, first):
            self._maker.prompt(place, row)  # refused before it has a number
        journal.commit(drawn.rows, drawn.state, num_told=self._num_told)
        self._num_rows = journal.standing.num_rows


def open_own_source(
    options: DataOptions,
    tokenizer_folder: Path,
    run_folder: Path,
    *,
    seed: int,
    max_context: int,
    keeps_messages: bool = False,
    images: ImageIntake | None = None,
) -> OwnSourceBackend:
    """The backend for ``data.source``.

    Raises:
        DataError: the tokenizer or its chat template cannot be used.
    """
    assert options.source is not None, "the scenario names a class"
    maker = PromptMaker(
        options, tokenizer_folder, max_context=max_context, keeps_messages=keeps_messages, images=images
    )
    opened = Opened(spec=options.source, options=options.source_options, seed=seed)
    return OwnSourceBackend(opened, options.source_timeout_s, run_folder, maker)
