"""The embedded engine behind its queue: commands in, local events out, with weights from a real transport."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from engine_cases import (
    CONTEXT,
    Case,
    expected_logprobs,
    open_engine,
    random_tokens,
    reference_canary,
    request,
    run_all,
    tokens_of,
    weights_of,
)
from torch_engine_bench import PROMPT, WAIT_S, Bench, BenchFactory, CountingFetcher, generate_command

from penstock.backends.engines.decode_passes import (
    DISTURBED,
    PASSES,
    READING,
    READING_DISTURBED,
    added_up,
    bands_in,
)
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.torch.factory import open_torch_engine
from penstock.backends.weights.segments import SHARED_FOLDER
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import floats_view, pack_tokens
from penstock.messages.canary import canary_difference
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    InterruptGenerations,
)
from penstock.messages.errors import UserFault
from penstock.messages.local import (
    GenerationAdvanced,
    GenerationEnded,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    Part,
    SampleKey,
    StopReason,
    Truncated,
    VersionSpan,
)
from penstock.messages.training import UpdateMode
from penstock.runtime.scenario.resolve import EXACT_CANARY

if TYPE_CHECKING:
    from collections.abc import Iterator


LONG = (1, 5, 7)
"""Indices of samples whose responses have more than eight tokens, after which progress is reported."""
NUM_MADE = (8, 7, 7)
"""Tokens they have when the first of them reports: the others wait a step for it to compute their prompt."""


@pytest.fixture(params=[False, True], ids=["in_place", "double_buffering"])
def open_bench(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BenchFactory]:
    factory = BenchFactory(case, tmp_path / "weights", double_buffering=request.param)
    yield factory
    factory.close()


def _alone(case: Case, index: int, limit: int = 40) -> list[int]:
    """The response of the sample with this index, of at most so many tokens; the end token is 1."""
    engine = open_engine(case, stop_token_ids=frozenset({1}), max_context=64)
    return tokens_of(run_all(engine, [request(index, PROMPT, limit)])[index].part)


def test_responses_are_those_of_the_engine_and_progress_adds_up(case: Case, open_bench: BenchFactory) -> None:
    bench = open_bench()
    bench.serve(case, version=3)
    for index in range(6):
        bench.generate(index)
    chunks: dict[int, list[GenerationAdvanced]] = {index: [] for index in range(6)}
    ends: dict[int, GenerationEnded] = {}
    while len(ends) < 6:
        event = bench.said.get(timeout=WAIT_S)
        if isinstance(event, GenerationAdvanced):
            chunks[event.key.index].append(event)
        elif isinstance(event, GenerationEnded):
            ends[event.key.index] = event
    for index, end in ends.items():
        tokens = _alone(case, index)
        assert tokens_of(end.part) == tokens
        assert end.part.spans == (VersionSpan(3, len(tokens)),)
        assert end.outcome == (Completed(stop=StopReason.END_TOKEN) if tokens[-1] == 1 else Truncated())
        assert [chunk.from_token for chunk in chunks[index]] == [8 * k for k in range(len(chunks[index]))]
        reported = b"".join(chunk.chunk.tokens for chunk in chunks[index])
        assert reported == end.part.tokens[: len(reported)]
        assert len(tokens) - len(reported) // 4 <= 8
    gauges: dict[str, float | None] = {metric.name: metric.value for metric in bench.engine.gauges()}
    bands = added_up(band for kind in (PASSES, DISTURBED) for band in bands_in(gauges, kind))
    assert all(band.least * band.passes <= band.requests < 2 * band.least * band.passes for band in bands)
    assert all(band.context_tokens > len(PROMPT) * band.requests for band in bands)
    assert 0 < sum(band.requests for band in bands) < sum(end.part.num_tokens for end in ends.values())
    timed = ("engine/decode", "engine/prefill/", "engine/prefill_disturbed/")
    assert {name: value for name, value in gauges.items() if not name.startswith(timed)} == {
        "engine/running": 0,
        "engine/queued": 0,
        "engine/occupancy": 0,
        "engine/generated_tokens": sum(end.part.num_tokens for end in ends.values()),
        "engine/prefill_tokens": len(PROMPT) - 1,
    }
    assert told_of_reading(bench) == [], "no plain pass had been"
    bench.generate(7)
    bench.hear_ends(1)
    bench.generate(8, prompt=PROMPT[:-2])
    bench.hear_ends(1)
    assert told_of_reading(bench) == [(2.0, 1 + len(PROMPT) - 2)], "a prompt that is held is not read again"


def told_of_reading(bench: Bench) -> list[tuple[float, float]]:
    """Passes that read, and tokens that they have read."""
    gauges: dict[str, float | None] = {metric.name: metric.value for metric in bench.engine.gauges()}
    bands = added_up(band for kind in (READING, READING_DISTURBED) for band in bands_in(gauges, kind))
    return [(band.passes, band.read_tokens) for band in bands]


def test_a_swap_answers_with_digest_and_canary(case: Case, other: Case, open_bench: BenchFactory) -> None:
    bench, tokens = open_bench(), random_tokens(20, seed=1)
    for version, served in enumerate((case, other)):
        canary = reference_canary(served.model, tokens)
        manifest = bench.stage(served, version, canary)
        bench.engine.execute(ApplyWeights(manifest, UpdateMode.DRAIN))
        swapped = bench.hear(WeightsSwapped)
        assert (swapped.version, swapped.publish, swapped.digest) == (version, version + 1, manifest.digest)
        assert canary_difference(canary, swapped.canary_logprobs) < EXACT_CANARY / 10


def test_a_swap_in_flight_stamps_both_versions(case: Case, other: Case, open_bench: BenchFactory) -> None:
    bench = open_bench()
    first, second = bench.stage(case, 1), bench.stage(other, 2)
    bench.then[WeightsSwapped] = [generate_command(index) for index in LONG]
    bench.then[GenerationAdvanced] = [ApplyWeights(second, UpdateMode.IN_FLIGHT)]
    bench.engine.execute(ApplyWeights(first, UpdateMode.DRAIN))
    assert bench.hear(WeightsSwapped).version == 1
    while not isinstance(event := bench.said.get(timeout=WAIT_S), WeightsSwapped):
        assert isinstance(event, GenerationAdvanced)
    assert event.version == 2
    for (index, end), num_before in zip(sorted(bench.hear_ends(3).items()), NUM_MADE, strict=True):
        assert end.part.spans == (VersionSpan(1, num_before), VersionSpan(2, end.part.num_tokens - num_before))
        assert tokens_of(end.part)[:num_before] == _alone(case, index)[:num_before]


@pytest.mark.skipif(not SHARED_FOLDER.is_dir(), reason="needs /dev/shm")
def test_a_bit_that_is_flipped_after_the_fetch_is_caught_before_a_token_is_made(
    case: Case, other: Case, open_bench: BenchFactory
) -> None:
    """The canary would not see it: it is the lowest bit of one weight. What has been prepared is this process's own."""
    bench = open_bench()
    bench.serve(case, 1)
    bench.exporter = open_exporter("shared_memory", run_id=f"flip-{os.getpid()}", learner_epoch=0, folder=Path())
    manifest = bench.export(weights_of(other.model), 2, None)
    # Before the fetch, so that no lease is to be had: what comes later waits until the engine has loaded.
    with Path(manifest.location).open("r+b") as segment:
        bench.fetch(manifest)
        segment.seek(manifest.size_bytes - 4)
        byte = segment.read(1)[0]
        segment.seek(manifest.size_bytes - 4)
        segment.write(bytes([byte ^ 1]))
    if open_bench.double_buffering:
        bench.engine.execute(ApplyWeights(manifest, UpdateMode.IN_FLIGHT))
        assert bench.hear(WeightsSwapped).digest == manifest.digest
        bench.generate(LONG[0])
        assert tokens_of(bench.hear_ends(1)[LONG[0]].part) == _alone(other, LONG[0])
        bench.exporter.close()
        return
    bench.then = {GenerationAdvanced: [ApplyWeights(manifest, UpdateMode.IN_FLIGHT)]}
    for index in LONG:
        bench.generate(index)
    ends = bench.hear_ends(len(LONG))
    swapped = bench.hear(WeightsSwapped)
    assert swapped.version == 2
    assert swapped.digest != manifest.digest
    assert {end.outcome for end in ends.values()} == {Cancelled(cause="interrupted")}
    assert {span.version for end in ends.values() for span in end.part.spans} == {1}
    bench.exporter.close()


