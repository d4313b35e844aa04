"""An embedded engine that answers a judge beside its samples: whose weights answer, and what the actor hears of it."""

from __future__ import annotations

import json
import re
import shutil
import threading
from dataclasses import dataclass, field
from http.client import HTTPConnection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from engine_cases import (
    Case,
    greedy_reference,
    open_engine,
    random_tokens,
    request,
    run_all,
    tokens_of,
    weights_of,
)
from reward_driver import RewardDriver, score_of, write_tokenizer

from penstock.backends.data.options import DataOptions
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.run_endpoints import FOLDER, RunEndpoints, write_endpoint
from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.engines.torch.factory import open_torch_engine
from penstock.backends.episodes.judge_endpoint.backend import QUESTION, Asked, JudgingEngine
from penstock.backends.episodes.judge_endpoint.judge_sampling import sampling_options_of
from penstock.backends.episodes.judge_endpoint.server import JudgeServer
from penstock.backends.episodes.judge_endpoint.settings import JudgingSettings
from penstock.backends.rewards.options import RewardOptions
from penstock.backends.rewards.service_options import JudgeOptions
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
    SleepEngine,
)
from penstock.messages.local import (
    EngineOpened,
    EngineSlept,
    GenerationEnded,
    LocalEvent,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    Outcome,
    Part,
    Prompt,
    Purpose,
    SampleKey,
    Truncated,
    VersionSpan,
)
from penstock.messages.training import UpdateMode
from penstock.messages.weights import Canary, WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.messages.base import Metric
    from penstock.messages.commands import EngineCommand

WAIT_S = 60.0
CONTEXT = 96
NUM_SAMPLE_SLOTS = 4
PROMPT = random_tokens(6, seed=3)
QUESTION_TEXT = "is abc right?"


class _NoServer:
    """Questions come from the test."""

    def start(self, engine: JudgingEngine, fail: Fail) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        pass


def options_of(**changed: Any) -> JudgeOptions:  # noqa: ANN401 - of any type
    given: dict[str, Any] = {
        "engine": "self", "max_tokens": 24, "backoff_s": 0.01, "max_backoff_s": 0.05, "timeout_s": 30.0, **changed,
    }  # fmt: skip
    return JudgeOptions(**given)


@dataclass
class Bench:
    """A torch engine that judges, the actor played by hand."""

    case: Case
    folder: Path
    judge: JudgeOptions = field(default_factory=options_of)
    num_slots: int = 2
    engine_name: str = "engine/0"
    serves_http: bool = True
    chat_template: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        samplings = sampling_options_of([self.judge], CONTEXT)
        inner = open_torch_engine(
            model_folder=self.case.folder,
            options=EnginesOptions(slots=NUM_SAMPLE_SLOTS + self.num_slots, device="cpu", progress_tokens=4),
            sampling=SamplingOptions(max_response_tokens=40),
            max_context=CONTEXT,
            dtype="float32",
            fetcher=open_fetcher(),
            by_dataset=samplings,
        )
        settings = JudgingSettings(
            engine=self.engine_name, run_folder=str(self.folder), model_folder=str(self.case.folder),
            host="127.0.0.1", max_context=CONTEXT, num_slots=self.num_slots, samplings=samplings, first_dataset=0,
            data=DataOptions(path="rows.jsonl", chat_template=self.chat_template), seed=0, timeout_s=30.0,
            canary_tolerance=0.01,
        )  # fmt: skip
        server = JudgeServer(settings) if self.serves_http else _NoServer()
        self.engine = JudgingEngine(inner, server, num_slots=self.num_slots, canary_tolerance=0.01)
        self.said: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        self.exporter = open_exporter("disk", run_id="judging", learner_epoch=0, folder=self.folder / "weights")
        self.publish = 0
        self.engine.start(self.said.put, self.said.put)
        self.engine.execute(OpenEngine())
        assert self.hear(EngineOpened).num_slots == NUM_SAMPLE_SLOTS

    def hear(self, kind: type[Any]) -> Any:  # noqa: ANN401 - an event of this kind
        while True:
            event = self.said.get(timeout=WAIT_S)
            assert not isinstance(event, BaseException), event
            assert getattr(event, "key", None) != QUESTION
            if isinstance(event, kind):
                return event

    def stage(self, case: Case, version: int) -> WeightManifest:
        self.publish += 1
        manifest = self.exporter.export(weights_of(case.model), version=version, publish=self.publish, canary=None)
        self.engine.execute(FetchWeights(manifest))
        assert not self.hear(WeightsStagedLocally).error
        return manifest

    def serve(self, case: Case, version: int, mode: UpdateMode = UpdateMode.DRAIN) -> None:
        self.engine.execute(ApplyWeights(self.stage(case, version), mode))
        assert self.hear(WeightsSwapped).version == version

    def issue(self, index: int) -> None:
        self.engine.execute(generate(SampleKey(0, index), index))

    def ask(self, prompt: list[int], max_new_tokens: int = 40, seed: int = 0) -> SimpleQueue[tuple[Outcome, Part]]:
        answers: SimpleQueue[tuple[Outcome, Part]] = SimpleQueue()
        asked = Asked(pack_tokens(prompt), seed, 0, max_new_tokens)
        self.engine.ask(asked, lambda outcome, part: answers.put((outcome, part)))
        return answers

    def figure(self, name: str) -> float:
        return {metric.name: metric.value for metric in self.engine.gauges()}[name]

    def endpoint(self) -> tuple[str, str]:
        """Its url and its key, once it listens."""
        runs = RunEndpoints("self", Surroundings(run_folder=str(self.folder)))
        for _ in range(600):
            found = [each for each in runs.now() if each.name == self.engine_name]
            if found:
                return found[0].url, found[0].key
            threading.Event().wait(0.05)
        raise AssertionError("no endpoint was written")

    def until_waiting(self, num_questions: int) -> None:
        for _ in range(600):
            if self.figure("judge/waiting") == num_questions:
                return
            threading.Event().wait(0.05)
        raise AssertionError(f"{self.figure('judge/waiting'):g} questions wait, not {num_questions}")

    def post(self, body: dict[str, Any], key: str = "", timeout_s: float = WAIT_S) -> httpx.Response:
        url, own_key = self.endpoint()
        headers = {"Authorization": f"Bearer {key or own_key}"}
        return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=timeout_s)

    def close(self) -> None:
        self.engine.close(WAIT_S)
        self.exporter.close()


