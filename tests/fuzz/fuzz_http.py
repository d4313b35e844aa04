"""A fuzzer for the HTTP servers of a run: the gateway of an engine with its sessions, the front door before it, a
judge's engine, ``/metrics``. Whoever comes, whatever is asked: no answer of 5xx, no error in the log, no traceback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import sys
import tempfile
import threading
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from fuzzing import Draw, fuzz, instrumented

sys.path.append(str(Path(__file__).parents[1] / "backends"))
import gateway_cases as cases
from prometheus_client import CollectorRegistry, Counter

with instrumented(
    "penstock.backends.episodes", "penstock.backends.processes.http_server", "penstock.backends.episodes.judge_endpoint"
):
    from penstock.backends.data.options import DataOptions
    from penstock.backends.engines.options import SamplingOptions
    from penstock.backends.engines.run_endpoints import RunEndpoints
    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.episodes import server as gateway_server
    from penstock.backends.episodes.backend import EpisodeBackend
    from penstock.backends.episodes.context import EpisodeContext
    from penstock.backends.episodes.gateway import GatewayEpisodes
    from penstock.backends.episodes.judge_endpoint.judge_sampling import Question
    from penstock.backends.episodes.judge_endpoint.server import ROUTE, JudgeServer
    from penstock.backends.episodes.judge_endpoint.settings import JudgingSettings
    from penstock.backends.episodes.options import EpisodeOptions
    from penstock.backends.episodes.registry import run_token
    from penstock.backends.processes.http_server import listen
    from penstock.runtime.gateway import door as front_door
    from penstock.runtime.gateway.door import FrontDoor
    from penstock.runtime.observability.metrics_server import serve_metrics

from penstock.backends.data.tokenizer import TextTokenizer
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.commands import Generate, OpenEngine
from penstock.messages.local import EngineOpened, GenerationEnded
from penstock.messages.samples import Completed, Part, Prompt, Purpose, SampleKey, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.episodes.judge_endpoint.backend import Asked
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.base import Metric
    from penstock.messages.commands import EngineCommand
    from penstock.messages.samples import Outcome

WAIT_S = 60.0
SILENT_S = 0.2
"""After so long without a byte the client goes away: half a request has no answer."""
CONTEXT = 4096
SAID = (
    "yes", "It is 42.", cases . CALL, "<tool_call>\n{", '<tool_call>\n{"name": 7}\n</tool_call>', "", "<think>\n",
    "\ufffd",
)  # fmt: skip
WORDS = (
    "role", "content", "user", "assistant", "system", "tool", "tool_calls", "function", "name", "arguments", "id",
    "type", "text", "messages", "model", "stream", "n", "stop", "max_tokens", "temperature", "logprobs", "tools",
    "tool_choice", "tool_call_id", "prompt", "reward", "components", "outcome", "detail", "metadata", "wait_s",
    "completed", "infra_error", "seed", "image_url", "response_format", "json_object", "auto", "hello",
    cases . QUESTION, "<|im_end|>", "</think>", "<tool_call>", "</tool_call>", "\x00", "\x1b[2J", "\n", "é", "日本",
    "{{", "%", '"', "\\", "",
)  # fmt: skip
HEADERS = (
    "Content-Type: application/json", "Content-Type: text/plain; charset=utf-16", "Content-Encoding: gzip",
    "Transfer-Encoding: chunked", "Expect: 100-continue", "Origin: http://evil.example", "Origin: null",
    "Accept: */*", "Accept: application/openmetrics-text; version=x", "Accept-Encoding: gzip, deflate",
    "Range: bytes=0-", "Cookie: a=b", "Idempotency-Key: \xe9", "X-Penstock-Session: 0-aa", "Content-Length: 3",
    "Upgrade: websocket", "Host: [::1", "Authorization: Basic eDp5", "Authorization: Bearer \xff", "X: " + "x" * 9000,
)  # fmt: skip


SETTINGS = (
    "stream", "n", "stop", "max_tokens", "tools", "tool_choice", "response_format", "logprobs", "temperature",
    "stream_options", "max_completion_tokens", "top_logprobs", "user", "seed",
)  # fmt: skip
PATHS = (
    "/", "/metrics", "/sessions", "/sessions/open?wait_s=nan", "/sessions/../v1/models", "/status", ROUTE, "/v1/models",
    "/sessions/0-a%00/finish", "/sessions/%ff/v1/models", "//", "*", "http://h/", "/%",
)  # fmt: skip


class Instant:
    """An engine that answers at once, with what it was told to say."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.said = ""

    def start(self, emit: Emit, fail: Fail) -> None:
        self._emit = emit

    def execute(self, command: EngineCommand, /) -> None:
        if isinstance(command, OpenEngine):
            self._emit(EngineOpened(num_slots=4))
        elif isinstance(command, Generate):
            before = () if command.prefix is None else tokens_view(command.prefix.tokens).tolist()
            part = self.part(list(before))
            self._emit(GenerationEnded(key=command.key, attempt=command.attempt, outcome=Completed(), part=part))

    def part(self, before: list[int]) -> Part:
        (ids,) = self._tokenizer.encode([self.said or "a"], special=True)
        assert isinstance(ids, list)
        everything = [*before, *ids]
        num = len(everything)
        return Part(tokens=pack_tokens(everything), logprobs=pack_floats([-0.5] * num), spans=(VersionSpan(0, num),))

    def ask(self, asked: Asked, take: Callable[[Outcome, Part], None]) -> int:
        take(Completed(), self.part([]))
        return 0

    def drop(self, number: int) -> None:
        pass

    def gauges(self) -> tuple[Metric, ...]:
        return ()

    def close(self, timeout_s: float) -> None:
        pass


