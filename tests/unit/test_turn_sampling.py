"""What a turn may be drawn with, when its tokens are trained, and what a server is asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_bench import manifest

from penstock.backends.engines.options import SamplingOptions
from penstock.backends.engines.served.base.calls import EndReason, Generated, VersionTokens
from penstock.backends.engines.served.base.requests import OpenRequest, RequestRules
from penstock.backends.engines.torch.sampling_parameters import SamplingParameters
from penstock.backends.episodes.api import ChatRequest
from penstock.backends.episodes.dialogue import MalformedError
from penstock.backends.episodes.turn_sampling import checked, requested, why_masked
from penstock.backends.protocol import Capability
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import Generate
from penstock.messages.samples import InfraError, Prompt, Purpose, SampleKey
from penstock.messages.turn_sampling import TurnSampling

ALL = frozenset(Capability)
RUN = SamplingOptions(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize(
    ("asked", "masked"),
    [
        (None, ""),
        (TurnSampling(temperature=0.7, top_p=0.9, top_k=0, seed=4), ""),
        (TurnSampling(temperature=1.0), "other_sampling"),
        (TurnSampling(top_k=5), "other_sampling"),
        (TurnSampling(min_p=0.1), "other_sampling"),
        (TurnSampling(temperature=0.7, regex="a*"), "constrained"),
        (TurnSampling(json_schema="{}"), "constrained"),
    ],
)
def test_what_is_drawn_as_the_run_draws_is_trained_and_nothing_else(asked: TurnSampling | None, masked: str) -> None:
    assert why_masked(asked, RUN) == masked


@pytest.mark.parametrize(
    ("asked", "lacks", "why"),
    [
        (TurnSampling(temperature=11.0), None, "<= 10"),
        (TurnSampling(top_p=float("nan")), None, "top_p"),
        (TurnSampling(top_p=0.0), None, "> 0"),
        (TurnSampling(seed=-1), None, ">= 0"),
        (TurnSampling(top_k=1 << 31), None, "<= 1073741824"),
        (TurnSampling(top_k=10**30), None, "<= 1073741824"),
        (TurnSampling(regex="a"), Capability.CONSTRAINED, "engines of sglang can"),
        (TurnSampling(regex="a", json_schema="{}"), None, "exclude each other"),
        (TurnSampling(json_schema="[1]"), None, "JSON object"),
        (TurnSampling(json_schema="{" * 9), None, "JSON object"),
        (TurnSampling(regex="a" * (1 << 17)), None, "characters"),
        (TurnSampling(top_k=1), Capability.SAMPLES_PER_CALL, "block sampling:"),
        (TurnSampling(seed=1), Capability.SEEDED_SAMPLING, "does not follow from a seed"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_with_its_reason(
    asked: TurnSampling, lacks: Capability | None, why: str
) -> None:
    with pytest.raises(MalformedError, match=why):
        checked(asked, ALL - {lacks})


def test_a_request_is_followed_where_the_scenario_says_so_and_a_schema_always() -> None:
    request = ChatRequest(messages=[], temperature=0.0, top_k=-1, seed=3)
    assert requested(request, ALL, follows=False) is None
    assert requested(request, ALL, follows=True) == TurnSampling(temperature=0.0, top_k=0, seed=3)
    unseeded = ALL - {Capability.SEEDED_SAMPLING}
    assert requested(request, unseeded, follows=True) == TurnSampling(temperature=0.0, top_k=0)
    body = b'{"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}}'
    held = requested(msgspec.json.decode(body, type=ChatRequest), ALL, follows=False)
    assert held == TurnSampling(json_schema='{"enum":[1]}')


def request_of(**wishes: Any) -> OpenRequest:  # noqa: ANN401 - fields of the sampling
    parameters = SamplingParameters(sampling=RUN, stop_token_ids=frozenset({1}), stop_strings=None)
    command = Generate(
        key=SampleKey(0, 0), attempt=0, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([5, 6])), seed=1,
        deadline_version=9, purpose=Purpose.TRAIN, sampling=TurnSampling(**wishes) if wishes else None,
    )  # fmt: skip
    return OpenRequest(command, RequestRules(tag="t", sampling=parameters, max_context=64, timeout_s=9.0))


def test_a_server_is_asked_for_what_the_turn_wants_and_for_the_runs_in_all_else() -> None:
    call = request_of(top_k=4, temperature=0.0, regex="a+").call(manifest(1))
    assert (call.temperature, call.top_p, call.top_k, call.min_p) == (0.0, 0.9, 4, 0.0)
    assert (call.regex, call.json_schema) == ("a+", "")
    usual = request_of().call(manifest(1))
    assert (usual.temperature, usual.top_p, usual.top_k, usual.regex) == (0.7, 0.9, 0, "")


def test_a_turn_that_is_held_to_a_schema_is_not_sent_again_behind_its_beginning() -> None:
    made = Generated(
        end=EndReason.ABORTED, tokens=pack_tokens([7]), logprobs=pack_floats([-1.0]), versions=(VersionTokens("1", 1),)
    )
    for wishes, outcome in (({"temperature": 0.5}, type(None)), ({"json_schema": "{}"}, InfraError)):
        request = request_of(**wishes)
        request.call(manifest(1))
        request.is_sent_again = True
        assert isinstance(request.take(made), outcome)