def test_interrupted_samples_go_on_after_the_swap_under_new_weights(
    case: Case, other: Case, open_bench: BenchFactory
) -> None:
    bench = open_bench()
    first, second = bench.stage(case, 1), bench.stage(other, 2)
    bench.then[WeightsSwapped] = [generate_command(index) for index in LONG]
    bench.then[GenerationAdvanced] = [InterruptGenerations(), ApplyWeights(second, UpdateMode.INTERRUPT)]
    bench.engine.execute(ApplyWeights(first, UpdateMode.DRAIN))
    assert bench.hear(WeightsSwapped).version == 1
    ends = bench.hear_ends(3)
    assert bench.hear(WeightsSwapped).version == 2
    for (index, end), num_before in zip(sorted(ends.items()), NUM_MADE, strict=True):
        assert end.outcome == Cancelled(cause="interrupted")
        assert end.part.spans == (VersionSpan(1, num_before),)
        bench.generate(index, prefix=end.part)
    for index, end in bench.hear_ends(3).items():
        prefix, made = ends[index].part, floats_view(end.part.logprobs).tolist()
        assert end.part.tokens.startswith(prefix.tokens)
        assert end.part.spans == (*prefix.spans, VersionSpan(2, end.part.num_tokens - prefix.num_tokens))
        expected = expected_logprobs(other, PROMPT, tokens_of(end.part))
        assert made[prefix.num_tokens :] == pytest.approx(expected[prefix.num_tokens :], abs=1e-5)


