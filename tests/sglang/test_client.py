"""The client against a real server: what the recordings show still holds, and what no recording can show."""

# transformers and torch.Tensor.tolist are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import itertools
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import pytest
import torch
from tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from penstock.backends.engines.served.base.calls import Chunk, EndReason, Failure, GenerateCall, Generated
from penstock.backends.engines.served.base.health import Check
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.sglang.control import NoOpenSession, PauseMode, SessionAlreadyOpen, SglangControl
from penstock.backends.engines.served.sglang.generate import SglangGenerator
from penstock.messages.arrays import floats_view, pack_tokens, tokens_view

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from running_server import RunningServer

    from penstock.backends.engines.served.sglang.server_facts import Loads

pytestmark = pytest.mark.sglang

TIMEOUT_S = 120.0
LONG = 1500
"""Tokens that take seconds: something can happen meanwhile."""
T = TypeVar("T")
rids = (f"test-{i}" for i in itertools.count())


class Client(NamedTuple):
    http: ServerHttp
    control: SglangControl
    generator: SglangGenerator


@asynccontextmanager
async def client_of(server: RunningServer, stream_interval: int) -> AsyncGenerator[Client]:
    http = ServerHttp(server.address, admin_api_key=server.admin_api_key)
    control = SglangControl(http)
    info = await control.server_info()
    generator = SglangGenerator(
        http, vocab_size=VOCAB_SIZE, incremental=info.incremental_streaming, stream_interval=stream_interval
    )
    try:
        yield Client(http, control, generator)
    finally:
        await control.abort_all()
        await control.continue_()
        await generator.close()
        await http.close()


def with_client(server: RunningServer, work: Callable[[Client], Awaitable[T]], stream_interval: int = 16) -> T:
    async def run() -> T:
        async with asyncio.timeout(TIMEOUT_S), client_of(server, stream_interval) as client:
            return await work(client)

    return asyncio.run(run())


def call_of(prompt: list[int], num_tokens: int, **changes: Any) -> GenerateCall:  # noqa: ANN401 - fields of the call
    plain = GenerateCall(
        rid=next(rids),
        input_ids=pack_tokens(prompt),
        max_new_tokens=num_tokens,
        temperature=0.0,
        ignore_eos=True,
        extra_key="test",
        deadline_s=TIMEOUT_S,
    )
    return msgspec.structs.replace(plain, **changes)


async def until(client: Client, is_so: Callable[[Loads], bool]) -> None:
    while not is_so(await client.control.loads()):  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.05)


