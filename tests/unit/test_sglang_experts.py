"""What a server says about experts, as a sample gets it."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_bench import manifest

from penstock.backends.engines.expert_choices import ExpertShape, pack_experts, read_expert_shape
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.engines.served.base.http import BadReply
from penstock.backends.engines.served.base.requests import OpenRequest, RequestRules
from penstock.backends.engines.served.sglang.assembler import SglangAssembler
from penstock.backends.engines.torch.sampling_parameters import SamplingParameters
from penstock.messages.arrays import pack_tokens
from penstock.messages.commands import Generate
from penstock.messages.errors import UserFault
from penstock.messages.samples import Completed, InfraError, Part, Prompt, Purpose, SampleKey, VersionSpan

SHAPE = ExpertShape(num_layers=2, per_token=2, num_experts=8)
PROMPT = (5, 6, 7)


SAMPLING = SamplingParameters(
    sampling=SamplingOptions(max_response_tokens=8), stop_token_ids=frozenset({1}), stop_strings=None
)


def rules(shape: ExpertShape | None = SHAPE) -> RequestRules:
    return RequestRules(
        tag="t", sampling=SAMPLING, max_context=64, timeout_s=10.0, is_seeded=False, has_priorities=False,
        experts=shape,
    )  # fmt: skip


def opened(shape: ExpertShape | None = SHAPE, prefix: Part | None = None) -> OpenRequest:
    command = Generate(
        key=SampleKey(0, 0), attempt=0, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens(PROMPT)), seed=1,
        deadline_version=9, prefix=prefix, purpose=Purpose.TRAIN,
    )  # fmt: skip
    return OpenRequest(command, rules(shape))


def answer(tokens: list[int], experts: np.ndarray[Any, Any] | None, *, text: str = "") -> bytes:
    """The one event of a request that ends by its end token."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": 1}, "prompt_tokens": 3, "completion_tokens": len(tokens),
        "weight_version": "v0", "output_token_logprobs": [[-0.5, token, None] for token in tokens],
    }  # fmt: skip
    if experts is not None:
        meta["routed_experts"] = text or base64.b64encode(experts.astype("<i4").tobytes()).decode()
    return msgspec.json.encode({"output_ids": tokens, "meta_info": meta})


def generated(event: bytes) -> Any:  # noqa: ANN401 - what an assembler gives
    assembler = SglangAssembler(incremental=True, vocab_size=32)
    assembler.take(event)
    return assembler.generated()


def drawn(num_inputs: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, SHAPE.num_experts, (num_inputs, SHAPE.num_layers, SHAPE.per_token))


def test_a_request_asks_for_experts_only_where_they_are_recorded() -> None:
    assert opened().call(manifest(0)).with_experts
    assert not opened(None).call(manifest(0)).with_experts


def test_the_sample_has_the_experts_of_every_input() -> None:
    request, experts = opened(), drawn(5)
    request.call(manifest(0))
    assert isinstance(request.take(generated(answer([8, 9, 1], experts))), Completed)
    found = request.part.experts
    assert found is not None
    assert (found.num_layers, found.per_token, found.id_bytes, found.num_inputs) == (2, 2, 1, 5)
    assert np.array_equal(np.frombuffer(found.ids, np.uint8).reshape(5, 2, 2), experts)


def test_after_a_prefix_the_record_is_of_all_of_it() -> None:
    prefix = Part(tokens=pack_tokens([8]), logprobs=b"\0\0\0\0", spans=(VersionSpan(0, 1),))
    request, experts = opened(prefix=prefix), drawn(5)
    request.call(manifest(0))
    request.take(generated(answer([9, 1], experts)))
    assert request.part.experts == pack_experts(experts, num_experts=8)


def test_without_a_record_there_is_none() -> None:
    request = opened()
    request.call(manifest(0))
    assert isinstance(request.take(generated(answer([8, 1], None))), Completed)
    assert request.part.experts is None


@pytest.mark.parametrize("num_inputs", [3, 2])
def test_a_record_of_too_few_tokens_fails_the_request(num_inputs: int) -> None:
    request = opened()
    request.call(manifest(0))
    outcome = request.take(generated(answer([8, 1], drawn(num_inputs))))
    assert isinstance(outcome, InfraError)
    assert "the server names experts in" in outcome.detail
    assert request.part.experts is None


def test_what_is_no_base64_is_a_bad_reply() -> None:
    with pytest.raises(BadReply, match="routed experts"):
        generated(answer([8, 1], drawn(4), text="?!"))


def test_ids_need_two_bytes_where_one_has_no_value_for_what_is_not_known() -> None:
    chosen = np.asarray([[[0, 254], [-1, -1]]])
    assert pack_experts(chosen, num_experts=255).ids == b"\x00\xfe\xff\xff"
    wide = pack_experts(chosen, num_experts=256)
    assert wide.id_bytes == 2
    assert np.frombuffer(wide.ids, "<u2").tolist() == [0, 254, 65535, 65535]


def test_a_model_without_experts_is_named(tmp_path: Any) -> None:  # noqa: ANN401 - a path
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(UserFault, match=r"record_experts is true, and the model .* has no experts"):
        read_expert_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}')
    assert read_expert_shape(tmp_path) == SHAPE
