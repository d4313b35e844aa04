"""Samples of all fates as text, for people: ``samples.sqlite`` in a run's folder, of a bounded size.

A thread of its own turns token ids into text and writes; whoever hands groups over does not wait.

Invariants:

* Nothing is computed from this file, and nothing in it is synced: what became of a sample stands in the ledger.
* It holds the newest samples, as many as were asked for, and a tenth as many each of the newest that failed, of those
  with the lowest rewards and of the longest.
* When groups come faster than they can be written, some are left out and counted; nobody waits.

| waits for | who ends it |
|---|---|
| groups that are not written yet, in ``close`` | the thread; after the timeout it is left to end with the process |
"""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.ledger.evaluation_answers import outcome_words, response_text
from penstock.messages.base import Metric
from penstock.messages.samples import Media

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.messages.commands import KeepSamples
    from penstock.messages.samples import Prompt, Sample

SAMPLES_FILE: Final = "samples.sqlite"
"""Name of the file of kept samples in the folder of a run."""
MAX_TEXT_CHARACTERS: Final = 24_000
"""Of a prompt or a response; of a longer one beginning and end are kept."""
ODD_SHARE: Final = 10
PRUNED_EVERY: Final = 64
MAX_WAITING: Final = 256
TOGETHER_S: Final = 0.2
"""Groups that come within this time are written together: a transaction costs as much as a group, and so does it to
wake the thread."""
BUSY_TIMEOUT_S: Final = 5.0

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS samples (place INTEGER PRIMARY KEY AUTOINCREMENT, group_id INTEGER NOT NULL, "
    "sample_index INTEGER NOT NULL, has_failed INTEGER NOT NULL, reward REAL, num_tokens INTEGER NOT NULL, "
    "body BLOB NOT NULL, UNIQUE (group_id, sample_index)) STRICT"
)
_INSERT: Final = (
    "INSERT OR REPLACE INTO samples (group_id, sample_index, has_failed, reward, num_tokens, body) "
    "VALUES (?, ?, ?, ?, ?, ?)"
)
_PRUNE: Final = """
DELETE FROM samples WHERE place NOT IN (
    SELECT place FROM (SELECT place FROM samples ORDER BY place DESC LIMIT :newest)
    UNION SELECT place FROM (SELECT place FROM samples WHERE has_failed ORDER BY place DESC LIMIT :odd)
    UNION SELECT place FROM (SELECT place FROM samples WHERE reward IS NOT NULL ORDER BY reward, place DESC LIMIT :odd)
    UNION SELECT place FROM (SELECT place FROM samples ORDER BY num_tokens DESC, place DESC LIMIT :odd))
"""


class KeptSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample as people read it."""

    group_id: int
    index: int
    kept_at: float
    """Unix time."""
    row: int
    """Row of the dataset, from 0."""
    prompt: str
    label: str = ""
    response: str = ""
    """With what others wrote in between, of an episode; empty where none came."""
    reward: float | None = None
    components: dict[str, float] = {}
    outcome: str = ""
    """``completed``, ``truncated`` or ``policy_error``; empty where no response came."""
    detail: str = ""
    """Why a completed one stopped, what a policy error was."""
    cause: str = ""
    """Why the Filter did not admit it; empty: it did."""
    reason: str = ""
    """What went wrong with it, where something did."""
    num_tokens: int = 0
    oldest_version: int | None = None
    engine: str = ""
    attempt: int = 0
    media: tuple[Media, ...] = ()
    """Images of the prompt and of the episode, by reference."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(KeptSample)


