"""Requests that are drawn otherwise than the engine's usual way, beside those that are not."""

from __future__ import annotations

from dataclasses import replace

from engine_cases import Case, logprobs_of, open_engine, random_tokens, request, run_all, tokens_of

from penstock.backends.checkpoint.make import SYMBOLS, character_tokenizer
from penstock.backends.engines.torch.engine_settings import OtherSampling
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.engines.torch.stopping import EndReason, StopStrings
from penstock.messages.turn_sampling import TurnSampling

GREEDY = OtherSampling(sampler=Sampler(temperature=0), stop_token_ids=frozenset(), stop_strings=None)
ANY_END = OtherSampling(
    sampler=Sampler(), stop_token_ids=frozenset(range(0, len(SYMBOLS), 2)),
    stop_strings=StopStrings(["e"], character_tokenizer()),
)  # fmt: skip


def test_each_request_is_drawn_as_it_asks_and_the_others_as_without_it(case: Case) -> None:
    prompts = [random_tokens(6, seed) for seed in range(6)]
    usual = [request(tag, prompt, 12) for tag, prompt in enumerate(prompts)]
    alone = run_all(open_engine(case), usual)
    greedy = run_all(open_engine(case, sampler=Sampler(temperature=0)), usual)
    mixed = run_all(
        open_engine(case, others=(GREEDY, ANY_END)),
        [replace(each, sampling_index=tag % 2) for tag, each in enumerate(usual)],
    )
    for tag in range(6):
        expected = greedy if tag % 2 else alone
        assert tokens_of(mixed[tag].part) == tokens_of(expected[tag].part)
        assert logprobs_of(mixed[tag].part).equal(logprobs_of(expected[tag].part))


def test_a_request_with_a_sampler_of_its_own_is_drawn_by_it_and_ends_as_the_others(case: Case) -> None:
    usual = [request(tag, random_tokens(6, tag), 12) for tag in range(6)]
    alone = run_all(open_engine(case), usual)
    greedy = run_all(open_engine(case, sampler=Sampler(temperature=0)), usual)
    own = Sampler().turned(TurnSampling(temperature=0))
    mixed = run_all(
        open_engine(case), [replace(each, sampler=own if tag % 2 else None) for tag, each in enumerate(usual)]
    )
    for tag in range(6):
        expected = greedy if tag % 2 else alone
        assert tokens_of(mixed[tag].part) == tokens_of(expected[tag].part)
        assert logprobs_of(mixed[tag].part).equal(logprobs_of(expected[tag].part))


def test_what_ends_a_response_is_what_its_drawing_says(case: Case) -> None:
    engine = open_engine(case, others=(GREEDY, ANY_END))
    requests = [replace(request(tag, random_tokens(4, tag), 40), sampling_index=2 * (tag % 2)) for tag in range(8)]
    ends = run_all(engine, requests)
    assert {ends[tag].reason for tag in range(0, 8, 2)} == {EndReason.LENGTH}
    for tag in range(1, 8, 2):
        assert ends[tag].reason in (EndReason.STOP_TOKEN, EndReason.STOP_STRING)
        last = tokens_of(ends[tag].part)[-1]
        assert (last % 2 == 0) == (ends[tag].reason is EndReason.STOP_TOKEN)