def generate(key: SampleKey, seed: int) -> Generate:
    return Generate(
        key=key, attempt=0, purpose=Purpose.TRAIN, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens(PROMPT)), seed=seed,
        deadline_version=9,
    )  # fmt: skip


def body_of(**changed: Any) -> dict[str, Any]:  # noqa: ANN401 - of any type
    messages = [{"role": "user", "content": QUESTION_TEXT}]
    return {"model": "x", "messages": messages, "temperature": 0.0, "max_tokens": 24, **changed}


@pytest.fixture
def open_bench(case: Case, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    before = set(threading.enumerate())
    opened: list[Bench] = []

    def open_one(**settings: Any) -> Bench:  # noqa: ANN401 - of any type
        opened.append(Bench(case, tmp_path / "run", **settings))
        return opened[-1]

    yield open_one
    for bench in opened:
        bench.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith(("torch-engine", "judge-"))]


def text_by(case: Case, num_tokens: int = 24) -> str:
    """What these weights answer, as transformers computes it."""
    tokenizer = TextTokenizer(case.folder)
    (ids,) = tokenizer.encode([QUESTION_TEXT], special=True)
    assert isinstance(ids, list)
    return tokenizer.decode(greedy_reference(case.model, ids, num_tokens))


def alone(case: Case, seed: int, prompt: list[int] = PROMPT, limit: int = 40) -> list[int]:
    engine = open_engine(case, stop_token_ids=frozenset({1}), max_context=CONTEXT)
    return tokens_of(run_all(engine, [request(0, prompt, limit, seed)])[0].part)


# --- over HTTP ------------------------------------------------------------------------------------------------


def test_the_weights_that_are_served_answer_and_after_a_swap_the_new_ones(
    case: Case, other: Case, open_bench: Callable[..., Bench]
) -> None:
    bench = open_bench()
    texts: list[str] = []
    for version, served in enumerate((case, other)):
        bench.serve(served, version)
        reply = bench.post(body_of())
        assert reply.status_code == 200, reply.text
        choice: dict[str, Any] = reply.json()["choices"][0]
        assert choice["message"]["content"] == text_by(served)
        texts.append(choice["message"]["content"])
        assert choice["finish_reason"] == "length"
        assert reply.json()["usage"]["prompt_tokens"] == len(QUESTION_TEXT)
    assert texts[0] != texts[1]


