"""A teacher on a stock server: its log-probs are those of transformers, on a server of ours and on one that runs."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import random
from queue import SimpleQueue
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tiny_models import CONTEXT_TOKENS, VOCAB_SIZE
from transformers import AutoModelForCausalLM

from penstock.backends.engines.served.sglang.opening import ADMIN_KEY_VARIABLE
from penstock.backends.engines.served.sglang.teacher import longest_sample, open_sglang_teacher
from penstock.backends.engines.spec import TeacherContext
from penstock.backends.engines.teacher_options import TeacherModelOptions, TeacherOptions
from penstock.messages.arrays import floats_view, pack_tokens, tokens_view
from penstock.messages.commands import ComputeLogprobs, OpenEngine
from penstock.messages.local import EngineOpened, LocalEvent, LogprobsComputed
from penstock.messages.samples import SampleKey
from penstock.messages.teaching import GivenTokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from running_server import RunningServer
    from transformers import PreTrainedModel

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
CONTEXT = 96
WAIT_S = 240.0
TOLERANCE = 1e-4
NUM_TOP = 5


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]


SHARED = ids(20, 0)
TEXTS: list[tuple[list[int], list[int]]] = [
    (SHARED, ids(10, 1)),
    (SHARED, [*ids(5, 2), VOCAB_SIZE - 1]),
    (ids(1, 3), ids(40, 4)),
    (ids(30, 5), ids(CONTEXT - 30, 6)),
    (SHARED, ids(10, 1)),
]


def distributions(folder: Path, context: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs ``[T, vocabulary]`` in the place of each of T tokens."""
    model = cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    every = torch.tensor([context + tokens])
    with torch.no_grad():
        logits = cast("torch.Tensor", model(every).logits)[0, :-1]
    return torch.log_softmax(logits, -1)[len(context) - 1 :]


def expected(folder: Path, context: list[int], tokens: list[int]) -> list[float]:
    found = distributions(folder, context, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return cast("list[float]", found.tolist())


def answers_of(folder: Path, run_folder: Path, options: TeacherOptions) -> tuple[list[LogprobsComputed], EngineOpened]:
    """To all texts, asked at once, one of them outside the vocabulary and one too long."""
    said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
    teacher = open_sglang_teacher(
        TeacherContext(
            name="teacher/0", index=0, epoch=0, model_folder=folder, run_folder=run_folder, options=options,
            max_context=CONTEXT, temperature=1.0, seed=0,
        )
    )  # fmt: skip
    teacher.start(said.put, said.put)
    try:
        teacher.execute(OpenEngine())
        opened = said.get(timeout=WAIT_S)
        assert isinstance(opened, EngineOpened), opened
        asked = [*TEXTS, ([VOCAB_SIZE], [3]), (ids(3000, 7), [3])]
        for index, (context, tokens) in enumerate(asked):
            texts = (GivenTokens(pack_tokens(context), pack_tokens(tokens)),)
            teacher.execute(ComputeLogprobs(key=SampleKey(index, 0), attempt=0, texts=texts))
        found: list[LogprobsComputed] = []
        for _ in asked:
            event = said.get(timeout=WAIT_S)
            assert isinstance(event, LogprobsComputed), event
            found.append(event)
    finally:
        teacher.close(60.0)
    assert said.empty()
    return sorted(found, key=lambda answer: answer.key), opened


def check(folder: Path, found: list[LogprobsComputed]) -> None:
    for (context, tokens), answer in zip(TEXTS, found, strict=False):
        assert answer.error == ""
        (logprobs,) = answer.logprobs
        assert floats_view(logprobs).tolist() == pytest.approx(expected(folder, context, tokens), abs=TOLERANCE)
    assert f"token id {VOCAB_SIZE}" in found[-2].error
    assert "context length" in found[-1].error or "too long" in found[-1].error or "longer" in found[-1].error


def check_likeliest(folder: Path, found: list[LogprobsComputed], k: int) -> None:
    """The k greatest log-probs of each place, under the ids whose log-probs they are."""
    for (context, tokens), answer in zip(TEXTS, found, strict=False):
        (top,) = answer.top
        every = distributions(folder, context, tokens)
        ids = torch.tensor(tokens_view(top.ids).tolist()).reshape(len(tokens), k)
        logprobs = torch.tensor(floats_view(top.logprobs).tolist()).reshape(len(tokens), k)
        torch.testing.assert_close(logprobs, every.topk(k).values, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(logprobs, every.gather(1, ids), atol=TOLERANCE, rtol=0)
        assert all(len(set(row)) == k for row in cast("list[list[int]]", ids.tolist()))


def test_a_server_of_ours_takes_samples_a_little_shorter_than_its_model(tiny_model: Callable[..., Path]) -> None:
    assert longest_sample(tiny_model()) == CONTEXT_TOKENS - 8


def test_a_server_of_ours_teaches(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model()
    options = TeacherOptions(
        backend="sglang",
        model=TeacherModelOptions(path=str(folder)),
        slots=8,
        device="cpu",
        sglang={"mem_fraction_static": 0.2, "max_total_tokens": 16384},
        top_logprobs=NUM_TOP,
    )
    found, opened = answers_of(folder, tmp_path, options)
    assert opened.num_slots == 8
    check(folder, found)
    check_likeliest(folder, found, NUM_TOP)
    assert (tmp_path / "logs" / "teacher-0-sglang.log").is_file()


def test_a_server_that_runs_already_teaches_and_is_left_running(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, server.admin_api_key)
    options = TeacherOptions(
        backend="sglang", model=TeacherModelOptions(path=str(server.model_folder)), addresses=(server.address,)
    )
    for _ in range(2):  # a successor finds it as it was, with a cache of the texts
        found, _opened = answers_of(server.model_folder, tmp_path, options)
        check(server.model_folder, found)
    assert not server.handle.ended.done()
