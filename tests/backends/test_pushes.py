"""Finished groups that are pushed over HTTP: what is taken, what is answered again, what is refused, with which words,
and what an engine makes of them."""

from __future__ import annotations

import json
import math
import queue
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest
from reward_driver import CHARACTERS, PLACES, write_tokenizer

from penstock.backends.data.options import PUSHED, DataOptions
from penstock.backends.data.own_source.journal import ROWS_FILE
from penstock.backends.data.pushed.reading import open_reader
from penstock.backends.data.pushed.responses import PushedResponses
from penstock.backends.data.recorded_rows import RecordedSettings
from penstock.backends.engines.recorded.backend import RecordedEngine
from penstock.backends.episodes.pushes import PushBackend
from penstock.backends.episodes.registry import read_push_address, run_token
from penstock.backends.learners.batch.sequences import read_groups
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens, tokens_view
from penstock.messages.commands import (
    ApplyWeights,
    ChooseRows,
    FetchPrompts,
    Generate,
    PromptRequest,
    StreamPlace,
    TellPushers,
)
from penstock.messages.errors import UserFault
from penstock.messages.local import GenerationEnded, PromptsFetched, RowsDrawn
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Purpose,
    Reward,
    Sample,
    SampleKey,
    Truncated,
    VersionSpan,
)
from penstock.messages.training import UpdateMode
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 60.0
SAMPLES = (
    {"tokens": [PLACES[c] for c in "ab"], "logprobs": [-1.0, -2.0], "reward": 0.5, "is_truncated": False},
    {"text": "c"},
)


def pushed(**changes: object) -> dict[str, Any]:
    return {"key": "k", "version": 3, "prompt": "a+b=", "label": "c", "samples": list(SAMPLES)} | changes


def sample(**changes: object) -> dict[str, Any]:
    return pushed(samples=[SAMPLES[0] | changes, SAMPLES[1]])


