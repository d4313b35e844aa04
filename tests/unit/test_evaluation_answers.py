"""Files of answers: every answer stands there with what became of it, in text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.backends.checkpoint.make import make_model
from penstock.backends.data.problems import DataError
from penstock.backends.ledger.evaluation_answers import AnswerFiles, AnswerRow, answer_rows, answers_file
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.commands import KeepAnswers
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    PolicyError,
    Prompt,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    Truncated,
    VersionSpan,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.samples import ModelOutcome

GROUP_ID = ~5


def sample(index: int, outcome: ModelOutcome, *tokens: int) -> Sample:
    part = Part(
        tokens=pack_tokens(list(tokens)),
        logprobs=pack_floats([0.0] * len(tokens)),
        spans=(VersionSpan(7, len(tokens)),) if tokens else (),
    )
    return Sample(key=SampleKey(GROUP_ID, index), engine="engine/0", parts=(part,), outcome=outcome)


def command(*samples: Sample, ended: tuple[SampleEnd, ...] = ()) -> KeepAnswers:
    prompt = Prompt(row=3, epoch=0, tokens=pack_tokens([1]), text="1+1=", label="2")
    group = Group(group_id=GROUP_ID, prompt=prompt, samples=samples, ended=ended)
    return KeepAnswers(evaluation=2, version=7, dataset="sums", group=group)


def words(ids: list[int]) -> str:
    return "".join(chr(96 + token) for token in ids)


def test_each_answer_has_a_row_by_index_with_what_became_of_it() -> None:
    reward = Reward(value=0.5, components=(Metric("format", 1.0),), answer="12")
    ended = SampleEnd(key=SampleKey(GROUP_ID, 1), state=TerminalState.FAILED, cause="engine lost", num_tokens=4)
    rows = list(
        answer_rows(
            command(
                sample(3, PolicyError(detail="no call", reward=Reward(value=0.0)), 1),
                sample(0, Completed(reward=reward), 1, 2),
                sample(2, Truncated(reward=Reward(value=0.0)), 3),
                ended=(ended,),
            ),
            words,
        )
    )
    assert [(row.index, row.outcome, row.response, row.reward) for row in rows] == [
        (0, "completed", "ab", 0.5),
        (1, "missing", "", None),
        (2, "truncated", "c", 0.0),
        (3, "policy_error", "a", 0.0),
    ]
    assert rows[0].components == {"format": 1.0}
    assert [row.answer for row in rows] == ["12", "", "", ""]
    assert rows[0].spans == ((7, 2),)
    assert [row.detail for row in rows] == ["end_token", "engine lost", "", "no call"]
    assert {(row.evaluation, row.version, row.dataset, row.row, row.label) for row in rows} == {(2, 7, "sums", 3, "2")}


def test_files_are_written_as_text_and_go_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model("xs", folder, 0)
    faults: list[BaseException] = []
    for index in range(2):
        files = AnswerFiles(tmp_path, folder)
        files.keep(command(sample(index, Completed(reward=Reward(value=1.0)), 5, 6)), faults.append)
        files.close(30)
    lines = answers_file(tmp_path, 2, "sums").read_bytes().splitlines()
    rows = [msgspec.json.decode(line, type=AnswerRow) for line in lines]
    assert [row.index for row in rows] == [0, 1]
    assert len(rows[0].response) > 0
    assert not faults


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    faults: list[BaseException] = []
    files = AnswerFiles(tmp_path, tmp_path / "nowhere")
    files.keep(command(sample(0, Completed(), 1)), faults.append)
    files.close(30)
    with pytest.raises(DataError, match="no tokenizer"):
        raise faults[0]