class SampleKeeper:
    """The file of a run, and the thread that writes it."""

    def __init__(self, run_folder: Path, tokenizer_folder: Path, num_newest: int) -> None:
        """Nothing is opened before the first group comes."""
        self._file = run_folder / SAMPLES_FILE
        self._tokenizer_folder = tokenizer_folder
        self._limits = {"newest": num_newest, "odd": max(1, num_newest // ODD_SHARE)}
        self._queue: SimpleQueue[KeepSamples | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._num_left_out = 0

    def keep(self, command: KeepSamples, fail: Callable[[BaseException], None]) -> None:
        """Write a group soon; ``fail`` hears of what cannot be written."""
        if self._queue.qsize() >= MAX_WAITING:
            self._num_left_out += len(command.group.samples)
            return
        self._queue.put(command)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, args=(fail,), name="samples", daemon=True)
            self._thread.start()

    def gauges(self) -> tuple[Metric, ...]:
        """Samples that were left out because too many came at once."""
        return (Metric("filter/samples_unkept", float(self._num_left_out)),)

    def close(self, timeout_s: float) -> None:
        """Write what was handed over."""
        if self._thread is not None:
            self._queue.put(None)
            self._closing.set()
            self._thread.join(timeout_s)
            self._thread = None

    def _taken(self) -> list[KeepSamples | None]:
        """What comes within ``TOGETHER_S``, once something has; None, the end, is the last."""
        first = self._queue.get()
        if first is not None:
            self._closing.wait(TOGETHER_S)
        return [first, *(self._queue.get() for _ in range(self._queue.qsize()))]

    def _write(self, fail: Callable[[BaseException], None]) -> None:
        try:
            tokenizer = TextTokenizer(self._tokenizer_folder)
            with closing(_opened(self._file)) as database:
                num_unpruned, is_open = 0, True
                while is_open:
                    taken = self._taken()
                    is_open = taken[-1] is not None
                    commands, now_s = [command for command in taken if command is not None], time.time()
                    rows = [row for command in commands for row in kept_samples(command, tokenizer.decode, now_s)]
                    num_unpruned += len(commands)
                    with database:
                        database.executemany(_INSERT, map(_row, rows))
                        if num_unpruned >= PRUNED_EVERY:
                            num_unpruned = 0
                            database.execute(_PRUNE, self._limits)
                with database:
                    database.execute(_PRUNE, self._limits)
        except BaseException as error:
            fail(error)


def kept_samples(command: KeepSamples, text_of: Callable[[list[int]], str], now_s: float) -> Iterator[KeptSample]:
    """The samples of a group, by index; of one that failed before it had a response only why."""
    group, ends = command.group, {end.key.index: end for end in command.group.ended}
    blank = KeptSample(
        group_id=group.group_id,
        index=0,
        kept_at=now_s,
        row=group.prompt.row,
        prompt=clipped(group.prompt.text),
        label=clipped(group.prompt.label),
        media=tuple(each for each in group.prompt.media if each.digest),
    )
    samples = {sample.key.index: sample for sample in group.samples}
    for index in sorted(samples.keys() | ends.keys()):
        end, sample = ends.get(index), samples.get(index)
        one = msgspec.structs.replace(blank, index=index, cause=command.cause)
        if end is not None:
            one = msgspec.structs.replace(one, cause=end.cause, reason=end.reason, num_tokens=end.num_tokens)
        yield one if sample is None else _with_response(one, sample, group.prompt, text_of)


def _with_response(one: KeptSample, sample: Sample, prompt: Prompt, text_of: Callable[[list[int]], str]) -> KeptSample:
    outcome, detail = outcome_words(sample.outcome)
    reward = sample.outcome.reward
    return msgspec.structs.replace(
        one,
        response=clipped(response_text(sample, text_of)),
        media=sample.images(prompt),
        reward=None if reward is None else reward.value,
        components={} if reward is None else {component.name: component.value for component in reward.components},
        outcome=outcome,
        detail=detail,
        num_tokens=sample.num_tokens,
        oldest_version=sample.oldest_version,
        engine=sample.engine,
        attempt=sample.attempt,
    )


def clipped(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """The text, or of a longer one three quarters of the limit from its beginning and a quarter from its end."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 4, limit // 4
    return f"{text[:head]}\n[… {len(text) - head - tail:,} characters left out …]\n{text[-tail:]}"


def read_kept(run_folder: Path, limit: int | None = None) -> list[KeptSample]:
    """The samples that a run has kept, newest first, at most so many; none where there is no file.

    Raises:
        sqlite3.Error: the file cannot be read.
        msgspec.DecodeError: it holds something else.
    """
    file = run_folder / SAMPLES_FILE
    if not file.is_file():
        return []
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as database:
        query = "SELECT body FROM samples ORDER BY place DESC LIMIT ?"
        rows = database.execute(query, (-1 if limit is None else limit,)).fetchall()
    return [_DECODER.decode(body) for (body,) in rows]


def read_kept_of(run_folder: Path, keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], KeptSample]:
    """Those of these samples, by group and index, that the run has kept; as :func:`read_kept`."""
    file = run_folder / SAMPLES_FILE
    if not file.is_file():
        return {}
    query = "SELECT body FROM samples WHERE group_id = ? AND sample_index = ?"
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as database:
        found = {key: database.execute(query, key).fetchone() for key in keys}
    return {key: _DECODER.decode(row[0]) for key, row in found.items() if row is not None}


def _opened(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)
    database.execute("PRAGMA synchronous = OFF")
    database.execute(_TABLE)
    return database


def _row(kept: KeptSample) -> tuple[int | float | bytes | None, ...]:
    has_failed = bool(kept.reason) or not kept.outcome
    reward = None if kept.reward is None or kept.reward != kept.reward else kept.reward
    return (kept.group_id, kept.index, has_failed, reward, kept.num_tokens, _ENCODER.encode(kept))
