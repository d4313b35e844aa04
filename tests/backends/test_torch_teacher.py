"""The embedded teacher: log-probs of given tokens as transformers computes them, whoever else is in the pass."""

# transformers and Tensor.tolist are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
import torch
from engine_cases import MODELS, VOCAB_SIZE, Case, make_case, random_tokens, reference_logprobs

from penstock.backends.engines.teacher_options import TeacherModelOptions, TeacherOptions
from penstock.backends.engines.torch.scoring import Text, TextScorer
from penstock.backends.engines.torch.teacher import open_torch_teacher
from penstock.messages.arrays import floats_view, pack_tokens
from penstock.messages.commands import ComputeLogprobs, OpenEngine
from penstock.messages.errors import UserFault
from penstock.messages.local import EngineOpened, LocalEvent, LogprobsComputed
from penstock.messages.samples import SampleKey
from penstock.messages.teaching import GivenTokens

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.protocol import Backend
    from penstock.messages.commands import TeacherCommand

WAIT_S = 60.0
TOLERANCE = 1e-5
TEXTS = [
    Text(random_tokens(5, seed=1), random_tokens(1, seed=2)),
    Text(random_tokens(1, seed=3), random_tokens(40, seed=4)),
    Text(random_tokens(30, seed=5), ()),
    Text(random_tokens(17, seed=6), random_tokens(9, seed=7)),
    Text(random_tokens(2, seed=8), random_tokens(600, seed=9)),
]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("qwen3_tied", tmp_path_factory.mktemp("teacher"))


def scorer_of(folder: Path, *, temperature: float = 1.0, max_context: int = 700, num_top: int = 0) -> TextScorer:
    device = torch.device("cpu")
    return TextScorer(
        folder, dtype=torch.float32, device=device, max_context=max_context, temperature=temperature, num_top=num_top
    )


def expected(case: Case, text: Text, temperature: float = 1.0) -> torch.Tensor:
    return reference_logprobs(case.model, [*text.context, *text.tokens], temperature)[len(text.context) - 1 :]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_log_probs_of_a_packed_pass_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = make_case(name, tmp_path)
    for text, (found, _, _) in zip(TEXTS, scorer_of(tmp_path).score(TEXTS), strict=True):
        assert found.shape == (len(text.tokens),)
        assert found.dtype == torch.float32
        if text.tokens:
            assert (found - expected(case, text)).abs().max() < TOLERANCE


def test_log_probs_are_of_the_temperature_that_is_sampled_with(case: Case) -> None:
    found = scorer_of(case.folder, temperature=0.7).score(TEXTS)[3].logprobs
    assert (found - expected(case, TEXTS[3], 0.7)).abs().max() < TOLERANCE
    assert (found - expected(case, TEXTS[3], 1.0)).abs().max() > 100 * TOLERANCE


def test_the_likeliest_tokens_are_those_of_transformers(case: Case) -> None:
    found = scorer_of(case.folder, temperature=0.7, num_top=4).score(TEXTS)
    for text, one in zip(TEXTS, found, strict=True):
        assert one.top_ids.shape == one.top_logprobs.shape == (len(text.tokens), 4)
    text, one = TEXTS[3], found[3]
    with torch.no_grad():
        logits = case.model(torch.tensor([[*text.context, *text.tokens]])).logits[0, len(text.context) - 1 : -1]
    wanted = torch.log_softmax(logits / 0.7, -1).topk(4, dim=-1)
    assert (one.top_logprobs - wanted.values).abs().max() < TOLERANCE
    assert (one.top_ids == wanted.indices).float().mean() > 0.99
    with pytest.raises(UserFault, match=r"teacher\.top_logprobs: 1000000 is more than"):
        scorer_of(case.folder, num_top=1_000_000)


def test_a_teacher_that_was_made_for_shorter_texts_is_refused(case: Case) -> None:
    with pytest.raises(UserFault, match=r"takes at most 1536 tokens, and model\.max_context is 2000"):
        scorer_of(case.folder, max_context=2000)


# --- as a backend -------------------------------------------------------------------------------------------------


