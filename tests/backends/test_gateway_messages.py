"""Anthropic's Messages protocol at the gateway, over plain HTTP as its documentation has it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gateway_cases as cases
import httpx2 as httpx
import pytest
from gateway_bench import TOOLS, WAIT_S, BenchFactory, GatewayBench, hold_conversation

from penstock.messages.arrays import floats_view, tokens_view

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.long_run
FUNCTION = cases.MULTIPLY["function"]
TOOL = {"name": "multiply", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
ASKED = {"role": "user", "content": cases.QUESTION}


@pytest.fixture
def bench(gateway_model: Path, tmp_path: Path) -> Iterator[GatewayBench]:
    factory = BenchFactory(gateway_model, tmp_path)
    yield factory()
    for bench in factory.benches:
        bench.close()


class Agent:
    """Speaks it in one session."""

    def __init__(self, bench: GatewayBench, index: int = 0) -> None:
        self.taken, self.openai = bench.begin(index)
        self.http = httpx.Client(headers={"x-api-key": bench.key, "anthropic-version": "2023-06-01"}, timeout=WAIT_S)

    def post(self, messages: list[Any], **fields: Any) -> httpx.Response:  # noqa: ANN401 - of the protocol
        body = {"model": "any", "max_tokens": 200, "tools": [TOOL], "messages": messages, **fields}
        return self.http.post(f"{self.taken.base_url}/messages", json=body)

    def ask(self, messages: list[Any], **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - likewise
        reply = self.post(messages, **fields)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def stream(self, messages: list[Any]) -> list[dict[str, Any]]:
        lines = self.post(messages, stream=True).text.strip().split("\n\n")
        events = [dict(line.split(": ", 1) for line in piece.split("\n")) for piece in lines]
        found = [json.loads(event["data"]) for event in events]
        assert [each["type"] for each in found] == [event["event"] for event in events]
        return found


def result_of(call_id: str, text: Any = cases.TOOL_RESULT) -> dict[str, Any]:  # noqa: ANN401 - text or blocks
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": text}]}


def test_a_conversation_with_a_tool_is_the_sample_that_openais_protocol_gives(bench: GatewayBench) -> None:
    agent = Agent(bench)
    first = agent.ask([ASKED])
    (call,) = first["content"]
    assert (first["type"], first["role"], first["stop_reason"]) == ("message", "assistant", "tool_use")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "multiply", {"a": 6, "b": 7})
    answered = [ASKED, {"role": "assistant", "content": first["content"]}, result_of(call["id"])]
    second = agent.ask(answered)
    assert second["content"] == [{"type": "text", "text": cases.ANSWER}]
    assert (second["stop_reason"], second["stop_sequence"]) == ("end_turn", None)
    assert second["usage"]["output_tokens"] == bench.engine.ends[-1].part.num_tokens
    assert second["penstock"]["turn"] == 2
    assert agent.ask(answered) == second, "the same request has the same answer"
    bench.finish(agent.taken, reward=1.0)
    ours = bench.ended()
    other, client = bench.begin(1)
    hold_conversation(client)
    bench.finish(other, reward=1.0)
    theirs = bench.ended()
    assert (ours.ids, ours.mask) == (theirs.ids, theirs.mask)
    for part in (ours.event.part, theirs.event.part):
        assert tokens_view(part.context_tokens).tolist() == tokens_view(theirs.event.part.context_tokens).tolist()
        assert floats_view(part.logprobs).tolist() == floats_view(ours.event.part.logprobs).tolist()


def test_a_stream_adds_up_to_the_answer(bench: GatewayBench) -> None:
    agent = Agent(bench)
    start, block, piece, stop, delta, end = agent.stream([ASKED])
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] > 0
    assert block["content_block"]["name"] == "multiply"
    assert json.loads(piece["delta"]["partial_json"]) == {"a": 6, "b": 7}
    assert (stop["index"], delta["delta"]["stop_reason"], end["type"]) == (0, "tool_use", "message_stop")
    use = {**block["content_block"], "input": json.loads(piece["delta"]["partial_json"])}
    blocks = [{"type": "text", "text": cases.TOOL_RESULT}]
    events = agent.stream([ASKED, {"role": "assistant", "content": [use]}, result_of(use["id"], blocks)])
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == cases.ANSWER
    assert [event["type"] for event in events if "index" not in event] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[-2]["usage"]["output_tokens"] == bench.engine.ends[-1].part.num_tokens


def test_stops_and_limits_have_their_reasons(bench: GatewayBench) -> None:
    stopped = Agent(bench).ask([ASKED], stop_sequences=["nothing", "multi"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "multi")
    assert "multi" not in stopped["content"][0]["text"]
    short = Agent(bench, 1).ask([ASKED], max_tokens=3, temperature=0.1)
    assert (short["stop_reason"], short["usage"]["output_tokens"]) == ("max_tokens", 3)
    assert short["penstock"]["ignored"] == ["temperature"]


def test_what_is_not_served_is_said_in_the_form_of_the_protocol(bench: GatewayBench) -> None:
    agent = Agent(bench)
    image: dict[str, Any] = {"role": "user", "content": [{"type": "image", "source": {}}]}
    cases_of: list[tuple[list[Any], dict[str, Any], str]] = [
        ([image], {}, "the source of an image: expected base64"),
        ([ASKED], {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ([ASKED], {"tool_choice": {"type": "any"}}, "tool_choice"),
        ([ASKED], {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "the server runs none itself"),
        ([ASKED, {"role": "assistant", "content": "It"}], {}, "the last one must not be the assistant's"),
        ([ASKED], {"max_tokens": 0}, "max_tokens"),
    ]
    for messages, fields, reason in cases_of:
        refused = agent.post(messages, **fields)
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        assert reason in refused.json()["error"]["message"]
    agent.http.headers["x-api-key"] = "another"
    refused = agent.post([ASKED])
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert TOOLS
