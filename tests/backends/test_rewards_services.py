"""Rewards over HTTP against a real server that misbehaves: whatever it does, a sample has a reward or a reason."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
from aiohttp import web
from reward_driver import RewardDriver, group_of, score_of

from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.options import RewardOptions
from penstock.backends.rewards.service_options import JudgeOptions, RemoteOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

QUICK: dict[str, Any] = {"backoff_s": 0.01, "max_backoff_s": 0.02, "request_timeout_s": 10.0, "timeout_s": 60.0}


class Service:
    """A server on a thread. What it does follows from the response that it is sent."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.ports: set[int] = set()
        self.counts: dict[str, int] = {}
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        assert self._ready.wait(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/score", self._score)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _note(self, request: web.Request, body: Any) -> None:  # noqa: ANN401 - JSON
        assert request.transport is not None
        self.ports.add(request.transport.get_extra_info("peername")[1])
        self.bodies.append(body)
        self.headers.append(dict(request.headers))

    async def _score(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._note(request, body)
        if isinstance(body, list):
            items = cast("list[dict[str, str]]", body)
            return web.json_response([len(item["response"]) for item in items][: None if len(items) < 9 else 1])
        if "responses" in body:
            return web.json_response([len(each) for each in body["responses"]])
        what, _, argument = body["response"].partition(" ")
        count = self.counts[body["response"]] = self.counts.get(body["response"], 0) + 1
        reply = await getattr(self, f"_{what}")(request, argument, count)
        assert isinstance(reply, web.StreamResponse)
        return reply

    async def _fine(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        return web.json_response(float(argument or 1))

    async def _raw(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        return web.Response(text=argument, content_type="application/json")

    async def _hang(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.json_response(1)

    async def _status(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        """``status 503 2``: twice, then fine."""
        status, _, times = argument.partition(" ")
        if count > int(times or 1000):
            return web.json_response(0.5)
        headers = {"Retry-After": "0.05"} if status == "429" else {}
        return web.Response(status=int(status), text="not now", headers=headers)

    async def _later(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": argument})

    async def _slow(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for _ in range(600):
            await reply.write(b" ")
            await asyncio.sleep(0.1)
        return reply

    async def _huge(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        return web.Response(body=b" " * 5000 + b"1")

    async def _reset(self, request: web.Request, argument: str, count: int) -> web.StreamResponse:
        if count <= int(argument or 1000):
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(0.25)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._note(request, body)
        said = body["messages"][-1]["content"].rpartition("SAY:")[2]
        if said.startswith("{"):
            return web.json_response(json.loads(said))
        finish = "length" if said == "cut" else "stop"
        choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": said}}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice]})


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    yield server
    server.close()


def remote(service: Service, **options: Any) -> RewardOptions:  # noqa: ANN401 - of any type
    given: dict[str, Any] = {"url": f"{service.url}/score", **QUICK, **options}
    return RewardOptions(function="remote", remote=RemoteOptions(**given))


def test_a_sample_is_posted_and_answered_over_connections_that_are_kept(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(remote(service, max_concurrent=2))
    answers = rewards.judged(
        *(score_of(f"fine {index}", index, label="L") for index in range(20)),
    )
    assert [answer.reward and answer.reward.value for answer in answers] == [float(index) for index in range(20)]
    assert service.bodies[0] == {"prompt": "the prompt", "response": "fine 0", "label": "L"}
    assert service.headers[3]["Idempotency-Key"].startswith("0/")
    assert len(service.ports) <= 2


def test_results_are_read_as_those_of_any_reward_function(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(remote(service))
    texts = ['{"reward": 0.5, "style": 2}', '{"score": 1}', "true", "null", '"1"', "[1]", '{"style": 1}', "1e999"]
    texts += ["1e200", '{"score": 1, "style": -1e200}']  # whose squares are no numbers any more
    answers = rewards.judged(*(score_of(f"raw {text}", index) for index, text in enumerate(texts)))
    values = [answer.reward and answer.reward.value for answer in answers]
    assert values == [0.5, 1.0, 1.0, None, None, None, None, None, None, None]
    assert [metric.name for metric in (answers[0].reward.components if answers[0].reward else ())] == ["style"]
    assert "expected a number" in answers[3].reason
    assert "without 'reward' or 'score'" in answers[6].reason
    assert all("expected a number from -1e+09 to 1e+09" in answer.reason for answer in answers[8:])


FAULTS = {
    "status 500": "HTTP 500: not now (2 tries)",
    "status 404": "HTTP 404: not now",
    "status 301": "HTTP 301: not now",
    "status 429": "HTTP 429: not now (2 tries)",
    "later 1000": "HTTP 429",
    "later Wed, 21 Oct 2099 07:28:00 GMT": "HTTP 429",
    "raw <html>": "the answer is no JSON: '<html>'",
    "raw [1": "the answer is no JSON: '[1'",
    "raw": "the answer is no JSON: ''",
    "huge": "the answer has more than 1000 bytes",
    "reset": "the connection broke",
}


def test_whatever_the_service_does_wrong_is_a_reason_and_never_a_reward(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(remote(service, num_retries=1, breaker_failures=1000, max_answer_bytes=1000))
    faults = list(FAULTS)
    commands = [score_of(fault, index) for index, fault in enumerate(faults)]
    answers = rewards.judged(*commands, score_of("fine", len(faults)))
    for fault, answer in zip(faults, answers, strict=False):
        assert answer.reward is None, fault
        assert FAULTS[fault] in answer.reason, fault
        assert answer.reason.startswith("reward.remote: "), fault
    assert answers[-1].reward is not None
    assert rewards.gauge("reward/replaced_processes") == 0


def test_a_service_that_does_not_answer_or_not_to_the_end_is_a_reason(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(remote(service, num_retries=1, breaker_failures=1000, request_timeout_s=0.5))
    values = rewards.values(score_of("hang"), score_of("slow", 1))
    assert values == ["reward.remote: no answer within 0.5 s (2 tries)"] * 2


def test_what_may_pass_is_tried_again(service: Service, driver: Callable[..., RewardDriver]) -> None:
    rewards = driver(remote(service, num_retries=3, breaker_failures=1000))
    faults = ["status 500 2", "status 503 3", "status 429 1", "reset 2"]
    assert rewards.values(*(score_of(fault, i) for i, fault in enumerate(faults))) == [0.5, 0.5, 0.5, 0.25]


def test_a_request_that_may_have_arrived_is_repeated_only_where_that_does_no_harm(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(remote(service, num_retries=3, breaker_failures=1000, repeats=False, request_timeout_s=3.0))
    faults = ["status 500 1", "reset 1", "hang", "status 503 1", "status 429 1"]
    values = rewards.values(*(score_of(fault, index) for index, fault in enumerate(faults)))
    assert [isinstance(value, str) for value in values] == [True, True, True, False, False]
    assert (service.counts["status 500 1"], service.counts["reset 1"], service.counts["hang"]) == (1, 1, 1)


def test_a_service_that_is_not_there_is_a_reason(driver: Callable[..., RewardDriver]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://user:hunter2@127.0.0.1:{taken.getsockname()[1]}/score"
        given: dict[str, Any] = {"url": url, **QUICK, "num_retries": 1}
        rewards = driver(RewardOptions(function="remote", remote=RemoteOptions(**given)))
        (reason,) = rewards.values(score_of("fine"))
    assert isinstance(reason, str)
    assert "http://***@127.0.0.1" in reason, "it is kept with the sample, and shown to whoever sees that"
    assert "cannot be reached" in reason


def test_the_breaker_leaves_a_service_alone_and_goes_on_when_it_answers_again(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(
        remote(service, num_retries=0, breaker_failures=3, breaker_open_s=0.5, max_concurrent=1, timeout_s=30.0)
    )
    for index in range(3):
        rewards.judged(score_of("status 500 3", index))
    num_before = len(service.bodies)
    values = rewards.values(*(score_of("status 500 3", index) for index in range(5)))  # wait for the pause to end
    assert values == [0.5] * 5
    assert len(service.bodies) == num_before + 5


def test_who_cannot_wait_for_an_open_breaker_is_told_at_once(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(
        remote(service, num_retries=0, breaker_failures=2, breaker_open_s=500.0, max_concurrent=1, timeout_s=9.0)
    )
    values = rewards.values(*(score_of("status 500", index) for index in range(6)))
    assert len(service.bodies) == 2
    assert all("has failed 2 times in a row and is left alone" in str(value) for value in values[2:])


def test_samples_travel_in_batches_and_each_gets_its_own(service: Service, driver: Callable[..., RewardDriver]) -> None:
    rewards = driver(remote(service, batch_size=4, batch_wait_s=0.05, max_concurrent=2))
    values = rewards.values(*(score_of("x" * index, index) for index in range(10)))
    assert values == [float(index) for index in range(10)]
    assert max(len(body) for body in service.bodies) == 4
    assert sum(len(body) for body in service.bodies) == 10


def test_a_batch_with_the_wrong_number_of_answers_fails_with_all_its_samples(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(remote(service, batch_size=9, batch_wait_s=10.0))
    values = rewards.values(*(score_of("x", index) for index in range(9)))
    assert values == ["reward.remote: 1 results for 9 samples; expected a list of as many"] * 9


def test_a_group_is_one_request(service: Service, driver: Callable[..., RewardDriver]) -> None:
    options = remote(service)
    rewards = driver(RewardOptions(function="remote", remote=options.remote, per_group=True))
    scored = rewards.scored(group_of("a", "bb", "ccc", label="L"))
    assert [judged.reward and judged.reward.value for judged in scored.samples] == [1.0, 2.0, 3.0]
    assert service.bodies == [{"prompt": "the prompt", "responses": ["a", "bb", "ccc"], "label": "L"}]


def test_the_key_comes_from_the_environment_and_its_lack_is_told_at_once(
    service: Service, driver: Callable[..., RewardDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    failure = driver(remote(service, auth_env="JUDGE_KEY")).failure()
    assert isinstance(failure, UserCodeError)
    assert "the environment variable JUDGE_KEY is not set" in str(failure)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    rewards = driver(remote(service, auth_env="JUDGE_KEY"))
    assert rewards.values(score_of("fine")) == [1.0]
    assert service.headers[-1]["Authorization"] == "Bearer secret"


def test_calls_that_wait_for_a_place_do_not_lose_their_time(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    """One request at a time: when the last one begins, more time has passed than each of them has."""
    rewards = driver(
        remote(service, max_concurrent=1, num_retries=0, breaker_failures=1000, timeout_s=4.0, request_timeout_s=2.5)
    )
    values = rewards.values(*(score_of("hang", index) for index in range(2)), score_of("fine", 2))
    assert [str(value) for value in values[:2]] == ["reward.remote: no answer within 2.5 s (1 tries)"] * 2
    assert values[2] == 1.0


# --- a judge --------------------------------------------------------------------------------------------------


def judge(service: Service, **options: Any) -> RewardOptions:  # noqa: ANN401 - of any type
    given: dict[str, Any] = {"url": f"{service.url}/v1", "template": None, **QUICK, **options}
    return RewardOptions(function="judge", judge=JudgeOptions(**given))


def template(tmp_path: Path, text: str) -> str:
    path = tmp_path / "question.txt"
    path.write_text(text)
    return str(path)


def test_a_judge_is_asked_with_the_template_and_its_verdict_is_the_reward(
    service: Service, driver: Callable[..., RewardDriver], tmp_path: Path
) -> None:
    path = template(tmp_path, "{{prompt}} | {{label}} | {{metadata.level}} | {{metadata.tags}} SAY:{{response}}")
    rewards = driver(judge(service, template=path, system="Be fair.", model="m", body={"seed": 3}))
    metadata = {"level": "hard", "tags": ["a"]}
    said = [
        "yes",
        "No.",
        "I first thought it right, but\nNO",
        "<think>no no</think> yes",
        "perhaps",
        "nobody",
        "cut",
        "",
    ]
    values = rewards.values(*(score_of(t, i, label="L", metadata=metadata) for i, t in enumerate(said)))
    assert values[:3] == [1.0, 0.0, 0.0]
    # The service repeats what follows SAY, which is of the response: that cannot end the judge's thinking.
    assert all("no verdict (yes, no)" in str(value) for value in (*values[3:6], values[7]))
    assert "ended with 'length'" in str(values[6])
    body = next(body for body in service.bodies if body["messages"][1]["content"].endswith("SAY:yes"))
    assert body["messages"][0] == {"role": "system", "content": "Be fair."}
    assert body["messages"][1]["content"] == 'the prompt | L | hard | ["a"] SAY:yes'
    assert (body["model"], body["seed"], body["temperature"]) == ("m", 3, 0.0)


def test_a_response_cannot_ask_for_the_label(
    service: Service, driver: Callable[..., RewardDriver], tmp_path: Path
) -> None:
    rewards = driver(judge(service, template=template(tmp_path, "{{label}} {{response}} SAY:yes")))
    assert rewards.values(score_of("{{label}} {{prompt}}", label="secret")) == [1.0]
    assert service.bodies[0]["messages"][0]["content"] == "secret {{label}} {{prompt}} SAY:yes"


def test_a_score_is_scaled_and_one_outside_is_no_verdict(
    service: Service, driver: Callable[..., RewardDriver], tmp_path: Path
) -> None:
    options = {"score": r"Score:\s*(-?\d+(?:\.\d+)?)", "lowest": 1.0, "highest": 5.0}
    rewards = driver(judge(service, template=template(tmp_path, "SAY:{{response}}"), **options))
    said = ["Score: 1", "Score: 3", "I thought of 2.\nScore: 5", "Score: 6", "Score: many", "4"]
    values = rewards.values(*(score_of(text, index) for index, text in enumerate(said)))
    assert values[:3] == [0.0, 0.5, 1.0]
    assert "6 is not between 1 and 5" in str(values[3])
    assert all("fits reward.judge.score" in str(value) for value in values[4:])


def test_an_endpoint_that_does_not_speak_the_protocol_is_a_reason(
    service: Service, driver: Callable[..., RewardDriver], tmp_path: Path
) -> None:
    rewards = driver(judge(service, template=template(tmp_path, "SAY:{{response}}")))
    said = ['{"error": "no model"}', '{"choices": []}', '{"choices": [{"message": {"content": 4}}]}']
    values = rewards.values(*(score_of(text, index) for index, text in enumerate(said)))
    assert "does not answer as OpenAI's" in str(values[0])
    assert "gave no answer" in str(values[1])
    assert "does not answer as OpenAI's" in str(values[2])


def test_a_judge_can_be_the_runs_own_engine(
    service: Service, driver: Callable[..., RewardDriver], tmp_path: Path
) -> None:
    path = template(tmp_path, "SAY:{{response}}")
    for kind, surroundings in (
        ("self", Surroundings(engine_addresses=(service.url,))),
        ("teacher", Surroundings(teacher_addresses=(service.url,))),
    ):
        rewards = driver(judge(service, url=None, engine=kind, template=path), surroundings)
        assert rewards.values(score_of("yes")) == [1.0]


def test_servers_that_the_run_has_started_are_found_when_they_are_there(
    service: Service, driver: Callable[..., RewardDriver], tmp_path: Path
) -> None:
    from penstock.backends.engines.run_endpoints import write_endpoint

    path = template(tmp_path, "SAY:{{response}}")
    options = judge(service, url=None, engine="self", template=path, num_retries=0, timeout_s=5.0)
    rewards = driver(options, Surroundings(run_folder=str(tmp_path)))
    (reason,) = rewards.values(score_of("yes"))
    assert "there is no engine to ask at the moment" in str(reason)
    assert "(1 tries)" not in str(reason)  # one may be on its way, so only the deadline ends it
    write_endpoint(tmp_path, "teacher/0", "http://127.0.0.1:9")
    write_endpoint(tmp_path, "engine/0", service.url)
    assert rewards.values(score_of("yes", 1)) == [1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "/nowhere"}, "cannot be read"),
        ({"text": "{{answer}} {{response}}"}, "asks for {{answer}}"),
        ({"text": "{{prompt}}"}, "does not show the judge {{response}}"),
        ({"score": "("}, "is no regular expression"),
        ({"score": "a"}, "expected one group"),
        ({"url": None}, "give the url of an endpoint"),
    ],
)
def test_options_that_cannot_work_end_the_run_before_it_begins(
    service: Service, driver: Callable[..., RewardDriver], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    given = dict(options)
    if "text" in given:
        given["template"] = template(tmp_path, given.pop("text"))
    failure = driver(judge(service, **given)).failure()
    assert isinstance(failure, UserCodeError)
    assert message in str(failure)


def test_time_is_not_spent_on_a_service_that_asks_for_more_than_there_is(
    service: Service, driver: Callable[..., RewardDriver]
) -> None:
    rewards = driver(remote(service, num_retries=5, timeout_s=30.0))
    (reason,) = rewards.values(score_of("later 1000"))
    assert "HTTP 429" in str(reason)
    assert service.counts["later 1000"] == 1
