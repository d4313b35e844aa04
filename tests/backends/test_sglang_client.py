"""The SGLang client against what a SGLang server answers, as recorded, and against servers and networks that fail."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest
from sglang_replay import (
    DONE,
    Answer,
    Exchange,
    ReplayServer,
    cut_after,
    events,
    raw,
    recorded,
    recording,
    replay,
    stalled,
    status,
)

from penstock.backends.engines.served.base.calls import (
    Chunk,
    EndReason,
    Failure,
    GenerateCall,
    Generated,
    VersionTokens,
)
from penstock.backends.engines.served.base.generator import BadTokenError, RetryPolicy
from penstock.backends.engines.served.base.http import (
    BadReply,
    CallError,
    ConnectFailed,
    CutOff,
    EventSplitter,
    Refused,
    ServerBusy,
    ServerError,
    ServerHttp,
    TimedOut,
    error_of,
)
from penstock.backends.engines.served.sglang.generate import LINGER_S, SglangGenerator
from penstock.messages.arrays import floats_view, pack_tokens, tokens_view
from penstock.messages.samples import Media

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from penstock.messages.top_logprobs import TopLogprobs

TIMEOUT_S = 20.0
SHORT_S = 0.1
"""A deadline that is meant to pass."""
VOCAB_SIZE = 512
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


async def silence(_: object) -> None:
    """Never begins to answer."""
    await asyncio.Event().wait()


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self.now_s += delay_s


def call_of(rid: str = "r", **changes: Any) -> GenerateCall:  # noqa: ANN401 - fields of the call
    plain = GenerateCall(
        rid=rid, input_ids=pack_tokens([5, 6, 7, 8]), max_new_tokens=12, extra_key="v1", deadline_s=TIMEOUT_S
    )
    return msgspec.structs.replace(plain, **changes)


@asynccontextmanager
async def generator_for(url: str, **options: Any) -> AsyncGenerator[SglangGenerator]:  # noqa: ANN401 - as it takes them
    http = ServerHttp(url)
    options.setdefault("incremental", True)
    generator = SglangGenerator(http, vocab_size=VOCAB_SIZE, **options)
    try:
        yield generator
    finally:
        await generator.close()
        await http.close()


async def generate(
    answer: Answer,
    *more: Answer,
    call: GenerateCall | None = None,
    on_chunk: Callable[[Chunk], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 - of the generator
) -> tuple[Generated, ReplayServer]:
    """One request to a server that answers so; what became of it, and the server."""
    async with replay(answer, *more) as server:
        async with generator_for(server.url, **options) as generator:
            generated = await generator.generate(call or call_of(), on_chunk)
        return generated, server


def incremental_tokens(name: str) -> tuple[list[int], list[float]]:
    """Ids and log-probs of a recorded incremental stream of a request that ran to its end, read independently."""
    ids: list[int] = []
    logprobs: list[float] = []
    for event in recording(name).events[:-1]:
        decoded = msgspec.json.decode(event[6:])
        ids += decoded["output_ids"]
        logprobs += [entry[0] for entry in decoded["meta_info"]["output_token_logprobs"]]
    return ids, logprobs


def edited(name: str, index: int, **changes: Any) -> list[bytes]:  # noqa: ANN401 - JSON
    """The events of a recording with other values in the event at ``index``; those of meta_info by ``meta_…``."""
    pieces = recording(name).events
    event = msgspec.json.decode(pieces[index][6:])
    for field, value in changes.items():
        if field.startswith("meta_") and field != "meta_info":
            event["meta_info"][field.removeprefix("meta_")] = value
        else:
            event[field] = value
    pieces[index] = b"data: " + msgspec.json.encode(event) + b"\n\n"
    return pieces


# --- how a generation ends ------------------------------------------------------------------------------------

ENDINGS = {
    "incremental_length": (EndReason.LENGTH, None),
    "incremental_cached": (EndReason.LENGTH, None),
    "incremental_stop_token": (EndReason.STOP_TOKEN, None),
    "incremental_stop_string": (EndReason.STOP_STRING, None),
    "incremental_updated": (EndReason.LENGTH, None),
    "incremental_abort_running": (EndReason.ABORTED, None),
    "incremental_abort_queued": (EndReason.ABORTED, None),
    "incremental_abort_retracted": (EndReason.ABORTED, None),
    "incremental_empty_input": (EndReason.FAILED, Failure.REFUSED),
    "incremental_too_long": (EndReason.FAILED, Failure.REFUSED),
    "incremental_bad_temperature": (EndReason.FAILED, Failure.REFUSED),
    "incremental_unknown_parameter": (EndReason.FAILED, Failure.REFUSED),
    "incremental_duplicate": (EndReason.FAILED, Failure.REFUSED),
    "cumulative_length": (EndReason.LENGTH, None),
    "cumulative_abort_running": (EndReason.ABORTED, None),
    "cumulative_abort_retracted": (EndReason.ABORTED, None),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_recorded_answer_gives_its_outcome(name: str) -> None:
    generated, server = run(generate(recorded(name), incremental=name.startswith("incremental")))
    assert (generated.end, generated.failure) == ENDINGS[name]
    assert len(server.requests) == 1
    num_tokens: int = 0
    if generated.failure is None:
        num_tokens = msgspec.json.decode(recording(name).events[-2][6:])["meta_info"]["completion_tokens"]
    assert len(tokens_view(generated.tokens)) == len(floats_view(generated.logprobs)) == num_tokens
    assert sum(span.num_tokens for span in generated.versions) == num_tokens


def test_a_refusal_carries_the_words_of_the_server() -> None:
    for name, words in (
        ("incremental_too_long", "maximum context length of 2048"),
        ("incremental_unknown_parameter", "unknown field `tempreature`"),
        ("incremental_duplicate", "Duplicate request ID"),
    ):
        assert words in run(generate(recorded(name)))[0].detail


@pytest.mark.parametrize("piece_bytes", [0, 1, 7, 100_000])
@pytest.mark.parametrize("name", ["incremental_stop_string", "incremental_updated"])
def test_tokens_are_those_of_the_events_however_the_bytes_are_split(name: str, piece_bytes: int) -> None:
    generated, _ = run(generate(recorded(name, piece_bytes)))
    ids, logprobs = incremental_tokens(name)
    assert tokens_view(generated.tokens).tolist() == ids
    assert list(floats_view(generated.logprobs)) == pytest.approx(logprobs)


@pytest.mark.parametrize("name", ["incremental_updated", "cumulative_length", "cumulative_abort_running"])
def test_chunks_join_to_the_beginning_of_the_result(name: str) -> None:
    chunks: list[Chunk] = []
    answer = recorded(name)
    generated, _ = run(generate(answer, on_chunk=chunks.append, incremental=name.startswith("incremental")))
    assert len(chunks) == len(recording(name).events) - 2
    tokens = b"".join(chunk.tokens for chunk in chunks)
    assert generated.tokens.startswith(tokens)
    assert generated.logprobs.startswith(b"".join(chunk.logprobs for chunk in chunks))
    joined = 0
    for chunk in chunks:
        assert chunk.from_token == joined
        joined += len(tokens_view(chunk.tokens))


def test_version_spans_are_those_of_the_server() -> None:
    generated, _ = run(generate(recorded("incremental_updated")))
    last = msgspec.json.decode(recording("incremental_updated").events[-2][6:])
    spans = [VersionTokens(s["version"], s["end"] - s["start"]) for s in last["meta_info"]["weight_versions"]]
    assert [span.version for span in spans] == ["v1", "v2"]
    assert list(generated.versions) == spans
    assert generated.num_retractions == 1


def test_without_the_end_no_token_counts_as_newer_than_it_is() -> None:
    pieces = recording("incremental_updated").events
    labels = [msgspec.json.decode(piece[6:])["meta_info"]["weight_version"] for piece in pieces[:-1]]
    exact = run(generate(events(*pieces)))[0].versions[0].num_tokens
    first_new = labels.index("v2")
    for num_events in range(1, len(pieces) - 1):
        cut, _ = run(generate(cut_after(*pieces[:num_events])))
        kept = len(tokens_view(cut.tokens))
        claimed_old = cut.versions[0].num_tokens
        assert [span.version for span in cut.versions] == (["v1"] if num_events <= first_new + 1 else ["v1", "v2"])
        assert claimed_old >= min(kept, exact)


def test_the_cached_part_of_the_prompt_is_told() -> None:
    assert run(generate(recorded("incremental_cached")))[0].cached_tokens == 3


@pytest.mark.parametrize("mode", ["incremental", "cumulative"])
def test_the_end_of_a_retracted_request_repeats_no_token(mode: str) -> None:
    """With increments its last event has the last token again, and all log-probs."""
    name = f"{mode}_abort_retracted"
    generated, _ = run(generate(recorded(name), incremental=mode == "incremental"))
    last = msgspec.json.decode(recording(name).events[-2][6:])
    assert "prompt_tokens" not in last["meta_info"]
    entries = last["meta_info"]["output_token_logprobs"]
    assert tokens_view(generated.tokens).tolist() == [entry[1] for entry in entries]
    assert list(floats_view(generated.logprobs)) == pytest.approx([entry[0] for entry in entries])


def test_the_end_of_a_retracted_request_may_come_joined_with_tokens_before_it() -> None:
    """The server joins events that wait together: then the last one has an increment, its last token, all log-probs."""
    pieces = recording("incremental_abort_retracted").events
    assert len(pieces) >= 3
    before, last = msgspec.json.decode(pieces[-3][6:]), msgspec.json.decode(pieces[-2][6:])
    joined = edited(
        "incremental_abort_retracted",
        -2,
        output_ids=before["output_ids"] + last["output_ids"],
        meta_output_token_logprobs=before["meta_info"]["output_token_logprobs"]
        + last["meta_info"]["output_token_logprobs"],
    )
    whole, _ = run(generate(events(*pieces)))
    generated, _ = run(generate(events(*joined[:-3], *joined[-2:])))
    assert generated == whole


# --- answers that contradict themselves -----------------------------------------------------------------------

CONTRADICTIONS: dict[str, Callable[[list[Any], list[int]], dict[str, Any]]] = {
    "fewer log-probs than tokens": lambda entries, _: {"meta_output_token_logprobs": entries[:-1]},
    "more log-probs than tokens": lambda entries, _: {"meta_output_token_logprobs": [*entries, entries[0]]},
    "log-probs of other tokens": lambda entries, _: {
        "meta_output_token_logprobs": [[entry[0], (entry[1] + 1) % VOCAB_SIZE, None] for entry in entries]
    },
    "a token beyond the vocabulary": lambda entries, ids: {
        "output_ids": [*ids[:-1], VOCAB_SIZE],
        "meta_output_token_logprobs": [*entries[:-1], [-1.0, VOCAB_SIZE, None]],
    },
    "a token below zero": lambda entries, ids: {
        "output_ids": [*ids[:-1], -1],
        "meta_output_token_logprobs": [*entries[:-1], [-1.0, -1, None]],
    },
    "another count than the tokens": lambda _, ids: {"meta_completion_tokens": len(ids) + 2},
    "an end of a kind that is not known": lambda _, __: {"meta_finish_reason": {"type": "tired"}},
    "no meta_info": lambda _, __: {"meta_info": None},
    "ids that are no numbers": lambda _, __: {"output_ids": ["a"]},
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_contradiction_fails_the_request_and_keeps_what_came_before(what: str) -> None:
    original = msgspec.json.decode(recording("incremental_length").events[1][6:])
    changes = CONTRADICTIONS[what](original["meta_info"]["output_token_logprobs"], original["output_ids"])
    generated, server = run(generate(events(*edited("incremental_length", 1, **changes))))
    ids, _ = incremental_tokens("incremental_length")
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.BAD_REPLY), generated.detail
    kept = tokens_view(generated.tokens).tolist()
    assert kept == ids[: len(kept)]
    assert len(kept) >= 1
    assert server.aborted == ["r"]


def test_version_spans_that_do_not_cover_the_tokens_fail_the_request() -> None:
    pieces = edited("incremental_length", -2, meta_weight_versions=[{"version": "v1", "start": 0, "end": 3}])
    assert run(generate(events(*pieces)))[0].failure is Failure.BAD_REPLY


def test_a_logprob_that_is_no_number_ends_the_request_before_it() -> None:
    entries = msgspec.json.decode(recording("incremental_length").events[1][6:])["meta_info"]["output_token_logprobs"]
    entries[2][0] = None
    generated, _ = run(generate(events(*edited("incremental_length", 1, meta_output_token_logprobs=entries))))
    assert generated.failure is Failure.NOT_A_NUMBER
    assert tokens_view(generated.tokens).tolist() == incremental_tokens("incremental_length")[0][:3]


def test_a_sampler_that_met_a_nan_is_a_failure_without_the_token_in_its_place() -> None:
    pieces = edited("incremental_length", -2, meta_finish_reason={"type": "stop", "matched": "NaN happened"})
    generated, _ = run(generate(events(*pieces)))
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.NOT_A_NUMBER)
    assert tokens_view(generated.tokens).tolist() == incremental_tokens("incremental_length")[0][:-1]
    assert sum(span.num_tokens for span in generated.versions) == 11


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff garbage \n\n", b"data: {not json}\n\n", b"<html>busy</html>" * 50, b"data: \xff\xfe\n\n"]
)
def test_garbage_in_a_stream_fails_the_request_and_keeps_what_came_before(garbage: bytes) -> None:
    pieces = recording("incremental_length").events
    generated, _ = run(generate(events(*pieces[:2], garbage, DONE)))
    assert generated.failure is Failure.BAD_REPLY
    assert tokens_view(generated.tokens).tolist() == incremental_tokens("incremental_length")[0][:5]


def test_garbage_instead_of_http_fails_the_request() -> None:
    generated, server = run(generate(raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")))
    assert generated.failure in {Failure.BAD_REPLY, Failure.CUT_OFF}
    assert len(server.requests) == 1


# --- connections that break, deadlines that pass --------------------------------------------------------------


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_a_cut_stream_keeps_its_tokens_and_is_not_sent_again(num_events: int) -> None:
    pieces = recording("incremental_length").events[:num_events]
    generated, server = run(generate(cut_after(*pieces), recorded("incremental_length")))
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.CUT_OFF)
    assert len(tokens_view(generated.tokens)) == (0, 1, 5, 9)[num_events]
    assert sum(span.num_tokens for span in generated.versions) == (0, 1, 5, 9)[num_events]
    assert len(server.requests) == 1
    assert server.aborted == ["r"]


def test_a_stream_that_ends_in_the_middle_of_an_event_is_cut() -> None:
    pieces = recording("incremental_length").events
    generated, _ = run(generate(events(pieces[0], pieces[1][:40])))
    assert generated.failure is Failure.CUT_OFF
    assert len(tokens_view(generated.tokens)) == 1


def test_a_stream_that_says_done_without_an_end_is_cut() -> None:
    generated, _ = run(generate(events(*recording("incremental_length").events[:2], DONE)))
    assert generated.failure is Failure.CUT_OFF
    assert len(tokens_view(generated.tokens)) == 5


def test_a_cut_after_the_last_event_does_no_harm() -> None:
    generated, server = run(generate(cut_after(*recording("incremental_length").events[:-1])))
    assert (generated.end, generated.failure) == (EndReason.LENGTH, None)
    assert server.aborted == []


def test_a_deadline_aborts_at_the_server_and_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.engines.served.base.generator.ABORT_GRACE_S", SHORT_S)
    pieces = recording("incremental_length").events
    generated, server = run(generate(stalled(*pieces[:2]), call=call_of(deadline_s=SHORT_S)))
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.TIMED_OUT)
    assert len(tokens_view(generated.tokens)) == 5
    assert server.aborted == ["r"]
    assert len(server.requests) == 1


def test_the_tokens_that_an_abort_brings_belong_to_the_request_that_was_late() -> None:
    pieces = recording("incremental_abort_running").events
    answer = stalled(*pieces[:-2], after_abort=pieces[-2:])
    generated, _ = run(generate(answer, call=call_of(deadline_s=SHORT_S)))
    whole, _ = run(generate(recorded("incremental_abort_running")))
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.TIMED_OUT)
    assert (generated.tokens, generated.versions) == (whole.tokens, whole.versions)
    assert whole.end is EndReason.ABORTED


def test_a_server_that_never_begins_to_answer_is_given_up_at_the_deadline() -> None:
    generated, server = run(generate(silence, call=call_of(deadline_s=SHORT_S)))
    assert (generated.failure, generated.tokens) == (Failure.TIMED_OUT, b"")
    assert server.aborted == ["r"]


def test_a_slow_drip_does_not_put_the_deadline_off() -> None:
    async def drip(exchange: Exchange) -> None:
        for piece in recording("incremental_length").events:
            for i in range(0, len(piece), 8):
                await exchange.send(piece[i : i + 8])
                await asyncio.sleep(0.01)

    generated, server = run(generate(drip, call=call_of(deadline_s=5 * SHORT_S)))
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.TIMED_OUT)
    assert server.aborted == ["r"]


def test_cancelling_aborts_at_the_server() -> None:
    async def work() -> ReplayServer:
        async with replay(stalled(recording("incremental_length").events[0])) as server:
            async with generator_for(server.url) as generator:
                arrived = asyncio.Event()
                task = asyncio.create_task(generator.generate(call_of(), lambda _: arrived.set()))
                await arrived.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            return server

    assert run(work()).aborted == ["r"]


def test_an_error_of_the_callback_is_the_callers_and_aborts_at_the_server() -> None:
    async def work() -> ReplayServer:
        def refuse(_: Chunk) -> None:
            raise ZeroDivisionError

        async with replay(recorded("incremental_length")) as server:
            async with generator_for(server.url) as generator:
                with pytest.raises(ZeroDivisionError):
                    await generator.generate(call_of(), refuse)
            return server

    assert run(work()).aborted == ["r"]


# --- what is tried again --------------------------------------------------------------------------------------


def retried(*answers: Answer, **changes: Any) -> tuple[Generated, ReplayServer, FakeTime]:  # noqa: ANN401 - of the call
    time = FakeTime()
    generated, server = run(generate(*answers, clock=time.clock, sleep=time.sleep, call=call_of(**changes)))
    return generated, server, time


@pytest.mark.parametrize("code", [503, 504])
def test_a_busy_server_is_tried_again_under_the_same_id_after_an_abort(code: int) -> None:
    generated, server, time = retried(status(code), status(code), recorded("incremental_length"))
    assert generated.end is EndReason.LENGTH
    assert [request.body["rid"] for request in server.requests] == ["r"] * 3
    assert [request.aborts_before for request in server.requests] == [0, 1, 2]
    assert server.aborted == ["r", "r"]
    assert len(time.slept_s) == 2
    assert time.slept_s[0] <= 0.1 < time.slept_s[1] <= 0.2


def test_a_full_queue_is_tried_again_when_the_server_has_forgotten_the_id() -> None:
    generated, server, time = retried(recorded("cumulative_full_queue"), recorded("incremental_length"))
    assert generated.end is EndReason.LENGTH
    assert len(server.requests) == 2
    assert time.slept_s[0] > LINGER_S > 2.0


def test_a_stream_that_says_busy_after_tokens_is_not_begun_anew() -> None:
    busy = b'data: {"error": {"message": "overloaded", "code": 503}}\n\n'
    pieces = recording("incremental_length").events[:2]
    generated, server, time = retried(events(*pieces, busy, DONE), recorded("incremental_length"))
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.BUSY)
    assert len(tokens_view(generated.tokens)) == 5
    assert (len(server.requests), time.slept_s) == (1, [])


def test_the_first_attempt_may_still_be_there_when_the_second_comes() -> None:
    generated, server, _ = retried(status(504), recorded("incremental_duplicate"), recorded("incremental_length"))
    assert generated.end is EndReason.LENGTH
    assert len(server.requests) == 3


@pytest.mark.parametrize("code", [400, 401, 404, 409, 422, 429, 500, 501, 502])
def test_any_other_refusal_is_final(code: int) -> None:
    generated, server, time = retried(status(code, b"no"), recorded("incremental_length"))
    assert generated.failure is (Failure.REFUSED if code < 500 else Failure.SERVER_ERROR)
    assert str(code) in generated.detail
    assert len(server.requests) == 1
    assert time.slept_s == []


def test_trying_again_ends_before_the_deadline() -> None:
    generated, server, time = retried(status(503), deadline_s=7.0)
    assert generated.failure is Failure.BUSY
    assert len(server.requests) == len(time.slept_s) + 1 > 5
    assert time.now_s < 1007.0


def test_a_server_that_is_not_there_is_tried_again_and_then_given_up() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        time = FakeTime()

        async def work() -> Generated:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            policy = RetryPolicy(give_up_after_s=3.0)
            async with generator_for(url, clock=time.clock, sleep=time.sleep, retry=policy) as generator:
                return await generator.generate(call_of(deadline_s=100.0), lambda _: None)

        generated = run(work())
    assert generated.failure is Failure.NO_CONNECTION
    assert len(time.slept_s) > 3
    assert time.now_s < 1003.0


def test_a_server_gone_in_the_middle_of_a_queue_is_not_mistaken_for_an_abort() -> None:
    """A pause of mode abort and a scheduler that gives up both end as ``abort``; the status tells them apart."""
    gave_up = {"type": "abort", "message": "out of memory", "status_code": 500, "err_type": "InternalServerError"}
    generated, _ = run(generate(events(*edited("incremental_length", -2, meta_finish_reason=gave_up))))
    assert (generated.end, generated.failure) == (EndReason.FAILED, Failure.SERVER_ERROR)
    assert len(tokens_view(generated.tokens)) == 12


# --- what is sent ---------------------------------------------------------------------------------------------


def test_every_sampling_parameter_is_sent_so_that_no_default_of_the_server_counts() -> None:
    call = call_of(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, stop=("x",), stop_token_ids=(3,), ignore_eos=True)
    _, server = run(generate(recorded("incremental_length"), call=call, stream_interval=16))
    body = server.requests[0].body
    assert body["sampling_params"] == {
        "max_new_tokens": 12,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "stop": ["x"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "stream_interval": 16,
        "sampling_seed": None,
        "n": 1,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    assert body["input_ids"] == [5, 6, 7, 8]
    assert body["extra_key"] == "v1"
    assert body["return_logprob"] is body["stream"] is True
    assert body["logprob_start_len"] == -1
    assert "X-SMG-Routing-Key" not in server.requests[0].headers
    assert not {"image_data", "return_routed_experts", "lora_path"} & body.keys()


def test_top_k_of_0_takes_all() -> None:
    _, server = run(generate(recorded("incremental_length")))
    assert msgspec.convert(server.requests[0].body["sampling_params"], dict[str, Any])["top_k"] == -1


def test_routing_key_priority_seed_and_further_fields_are_passed_on() -> None:
    call = call_of(routing_key="group-7", priority=3, seed=11, media=(Media("image", "data:,aGk="),), with_experts=True)
    _, server = run(generate(recorded("incremental_length"), call=call, seeded=True, priorities=True))
    request = server.requests[0]
    assert request.headers["X-SMG-Routing-Key"] == "group-7"
    assert (request.body["priority"], request.body["image_data"]) == (3, ["data:,aGk="])
    assert request.body["return_routed_experts"] is True
    assert msgspec.convert(request.body["sampling_params"], dict[str, Any])["sampling_seed"] == 11


@pytest.mark.parametrize(("more", "failure"), [(0, None), (1, Failure.BAD_REPLY)])
def test_a_server_has_to_read_as_many_tokens_of_an_image_as_the_prompt_holds(
    more: int, failure: Failure | None
) -> None:
    num_read = msgspec.json.decode(recording("incremental_length").events[0][6:])["meta_info"]["prompt_tokens"]
    num_squares = num_read - 2 + more
    call = call_of(
        input_ids=pack_tokens([5, *[9] * num_squares, 6]), media=(Media("image", "/a.png", "d", 1, num_squares),)
    )
    generated, server = run(generate(recorded("incremental_length"), call=call))
    assert server.requests[0].body["input_ids"] == [5, 9, 6]
    assert server.requests[0].body["image_data"] == ["file:///a.png"]
    assert generated.failure == failure
    if failure is not None:
        assert (
            f"the server counts {num_read} tokens of a prompt with images that has {num_read + 1}" in generated.detail
        )


@pytest.mark.parametrize("changes", [{"seed": 1}, {"priority": 1}], ids=["seed", "priority"])
def test_what_the_server_would_ignore_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="request r"):
        run(generate(recorded("incremental_length"), call=call_of(**changes)))


@pytest.mark.parametrize("ids", [[5, VOCAB_SIZE], [-1], [], [2**31 - 1]])
def test_an_id_outside_the_embedding_is_not_sent(ids: list[int]) -> None:
    async def work() -> ReplayServer:
        async with replay(recorded("incremental_length")) as server:
            async with generator_for(server.url) as generator:
                with pytest.raises(BadTokenError):
                    await generator.generate(call_of(input_ids=pack_tokens(ids)), lambda _: None)
                with pytest.raises(BadTokenError):
                    await generator.score(pack_tokens(ids), rid="s", extra_key="v1", timeout_s=TIMEOUT_S)
            return server

    assert run(work()).requests == []


def test_an_abort_behind_a_router_goes_to_every_server() -> None:
    async def work() -> list[object]:
        async with replay(status(404)) as router, replay() as one, replay() as other:
            servers = [ServerHttp(one.url), ServerHttp(other.url)]
            async with generator_for(router.url, abort_at=servers) as generator:
                await generator.abort("r")
            for http in servers:
                await http.close()
            return [router.aborted, one.aborted, other.aborted]

    assert run(work()) == [[], ["r"], ["r"]]


# --- scores ---------------------------------------------------------------------------------------------------


async def score(answer: Answer, ids: list[int]) -> tuple[list[float], dict[str, Any]]:
    async with replay(answer) as server, generator_for(server.url) as generator:
        scores = await generator.score(pack_tokens(ids), rid="s", extra_key="v9", timeout_s=TIMEOUT_S)
        assert scores.top is None
        return list(floats_view(scores.logprobs)), server.requests[0].body


def test_a_score_has_a_logprob_for_every_token_but_the_first() -> None:
    scores, body = run(score(recorded("incremental_scored"), [5, 6, 511, 7]))
    entries = msgspec.json.decode(recording("incremental_scored").body)["meta_info"]["input_token_logprobs"]
    assert entries[2][1] == 0  # the server says 0 for the last id of the vocabulary
    assert scores == pytest.approx([entry[0] for entry in entries[1:]])
    assert (body["extra_key"], body["logprob_start_len"], body["stream"]) == ("v9", 0, False)
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["sampling_params"]["temperature"] == 1.0


@pytest.mark.parametrize("ids", [[5, 6, 511], [5, 6, 511, 8], [5, 6, 510, 7], [5, 6, 511, 7, 7]])
def test_a_score_of_other_tokens_is_refused(ids: list[int]) -> None:
    with pytest.raises(BadReply, match="other ones"):
        run(score(recorded("incremental_scored"), ids))


@pytest.mark.parametrize(("code", "error"), [(400, Refused), (500, ServerError), (503, ServerBusy)])
def test_a_score_that_fails_raises(code: int, error: type[CallError]) -> None:
    with pytest.raises(error):
        run(score(status(code), [5, 6]))


def test_a_score_that_is_not_answered_in_time_is_aborted() -> None:
    async def work() -> ReplayServer:
        async with replay(silence) as server:
            async with generator_for(server.url) as generator:
                with pytest.raises(TimedOut):
                    await generator.score(pack_tokens([5, 6]), rid="s", extra_key="v1", timeout_s=SHORT_S)
            return server

    assert run(work()).aborted == ["s"]


def test_a_score_whose_logprob_is_no_number_is_refused() -> None:
    answer = msgspec.json.decode(recording("incremental_scored").body)
    answer["meta_info"]["input_token_logprobs"][2][0] = None
    with pytest.raises(BadReply, match="no numbers"):
        run(score(status(200, msgspec.json.encode(answer)), [5, 6, 511, 7]))


Rows = list[list[tuple[float | None, int, None]] | None]
LIKELIEST: Rows = [
    None,
    [(-0.1, 3, None), (-2.5, 511, None)],
    [(-0.2, 7, None), (-3.0, 5, None)],
    [(-0.3, 0, None), (-1.0, 1, None)],
]


async def likeliest(rows: Rows) -> tuple[TopLogprobs | None, dict[str, Any]]:
    answer = msgspec.json.decode(recording("incremental_scored").body)
    answer["meta_info"]["input_top_logprobs"] = rows
    async with replay(status(200, msgspec.json.encode(answer))) as server, generator_for(server.url) as generator:
        found = await generator.score(
            pack_tokens([5, 6, 511, 7]), rid="s", extra_key="v9", timeout_s=TIMEOUT_S, num_top=2
        )
        return found.top, server.requests[0].body


def test_a_score_names_the_likeliest_tokens_in_the_place_of_each() -> None:
    top, body = run(likeliest(LIKELIEST))
    assert top is not None
    assert (body["top_logprobs_num"], top.per_token, top.num_tokens) == (2, 2, 3)
    assert tokens_view(top.ids).tolist() == [3, 511, 7, 5, 0, 1]
    assert floats_view(top.logprobs).tolist() == pytest.approx([-0.1, -2.5, -0.2, -3.0, -0.3, -1.0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "likeliest tokens of 3 places"),
        ([(-0.1, 3, None)], "likeliest tokens of 3 places"),
        ([(-0.1, 3, None), (None, 4, None)], "likeliest tokens of 3 places"),
        ([(-0.1, 3, None), (-1.0, 512, None)], "token id 512 is outside"),
    ],
)
def test_an_answer_without_the_likeliest_tokens_is_refused(row: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(BadReply, match=message):
        run(likeliest([*LIKELIEST[:2], row, LIKELIEST[3]]))
    with pytest.raises(BadReply, match="likeliest tokens of 3 places"):
        run(likeliest(LIKELIEST[:-1]))


async def probe(answer: Answer, ids: list[int], adapter: str = "") -> tuple[list[float], dict[str, Any]]:
    async with replay(answer) as server, generator_for(server.url) as generator:
        found = await generator.probe(pack_tokens(ids), rid="p", extra_key="v9", timeout_s=TIMEOUT_S, adapter=adapter)
        return list(floats_view(found)), server.requests[0].body


def test_a_probe_has_the_logprob_of_every_token_at_every_place() -> None:
    found, body = run(probe(recorded("incremental_probed"), [5, 6, 511]))
    rows = msgspec.json.decode(recording("incremental_probed").body)["meta_info"]["input_token_ids_logprobs"]
    assert rows[0] is None
    assert found == pytest.approx([entry[0] for row in rows[1:] for entry in row])
    assert len(found) == 2 * 3
    assert (body["token_ids_logprob"], body["logprob_start_len"], body["stream"]) == ([5, 6, 511], 0, False)
    assert "lora_path" not in body


def test_requests_name_the_adapter_that_they_are_computed_with() -> None:
    _, body = run(probe(recorded("incremental_probed"), [5, 6, 511], "v9.1.9"))
    assert body["lora_path"] == "v9.1.9"
    _, server = run(generate(recorded("incremental_length"), call=call_of(adapter="v9.1.9")))
    assert server.requests[0].body["lora_path"] == "v9.1.9"
    assert body["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize("ids", [[5, 6], [5, 6, 510], [6, 5, 511], [5, 6, 511, 7]])
def test_a_probe_of_other_tokens_is_refused(ids: list[int]) -> None:
    with pytest.raises(BadReply, match="is not that of"):
        run(probe(recorded("incremental_probed"), ids))


@pytest.mark.parametrize(("place", "value"), [(1, None), (2, [])])
def test_a_probe_without_a_number_at_a_place_is_refused(place: int, value: object) -> None:
    answer = msgspec.json.decode(recording("incremental_probed").body)
    rows = answer["meta_info"]["input_token_ids_logprobs"]
    if value is None:
        rows[place][0][0] = None
    else:
        rows[place] = value
    with pytest.raises(BadReply, match="is not that of"):
        run(probe(status(200, msgspec.json.encode(answer)), [5, 6, 511]))


# --- the connection -------------------------------------------------------------------------------------------


async def http_call(answer: Answer, timeout_s: float = TIMEOUT_S) -> bytes:
    async with replay(answer) as server:
        http = ServerHttp(server.url)
        try:
            return await http.call("POST", "/generate", b"{}", timeout_s=timeout_s)
        finally:
            await http.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [(status(503), ServerBusy), (status(403), Refused), (status(500), ServerError), (cut_after(), CutOff)],
)
def test_a_failed_call_says_of_what_kind(answer: Answer, error: type[CallError]) -> None:
    with pytest.raises(error):
        run(http_call(answer))


def test_a_call_has_a_deadline() -> None:
    with pytest.raises(TimedOut, match=r"no answer within 0\.1 s"):
        run(http_call(silence, timeout_s=SHORT_S))


def test_nothing_listening_is_a_failed_connection() -> None:
    async def work(port: int) -> None:
        http = ServerHttp(f"http://127.0.0.1:{port}")
        with pytest.raises(ConnectFailed):
            await http.call("GET", "/ready", timeout_s=TIMEOUT_S)
        await http.close()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        run(work(taken.getsockname()[1]))


def test_a_control_call_is_answered_beside_hundreds_of_open_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two hundred aborts at once may take a busy machine longer than one is waited for.
    monkeypatch.setattr("penstock.backends.engines.served.base.generator.ABORT_TIMEOUT_S", 60.0)

    async def work() -> int:
        async with replay(stalled(recording("incremental_length").events[0])) as server:
            async with generator_for(server.url) as generator:
                arrived: list[Chunk] = []
                all_arrived = asyncio.Event()

                def arrive(chunk: Chunk) -> None:
                    arrived.append(chunk)
                    if len(arrived) == 200:
                        all_arrived.set()

                calls = [generator.generate(call_of(f"r{i}"), arrive) for i in range(200)]
                tasks = [asyncio.create_task(call) for call in calls]
                await all_arrived.wait()
                await generator.abort("r0", timeout_s=TIMEOUT_S)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return len(server.aborted)

    assert run(work()) > 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "Duplicate request ID detected: x"}}', "Duplicate request ID detected: x"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"object": "error", "message": "The request queue is full.", "code": 503}', "The request queue is full."),
        (b'{"success": false, "message": "no session is open"}', "no session is open"),
        (b'{"detail": "Not Found"}', "404: '\"Not Found\"'"),
        (b"Flush cache failed.\n", "Flush cache failed."),
        (b"", "without a word"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_an_error_repeats_the_words_of_the_server(body: bytes, words: str) -> None:
    assert words in str(error_of(404, body, "POST /x"))


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.engines.served.base.http.MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    assert splitter.feed(b"data: " + b"x" * 90) == []
    assert splitter.error is None
    assert splitter.feed(b"xxxxx") == []
    assert "101 bytes" in str(splitter.error)