def test_an_abort_ends_one_sample_and_is_deaf_to_the_ended(case: Case, open_bench: BenchFactory) -> None:
    bench, (kept, aborted, later) = open_bench(), LONG
    bench.then[WeightsSwapped] = [generate_command(kept), generate_command(aborted)]
    bench.then[GenerationAdvanced] = [AbortGeneration(SampleKey(0, aborted), 0)]
    bench.serve(case)
    ends = bench.hear_ends(2)
    assert tokens_of(ends[kept].part) == _alone(case, kept)
    assert ends[aborted].outcome == Cancelled(cause="aborted")
    assert tokens_of(ends[aborted].part) == _alone(case, aborted)[: NUM_MADE[1]]
    bench.engine.execute(AbortGeneration(SampleKey(0, aborted), 0))
    bench.generate(later)
    assert bench.hear_ends(1).keys() == {later}


def test_what_cannot_be_served_ends_as_infra_error_and_others_go_on(case: Case, open_bench: BenchFactory) -> None:
    bench = open_bench()
    bench.generate(0)
    early = bench.hear(GenerationEnded)
    assert early.outcome == InfraError(detail="sample 0/0: the engine has no weights yet")
    bench.serve(case)
    bench.generate(1)
    bench.generate(2, prompt=[5, 79])
    bench.generate(3, prompt=[5] * 64)
    ends = bench.hear_ends(3)
    for index, text in ((2, "token 1 of the prompt has id 79"), (3, "a prompt must have 1 to 63 tokens")):
        outcome = ends[index].outcome
        assert isinstance(outcome, InfraError)
        assert text in outcome.detail
    assert tokens_of(ends[1].part) == _alone(case, 1)


def test_the_context_limits_the_response(case: Case, open_bench: BenchFactory) -> None:
    bench = open_bench(max_response_tokens=1000)
    bench.serve(case)
    bench.generate(0, prompt=[5] * 60)
    end = bench.hear(GenerationEnded)
    assert end.part.num_tokens <= 4
    assert isinstance(end.outcome, Truncated if end.part.num_tokens == 4 else Completed)


def test_a_stop_string_is_told_apart(case: Case, open_bench: BenchFactory) -> None:
    tokenizer_text = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    bench = open_bench(stop=tuple(tokenizer_text))
    bench.serve(case)
    for index in range(4):
        bench.generate(index)
    outcomes = [end.outcome for end in bench.hear_ends(4).values()]
    assert Completed(stop=StopReason.STOP_STRING) in outcomes


def test_context_of_a_later_turn_stands_in_for_the_prompt(case: Case, open_bench: BenchFactory) -> None:
    bench, context = open_bench(), random_tokens(12, seed=8)
    bench.serve(case)
    bench.generate(0, prefix=Part(context_tokens=pack_tokens(context)))
    end = bench.hear_ends(1)[0]
    assert end.part.context_tokens == pack_tokens(context)
    expected = expected_logprobs(case, context, tokens_of(end.part))
    assert floats_view(end.part.logprobs).tolist() == pytest.approx(expected, abs=1e-5)


