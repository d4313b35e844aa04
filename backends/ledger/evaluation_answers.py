"""The answers of evaluations as JSON lines, for people: ``evaluations/003-gsm8k.jsonl``.

A thread of its own turns token ids into text and writes; whoever hands groups over does not wait.

Invariants:

* Nothing is computed from these files. A Buffer that is killed may leave groups out that the ledger has, and a group
  that is evaluated twice over such a death may stand here twice; the later lines are those that count.
* A group is written whole.

| waits for | who ends it |
|---|---|
| groups that are not written yet, in ``close`` | the thread; after the timeout it is left to end with the process |
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.data.tokenizer import TextTokenizer
from penstock.messages.arrays import tokens_view
from penstock.messages.samples import Completed, PolicyError, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from penstock.messages.commands import KeepAnswers
    from penstock.messages.samples import ModelOutcome, Sample

FOLDER: Final = "evaluations"
"""Name of the folder in the folder of a run."""
MISSING: Final = "missing"


class AnswerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, as it stands in a file."""

    evaluation: int
    """Number of the evaluation, from 0."""
    version: int
    """Policy version that the evaluation asked for."""
    dataset: str
    row: int
    """Of the dataset as it is evaluated, from 0."""
    index: int
    """Of the answer among those to its prompt, from 0."""
    prompt: str
    label: str
    response: str = ""
    """Empty for an answer that is missing."""
    reward: float | None = None
    """null for an answer that is missing."""
    components: dict[str, float] = {}
    """Components of the reward by name."""
    answer: str = ""
    """What the reward function took for the final answer; empty: none."""
    outcome: str = MISSING
    """``completed``, ``truncated``, ``policy_error`` or ``missing``."""
    detail: str = ""
    """Why a completed answer stopped, what a policy error was, why an answer is missing."""
    num_tokens: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    """Which version made how many of the tokens, in order."""
    engine: str = ""
    attempt: int = 0


def answers_file(run_folder: Path, evaluation: int, dataset: str) -> Path:
    """Where the answers to a dataset are."""
    return run_folder / FOLDER / f"{evaluation:03d}-{dataset}.jsonl"


class AnswerFiles:
    """The files of a run."""

    def __init__(self, run_folder: Path, tokenizer_folder: Path) -> None:
        """Nothing is opened before the first group comes."""
        self._run_folder = run_folder
        self._tokenizer_folder = tokenizer_folder
        self._queue: SimpleQueue[KeepAnswers | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.num_answers = 0
        """That were handed over, the missing ones included."""

    def keep(self, command: KeepAnswers, fail: Callable[[BaseException], None]) -> None:
        """Write a group soon; ``fail`` hears of what cannot be written."""
        self._queue.put(command)
        self.num_answers += len(command.group.samples) + len(command.group.ended)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, args=(fail,), name="answers", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Write what was handed over."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _write(self, fail: Callable[[BaseException], None]) -> None:
        files: dict[tuple[int, str], BinaryIO] = {}
        try:
            tokenizer = TextTokenizer(self._tokenizer_folder)
            encoder = msgspec.json.Encoder()
            while (command := self._queue.get()) is not None:
                key = command.evaluation, command.dataset
                for earlier in [other for other in files if other[0] < command.evaluation]:
                    files.pop(earlier).close()
                if key not in files:
                    path = answers_file(self._run_folder, *key)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    files[key] = path.open("ab")
                files[key].write(encoder.encode_lines(list(answer_rows(command, tokenizer.decode))))
                files[key].flush()
        except BaseException as error:
            fail(error)
        finally:
            for file in files.values():
                file.close()


def answer_rows(command: KeepAnswers, text_of: Callable[[list[int]], str]) -> Iterator[AnswerRow]:
    """The rows of a group, by index, with those that are missing."""
    rows = {sample.key.index: _row(command, sample, text_of) for sample in command.group.samples}
    for ended in command.group.ended:
        missing = msgspec.structs.replace(
            _blank(command, ended.key.index), detail=ended.cause, num_tokens=ended.num_tokens
        )
        rows.setdefault(ended.key.index, missing)
    for index in sorted(rows):
        yield rows[index]


def _row(command: KeepAnswers, sample: Sample, text_of: Callable[[list[int]], str]) -> AnswerRow:
    outcome, detail = outcome_words(sample.outcome)
    reward = sample.outcome.reward
    return msgspec.structs.replace(
        _blank(command, sample.key.index),
        response=response_text(sample, text_of),
        reward=None if reward is None else reward.value,
        components={} if reward is None else {component.name: component.value for component in reward.components},
        answer="" if reward is None else reward.answer,
        outcome=outcome,
        detail=detail,
        num_tokens=sample.num_tokens,
        spans=tuple((span.version, span.num_tokens) for span in sample.spans),
        engine=sample.engine,
        attempt=sample.attempt,
    )


def _blank(command: KeepAnswers, index: int) -> AnswerRow:
    prompt = command.group.prompt
    return AnswerRow(
        evaluation=command.evaluation,
        version=command.version,
        dataset=command.dataset,
        row=prompt.row,
        index=index,
        prompt=prompt.text,
        label=prompt.label,
    )


def response_text(sample: Sample, text_of: Callable[[list[int]], str]) -> str:
    """All of a response, with what others wrote in between."""
    return "".join(text_of(tokens_view(part.tokens).tolist()) for part in sample.parts)


def outcome_words(outcome: ModelOutcome) -> tuple[str, str]:
    """Its name, and why it is one: why a completed one stopped, what a policy error was."""
    match outcome:
        case Completed(stop=stop):
            return "completed", stop.value
        case Truncated():
            return "truncated", ""
        case PolicyError(detail=detail):
            return "policy_error", detail
