"""What a server says of the tokens that it drew from, as a sample gets it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_bench import manifest

from penstock.backends.engines.options import SamplingOptions
from penstock.backends.engines.served.base.calls import Chunk, GenerateCall
from penstock.backends.engines.served.base.http import BadReply, ServerHttp
from penstock.backends.engines.served.base.requests import OpenRequest, RequestRules
from penstock.backends.engines.served.sglang.assembler import SglangAssembler
from penstock.backends.engines.served.sglang.generate import SglangGenerator
from penstock.backends.engines.torch.sampling_parameters import SamplingParameters
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens
from penstock.messages.commands import Generate
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.samples import Completed, Part, Prompt, Purpose, SampleKey, VersionSpan
from penstock.messages.turn_sampling import TurnSampling

VOCAB_SIZE = 32
SETS = [[8, 3], [9], [1, 2, 4]]


def kept_tokens(sets: list[list[int]]) -> KeptTokens:
    counts = b"".join(len(own).to_bytes(2, "little") for own in sets)
    return KeptTokens(counts, pack_tokens(token for own in sets for token in own))


def opened(replay_kept: int | None = 16, prefix: Part | None = None, asked: TurnSampling | None = None) -> OpenRequest:
    sampling = SamplingOptions(max_response_tokens=8, top_p=0.9, replay_kept=replay_kept)
    rules = RequestRules(
        tag="t",
        sampling=SamplingParameters(sampling=sampling, stop_token_ids=frozenset({1}), stop_strings=None),
        max_context=64,
        timeout_s=10.0,
    )
    command = Generate(
        key=SampleKey(0, 0), attempt=0, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([5, 6])), seed=1,
        deadline_version=9, prefix=prefix, purpose=Purpose.TRAIN, sampling=asked,
    )  # fmt: skip
    return OpenRequest(command, rules)


def event(tokens: list[int], sets: list[list[int]] | None, *, is_last: bool = True, **more: object) -> bytes:
    meta: dict[str, Any] = {
        "prompt_tokens": 2,
        "weight_version": "v0",
        "output_token_logprobs": [[-5.0, token, None] for token in tokens],
        **more,
    }
    if sets is not None:
        meta["output_token_sampling_mask"] = sets
        meta["output_token_sampling_logprobs"] = [-0.25 * len(own) for own in sets]
    if is_last:
        meta["finish_reason"] = {"type": "stop", "matched": 1}
    return msgspec.json.encode({"output_ids": tokens, "meta_info": meta})


def assembler() -> SglangAssembler:
    return SglangAssembler(incremental=True, vocab_size=VOCAB_SIZE, with_kept=True)


def test_a_request_asks_for_it_where_it_is_recorded_and_bounds_it() -> None:
    generator = SglangGenerator(ServerHttp("http://127.0.0.1:1"), vocab_size=VOCAB_SIZE, incremental=True)

    def body(call: GenerateCall) -> tuple[object, object]:
        sent = msgspec.json.decode(generator._encoded(call), type=dict[str, Any])  # pyright: ignore[reportPrivateUsage]
        return sent.get("return_sampling_mask"), sent["sampling_params"]["top_k"]

    call = opened().call(manifest(0))
    assert body(call) == (True, 16)
    assert [body(msgspec.structs.replace(call, top_k=top_k)) for top_k in (4, 16, 99)] == [
        (True, 4), (True, 16), (True, 16),
    ]  # fmt: skip
    assert body(opened(None).call(manifest(0))) == (None, -1)
    for asked in (TurnSampling(temperature=0.0), TurnSampling(regex="[a-z]")):
        assert body(opened(asked=asked).call(manifest(0))) == (None, -1)


def test_the_sample_has_what_each_token_was_drawn_from_and_log_probs_over_it() -> None:
    prefix = Part(
        tokens=pack_tokens([7]), logprobs=pack_floats([-1.5]), spans=(VersionSpan(0, 1),), kept=kept_tokens([[7, 9]])
    )
    request, reader = opened(prefix=prefix), assembler()
    request.call(manifest(0))
    chunk = reader.take(event([8, 9], SETS[:2], is_last=False))
    assert isinstance(chunk, Chunk)
    advanced = request.advance(chunk)
    assert advanced is not None
    assert advanced.chunk.kept == kept_tokens(SETS[:2])
    assert reader.take(event([1], SETS[2:])) is None
    assert isinstance(request.take(reader.generated()), Completed)
    assert request.part.kept == kept_tokens([[7, 9], *SETS])
    assert list(floats_view(request.part.logprobs)) == [-1.5, -0.5, -0.25, -0.75]


def test_a_request_that_is_aborted_in_the_queue_keeps_what_it_had() -> None:
    """Its last event has the log-probs of all tokens, and says nothing of what they were drawn from."""
    reader = assembler()
    reader.take(event([8, 9], SETS[:2], is_last=False))
    meta: dict[str, Any] = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "completion_tokens": 2,
        "weight_version": "v0", "output_token_logprobs": [[-5.0, 8, None], [-5.0, 9, None]],
    }  # fmt: skip
    reader.take(msgspec.json.encode({"output_ids": [9], "meta_info": meta}))
    generated = reader.generated()
    assert generated.kept == kept_tokens(SETS[:2])
    assert list(floats_view(generated.logprobs)) == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (None, r"2 tokens came, and what 0 were drawn from \(return_sampling_mask\)"),
        ([[8]], "2 tokens came, and what 1 were drawn from"),
        ([[8], [3, 4]], "token 9 is not among the 2"),
        ([[8], []], "token 9 is not among the 0"),
        ([[8], [9, VOCAB_SIZE]], "cannot be"),
    ],
)
def test_what_cannot_be_is_a_bad_reply_and_the_tokens_before_it_stay(sets: list[list[int]] | None, words: str) -> None:
    reader = assembler()
    reader.take(event([8], SETS[:1], is_last=False))
    with pytest.raises(BadReply, match=words) as raised:
        reader.take(event([8, 9], sets))
    failed = reader.failed(raised.value)
    assert (failed.tokens, failed.kept) == (pack_tokens([8]), kept_tokens(SETS[:1]))


def test_a_token_without_a_log_prob_ends_the_record_with_the_tokens() -> None:
    reader = assembler()
    reply: Any = msgspec.json.decode(event([8, 9, 1], SETS))
    reply["meta_info"]["output_token_sampling_logprobs"][1] = None
    with pytest.raises(BadReply, match="no number") as raised:
        reader.take(msgspec.json.encode(reply))
    assert reader.failed(raised.value).kept == kept_tokens(SETS[:1])
