"""The gateway with the embedded engine behind it and the official OpenAI client in front of it."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, cast

import gateway_cases as cases
import httpx2 as httpx
import msgspec
import openai
import pytest
from gateway_bench import ASKED, TOOLS, WAIT_S, BenchFactory, GatewayBench, hold_conversation

from penstock.backends.data.options import DataOptions
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.episodes.context import EpisodeContext
from penstock.backends.episodes.gateway import GatewayEpisodes
from penstock.backends.episodes.options import EpisodeOptions
from penstock.backends.episodes.registry import log_file, read_addresses
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.base import Metric
from penstock.messages.commands import (
    AbortGeneration,
    Generate,
    InterruptGenerations,
)
from penstock.messages.errors import UserFault
from penstock.messages.local import WeightsSwapped
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    PolicyError,
    Reward,
    SampleKey,
    StopReason,
    Truncated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.backends.episodes.api import SessionTaken
    from penstock.messages.samples import Part


EPISODE = StopReason.EPISODE


@pytest.fixture
def open_bench(gateway_model: Path, tmp_path: Path) -> Iterator[BenchFactory]:
    factory = BenchFactory(gateway_model, tmp_path)
    yield factory
    for bench in factory.benches:
        bench.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "gateway"]


@pytest.fixture
def bench(open_bench: BenchFactory) -> GatewayBench:
    return open_bench()


def test_a_conversation_with_a_tool_becomes_a_sample_of_the_very_tokens_that_the_engine_made(
    bench: GatewayBench,
) -> None:
    taken, client = bench.begin()
    hold_conversation(client)
    done = bench.finish(taken, reward=1.0, components={"steps": 2})
    end = bench.ended()
    assert end.event.outcome == Completed(stop=EPISODE, reward=Reward(value=1.0, components=(Metric("steps", 2.0),)))
    made = [tokens_view(turn.part.tokens).tolist() for turn in bench.engine.ends]
    assert len(made) == 2
    assert [i for i, m in zip(end.ids, end.mask, strict=True) if m] == made[0] + made[1]
    logprobs = floats_view(end.event.part.logprobs).tolist()
    of_engine = [value for turn in bench.engine.ends for value in floats_view(turn.part.logprobs).tolist()]
    assert [value for value, m in zip(logprobs, end.mask, strict=True) if m] == of_engine
    assert {value for value, m in zip(logprobs, end.mask, strict=True) if not m} == {0.0}
    context = tokens_view(end.event.part.context_tokens).tolist()
    text = "".join(bench.tokenizer.token_text(i) if i in specials(bench) else bench.tokenizer.decode([i]) for i in
                   context + end.ids)  # fmt: skip
    assert text == rendered(bench.model)
    assert (done.num_turns, done.num_tokens, done.num_model_tokens) == (2, len(end.ids), sum(end.mask))
    assert done.outcome == "completed"


def specials(bench: GatewayBench) -> set[int | None]:
    return {bench.tokenizer.token_id(token) for token in cases.SPECIAL}


def rendered(gateway_model: Path) -> str:
    """The whole conversation as transformers renders it, up to the end token of the last turn."""
    from transformers import AutoTokenizer

    tokenizer = cast("Any", AutoTokenizer.from_pretrained(str(gateway_model)))
    call = {"id": "c", "type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": cases.TOOL_RESULT},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    return str(text) + f"{cases.ANSWER}<|im_end|>"


def test_a_session_names_its_sample_and_shows_no_label(bench: GatewayBench) -> None:
    taken, _ = bench.begin()
    assert (taken.sample, taken.attempt, taken.prompt) == ("7/0", 0, cases.QUESTION)
    assert json.loads(bytes(taken.messages)) == ASKED
    assert json.loads(bytes(taken.metadata)) == {"level": 3}
    assert taken.base_url == f"{bench.url}/sessions/{taken.id}/v1"


def test_usage_versions_and_logprobs_are_those_of_the_turn(bench: GatewayBench) -> None:
    _, client = bench.begin()
    reply = client.chat.completions.create(model="any", messages=ASKED, tools=TOOLS, logprobs=True)
    (turn,) = bench.engine.ends
    num_tokens = turn.part.num_tokens
    assert reply.usage is not None
    assert reply.usage.completion_tokens == num_tokens
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + num_tokens
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == floats_view(turn.part.logprobs).tolist()
    assert "".join(entry.token for entry in logprobs.content) == f"{cases.CALL}<|im_end|>"
    said = cast("dict[str, Any]", reply.to_dict())["penstock"]
    assert (said["turn"], said["versions"]) == (1, [[0, num_tokens]])


def test_a_stream_has_the_same_message_as_the_whole(bench: GatewayBench) -> None:
    taken, client = bench.begin()
    chunks = list(
        client.chat.completions.create(
            model="t", messages=ASKED, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == ""
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert call.function is not None
    assert (call.function.name, json.loads(call.function.arguments or "")) == ("multiply", {"a": 6, "b": 7})
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == bench.engine.ends[0].part.num_tokens
    calls = [{"id": call.id, "type": "function", "function": {"name": "multiply", "arguments": '{"b":7, "a":6}'}}]
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.id, "content": cases.TOOL_RESULT},
    ]
    pieces = list(client.chat.completions.create(model="t", messages=messages, tools=TOOLS, stream=True))
    texts = [piece.choices[0].delta.content or "" for piece in pieces]
    assert "".join(texts) == cases.ANSWER
    bench.finish(taken)
    assert bench.ended().event.outcome == Completed(stop=EPISODE)


def test_the_same_request_again_gets_the_same_answer_and_costs_nothing(bench: GatewayBench) -> None:
    _, client = bench.begin()
    first = client.chat.completions.create(model="t", messages=ASKED, tools=TOOLS)
    again = client.chat.completions.create(model="t", messages=ASKED, tools=TOOLS)
    assert again.choices == first.choices
    assert len(bench.engine.ends) == 1


EDITS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "edited": lambda m: [{"role": "user", "content": "What is 1 times 1?"}, *m[1:], ASKED[0]],
    "branched": lambda m: [m[0], {"role": "user", "content": "And now?"}],
    "shortened": lambda m: [m[0]],
    "another answer": lambda m: [m[0], {"role": "assistant", "content": "No."}, ASKED[0]],
    "another call": lambda m: [m[0], {**m[1], "tool_calls": []}, m[2]],
    "without its last answer": lambda m: [*m[:3], ASKED[0]],
}


def _as_dict(message: Any) -> dict[str, Any]:  # noqa: ANN401 - ours or the client's
    return cast("dict[str, Any]", message if isinstance(message, dict) else message.to_dict())


@pytest.mark.parametrize("edit", EDITS)
def test_a_conversation_that_was_changed_is_refused_where_there_may_be_one_and_can_go_on_as_it_was(
    open_bench: BenchFactory, edit: str
) -> None:
    bench = open_bench(options={"max_parts": 1})
    taken, client = bench.begin()
    messages: list[Any] = [_as_dict(m) for m in hold_conversation(client)]
    with pytest.raises(openai.ConflictError, match="a session is one conversation") as refused:
        client.chat.completions.create(model="t", messages=EDITS[edit](messages), tools=TOOLS)
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert len(bench.engine.ends) == 2
    more: list[Any] = [*messages, {"role": "user", "content": cases.QUESTION}]
    client.chat.completions.create(model="t", messages=more, tools=TOOLS)
    assert bench.finish(taken).num_turns == 3


def test_other_tools_in_the_middle_are_refused_where_there_may_be_one_conversation(open_bench: BenchFactory) -> None:
    _, client = open_bench(options={"max_parts": 1}).begin()
    messages = hold_conversation(client)
    with pytest.raises(openai.ConflictError, match="tools"):
        client.chat.completions.create(model="t", messages=[*messages, *ASKED], tools=[])


def said_of(reply: Any) -> dict[str, Any]:  # noqa: ANN401 - the client's
    """What a response says beyond the protocol."""
    return cast("dict[str, Any]", reply.to_dict()["penstock"])


def test_a_changed_conversation_is_a_part_of_its_own_and_the_first_goes_on(bench: GatewayBench) -> None:
    taken, client = bench.begin()
    messages: list[Any] = [_as_dict(m) for m in hold_conversation(client)]
    create = client.chat.completions.create
    other: Any = {"role": "user", "content": "And now?"}
    result: Any = {**messages[2], "content": "43"}
    asides = [
        create(model="t", messages=[*messages[:2], result], tools=TOOLS, max_tokens=4),
        create(model="t", messages=[other], max_tokens=5),
    ]
    assert [said_of(reply)["conversation"] for reply in asides] == [1, 2]
    aside: Any = asides[1].choices[0].message
    further = create(model="t", messages=[other, aside, other], max_tokens=3)
    back = create(model="t", messages=[*messages, other], tools=TOOLS, max_tokens=2)
    assert (said_of(further)["conversation"], said_of(back).get("conversation", 0)) == (2, 0)
    bench.finish(taken, reward=1.0)
    parts = bench.ended().event.parts
    made = [tokens_view(turn.part.tokens).tolist() for turn in bench.engine.ends]
    assert [trained_tokens(part) for part in parts] == [made[0] + made[1] + made[5], made[2], made[3] + made[4]]
    first = parts[0].context_tokens + parts[0].tokens[: 4 * len(made[0])]
    assert parts[1].context_tokens.startswith(first)  # the very tokens that stood there, not their text anew
    assert not parts[2].context_tokens.startswith(parts[0].context_tokens[:40])


def trained_tokens(part: Part) -> list[int]:
    mask = part.loss_mask or b"\1" * part.num_tokens
    return [token for token, is_trained in zip(tokens_view(part.tokens), mask, strict=True) if is_trained]


def test_of_several_answers_the_one_that_goes_on_is_trained(bench: GatewayBench) -> None:
    taken, client = bench.begin()
    asked: Any = {"role": "user", "content": "Is number object?"}
    several = client.chat.completions.create(model="t", messages=[asked], n=3, max_tokens=6)
    again = client.chat.completions.create(model="t", messages=[asked], n=3, max_tokens=6)
    assert [choice.index for choice in again.choices] == [0, 1, 2]
    assert again.choices == several.choices
    assert len({choice.message.content for choice in several.choices}) == 3
    assert several.usage is not None
    assert several.usage.completion_tokens == sum(turn.part.num_tokens for turn in bench.engine.ends)
    goes_on: Any = several.choices[1].message
    client.chat.completions.create(model="t", messages=[asked, goes_on, asked], max_tokens=4)
    last = client.chat.completions.create(model="t", messages=[asked, goes_on, asked, goes_on, asked], n=2)
    assert said_of(last)["conversation"] > 3  # its history is another
    assert bench.finish(taken, choice=1, reward=1.0).num_turns == 6
    parts = bench.ended().event.parts
    made = [tokens_view(turn.part.tokens).tolist() for turn in bench.engine.ends]
    assert [trained_tokens(part) for part in parts] == [made[1] + made[3], made[5]]
    untaken = float(sum(len(made[n]) for n in (0, 2, 4)))
    assert Metric("episodes/untaken_tokens", untaken) in bench.backend.gauges()


def test_a_temperature_that_is_followed_is_masked_and_says_so(open_bench: BenchFactory) -> None:
    bench = open_bench(options={"follow_sampling": True})
    asked: Any = {"role": "user", "content": "Is number object?"}
    greedy: list[str] = []
    for index in range(2):
        taken, client = bench.begin(index)
        cold = client.chat.completions.create(model="t", messages=[asked], temperature=0, max_tokens=6)
        greedy.append(str(cold.choices[0].message.content))
        assert said_of(cold)["masked"] == "other_sampling"
        reply = bench.http.post(f"/sessions/{taken.id}/finish", json={"reward": 1})
        assert (reply.status_code, "can be trained" in reply.text) == (409, True)
        message: Any = cold.choices[0].message
        warm = client.chat.completions.create(
            model="t", messages=[asked, message, asked], temperature=1.0, seed=5, presence_penalty=1, max_tokens=6
        )
        assert (said_of(warm).get("masked", ""), said_of(warm)["ignored"]) == ("", ["presence_penalty"])
        bench.finish(taken, reward=1.0)
        ended = bench.ended()
        num_cold = bench.engine.ends[-2].part.num_tokens
        assert (set(ended.mask[:num_cold]), sum(ended.mask)) == ({0}, bench.engine.ends[-1].part.num_tokens)
    assert greedy[0] == greedy[1]  # of two seeds
    first, second = bench.engine.ends[1::2]
    assert first.part.logprobs[:16] == second.part.logprobs[:16]  # of one
    num_masked = sum(turn.part.num_tokens for turn in bench.engine.ends[::2])
    assert Metric("episodes/masked_other_sampling", float(num_masked)) in bench.backend.gauges()


def test_an_answer_that_was_cut_off_is_closed_as_the_template_closes_it(bench: GatewayBench) -> None:
    taken, client = bench.begin()
    first = client.chat.completions.create(model="t", messages=ASKED, max_tokens=3)
    assert first.choices[0].finish_reason == "length"
    assert bench.engine.ends[0].part.num_tokens == 3
    message = first.choices[0].message
    client.chat.completions.create(model="t", messages=[*ASKED, cast("Any", message), *ASKED], max_tokens=5)
    bench.finish(taken)
    end = bench.ended()
    between = [i for i, m in zip(end.ids, end.mask, strict=True) if not m]
    (expected,) = bench.tokenizer.encode(
        [f"<|im_end|>\n<|im_start|>user\n{cases.QUESTION}<|im_end|>\n<|im_start|>assistant\n"], special=False
    )
    assert between == expected
    assert end.event.outcome == Truncated()


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(bench: GatewayBench) -> None:
    taken, client = bench.begin()
    reply = client.chat.completions.create(model="t", messages=ASKED, tools=TOOLS, stop=["arguments"])
    assert (reply.choices[0].finish_reason, reply.choices[0].message.tool_calls) == ("stop", None)
    assert reply.choices[0].message.content == cases.CALL[: cases.CALL.index("arguments")]
    bench.finish(taken)
    end = bench.ended()
    assert bench.tokenizer.decode(end.ids).endswith("arguments")
    assert set(end.mask) == {1}


def test_sampling_that_differs_from_the_scenarios_is_named_and_not_followed(bench: GatewayBench) -> None:
    _, client = bench.begin()
    reply = client.chat.completions.create(
        model="t", messages=ASKED, tools=TOOLS, temperature=0.2, top_p=1.0, presence_penalty=0.5, seed=3
    )
    assert cast("dict[str, Any]", reply.to_dict())["penstock"]["ignored"] == ["temperature", "presence_penalty", "seed"]


@pytest.mark.parametrize(
    "wish",
    [
        {"n": 0},
        {"n": 2, "stream": True},
        {"n": 999},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"max_tokens": 0},
        {"stop": ["x" * 257]},
        {"stop": ["a", ""]},
    ],
)
def test_what_cannot_be_served_is_refused(bench: GatewayBench, wish: dict[str, Any]) -> None:
    _, client = bench.begin()
    with pytest.raises(openai.BadRequestError, match=next(iter(wish))):
        client.chat.completions.create(model="t", messages=ASKED, tools=TOOLS, **wish)
    assert bench.engine.ends == []


def test_plain_completions_go_on_from_their_own_text_and_tokens(open_bench: BenchFactory) -> None:
    bench = open_bench(options={"max_parts": 1})
    taken, client = bench.begin()
    first = client.completions.create(model="t", prompt=cases.QUESTION, max_tokens=4, logprobs=0)
    assert first.choices[0].logprobs is not None
    assert first.choices[0].logprobs.token_logprobs == floats_view(bench.engine.ends[0].part.logprobs).tolist()
    token_texts, offsets = first.choices[0].logprobs.tokens, first.choices[0].logprobs.text_offset
    assert token_texts is not None
    assert offsets == [len("".join(token_texts[:place])) for place in range(len(token_texts))]
    text = cases.QUESTION + first.choices[0].text
    client.completions.create(model="t", prompt=f"{text} user", max_tokens=2)
    with pytest.raises(openai.ConflictError):
        client.completions.create(model="t", prompt="something else", max_tokens=2)
    bench.finish(taken)
    end = bench.ended()
    assert end.event.part.context_tokens == b""
    assert sum(end.mask) == sum(turn.part.num_tokens for turn in bench.engine.ends)


def test_a_session_goes_through_new_weights_and_its_agent_does_not_notice(bench: GatewayBench) -> None:
    taken, client = bench.begin()
    waiting = threading.Event()

    def interrupt_first(command: Generate) -> None:
        """The actor interrupts as soon as the first turn is asked for; the turn itself is given to the engine."""
        bench.engine.hold = None
        bench.engine.inner.execute(command)
        bench.backend.execute(InterruptGenerations())
        waiting.set()

    swap = bench.stage(1)
    bench.engine.hold = interrupt_first
    answers: list[list[Any]] = []
    agent = threading.Thread(target=lambda: answers.append(hold_conversation(client)))
    agent.start()
    assert waiting.wait(WAIT_S)
    paused = bench.ended()
    assert paused.event.outcome == Cancelled(cause="interrupted")
    bench.backend.execute(swap)
    bench.hear(WeightsSwapped)
    bench.issue(prefix=paused.event.part)
    agent.join(WAIT_S)
    assert len(answers) == 1
    bench.finish(taken)
    end = bench.ended()
    assert end.event.outcome == Completed(stop=EPISODE)
    assert end.ids[: len(paused.ids)] == paused.ids
    assert [span.version for span in end.event.part.spans][-1] == 1


def test_an_aborted_session_is_gone_for_its_agent(bench: GatewayBench) -> None:
    taken, client = bench.begin()
    bench.backend.execute(AbortGeneration(SampleKey(7, 0), 0))
    assert bench.ended().event.outcome == Cancelled(cause="aborted")
    with pytest.raises(openai.APIStatusError, match="not needed any more") as gone:
        client.chat.completions.create(model="t", messages=ASKED)
    assert gone.value.status_code == 410
    assert bench.http.post(f"/sessions/{taken.id}/finish", json={"reward": 1}).status_code == 410


@pytest.mark.parametrize("limit", ["take_timeout_s", "idle_timeout_s", "timeout_s"])
def test_an_abandoned_session_is_an_infra_error_and_earns_nothing(open_bench: BenchFactory, limit: str) -> None:
    bench = open_bench(options={limit: 0.2})
    bench.issue()
    if limit != "take_timeout_s":
        bench.take()
    end = bench.ended()
    assert isinstance(end.event.outcome, InfraError)
    assert f"episode.{limit}" in end.event.outcome.detail
    line = json.loads(log_file(bench.folder, "engine/0").read_text())
    assert (line["outcome"], line["sample"]) == ("infra_error", "7/0")


def test_a_session_at_its_last_turn_is_truncated_and_not_thrown_away(open_bench: BenchFactory) -> None:
    bench = open_bench(options={"max_turns": 1})
    taken, client = bench.begin()
    first = client.chat.completions.create(model="t", messages=ASKED, tools=TOOLS)
    call = (first.choices[0].message.tool_calls or [])[0]
    more: list[Any] = [
        *ASKED,
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": cases.TOOL_RESULT},
    ]
    with pytest.raises(openai.BadRequestError, match=r"episode\.max_turns"):
        client.chat.completions.create(model="t", messages=more, tools=TOOLS)
    assert bench.finish(taken).outcome == "truncated"
    assert bench.ended().event.outcome == Truncated()


@pytest.mark.parametrize("length", [600, 3_000_000])
def test_a_prompt_beyond_the_context_is_refused_with_its_length(
    length: int, bench: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = bench.begin()
    long: list[Any] = [{"role": "user", "content": "x " * length}]
    if length > 600:
        monkeypatch.setattr(TextTokenizer, "encode", None)  # which takes seconds for a megabyte
    with pytest.raises(openai.BadRequestError, match=r"model\.max_context of 512") as refused:
        client.chat.completions.create(model="t", messages=long)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"outcome": "policy_error", "detail": "malformed"}, PolicyError(detail="malformed")),
        ({"outcome": "policy_error", "reward": 0}, PolicyError(detail="", reward=Reward(value=0.0))),
        ({"outcome": "infra_error", "detail": "no sandbox"}, InfraError(detail="no sandbox")),
        ({"outcome": "truncated"}, Truncated()),
    ],
)
def test_an_agent_says_what_became_of_it(bench: GatewayBench, said: dict[str, Any], expected: object) -> None:
    taken, client = bench.begin()
    client.chat.completions.create(model="t", messages=ASKED, tools=TOOLS)
    bench.finish(taken, **said, metadata={"note": "x"})
    outcome = bench.ended().event.outcome
    if isinstance(outcome, PolicyError) and not said.get("detail"):
        outcome = msgspec.structs.replace(outcome, detail="")
    assert outcome == expected
    assert json.loads(log_file(bench.folder, "engine/0").read_text())["metadata"] == {"note": "x"}


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"outcome": "infra_error", "reward": 0}, 400),
        ({"reward": "much"}, 400),
        ({"rewrad": 1}, 400),
        ({"components": {"a": 1}}, 400),
        ({"reward": 1e308}, 400),
        ({"reward": -1.1e9}, 400),
        ({"reward": 1, "components": {"a": -1e308}}, 400),
        ({"reward": 1, "components": {"a\0b": 1}}, 400),
        ({"reward": 1, "components": {"<b>a</b>": 1}}, 400),
        ({"reward": 1, "components": {"\x1b[31m": 1}}, 400),
        ({"reward": 1, "components": {"": 1}}, 400),
        ({"reward": 1, "components": {"a" * 65: 1}}, 400),
        ({"reward": 1, "components": {f"a{i}": 1 for i in range(65)}}, 400),
        ({"outcome": "policy_error", "detail": "x" * 5000}, 400),
        ({"reward": 1, "metadata": {"x": "y" * 2_000_000}}, 400),
        ({"reward": 1}, 409),
    ],
)
def test_an_end_that_makes_no_sense_is_refused(bench: GatewayBench, said: dict[str, Any], status: int) -> None:
    """The last one: the model has not answered once."""
    taken, _ = bench.begin()
    reply = bench.http.post(f"/sessions/{taken.id}/finish", json=said)
    assert (reply.status_code, reply.headers["x-should-retry"]) == (status, "false")
    assert bench.take_status()["num_taken"] == 1


def test_without_the_token_there_is_nothing(bench: GatewayBench) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        reply = httpx.post(f"{bench.url}/sessions", json={"wait_s": 0}, headers=headers, timeout=WAIT_S)
        assert reply.status_code == 401
    assert (bench.folder / "gateway" / "token").stat().st_mode & 0o077 == 0


def test_an_unknown_session_is_not_found_and_one_of_an_engine_before_is_gone(bench: GatewayBench) -> None:
    taken, _ = bench.begin()
    mine = taken.id.rsplit("-", 1)[0]
    for name, status in ((f"{mine}-0000", 404), ("0-deadbeef-0000", 410)):
        reply = bench.http.post(f"/sessions/{name}/v1/chat/completions", json={"messages": ASKED})
        assert reply.status_code == status, name


def test_an_agent_waits_for_a_session_and_gets_none_when_there_is_none(bench: GatewayBench) -> None:
    assert bench.http.post("/sessions", json={"wait_s": 0}).status_code == 204
    got: list[SessionTaken] = []
    agent = threading.Thread(target=lambda: got.append(bench.take()))
    agent.start()
    bench.issue()
    agent.join(WAIT_S)
    assert got[0].sample == "7/0"


def test_models_and_status_are_served(bench: GatewayBench) -> None:
    _, client = bench.begin()
    assert [card.id for card in client.models.list()] == [bench.model.name]
    status = bench.take_status()
    assert (status["engine"], status["num_open"], status["num_taken"]) == ("engine/0", 0, 1)


def test_the_address_is_in_the_runs_folder_while_the_gateway_is_there(gateway_model: Path, tmp_path: Path) -> None:
    factory = BenchFactory(gateway_model, tmp_path)
    bench = factory()
    assert [(address.engine, address.url) for address in read_addresses(bench.folder)] == [("engine/0", bench.url)]
    bench.close()
    assert read_addresses(bench.folder) == []


def test_an_address_that_is_not_this_machines_is_refused(gateway_model: Path, tmp_path: Path) -> None:
    settings = EpisodeContext(
        engine="engine/0", epoch=0, run_folder=tmp_path, model_folder=gateway_model,
        max_context=64, options=EpisodeOptions(kind="gateway", host="192.0.2.1"), sampling=SamplingOptions(),
        data=DataOptions(path="x.jsonl"),
    )  # fmt: skip
    gateway = GatewayEpisodes(settings)
    failures: list[BaseException] = []
    gateway.start(failures.append)
    with pytest.raises(UserFault, match=r"episode\.host: 192\.0\.2\.1 is no address"):
        gateway.address.result(WAIT_S)
    gateway.close(WAIT_S)
    assert len(failures) == 1