class Running:
    """A request in the background."""

    def __init__(self, client: Client, call: GenerateCall) -> None:
        self.chunks: list[Chunk] = []
        self.has_begun = asyncio.Event()
        self.call = call
        self.ending = asyncio.create_task(client.generator.generate(call, self._take))

    def _take(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.has_begun.set()


async def plain_answer(client: Client, call: GenerateCall) -> tuple[list[int], list[float]]:
    """Without streaming, asked for and read without the client's own code for it."""
    body = {
        "input_ids": tokens_view(call.input_ids).tolist(),
        "return_logprob": True,
        "extra_key": call.extra_key,
        "sampling_params": {"max_new_tokens": call.max_new_tokens, "temperature": 0, "ignore_eos": True},
    }
    data = await client.http.call("POST", "/generate", msgspec.json.encode(body), timeout_s=TIMEOUT_S)
    answer = msgspec.json.decode(data)
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("stream_interval", [1, 16, 1000])
def test_a_streamed_answer_is_the_plain_answer(server: RunningServer, stream_interval: int) -> None:
    async def work(client: Client) -> tuple[Generated, list[Chunk], tuple[list[int], list[float]]]:
        call = call_of([5, 6, 7, VOCAB_SIZE - 1], 100)
        running = Running(client, call)
        return await running.ending, running.chunks, await plain_answer(client, call)

    generated, chunks, (ids, logprobs) = with_client(server, work, stream_interval)
    assert generated.end is EndReason.LENGTH
    assert tokens_view(generated.tokens).tolist() == ids
    assert list(floats_view(generated.logprobs)) == pytest.approx(logprobs, abs=2e-5)
    assert sum(span.num_tokens for span in generated.versions) == 100
    joined = b"".join(chunk.tokens for chunk in chunks)
    assert generated.tokens.startswith(joined)
    assert len(joined) > 0


def test_an_end_token_and_a_stop_string_are_told_apart_and_kept(server: RunningServer) -> None:
    async def work(client: Client) -> tuple[Generated, Generated, Generated]:
        plain = await Running(client, call_of([5, 6, 7, 8], 60)).ending
        stop_at = tokens_view(plain.tokens)[40]
        by_token = call_of([5, 6, 7, 8], 60, ignore_eos=False, stop_token_ids=(stop_at,))
        by_string = call_of([5, 6, 7, 8], 60, stop=("e",))
        return plain, await Running(client, by_token).ending, await Running(client, by_string).ending

    plain, by_token, by_string = with_client(server, work)
    ids = tokens_view(plain.tokens).tolist()
    assert by_token.end is EndReason.STOP_TOKEN
    assert tokens_view(by_token.tokens).tolist() == ids[: ids.index(ids[40]) + 1]
    assert by_string.end is EndReason.STOP_STRING
    assert plain.tokens.startswith(by_string.tokens)
    assert 0 < len(by_string.tokens) < len(plain.tokens)


def test_an_abort_returns_what_there_is(server: RunningServer) -> None:
    async def work(client: Client) -> tuple[Generated, Running]:
        running = Running(client, call_of([5, 6, 7, 8], LONG))
        await running.has_begun.wait()
        await client.generator.abort(running.call.rid)
        return await running.ending, running

    generated, running = with_client(server, work)
    assert generated.end is EndReason.ABORTED
    assert generated.tokens.startswith(b"".join(chunk.tokens for chunk in running.chunks))
    assert 0 < len(tokens_view(generated.tokens)) < LONG


def test_a_queued_request_is_aborted_without_tokens_and_the_others_go_on(server: RunningServer) -> None:
    async def work(client: Client) -> tuple[Generated, list[bool]]:
        num_slots = (await client.control.server_info()).max_running_requests
        ahead = [Running(client, call_of([5, i, 7], LONG // 2)) for i in range(num_slots)]
        for running in ahead:
            await running.has_begun.wait()
        queued = Running(client, call_of([9, 9, 9], 10))
        await until(client, lambda loads: loads.num_waiting > 0)
        await client.generator.abort(queued.call.rid)
        generated = await queued.ending
        are_done = [running.ending.done() for running in ahead]
        await client.control.abort_all()
        await asyncio.gather(*(running.ending for running in ahead))
        return generated, are_done

    generated, are_done = with_client(server, work)
    assert (generated.end, generated.tokens, generated.versions) == (EndReason.ABORTED, b"", ())
    assert not all(are_done)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_request_goes_on_after_a_pause_as_if_there_had_been_none(server: RunningServer, mode: PauseMode) -> None:
    async def work(client: Client) -> tuple[Generated, int, bool, tuple[list[int], list[float]]]:
        call = call_of([11, 12, 13, 14], 300)
        running = Running(client, call)
        await running.has_begun.wait()
        await client.control.pause(mode)
        is_ready = not await client.control.ask(Check.FRONT, TIMEOUT_S)
        num_before = len(running.chunks)
        assert not running.ending.done()
        await client.control.continue_()
        return await running.ending, num_before, is_ready, await plain_answer(client, call)

    generated, num_before, is_ready, (ids, logprobs) = with_client(server, work)
    assert not is_ready
    assert num_before >= 1
    assert tokens_view(generated.tokens).tolist() == ids
    assert list(floats_view(generated.logprobs)) == pytest.approx(logprobs, abs=2e-5)
    assert generated.num_retractions == (1 if mode is PauseMode.RETRACT else 0)


def test_a_retracted_request_is_aborted_with_tokens_that_are_right(server: RunningServer) -> None:
    async def work(client: Client) -> tuple[Generated, list[int]]:
        call = call_of([11, 12, 13, 15], 1000)
        running = Running(client, call)
        await running.has_begun.wait()
        await client.control.pause(PauseMode.RETRACT)
        await client.generator.abort(call.rid)
        generated = await running.ending
        await client.control.continue_()
        num_tokens = len(tokens_view(generated.tokens))
        ids, _ = await plain_answer(client, msgspec.structs.replace(call, max_new_tokens=num_tokens))
        return generated, ids

    generated, ids = with_client(server, work)
    assert generated.end is EndReason.ABORTED
    assert tokens_view(generated.tokens).tolist() == ids


def test_requests_of_different_keys_share_no_cache(server: RunningServer) -> None:
    async def work(client: Client) -> list[int]:
        prompt = [(7 * i) % VOCAB_SIZE for i in range(100)]
        one, two = uuid.uuid4().hex, uuid.uuid4().hex
        keys = (one, one, two)
        return [(await Running(client, call_of(prompt, 2, extra_key=key)).ending).cached_tokens or 0 for key in keys]

    first, again, other = with_client(server, work)
    assert (first, other) == (0, 0)
    assert again >= 64


def test_a_score_equals_transformers(server: RunningServer) -> None:
    ids = [5, VOCAB_SIZE - 1, 7, 400, 0, VOCAB_SIZE - 1, 3]
    scores = with_client(
        server,
        lambda client: client.generator.score(pack_tokens(ids), rid=next(rids), extra_key="s", timeout_s=TIMEOUT_S),
    )
    model = AutoModelForCausalLM.from_pretrained(server.model_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert list(floats_view(scores.logprobs)) == pytest.approx([float(value) for value in expected], abs=2e-5)


def test_a_deadline_and_a_cancellation_leave_nothing_running_on_the_server(server: RunningServer) -> None:
    async def work(client: Client) -> Generated:
        late = await Running(client, call_of([5, 6, 7, 8], LONG, deadline_s=0.5)).ending
        running = Running(client, call_of([5, 6, 7, 8], LONG))
        await running.has_begun.wait()
        running.ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running.ending
        await client.generator.close()
        await until(client, lambda loads: loads.num_running == 0)
        return late

    late = with_client(server, work)
    assert (late.end, late.failure) == (EndReason.FAILED, Failure.TIMED_OUT)
    assert 0 < len(tokens_view(late.tokens)) < LONG


def test_a_request_id_in_use_is_refused(server: RunningServer) -> None:
    async def work(client: Client) -> Generated:
        running = Running(client, call_of([5, 6, 7, 8], LONG))
        await running.has_begun.wait()
        twice = await Running(client, msgspec.structs.replace(running.call, max_new_tokens=1)).ending
        await client.generator.abort(running.call.rid)
        await running.ending
        return twice

    twice = with_client(server, work)
    assert twice.failure is Failure.REFUSED
    assert "Duplicate request ID" in twice.detail


def test_a_session_that_was_left_open_can_be_ended_by_another_client(server: RunningServer) -> None:
    async def begin(client: Client) -> None:
        await client.control.begin_update()
        with pytest.raises(SessionAlreadyOpen):
            await client.control.begin_update()

    async def end(client: Client) -> None:
        await client.control.end_update()
        with pytest.raises(NoOpenSession):
            await client.control.end_update()

    with_client(server, begin)
    with_client(server, end)


def test_the_checksum_names_every_parameter_and_is_answered_while_paused(server: RunningServer) -> None:
    async def work(client: Client) -> tuple[Any, Any]:
        before = await client.control.weights_checksum()
        await client.control.pause(PauseMode.RETRACT)
        return before, await client.control.weights_checksum()

    before, paused = with_client(server, work)
    assert before == paused
    assert "model.embed_tokens.weight" in before.ranks[0].checksums
    assert before.ranks[0].tp_rank == 0
    assert before.overall
