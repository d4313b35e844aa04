"""Kept samples as users read them: with pandas, and with pyarrow alone; every column is what was trained."""
# pandas and pyarrow have no types that the checkers know of.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnknownLambdaType=false

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

import ledger_entries as make
import pandas  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest
from pyarrow import parquet

from penstock.actors.buffer.books import recorded
from penstock.backends.ledger.archive import COLUMNS, archive_samples
from penstock.backends.ledger.archived_groups import read_archived
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.ledger import StepRecorded, VersionRecorded
from penstock.messages.samples import (
    Completed,
    CountedSample,
    ExpertChoices,
    Group,
    Loss,
    Media,
    Part,
    PolicyError,
    Prompt,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    StopReason,
    TerminalState,
    VersionSpan,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.ledger import LedgerEntry

FIRST = Part(
    tokens=pack_tokens([5, 6, 7]),
    logprobs=pack_floats([-0.5, -0.25, -1.0]),
    spans=(VersionSpan(0, 2), VersionSpan(1, 1)),
    experts=ExpertChoices(1, 2, 1, b"\0\3"),
)
SECOND = Part(
    tokens=pack_tokens([8, 9]),
    logprobs=pack_floats([0.0, -2.0]),
    spans=(VersionSpan(1, 2),),
    loss_mask=b"\0\1",
    context_tokens=pack_tokens([1, 2]),
    media=(Media("image", "/a", "d", -1, 2),),
    teacher_logprobs=pack_floats([-0.5, -0.125]),
    kept=KeptTokens(b"\0\0\1\0", pack_tokens([9])),
)
GROUP = Group(
    group_id=0,
    prompt=Prompt(
        row=41, epoch=2, tokens=pack_tokens([3, 1, 2]), text="two + two", label="4", metadata=b'{"level": 3}',
        media=(Media("image", "/a", "d", 1, 2),),
    ),
    samples=(
        Sample(
            key=SampleKey(0, 0),
            attempt=1,
            engine="engine/1",
            parts=(FIRST, SECOND),
            outcome=Completed(
                stop=StopReason.EPISODE, reward=Reward(value=0.75, components=(Metric("format", 0.5),))
            ),
        ),
        Sample(
            key=SampleKey(0, 3),
            engine="engine/0",
            parts=(Part(),),
            outcome=PolicyError(detail="no such tool"),
            loss=Loss.SUPERVISED,
        ),
    ),
    ended=(SampleEnd(key=SampleKey(0, 1), state=TerminalState.FAILED, cause="why"),
           SampleEnd(key=SampleKey(0, 2), state=TerminalState.FILTERED, cause="dull")),
    counted=(CountedSample(2, 0.25, (Metric("format", 0.125),)),),
)  # fmt: skip
SEEN = {"kind": "image", "reference": "/a", "digest": "d", "at": 1, "num_tokens": 2}
COUNTED = [{"sample_index": 2, "reward": 0.25, "components": [("format", 0.125)]}]
EXPECTED: list[dict[str, Any]] = [
    {
        "group_id": 0, "sample_index": 0, "version": 1, "staleness": 0, "attempt": 1, "engine": "engine/1", "row": 41,
        "epoch": 2, "prompt": "two + two", "prompt_tokens": [3, 1, 2], "label": "4", "metadata": '{"level": 3}',
        "response_tokens": [5, 6, 7, 8, 9], "logprobs": [-0.5, -0.25, -1.0, 0.0, -2.0],
        "teacher_logprobs": [math.nan, math.nan, math.nan, -0.5, -0.125], "loss_mask": [1, 1, 1, 0, 1],
        "spans": [{"version": 0, "num_tokens": 2}, {"version": 1, "num_tokens": 1}, {"version": 1, "num_tokens": 2}],
        "part_lengths": [3, 2], "part_contexts": [[], [1, 2]],
        "part_experts": [{"num_layers": 1, "per_token": 2, "id_bytes": 1, "ids": b"\0\3"}, None],
        "part_kept": [None, {"counts": b"\0\0\1\0", "ids": b"\x09\0\0\0"}],
        "prompt_media": [SEEN], "part_media": [[], [SEEN | {"at": -1}]],
        "outcome": "completed", "outcome_detail": "episode", "loss": "", "reward": 0.75,
        "reward_components": [("format", 0.5)], "counted": COUNTED,
    },
    {
        "group_id": 0, "sample_index": 3, "version": 1, "staleness": None, "attempt": 0, "engine": "engine/0",
        "row": 41, "epoch": 2, "prompt": "two + two", "prompt_tokens": [3, 1, 2], "label": "4",
        "metadata": '{"level": 3}', "response_tokens": [], "logprobs": [], "teacher_logprobs": None,
        "loss_mask": None, "spans": [], "part_lengths": [0], "part_contexts": None, "part_experts": None,
        "part_kept": None, "prompt_media": [SEEN], "part_media": None,
        "outcome": "policy_error", "outcome_detail": "no such tool", "loss": "sft", "reward": None,
        "reward_components": [], "counted": COUNTED,
    },
]  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of a run's samples, with the one group of its one batch."""
    store = SqliteStore(tmp_path / "ledger.sqlite")
    store.claim(0)
    begun: list[LedgerEntry] = [make.run(), VersionRecorded(version=0), make.granted(0, 1)]
    trained = StepRecorded(version=1, group_ids=(0,), num_trained_tokens=4, max_staleness=0)
    store.commit([*begun, recorded(GROUP, 2), make.leased(1, 0), trained])
    archive_samples(store.reader(), tmp_path / "samples", 1, 1)
    store.close()
    return tmp_path / "samples"


def plain(value: object) -> object:
    """What pandas gives (arrays, missing values) as lists and None."""
    if hasattr(value, "tolist"):
        value = cast("Any", value).tolist()
    if isinstance(value, list | tuple):
        items = [plain(item) for item in cast("list[object]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast("dict[str, object]", value).items()}
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def test_the_expectation_names_every_documented_column() -> None:
    assert [list(row) for row in EXPECTED] == [list(COLUMNS)] * 2


def test_pyarrow_reads_every_column(kept: Path) -> None:
    assert plain(parquet.read_table(kept).to_pylist()) == plain(EXPECTED)


def test_pandas_reads_every_column(kept: Path) -> None:
    frame = pandas.read_parquet(kept)
    assert list(frame.columns) == list(COLUMNS)
    for number, expected in enumerate(EXPECTED):
        for name, value in expected.items():
            found = plain(frame[name].iloc[number])
            missing = value is None and found in (None, "nan")
            assert missing or found == plain(value), (name, found, value)


def test_pandas_answers_what_people_ask(kept: Path) -> None:
    frame = pandas.read_parquet(kept)
    assert frame.groupby("group_id").reward.mean().to_dict() == {0: 0.75}
    assert frame.response_tokens.map(len).tolist() == [5, 0]
    assert json.loads(frame.metadata[0]) == {"level": 3}
    assert dict(frame.reward_components[0]) == {"format": 0.5}


def test_groups_come_back_as_they_were_but_for_what_the_ledger_has(kept: Path) -> None:
    (path,) = kept.glob("*.parquet")
    (group,) = read_archived(path)
    assert group.counted == GROUP.counted
    assert group.samples == GROUP.samples
    assert group.prompt == GROUP.prompt