class Heard(logging.Handler):
    """What the servers log as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record)[-1500:])


class Servers:
    """All of them, until the process ends."""

    def __init__(self) -> None:
        for module in (gateway_server, front_door):  # an agent waits for a session for as long as it says
            vars(module)["MAX_WAIT_S"] = 0.01
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-fuzz-http-"))
        cases.make_tokenizer(self.folder)
        tokenizer = TextTokenizer(self.folder)
        self.heard = Heard()
        logging.getLogger().addHandler(self.heard)
        self.engine = Instant(tokenizer)
        sampling = SamplingOptions(max_response_tokens=64)
        data = DataOptions(path="rows.jsonl", metadata_keys=("level",), chat_template=True)
        gateway = GatewayEpisodes(
            EpisodeContext(
                engine="engine/0", epoch=0, run_folder=self.folder, model_folder=self.folder,
                max_context=CONTEXT, options=EpisodeOptions(kind="gateway"), sampling=sampling, data=data,
            )
        )  # fmt: skip
        self.backend = EpisodeBackend(self.engine, gateway)
        self.backend.start(lambda _: None, self._failed)
        self.backend.execute(OpenEngine())
        self.key = run_token(self.folder)
        judge = JudgeServer(
            JudgingSettings(
                engine="engine/1", run_folder=str(self.folder), model_folder=str(self.folder), host="127.0.0.1",
                max_context=CONTEXT, num_slots=2, samplings=(Question(messages=[], max_tokens=1).sampling(CONTEXT),),
                first_dataset=0, data=data, seed=0, timeout_s=5.0, canary_tolerance=None,
            )
        )  # fmt: skip
        judge.start(self.engine, self._failed)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        registry = CollectorRegistry()
        Counter("steps", "of it", registry=registry).inc()
        metrics = serve_metrics(0, registry)
        asked = RunEndpoints("self", Surroundings(run_folder=str(self.folder)))
        while not asked.now():
            threading.Event().wait(0.05)
        (judging,) = asked.now()
        self.places = {
            "gateway": (_port(gateway.address.result(WAIT_S).url), self.key),
            "door": (self._open_door(), self.key),
            "judge": (_port(judging.url), judging.key),
            "metrics": (metrics.port, "any"),
        }
        self.num_issued = 0

    def _failed(self, error: BaseException) -> None:
        self.heard.records.append(f"failed: {error!r}")

    def _open_door(self) -> int:
        port: Future[int] = Future()

        async def serve() -> None:
            port.set_result((await listen(FrontDoor(self.folder, self.key).app("127.0.0.1"), "127.0.0.1", 0)).port)
            await asyncio.Event().wait()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        return port.result(WAIT_S)

    def ask(self, where: str, raw: bytes, *, is_whole: bool = True) -> bytes:
        """What comes back, which must not be the server's fault; to a whole request something does."""
        port, _ = self.places[where]
        answer = b""
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as line, contextlib.suppress(OSError):
            line.sendall(raw)
            line.settimeout(WAIT_S if is_whole else SILENT_S)
            while data := line.recv(65536):
                answer += data
        found = re.match(rb"HTTP/\d\.\d (\d{3}) ", answer)
        assert found or not (answer or is_whole), (where, raw, answer)
        assert found is None or int(found.group(1)) < 500, (where, raw, answer)
        assert b"Traceback" not in answer, (where, raw, answer)
        assert not self.heard.records, (where, raw, self.heard.records)
        return answer

    def session(self) -> str:
        """A new one that is taken."""
        self.num_issued += 1
        self.backend.execute(
            Generate(
                key=SampleKey(self.num_issued, 0), attempt=0, purpose=Purpose.TRAIN, seed=1, deadline_version=9,
                prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([5, 6]), text="hi", metadata=b'{"level":3}'),
            )
        )  # fmt: skip
        answer = self.ask("gateway", request("POST", "/sessions", b"{}", self.key))
        found = re.search(rb'"id":"([^"]+)"', answer)
        assert found, answer
        return found.group(1).decode()