class Door:
    """The backend of one incarnation, and somebody who pushes."""

    def __init__(self, run_folder: Path, model: Path, *, objective: str = "") -> None:
        settings = RecordedSettings(
            group_size=2, max_response_tokens=8, are_all_recorded=True, imitates=False, ratio_objective=objective
        )
        options = DataOptions(source=PUSHED, metadata={"reward": "math"})
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failures: list[BaseException] = []
        reader: Callable[[], Any] = lambda: open_reader(options, settings, model, max_context=32)  # noqa: E731
        self.backend = PushBackend(run_folder, "127.0.0.1", reader)
        self.backend.start(self.said.put, self.failures.append)
        self.run_folder = run_folder
        self.http: httpx.Client | None = None

    def tells(self, version: int, *wanted: tuple[int, int], gone: tuple[int, ...] = ()) -> None:
        """Of the groups that are wanted: row and least version; group 10 is that of row 0."""
        requests = tuple(PromptRequest(10 + row, row, 0, None, oldest) for row, oldest in wanted)
        self.backend.execute(FetchPrompts(requests))
        self.backend.execute(TellPushers(version, gone))

    @property
    def client(self) -> httpx.Client:
        if self.http is None:
            while (url := read_push_address(self.run_folder)) is None:  # it has just been started
                assert not self.failures, self.failures
            key = {"Authorization": f"Bearer {run_token(self.run_folder)}"}
            self.http = httpx.Client(base_url=url, headers=key, timeout=WAIT_S)
        return self.http

    def push(self, group: dict[str, Any]) -> httpx.Response:
        return self.client.post("/trajectories", content=json.dumps(group))

    def refusal(self, group: dict[str, Any]) -> tuple[int, str, str]:
        reply = self.push(group)
        assert reply.status_code >= 400, reply.text
        error = reply.json()["error"]
        return reply.status_code, error["code"], error["message"]

    def prompt(self) -> tuple[int, Prompt]:
        (fetched,) = self.said.get(timeout=WAIT_S).prompts
        return fetched.group_id, fetched.prompt

    def close(self) -> None:
        if self.http is not None:
            self.http.close()
        self.backend.close(WAIT_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": PLACES["\n"]}))
    return folder


@pytest.fixture
def opened(tmp_path: Path, model: Path) -> Iterator[Callable[..., Door]]:
    doors: list[Door] = []

    def open_door(**options: str) -> Door:
        for door in doors:
            door.close()
        doors.append(Door(tmp_path, model, **options))
        return doors[-1]

    yield open_door
    for door in doors:
        door.close()
        assert door.failures == []


def answered(run_folder: Path, prompt: Prompt, index: int) -> GenerationEnded:
    """By an engine that serves version 9."""
    said: list[Any] = []
    engine = RecordedEngine(PushedResponses(run_folder), num_slots=4)
    engine.start(said.append, said.append)
    manifest = WeightManifest(
        version=9, publish=1, learner_epoch=0, transport="disk", location="", size_bytes=0, digest=""
    )
    engine.execute(ApplyWeights(manifest=manifest, update_mode=UpdateMode.DRAIN))
    key = SampleKey(10, index)
    engine.execute(Generate(key=key, attempt=0, purpose=Purpose.TRAIN, prompt=prompt, seed=0, deadline_version=9))
    ended: GenerationEnded = said[-1]
    return ended


def test_a_group_is_answered_as_it_was_pushed_with_the_versions_that_made_it(
    opened: Callable[..., Door], tmp_path: Path
) -> None:
    door = opened()
    door.tells(3, (0, 1))
    tokens = [PLACES[c] for c in "abcd"]
    first = {"tokens": tokens, "logprobs": [-1.0] * 4, "spans": [[0, 1], [2, 4]], "versions": [[1, 3], [3, 1]]}
    reply = door.push(pushed(samples=[first, {"text": "c", "reward": 2}], metadata={"level": 2}))
    assert reply.json() == {"key": "k", "row": 0, "version": 3}
    group_id, prompt = door.prompt()
    assert (group_id, prompt.row, prompt.pushed, prompt.is_recorded, prompt.text) == (10, 0, "k", True, "a+b=")
    assert json.loads(prompt.metadata) == {"level": 2, "reward": "math"}
    ended = answered(tmp_path, prompt, 0)
    assert ended.part.spans == (VersionSpan(1, 3), VersionSpan(3, 1)), "not 9, which the engine serves"
    assert tokens_view(ended.part.tokens).tolist() == tokens
    assert floats_view(ended.part.logprobs).tolist() == [-1.0, 0.0, -1.0, -1.0]
    assert (ended.part.loss_mask, ended.outcome) == (bytes([1, 0, 1, 1]), Truncated())
    ended = answered(tmp_path, prompt, 3)  # in place of sample 1, whose scoring failed
    assert all(map(math.isnan, floats_view(ended.part.logprobs))), "nobody knows them"
    assert ended.part.spans == (VersionSpan(3, 2),)
    assert ended.outcome == Completed(reward=Reward(value=2.0))


def test_the_learner_knows_how_old_it_is() -> None:
    part = Part(tokens=pack_tokens([1]), logprobs=pack_floats([math.nan]), spans=(VersionSpan(3, 1),))
    outcome = Completed(reward=Reward(value=1.0))
    made = Sample(key=SampleKey(0, 0), parts=(part,), outcome=outcome)
    for key, is_recorded in (("k", False), ("", True)):
        prompt = Prompt(row=0, epoch=0, tokens=pack_tokens([2]), is_recorded=True, pushed=key)
        (sequence,) = read_groups([Group(group_id=0, prompt=prompt, samples=(made,))], min_token_version=2).sequences
        assert (sequence.is_recorded, sequence.versions.tolist()) == (is_recorded, [3])


def test_prompts_may_be_token_ids(opened: Callable[..., Door]) -> None:
    door = opened()
    door.tells(3, (0, 1))
    ids = [PLACES[c] for c in "a+b="]
    assert door.push(pushed(prompt=None, prompt_tokens=ids)).status_code == 200
    _, prompt = door.prompt()
    assert (tokens_view(prompt.tokens).tolist(), prompt.text) == (ids, "a+b=")


def test_a_key_is_answered_the_same_and_counts_once_in_its_successor_too(
    opened: Callable[..., Door], tmp_path: Path
) -> None:
    door = opened()
    door.tells(3, (0, 3), (1, 3))
    first = door.push(pushed())
    assert door.push(pushed()).content == first.content
    assert door.refusal(pushed(version=2))[:2] == (409, "key_reused")
    assert door.client.get("/trajectories").json()["wanted"] == 1
    with (tmp_path / PUSHED / ROWS_FILE).open("ab") as file:
        file.write(b'{"key":"torn')  # written by a process that died before it could commit
    door = opened()
    door.tells(4, (0, 3), (1, 3))
    assert door.push(pushed()).content == first.content
    assert door.prompt()[1].pushed == "k", "the group that waits for it gets it from disk"
    assert door.push(pushed(key="l", version=4)).json() == {"key": "l", "row": 1, "version": 4}
    assert door.client.get("/trajectories").json() == {
        "version": 4, "oldest_version": None, "wanted": 0, "accepted": 2,
    }  # fmt: skip


def test_ages_and_demand_are_kept(opened: Callable[..., Door]) -> None:
    door = opened()
    assert door.refusal(pushed())[:2] == (503, "not_ready")
    door.tells(3)
    reply = door.push(pushed())
    assert (reply.status_code, reply.json()["error"]["code"], reply.headers["retry-after"]) == (429, "demand_met", "1")
    door.tells(3, (0, 2), (1, 3))
    assert door.refusal(pushed(version=4)) == (
        409, "version_not_published", "version: 4 is above the newest that is announced, 3",
    )  # fmt: skip
    assert door.refusal(pushed(version=1))[:2] == (409, "version_too_old")
    old = sample(versions=[[1, 1], [3, 1]])
    assert door.refusal(old)[1] == "version_too_old", "its oldest token counts"
    assert door.push(pushed(version=2)).status_code == 200
    assert door.refusal(pushed(key="l", version=2))[1] == "version_too_old", "of the next group that waits"
    assert door.backend.gauges()[2].value == 6


def test_a_group_that_is_settled_leaves_its_number_empty(opened: Callable[..., Door], tmp_path: Path) -> None:
    door = opened()
    door.tells(3, (0, 1), (1, 2), gone=(10,))
    assert door.refusal(pushed(version=1))[1] == "version_too_old"
    assert door.push(pushed()).json()["row"] == 1
    group_id, prompt = door.prompt()
    assert group_id == 11
    assert answered(tmp_path, prompt, 0).part.num_tokens == 2
    door = opened()
    door.tells(3, (2, 1))
    assert door.push(pushed()).json()["row"] == 1
    assert door.push(pushed(key="l")).json()["row"] == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    (pushed(version=-1), "`$.version`"),
    (pushed(version="3"), "`$.version`"),
    ({"key": "k"}, "missing required field `version`"),
    (pushed(key="a\x1b[31m"), "`$.key`"),
    (pushed(more=1), "unknown field `more`"),
    (pushed(prompt=None), "prompt: give either"),
    (pushed(prompt_tokens=[1]), "prompt: give either"),
    (pushed(prompt=None, prompt_tokens=[len(CHARACTERS)]), "prompt_tokens: "),
    (pushed(prompt="a" * 32), "the prompt has 32 tokens"),
    (pushed(prompt=[{"role": "user", "content": "a"}]), "data.chat_template"),
    (pushed(label=""), "label: it is missing"),
    (pushed(metadata={"a": "x" * 2**20}), "metadata: 1,048,584 bytes"),
    (pushed(samples=[SAMPLES[0]]), "samples: found 1, and a group has 2"),
    (sample(text="c"), "samples[0]: give one of"),
    (sample(tokens=None), "samples[0]: give one of"),
    (sample(tokens=None, text="c"), "samples[0]: logprobs, spans and versions"),
    (sample(tokens=[1, len(CHARACTERS)]), "the token id"),
    (sample(tokens=[1, -1]), "tokens[1]`"),
    (sample(tokens=[1] * 9, logprobs=[-1] * 9), "at most 8"),
    (sample(logprobs=[-1.0]), "samples[0].logprobs: found 1 for 2 tokens"),
    (sample(logprobs=[-1.0, 0.5]), "logprobs[1]`"),
    (sample(logprobs=[-1.0, math.nan]), "invalid"),
    (sample(logprobs=[-1.0, -1e300]), "logprobs[1]`"),
    (sample(logprobs=[-1.0, -math.inf]), "invalid"),
    (sample(spans=[[0, 3]]), "samples[0].spans"),
    (sample(spans=[[1, 2], [0, 1]]), "samples[0].spans"),
    (sample(spans=[]), "samples[0].spans"),
    (sample(versions=[[3, 1]]), "samples[0].versions: they are of 1 tokens, not 2"),
    (sample(versions=[[4, 2]]), "samples[0].versions: none is above"),
    (sample(reward=2e9), "reward"),
    (sample(messages=[{"role": "assistant", "content": "x"}], tokens=None, logprobs=None), "samples[0].messages"),
]