class Bench:
    """A teacher, and what it said."""

    def __init__(self, folder: Path, options: TeacherOptions) -> None:
        self.said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        self.teacher: Backend[TeacherCommand] = open_torch_teacher(
            model_folder=folder, options=options, max_context=700, temperature=1.0
        )
        self.teacher.start(self.said.put, self.said.put)

    def ask(self, group_id: int, *texts: Text) -> None:
        given = tuple(GivenTokens(pack_tokens(text.context), pack_tokens(text.tokens)) for text in texts)
        self.teacher.execute(ComputeLogprobs(key=SampleKey(group_id, 0), attempt=1, texts=given))

    def answers(self, count: int) -> dict[int, LogprobsComputed]:
        found: dict[int, LogprobsComputed] = {}
        while len(found) < count:
            event = self.said.get(timeout=WAIT_S)
            assert isinstance(event, LogprobsComputed), event
            assert event.key.group_id not in found
            found[event.key.group_id] = event
        return found


def options(max_tokens: int = 64) -> TeacherOptions:
    return TeacherOptions(device="cpu", slots=7, max_tokens=max_tokens, model=TeacherModelOptions(path="unused"))


def test_every_question_is_answered_once_and_several_share_a_pass(case: Case) -> None:
    bench = Bench(case.folder, options(max_tokens=200))
    bench.teacher.execute(OpenEngine())
    assert bench.said.get(timeout=WAIT_S) == EngineOpened(num_slots=7)
    for group_id in range(12):
        bench.ask(group_id, Text(TEXTS[0].context, random_tokens(10, seed=group_id)), TEXTS[3])
    found = bench.answers(12)
    gauges = {metric.name: metric.value for metric in bench.teacher.gauges()}
    bench.teacher.close(WAIT_S)
    for group_id, answer in found.items():
        assert (answer.attempt, answer.error) == (1, "")
        texts = (Text(TEXTS[0].context, random_tokens(10, seed=group_id)), TEXTS[3])
        for text, logprobs in zip(texts, answer.logprobs, strict=True):
            assert floats_view(logprobs).tolist() == pytest.approx(expected(case, text).tolist(), abs=TOLERANCE)
    assert gauges["teacher/tokens"] == 12 * 19
    assert 3 <= gauges["teacher/passes"] <= 12  # 39 inputs each, at most 200 in a pass


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (Text((), (3, 4)), "nothing stands before the first token, so nothing predicts it"),
        (Text((3,), (4,) * 700), r"it has 701 tokens, at most 700 fit \(model.max_context\)"),
        (Text((3,), (VOCAB_SIZE,)), f"token id {VOCAB_SIZE} is outside the {VOCAB_SIZE} of the teacher's vocabulary"),
        (Text((-1,), (3,)), f"token id -1 is outside the {VOCAB_SIZE} of the teacher's vocabulary"),
    ],
)
def test_a_sample_that_cannot_be_scored_is_refused_with_the_reason_and_touches_no_other(
    case: Case, text: Text, reason: str
) -> None:
    bench = Bench(case.folder, options())
    bench.teacher.execute(OpenEngine())
    bench.said.get(timeout=WAIT_S)
    bench.ask(0, TEXTS[3])
    bench.ask(1, TEXTS[3], text)
    bench.ask(2, TEXTS[3])
    found = bench.answers(3)
    bench.teacher.close(WAIT_S)
    assert re.fullmatch(reason, found[1].error)
    assert found[1].logprobs == ()
    assert found[0].logprobs == found[2].logprobs != ()


def test_a_log_prob_that_is_not_finite_is_no_answer(case: Case, tmp_path: Path) -> None:
    broken = make_case("qwen3_untied", tmp_path)
    with torch.no_grad():
        for parameter in broken.model.parameters():
            parameter.fill_(float("nan"))
    broken.model.save_pretrained(tmp_path)
    bench = Bench(tmp_path, options())
    bench.teacher.execute(OpenEngine())
    bench.said.get(timeout=WAIT_S)
    bench.ask(0, TEXTS[3])
    assert "not finite" in bench.answers(1)[0].error
    bench.teacher.close(WAIT_S)


def test_a_folder_without_a_model_ends_the_teacher_with_the_story(tmp_path: Path) -> None:
    bench = Bench(tmp_path, options())
    bench.teacher.execute(OpenEngine())
    error = bench.said.get(timeout=WAIT_S)
    bench.teacher.close(WAIT_S)
    assert isinstance(error, UserFault)