def _port(url: str) -> int:
    return urlsplit(url).port or 0


@cache
def servers() -> Servers:
    return Servers()


def request(method: str, path: str, body: bytes, key: str, *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}", "Connection: close", *headers,
        f"Content-Length: {len(body) if length is None else length}",
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def message(draw: Draw) -> object:
    if draw.number(0, 5) == 0:
        return draw.value(WORDS)
    found: dict[str, object] = {"role": draw.pick(("user", "assistant", "system", "tool", "developer", "x"))}
    found["content"] = draw.text(WORDS, max_pieces=3) if draw.number(0, 3) else draw.value(WORDS)
    if draw.number(0, 3) == 0:
        function = {"name": draw.value(WORDS, 0), "arguments": draw.value(WORDS, 1)}
        found["tool_calls"] = (
            [{"id": "1", "type": "function", "function": function}] if draw.flag() else draw.value(WORDS)
        )
    return found


def chat(draw: Draw) -> dict[str, object]:
    asked: dict[str, object] = {"model": "tiny", "messages": [message(draw) for _ in range(draw.number(0, 3))]}
    if draw.flag():
        asked["messages"] = [{"role": "user", "content": "hi"}]
    for name in SETTINGS:
        if draw.number(0, 7) == 0:
            asked[name] = draw.value(WORDS)
    if draw.flag():
        asked["tools"] = [cases.MULTIPLY] if draw.flag() else [{"type": "function", "function": draw.value(WORDS)}]
    return asked


def body_of(draw: Draw, kind: str) -> bytes:
    match draw.number(0, 9):
        case 0:
            return draw.text(WORDS).encode("utf-8", "replace")
        case 1:
            opened, closed = draw.pick((("[", "]"), ('{"a":', "}"), ('{"messages":[', "]}")))
            depth = draw.pick((10, 65, 1000, 20_000))
            return (opened * depth + "1" + closed * depth).encode()
        case 2:
            return msgspec.json.encode(draw.value(WORDS))
        case _:
            pass
    asked: dict[str, object] = {}
    if kind == "chat":
        asked = chat(draw)
    elif kind == "complete":
        asked = {"model": "tiny", "prompt": draw.value(WORDS), "max_tokens": 5, "stream": draw.flag()}
    elif kind == "judge":
        asked = {"messages": [message(draw)], "max_tokens": draw.pick((1, 5, 2**40)), "seed": draw.value(WORDS, 0)}
        asked = (
            asked if draw.flag() else {**asked, "messages": [{"role": "user", "content": draw.text(WORDS)}], "seed": 3}
        )
    elif kind == "finish":
        asked = {"outcome": draw.pick(("completed", "truncated", "policy_error", "infra_error", None)),
                 "reward": draw.value(WORDS, 0), "components": {draw.text(WORDS, max_pieces=2): 1e300},
                 "detail": draw.text(WORDS), "metadata": draw.value(WORDS)}  # fmt: skip
        asked = {name: value for name, value in asked.items() if draw.flag()}
    body = msgspec.json.encode(asked)
    return draw.changed(body) if draw.number(0, 5) == 0 else body


def check(data: bytes) -> None:
    draw, running = Draw(data), servers()
    running.engine.said = draw.pick(SAID)
    where = draw.pick(("gateway", "gateway", "door", "door", "judge", "metrics"))
    key = running.places[where][1]
    if where in ("gateway", "door") and draw.number(0, 3):
        name = running.session()
        for _ in range(draw.number(1, 3)):
            kind, path = draw.pick(
                (("chat", "v1/chat/completions"), ("complete", "v1/completions"), ("finish", "finish"))
            )
            running.ask(where, request("POST", f"/sessions/{name}/{path}", body_of(draw, kind), key))
        running.ask("gateway", request("POST", f"/sessions/{name}/finish", b'{"outcome":"infra_error"}', running.key))
        return
    method = draw.pick(("GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE", "é", "get"))
    path = draw.pick(PATHS)
    kind = "judge" if where == "judge" else "chat"
    if where == "judge" and draw.flag():
        method, path = "POST", ROUTE
    headers = [draw.pick(HEADERS) for _ in range(draw.pick((0, 0, 1, 2)))]
    raw = request(method, path, body_of(draw, kind), key, *headers, length=draw.pick((None, None, None, 0, 10**6)))
    raw = draw.changed(raw) if draw.number(0, 2) == 0 else raw[: draw.pick((len(raw), len(raw) // 2))]
    running.ask(where, raw, is_whole=False)


if __name__ == "__main__":
    fuzz(check)
