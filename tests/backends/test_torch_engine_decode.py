"""Continuous batching: who runs beside whom, and when, changes nothing; what ends a response, and what it carries."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from engine_cases import (
    Case,
    drawn,
    largest_error,
    logprobs_of,
    open_engine,
    part_of,
    random_tokens,
    reference_logprobs,
    request,
    run_all,
    run_steps,
    tokens_of,
    weights_of,
)
from transformers import DynamicCache

from penstock.backends.checkpoint.make import END_ID, character_tokenizer
from penstock.backends.engines.torch.requests import RequestError
from penstock.backends.engines.torch.sampling import Sampler
from penstock.backends.engines.torch.slots import MIN_ROWS
from penstock.backends.engines.torch.stopping import EndReason, StopStrings
from penstock.messages.arrays import pack_tokens, tokens_view
from penstock.messages.errors import UserFault
from penstock.messages.samples import Part, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.torch.engine import TorchEngine
    from penstock.backends.engines.torch.requests import Ended, GenerationRequest

TOLERANCE = 1e-5
"""Nats, in float32."""


@pytest.fixture(scope="module")
def mixed() -> list[GenerationRequest]:
    """Groups of three with prompts of 1 to 60 tokens and 1 to 150 new ones."""
    draw = random.Random(0)
    prompts = [random_tokens(draw.randrange(1, 60), seed=group) for group in range(14)]
    return [request(tag, prompts[tag // 3], draw.randrange(1, 150)) for tag in range(42)]


@pytest.fixture(scope="module")
def alone(case: Case, mixed: list[GenerationRequest]) -> dict[int, Ended]:
    """Each request of ``mixed`` with an engine of its own."""
    engine = open_engine(case, num_slots=1)
    return {cast("int", wanted.tag): run_all(engine, [wanted])[cast("int", wanted.tag)] for wanted in mixed}


def _rows_are_independent() -> bool:
    """Whether a row of a matrix product has the same bits however many rows there are, on this machine."""
    generator = torch.Generator().manual_seed(0)
    rows, matrix = torch.randn(64, 48, generator=generator), torch.randn(48, 160, generator=generator)
    whole = rows @ matrix
    return all(torch.equal(rows[:count] @ matrix, whole[:count]) for count in range(MIN_ROWS, 64))


def _assert_same(left: Ended, right: Ended) -> None:
    assert left.reason == right.reason
    assert tokens_of(left.part) == tokens_of(right.part)
    assert torch.allclose(logprobs_of(left.part), logprobs_of(right.part), atol=TOLERANCE, rtol=0)


# --- who runs beside whom -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 3, 16, 64])
def test_company_does_not_change_a_response(
    case: Case, mixed: list[GenerationRequest], alone: dict[int, Ended], num_slots: int
) -> None:
    engine = open_engine(case, num_slots=num_slots)
    is_exact = _rows_are_independent()
    for seed in range(3):
        shuffled = random.Random(seed).sample(mixed, len(mixed))
        together = run_all(engine, shuffled)
        assert together.keys() == alone.keys()
        for tag, end in together.items():
            _assert_same(end, alone[tag])
            assert not is_exact or drawn(end) == drawn(alone[tag])


def test_responses_have_the_logprobs_of_transformers(
    case: Case, mixed: list[GenerationRequest], alone: dict[int, Ended]
) -> None:
    for wanted in mixed:
        end = alone[cast("int", wanted.tag)]
        assert end.part.num_tokens == wanted.max_new_tokens
        assert largest_error(case, tokens_view(wanted.prompt).tolist(), end.part) < TOLERANCE


def test_requests_that_arrive_while_others_run_are_not_different(
    case: Case, mixed: list[GenerationRequest], alone: dict[int, Ended]
) -> None:
    engine, draw = open_engine(case, num_slots=6), random.Random(5)
    waiting = list(mixed)
    ended: list[Ended] = []
    while waiting or engine.num_running or engine.num_queued:
        for _ in range(min(len(waiting), draw.randrange(3))):
            engine.submit(waiting.pop())
        ended += engine.step().ended
    assert len(ended) == len(mixed)
    for end in ended:
        _assert_same(end, alone[cast("int", end.tag)])


def test_a_freed_slot_takes_the_next_request(case: Case) -> None:
    engine = open_engine(case, num_slots=2)
    for tag, length in enumerate((3, 9, 2, 2)):
        engine.submit(request(tag, [5, 6, 7], length))
    running: list[int] = []
    order: list[int] = []
    while engine.num_running or engine.num_queued:
        order += [cast("int", end.tag) for end in engine.step().ended]
        running.append(engine.num_running)
    assert order == [0, 2, 3, 1]
    assert max(running) == 2


def test_a_group_computes_its_prompt_once(case: Case) -> None:
    engine, prompt = open_engine(case, num_slots=3), random_tokens(20, seed=1)
    run_all(engine, [request(tag, prompt, 5) for tag in range(8)])
    assert engine.num_prefilled == len(prompt) - 1  # the decode steps feed the last token
    assert engine.num_generated == 8 * 5


def test_a_prompt_is_computed_anew_under_other_weights(case: Case, other: Case) -> None:
    engine, prompt = open_engine(case, num_slots=8), random_tokens(20, seed=1)
    engine.submit(request(0, prompt, 30))
    run_steps(engine, 5)
    engine.load(weights_of(other.model), version=1)
    ended = run_all(engine, [request(tag, prompt, 20) for tag in (1, 2)])
    assert engine.num_prefilled == 2 * (len(prompt) - 1)
    assert all(largest_error(other, prompt, ended[tag].part) < TOLERANCE for tag in (1, 2))


def test_temperature_scales_the_logprobs(case: Case) -> None:
    engine, prompt = open_engine(case, sampler=Sampler(temperature=0.7, top_k=5)), random_tokens(8, seed=1)
    ended = run_all(engine, [request(0, prompt, 30)])
    assert largest_error(case, prompt, ended[0].part, temperature=0.7) < TOLERANCE


# --- continuing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [2, 16])
def test_a_continued_response_is_the_uninterrupted_one(
    case: Case, mixed: list[GenerationRequest], alone: dict[int, Ended], num_slots: int
) -> None:
    draw = random.Random(1)
    continued = [
        replace(wanted, prefix=_cut(alone[cast("int", wanted.tag)].part, draw.randrange(wanted.max_new_tokens)))
        for wanted in mixed
    ]
    is_exact = _rows_are_independent()
    for tag, end in run_all(open_engine(case, num_slots=num_slots), continued).items():
        _assert_same(end, alone[tag])
        assert not is_exact or drawn(end) == drawn(alone[tag])


def _cut(part: Part, length: int) -> Part:
    spans = (VersionSpan(0, length),) if length else ()
    return Part(tokens=part.tokens[: 4 * length], logprobs=part.logprobs[: 4 * length], spans=spans)


def test_spans_of_a_prefix_are_merged_with_the_new(case: Case) -> None:
    prompt, tokens = [4, 5, 6], random_tokens(6, seed=2)
    prefix = part_of(case.model, prompt, tokens)
    prefix = Part(tokens=prefix.tokens, logprobs=prefix.logprobs, spans=(VersionSpan(1, 2), VersionSpan(3, 4)))
    for version, spans in ((3, [(1, 2), (3, 8)]), (4, [(1, 2), (3, 4), (4, 4)])):
        engine = open_engine(case, version=version)
        end = run_all(engine, [replace(request(0, prompt, 10), prefix=prefix)])[0]
        assert [(span.version, span.num_tokens) for span in end.part.spans] == spans
        assert end.part.logprobs[: len(prefix.logprobs)] == prefix.logprobs


def test_a_loss_mask_of_a_prefix_goes_on_with_ones(case: Case) -> None:
    prefix = Part(tokens=bytes(8), logprobs=bytes(8), spans=(VersionSpan(0, 2),), loss_mask=b"\x00\x01")
    end = run_all(open_engine(case), [replace(request(0, [4, 5], 5), prefix=prefix)])[0]
    assert end.part.loss_mask == b"\x00\x01\x01\x01\x01"


@pytest.mark.parametrize(
    ("prefix", "limit", "reason"),
    [
        ([9, 8, END_ID], 10, EndReason.STOP_TOKEN),
        ([9, 8, 7], 3, EndReason.LENGTH),
        (character_tokenizer().encode("xab").ids, 10, EndReason.STOP_STRING),
    ],
)
def test_a_prefix_that_is_whole_ends_at_once(case: Case, prefix: list[int], limit: int, reason: EndReason) -> None:
    engine = open_engine(
        case, stop_token_ids=frozenset({END_ID}), stop_strings=StopStrings(["ab"], character_tokenizer())
    )
    part = part_of(case.model, [4], prefix)
    ended = engine.submit(replace(request(0, [4], limit), prefix=part))
    assert ended is not None
    assert (ended.reason, ended.part) == (reason, part)
    assert engine.num_queued == 0


# --- aborts, interrupts, swaps --------------------------------------------------------------------------------


def test_an_abort_gives_what_there_is_and_touches_no_other(case: Case) -> None:
    wanted = [request(tag, random_tokens(5, seed=tag), 40) for tag in range(4)]
    alone = run_all(open_engine(case), wanted)
    engine = open_engine(case, num_slots=3)
    for each in wanted:
        engine.submit(each)
    run_steps(engine, 7)
    running, queued = engine.abort(1), engine.abort(3)
    assert running is not None
    assert queued is not None
    assert running.reason == queued.reason == EndReason.ABORTED
    assert drawn(running).part == _cut(alone[1].part, 7)
    assert queued.part == Part()
    assert engine.abort(1) is None
    rest = run_all(engine, [])
    assert rest.keys() == {0, 2}
    for tag, end in rest.items():
        _assert_same(end, alone[tag])


def test_an_interrupt_ends_all_and_what_it_gives_can_be_continued(case: Case) -> None:
    wanted = [request(tag, random_tokens(5 + tag, seed=tag), 40) for tag in range(6)]
    alone = run_all(open_engine(case), wanted)
    engine = open_engine(case)
    for each in wanted:
        engine.submit(each)
    run_steps(engine, 11)
    ended = {cast("int", end.tag): end for end in engine.interrupt()}
    assert [ended[tag].part.num_tokens for tag in range(6)] == [11] * 4 + [0] * 2
    assert {end.reason for end in ended.values()} == {EndReason.INTERRUPTED}
    assert (engine.num_running, engine.num_queued) == (0, 0)
    for tag, end in run_all(
        engine, [replace(each, prefix=ended[cast("int", each.tag)].part) for each in wanted]
    ).items():
        _assert_same(end, alone[tag])


def test_a_swap_in_flight_goes_on_with_the_cache_of_the_old_weights(case: Case, other: Case) -> None:
    prompts = [random_tokens(4 + 3 * tag, seed=tag) for tag in range(4)]
    engine = open_engine(case, sampler=Sampler(temperature=0), version=7)
    for tag, prompt in enumerate(prompts):
        engine.submit(request(tag, prompt, 30))
    run_steps(engine, 12)
    engine.load(weights_of(other.model), version=8)
    ended = run_all(engine, [])
    for tag, prompt in enumerate(prompts):
        part = ended[tag].part
        assert part.spans == (VersionSpan(7, 12), VersionSpan(8, 18))
        logits = _logits_across_a_swap(case, other, prompt + tokens_of(part), len(prompt) + 11)[len(prompt) - 1 :]
        assert torch.equal(logits.argmax(-1), torch.tensor(tokens_of(part)))
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens_of(part))[:, None])[:, 0]
        assert (logprobs_of(part) - expected).abs().max() < TOLERANCE


def _logits_across_a_swap(before: Case, after: Case, tokens: list[int], num_before: int) -> torch.Tensor:
    """Logits ``[T − 1, V]`` of transformers, the first ``num_before`` tokens fed under the one set of weights and the
    others under the other, with one cache."""
    ids, cache = torch.tensor([tokens[:-1]]), DynamicCache()
    with torch.no_grad():
        first = before.model(ids[:, :num_before], past_key_values=cache, use_cache=True).logits
        second = after.model(ids[:, num_before:], past_key_values=cache, use_cache=True).logits
    return torch.cat((first, second), 1)[0].float()


def test_swaps_without_a_token_between_leave_one_span(case: Case, other: Case) -> None:
    engine = open_engine(case, version=1)
    engine.submit(request(0, [4, 5, 6], 9))
    run_steps(engine, 3)
    engine.load(weights_of(other.model), version=2)
    engine.load(weights_of(case.model), version=3)
    run_steps(engine, 2)
    engine.load(weights_of(case.model), version=3)
    engine.load(weights_of(other.model), version=4)
    engine.load(weights_of(case.model), version=3)
    end = run_all(engine, [])[0]
    assert end.part.spans == (VersionSpan(1, 3), VersionSpan(3, 6))


# --- what ends a response -------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_response_and_belongs_to_it(case: Case) -> None:
    whole = run_all(open_engine(case), [request(tag, [4, 5, 6], 60) for tag in range(5)])
    stop = tokens_of(whole[0].part)[20]
    ended = run_all(
        open_engine(case, stop_token_ids=frozenset({stop})), [request(tag, [4, 5, 6], 60) for tag in range(5)]
    )
    for tag, end in ended.items():
        tokens = tokens_of(whole[tag].part)
        length = tokens.index(stop) + 1 if stop in tokens else 60
        assert tokens_of(end.part) == tokens[:length]
        assert end.reason is (EndReason.STOP_TOKEN if stop in tokens else EndReason.LENGTH)
    assert ended[0].reason is EndReason.STOP_TOKEN


def test_a_stop_token_at_the_limit_counts_as_a_stop(case: Case) -> None:
    whole = run_all(open_engine(case), [request(0, [4, 5, 6], 10)])[0]
    engine = open_engine(case, stop_token_ids=frozenset({tokens_of(whole.part)[9]}))
    end = run_all(engine, [request(0, [4, 5, 6], 10)])[0]
    assert end.reason is EndReason.STOP_TOKEN


def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(case: Case) -> None:
    tokenizer = character_tokenizer()
    sampler = Sampler(top_k=3)  # few enough letters that pairs come up
    wanted = [request(tag, random_tokens(4, seed=tag), 80) for tag in range(6)]
    whole = {tag: tokens_of(end.part) for tag, end in run_all(open_engine(case, sampler=sampler), wanted).items()}
    stops = [tokenizer.decode(whole[0][30:33], skip_special_tokens=False), tokenizer.decode(whole[1][10:12])]
    engine = open_engine(case, sampler=sampler, stop_strings=StopStrings(stops, tokenizer))
    reasons: list[EndReason] = []
    for tag, end in run_all(engine, wanted).items():
        texts = [tokenizer.decode(whole[tag][:count], skip_special_tokens=False) for count in range(81)]
        count = next((count for count, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        assert tokens_of(end.part) == whole[tag][:count]
        assert end.reason is (EndReason.LENGTH if count is None else EndReason.STOP_STRING)
        reasons.append(end.reason)
    assert reasons[0] is reasons[1] is EndReason.STOP_STRING


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserFault, match="must not contain an empty string"):
        StopStrings(["x", ""], character_tokenizer())


def test_progress_is_reported_in_steps_without_holes(case: Case) -> None:
    engine = open_engine(case, num_slots=2, progress_tokens=8)
    wanted = [request(tag, [4, 5, 6], 30) for tag in range(3)]
    prefix = part_of(case.model, [4, 5, 6], random_tokens(5, seed=1))
    wanted.append(replace(request(3, [4, 5, 6], 30), prefix=prefix))
    for each in wanted:
        engine.submit(each)
    chunks: dict[int, list[tuple[int, Part]]] = {tag: [] for tag in range(4)}
    ended: dict[int, Ended] = {}
    while engine.num_running or engine.num_queued:
        tick = engine.step()
        for report in tick.advanced:
            chunks[cast("int", report.tag)].append((report.from_token, report.chunk))
        ended |= {cast("int", end.tag): end for end in tick.ended}
    for tag, reports in chunks.items():
        begin = 5 if tag == 3 else 0
        assert [(start, chunk.num_tokens) for start, chunk in reports] == [(begin + 8 * k, 8) for k in range(3)]
        part = ended[tag].part
        end = 4 * (begin + 24)
        assert b"".join(chunk.tokens for _, chunk in reports) == part.tokens[4 * begin : end]
        assert b"".join(chunk.logprobs for _, chunk in reports) == part.logprobs[4 * begin : end]


def test_requests_that_cannot_be_served_say_why_and_touch_no_other(case: Case) -> None:
    engine = open_engine(case, max_context=32)
    engine.submit(request(0, [4, 5], 20))
    run_steps(engine, 3)
    for prompt, limit, message in (
        ([4, 79], 5, "token 1 of the prompt has id 79, outside the model's vocabulary of 79"),
        ([-1], 5, "token 0 of the prompt has id -1"),
        ([], 5, "1 to 31 tokens.* got 0"),
        ([4] * 32, 1, "1 to 31 tokens.* got 32"),
        ([4] * 30, 3, "max_new_tokens must be at most 2 after this prompt, got 3"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(request(1, prompt, limit))
    bad_prefix = Part(tokens=pack_tokens([79]), logprobs=bytes(4), spans=(VersionSpan(0, 1),))
    with pytest.raises(RequestError, match="token 0 of the prefix has id 79"):
        engine.submit(replace(request(1, [4], 5), prefix=bad_prefix))
    assert run_all(engine, [request(2, [4] * 31, 1)]).keys() == {0, 2}


def test_scoring_leaves_running_requests_alone(case: Case) -> None:
    wanted = [request(tag, [4, 5, 6], 20) for tag in range(3)]
    alone = run_all(open_engine(case), wanted)
    engine = open_engine(case)
    for each in wanted:
        engine.submit(each)
    run_steps(engine, 6)
    tokens = random_tokens(50, seed=9)
    assert (engine.score(tokens) - reference_logprobs(case.model, tokens)).abs().max() < TOLERANCE
    assert engine.score([5]).shape == (0,)
    with pytest.raises(RequestError, match="tokens to score"):
        engine.score([5, 79])
    assert run_all(engine, []) == alone


def test_what_is_scored_may_be_longer_than_the_context(case: Case) -> None:
    tokens = random_tokens(300, seed=9)
    scored = open_engine(case, max_context=32).score(tokens)
    assert (scored - reference_logprobs(case.model, tokens)).abs().max() < TOLERANCE


def test_nothing_to_do_is_no_error(case: Case) -> None:
    engine: TorchEngine = open_engine(case)
    nothing: Sequence[Ended] = engine.step().ended
    assert list(nothing) == []
    assert engine.interrupt() == []


# --- everything at once ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_ends_each_request_once_with_the_tokens_of_its_weights(
    case: Case, other: Case, mixed: list[GenerationRequest], seed: int
) -> None:
    draw = random.Random(seed)
    models = (case, other)
    engine = open_engine(case, num_slots=draw.choice((2, 5, 16, 40)), progress_tokens=7)
    waiting = draw.sample(mixed, len(mixed))
    ended: dict[int, Ended] = {}
    aborted: set[int] = set()
    version = 0

    def take(ends: Sequence[Ended]) -> None:
        for end in ends:
            tag = cast("int", end.tag)
            assert tag not in ended
            if end.reason is EndReason.INTERRUPTED:
                waiting.append(replace(mixed[tag], prefix=end.part))
            else:
                ended[tag] = end

    while len(ended) < len(mixed):
        match draw.randrange(40):
            case 0:
                take(engine.interrupt())
            case 1:
                version += 1
                engine.load(weights_of(models[version % 2].model), version)
            case 2:
                gone = engine.abort(tag := draw.randrange(len(mixed)))
                aborted |= set() if gone is None else {tag}
                take([] if gone is None else [gone])
            case choice if choice < 20 and waiting:
                early = engine.submit(waiting.pop(draw.randrange(len(waiting))))
                take([] if early is None else [early])
            case _:
                take(engine.step().ended)
    assert (engine.num_running, engine.num_queued) == (0, 0)
    alone = [open_engine(model, num_slots=1) for model in models]
    for tag, end in ended.items():
        assert end.reason is (EndReason.ABORTED if tag in aborted else EndReason.LENGTH)
        assert sum(span.num_tokens for span in end.part.spans) == end.part.num_tokens
        made_by = {span.version % 2 for span in end.part.spans}
        if len(made_by) == 1 and end.part.spans[0].version == end.part.spans[-1].version:
            expected = run_all(alone[made_by.pop()], [mixed[tag]])[tag]
            assert tokens_of(end.part) == tokens_of(expected.part)[: end.part.num_tokens]
            made = logprobs_of(end.part)
            assert torch.allclose(made, logprobs_of(expected.part)[: len(made)], atol=TOLERANCE, rtol=0)