def test_a_judge_gets_its_verdict_from_the_embedded_engine(
    case: Case, open_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """Drawn with a seed, cut at a character that is known to come; what stands before it is the verdict."""
    seed, verdict, stop = _word_and_stop(case)
    (tmp_path / "ask.txt").write_text(QUESTION_TEXT.replace("abc", "{{response}}"))
    judge = options_of(
        template=str(tmp_path / "ask.txt"),
        temperature=1.0,
        body={"stop": stop, "seed": seed},
        verdicts={verdict: 0.75},
    )
    bench = open_bench(judge=judge)
    bench.serve(case, 0)
    bench.endpoint()
    options, surroundings = RewardOptions(function="judge", judge=judge), Surroundings(run_folder=str(bench.folder))
    rewards = RewardDriver(write_tokenizer(tmp_path), options, surroundings)
    try:
        assert rewards.values(score_of("abc")) == [0.75]
    finally:
        rewards.close()
    assert bench.figure("judge/answered") == 1


def _word_and_stop(case: Case) -> tuple[int, str, str]:
    """A seed with which these weights begin with a word, the word, and the character after it."""
    tokenizer = TextTokenizer(case.folder)
    (prompt,) = tokenizer.encode([QUESTION_TEXT], special=True)
    assert isinstance(prompt, list)
    for seed in range(200):
        text = tokenizer.decode(alone(case, seed, prompt, 24))
        found = re.match(r"([A-Za-z0-9]+)([^A-Za-z0-9])", text)
        if found:
            return seed, found[1], found[2]
    raise AssertionError("these weights say nothing of use; take others")


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"tools": []}, 400, "unknown field `tools`"),
        ({"temperature": 0.5}, 400, "no judge of this run draws"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a" * CONTEXT}]}, 400, f"max_context is {CONTEXT}"),
        ({"messages": [{"role": "user", "content": "你"}]}, 400, "tokenizer refuses"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    http_bench: Bench, changed: dict[str, Any], status: int, message: str
) -> None:
    reply = http_bench.post(body_of(**changed))
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


def test_the_question_is_asked_in_the_chat_template_where_prompts_are(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(case.folder, folder)
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}={% endfor %}a:"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    bench = Bench(Case(folder, case.model), tmp_path / "run", chat_template=True)
    try:
        bench.serve(case, 0)
        messages = [{"role": "system", "content": "be fair"}, {"role": "user", "content": "is it right?"}]
        reply = bench.post(body_of(messages=messages)).json()
        tokenizer = TextTokenizer(folder)
        (ids,) = tokenizer.encode(["s:be fair=u:is it right?=a:"], special=False)
        assert isinstance(ids, list)
        assert reply["usage"]["prompt_tokens"] == len(ids)
        assert reply["choices"][0]["message"]["content"] == tokenizer.decode(greedy_reference(case.model, ids, 24))
    finally:
        bench.close()


def test_who_has_the_key_of_another_engine_is_sent_away(http_bench: Bench) -> None:
    assert http_bench.post(body_of(), key="that-of-another").status_code == 421
    (file,) = (http_bench.folder / FOLDER).iterdir()
    assert file.stat().st_mode & 0o077 == 0


@pytest.fixture(scope="module")
def http_bench(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(case, tmp_path_factory.mktemp("run"))
    bench.serve(case, 0)
    yield bench
    bench.close()


def test_a_question_whose_client_has_gone_leaves_nothing_behind(open_bench: Callable[..., Bench]) -> None:
    """There are no weights yet, so that it waits."""
    bench = open_bench()
    url, key = bench.endpoint()
    address = urlsplit(url)
    client = HTTPConnection(str(address.hostname), address.port, timeout=WAIT_S)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    client.request("POST", f"{address.path}/v1/chat/completions", json.dumps(body_of()), headers)
    bench.until_waiting(1)
    client.close()
    bench.until_waiting(0)


def test_an_engine_that_is_gone_is_passed_over_for_one_that_answers(
    case: Case, open_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """And where none is left the sample has a reason by the deadline, and no reward."""
    (tmp_path / "ask.txt").write_text(QUESTION_TEXT.replace("abc", "{{response}}"))
    judge = options_of(
        template=str(tmp_path / "ask.txt"), num_retries=0, timeout_s=20.0, score="(xyz)", breaker_failures=1000
    )
    bench = open_bench(judge=judge, engine_name="engine/1")
    bench.serve(case, 0)
    bench.endpoint()
    write_endpoint(bench.folder, "engine/0", "http://127.0.0.1:9", "k")  # nobody listens there
    surroundings = Surroundings(run_folder=str(bench.folder))
    rewards = RewardDriver(write_tokenizer(tmp_path), RewardOptions(function="judge", judge=judge), surroundings)
    try:
        answered = rewards.values(*(score_of("abc", index) for index in range(4)))
        assert all("ended with 'length'" in str(reason) for reason in answered)  # an answer, though without a verdict
    finally:
        rewards.close()
    assert bench.figure("judge/answered") == 4
    bench.close()
    assert not [each for each in (bench.folder / FOLDER).iterdir() if "engine-1" in each.name]
    brief = RewardOptions(function="judge", judge=options_of(template=judge.template, timeout_s=10.0))
    rewards = RewardDriver(write_tokenizer(tmp_path), brief, surroundings)
    try:
        (reason,) = rewards.values(score_of("abc"))
        assert "cannot be reached" in str(reason)
    finally:
        rewards.close()


# --- beside samples and swaps ---------------------------------------------------------------------------------


def test_samples_are_those_of_an_engine_without_a_judge(case: Case, open_bench: Callable[..., Bench]) -> None:
    bench = open_bench(serves_http=False)
    bench.serve(case, 0)
    questions = [random_tokens(9, seed=seed) for seed in range(5)]
    answers = [bench.ask(question, seed=seed) for seed, question in enumerate(questions)]
    for index in range(6):
        bench.issue(index)
    ends: dict[int, list[int]] = {}
    while len(ends) < 6:
        event = bench.hear(GenerationEnded)
        ends[event.key.index] = tokens_of(event.part)
    assert ends == {index: alone(case, index) for index in range(6)}
    greedy = [greedy_reference(case.model, question, 40) for question in questions]
    assert [tokens_of(answer.get(timeout=WAIT_S)[1]) for answer in answers] == greedy
    assert bench.figure("engine/generated_tokens") == sum(map(len, ends.values()))
    assert bench.figure("judge/tokens") == sum(map(len, greedy))
    assert bench.figure("engine/running") == bench.figure("engine/occupancy") == 0


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_a_swap_finds_no_question_and_each_goes_on_under_the_new_weights(
    case: Case, other: Case, open_bench: Callable[..., Bench], mode: UpdateMode
) -> None:
    """The engine itself would end with an error if a question ran at a drained swap."""
    bench = open_bench(serves_http=False, num_slots=1)
    bench.serve(case, 1)
    second = bench.stage(other, 2)
    first_answer = bench.ask(PROMPT)
    bench.engine.execute(ApplyWeights(second, mode))
    next_answer = bench.ask(PROMPT)
    assert bench.hear(WeightsSwapped).version == 2
    outcome, part = first_answer.get(timeout=WAIT_S)
    assert isinstance(outcome, Completed | Truncated)
    assert [span.version for span in part.spans] in ([1, 2], [2], [1])
    begin = sum(span.num_tokens for span in part.spans if span.version == 1)
    tokens = tokens_of(part)
    assert tokens[:begin] == greedy_reference(case.model, PROMPT, 40)[:begin]
    assert begin == len(tokens) or tokens[begin:] == greedy_reference(other.model, PROMPT + tokens[:begin], 40 - begin)
    _, part = next_answer.get(timeout=WAIT_S)
    assert (part.spans, tokens_of(part)) == (
        (VersionSpan(2, part.num_tokens),),
        greedy_reference(other.model, PROMPT, 40),
    )


def test_an_engine_falls_asleep_over_a_question_and_answers_when_it_has_woken(
    case: Case, other: Case, open_bench: Callable[..., Bench]
) -> None:
    bench = open_bench(serves_http=False)
    early = bench.ask(PROMPT)  # before any weights
    bench.serve(case, 1)
    assert tokens_of(early.get(timeout=WAIT_S)[1]) == greedy_reference(case.model, PROMPT, 40)
    bench.engine.execute(SleepEngine())
    waiting = bench.ask(PROMPT)
    bench.hear(EngineSlept)
    assert bench.figure("judge/waiting") == 1
    bench.serve(other, 2)
    assert tokens_of(waiting.get(timeout=WAIT_S)[1]) == greedy_reference(other.model, PROMPT, 40)


# --- orders of events that an engine may bring about ----------------------------------------------------------


class _Scripted:
    """An engine that says what the test says."""

    def __init__(self) -> None:
        self.told: list[EngineCommand] = []

    def start(self, emit: Emit, fail: Fail) -> None:
        self.emit = emit

    def execute(self, command: EngineCommand, /) -> None:
        self.told.append(command)

    def gauges(self) -> tuple[Metric, ...]:
        return ()

    def close(self, timeout_s: float) -> None:
        pass

    def take(self) -> list[EngineCommand]:
        told, self.told = self.told, []
        return told

    def end(self, number: int, outcome: Outcome, tokens: list[int]) -> None:
        n = len(tokens)
        part = Part(
            tokens=pack_tokens(tokens), logprobs=pack_floats([0.0] * n), spans=(VersionSpan(0, n),) if n else ()
        )
        self.emit(GenerationEnded(key=QUESTION, attempt=number, outcome=outcome, part=part))


@dataclass
class Script:
    """A scripted engine that serves, and what was answered."""

    num_slots: int = 1
    answers: list[tuple[int, Outcome, int]] = field(default_factory=list[tuple[int, Outcome, int]])

    def __post_init__(self) -> None:
        self.inner = _Scripted()
        inner: Backend[EngineCommand] = self.inner
        self.engine = JudgingEngine(inner, _NoServer(), num_slots=self.num_slots, canary_tolerance=0.1)
        self.told_actor: list[LocalEvent] = []
        self.engine.start(self.told_actor.append, self._fail)

    def _fail(self, error: BaseException) -> None:
        raise AssertionError(error)

    def ask(self) -> int:
        asked = Asked(pack_tokens([5]), 0, 0, 8)
        number = -1

        def take(outcome: Outcome, part: Part) -> None:
            self.answers.append((number, outcome, part.num_tokens))

        number = self.engine.ask(asked, take)
        return number

    def swap(self, *, digest: str = "d", canary_logprob: float = -1.0) -> None:
        self.engine.execute(ApplyWeights(MANIFEST, UpdateMode.DRAIN))
        logprobs = pack_floats([canary_logprob, -3.0])
        self.inner.emit(WeightsSwapped(version=1, publish=1, digest=digest, canary_logprobs=logprobs))

    def generated(self) -> list[int]:
        return [each.attempt for each in self.inner.take() if isinstance(each, Generate)]


CANARY = Canary(tokens=pack_tokens([2, 3]), logprobs=pack_floats([-1.0, -3.0]))
MANIFEST = WeightManifest(
    version=1, publish=1, learner_epoch=0, transport="disk", location="", size_bytes=0, digest="d", canary=CANARY
)


@pytest.mark.parametrize("wrong", [{"digest": "e"}, {"canary_logprob": -2.0}, {"canary_logprob": float("nan")}])
def test_weights_that_turn_out_wrong_answer_nothing_and_the_next_ones_do(wrong: dict[str, Any]) -> None:
    script = Script()
    number = script.ask()
    script.swap(**wrong)
    assert script.generated() == []
    script.swap()
    assert script.generated() == [number]


def test_more_questions_than_places_wait_in_the_order_in_which_they_came() -> None:
    script = Script(num_slots=2)
    script.swap()
    numbers = [script.ask() for _ in range(5)]
    assert script.generated() == numbers[:2]
    script.inner.end(numbers[1], Truncated(), [1])
    assert script.generated() == [numbers[2]]
    script.engine.execute(InterruptGenerations())
    for number in (numbers[0], numbers[2]):
        script.inner.end(number, Cancelled(cause="interrupted"), [1])
    script.swap()
    assert script.generated() == [numbers[0], numbers[2]]


def test_an_end_that_comes_after_the_swap_is_gone_on_from() -> None:
    script = Script()
    script.swap()
    number = script.ask()
    script.inner.take()
    script.swap()
    told = script.inner.take()
    assert told == [AbortGeneration(QUESTION, number), ApplyWeights(MANIFEST, UpdateMode.DRAIN)]
    script.inner.end(number, Cancelled(cause="aborted"), [7, 8])
    (again,) = script.inner.take()
    assert isinstance(again, Generate)
    assert again.prefix is not None
    assert again.prefix.num_tokens == 2
    script.inner.end(number, Completed(), [7, 8, 9])
    assert script.answers == [(number, Completed(), 3)]


def test_one_that_is_dropped_is_not_answered_and_its_place_is_free_when_it_has_ended() -> None:
    script = Script()
    script.swap()
    first, second = script.ask(), script.ask()
    script.engine.drop(first)
    script.engine.drop(first)
    told = script.inner.take()
    assert told[2:] == [AbortGeneration(QUESTION, first)]
    script.inner.end(first, Cancelled(cause="aborted"), [1])
    assert script.generated() == [second]
    script.engine.drop(second)
    script.inner.end(second, Completed(), [1])
    assert script.answers == []


def test_what_the_engine_cannot_serve_is_said_and_others_go_on() -> None:
    script = Script()
    script.swap()
    first, second = script.ask(), script.ask()
    script.inner.end(first, InfraError(detail="no"), [])
    script.inner.end(second, Completed(), [1])
    assert [outcome for _, outcome, _ in script.answers] == [InfraError(detail="no"), Completed()]
    assert [type(event) for event in script.told_actor] == [WeightsSwapped]