def test_weights_that_cannot_be_served_are_refused_when_they_are_staged(case: Case, open_bench: BenchFactory) -> None:
    bench = open_bench()
    good = weights_of(case.model)
    lacking = {name: tensor for name, tensor in good.items() if "layers.1.mlp.up_proj" not in name}
    spoilt = good | {"model.norm.weight": torch.full_like(good["model.norm.weight"], float("nan"))}
    for tensors, text in (
        (lacking, "lack model.layers.1.mlp.up_proj.weight"),
        (spoilt, "model.norm.weight holds values that are not finite: the learner has diverged"),
    ):
        bench.engine.execute(FetchWeights(bench.export(tensors, 1)))
        staged = bench.hear(WeightsStagedLocally)
        assert staged.digest == ""
        assert text in staged.error
    gone = bench.export(good, 1)
    bench.exporter.close()
    bench.engine.execute(FetchWeights(gone))
    assert "is gone" in bench.hear(WeightsStagedLocally).error


def test_swaps_that_nobody_may_ask_for_end_the_engine(case: Case, open_bench: BenchFactory) -> None:
    unfetched = open_bench()
    unfetched.engine.execute(ApplyWeights(unfetched.export(weights_of(case.model), 4), UpdateMode.DRAIN))
    story = unfetched.said.get(timeout=WAIT_S)
    assert isinstance(story, RuntimeError)
    assert "version 4, publish 1, was to be applied unfetched" in str(story)
    busy = open_bench()
    busy.serve(case)
    busy.then[GenerationAdvanced] = [ApplyWeights(busy.stage(case, 1), UpdateMode.DRAIN)]
    busy.generate(LONG[0])
    while isinstance(story := busy.said.get(timeout=WAIT_S), GenerationAdvanced):
        pass
    assert isinstance(story, RuntimeError)
    assert "1 request runs at a swap in mode drain" in str(story)


def test_fetched_weights_are_let_go_of(case: Case, open_bench: BenchFactory) -> None:
    fetcher = CountingFetcher()
    bench = open_bench(fetcher=fetcher)
    manifests = [bench.stage(case, version) for version in range(4)]
    bench.engine.execute(ApplyWeights(manifests[2], UpdateMode.DRAIN))
    assert bench.hear(WeightsSwapped).version == 2
    assert fetcher.num_held == 1  # the newest, which may be applied next
    bench.engine.execute(ApplyWeights(manifests[3], UpdateMode.DRAIN))
    bench.hear(WeightsSwapped)
    assert fetcher.num_held == 0
    bench.stage(case, 4)
    bench.engine.close(timeout_s=WAIT_S)
    assert fetcher.num_held == 0


def test_closing_ends_requests_in_the_middle(case: Case, open_bench: BenchFactory) -> None:
    bench = open_bench()
    bench.serve(case)
    for index in range(8):
        bench.generate(index)
    bench.engine.close(timeout_s=WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torch-engine")]


@pytest.mark.parametrize(
    ("device", "stop_token_ids", "dtype", "max_context", "message"),
    [
        ("tpu", (), "float32", 64, "engines.device: must be auto, cpu, cuda or cuda:N; found 'tpu'"),
        ("cuda:99", (), "float32", 64, "engines.device: cuda:99 was asked for, and this process may see 0 GPUs"),
        ("cpu", (), "int8", 64, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ("cpu", (), "float32", CONTEXT + 1, f"max_context must be at most .* {CONTEXT}, got {CONTEXT + 1}"),
        ("cpu", (5, 79), "float32", 64, r"stop_token_ids must be below .* 79, got \[79\]"),
    ],
)
def test_options_that_cannot_be_served_are_refused(
    case: Case, device: str, stop_token_ids: tuple[int, ...], dtype: str, max_context: int, message: str
) -> None:
    with pytest.raises(UserFault, match=message):
        open_torch_engine(
            model_folder=case.folder,
            options=EnginesOptions(device=device),
            sampling=SamplingOptions(stop_token_ids=stop_token_ids),
            max_context=max_context,
            dtype=dtype,
            fetcher=open_fetcher(),
        )