def test_what_is_wrong_is_told_and_nothing_of_it_is_kept(opened: Callable[..., Door]) -> None:
    door = opened()
    door.tells(3, (0, 1))
    for group, words in WRONG:
        status, code, message = door.refusal(group)
        assert (status, code) == (400, "invalid_request"), (group, message)
        assert words in message, (group, message)
        assert "\n" not in message
    assert door.client.get("/trajectories").json()["wanted"] == 1
    assert door.client.post("/trajectories", content=b"{}", headers={"Authorization": "Bearer x"}).status_code == 401
    assert door.push(pushed()).status_code == 200


def test_objectives_that_need_log_probs_refuse_a_group_without(opened: Callable[..., Door]) -> None:
    door = opened(objective="grpo")
    door.tells(3, (0, 1))
    assert "samples[1].logprobs: they are missing, and learner.objective: grpo" in door.refusal(pushed())[2]
    assert door.push(pushed(samples=[SAMPLES[0], SAMPLES[0]])).status_code == 200


def test_numbers_follow_the_stream_and_a_damaged_journal_is_told(
    opened: Callable[..., Door], tmp_path: Path, model: Path
) -> None:
    door = opened()
    door.backend.execute(ChooseRows((4, 5), (StreamPlace(7, 7, 0), StreamPlace(8, 8, 0)), (), ()))
    drawn = door.said.get(timeout=WAIT_S)
    assert isinstance(drawn, RowsDrawn)
    assert [(row.group_id, row.row) for row in drawn.rows] == [(4, 7), (5, 8)]
    assert not isinstance(drawn, PromptsFetched)
    door.close()
    (tmp_path / PUSHED / "state.json").write_text('{"num_rows": 2, "size_bytes": 9}')
    broken = Door(tmp_path, model)
    while not broken.failures:
        broken.backend.close(WAIT_S)
    assert isinstance(broken.failures[0], UserFault)
    assert "damaged" in str(broken.failures[0])
