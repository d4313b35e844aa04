"""What every engine that a learner trains from must do, the same for the embedded one and for SGLang servers."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from conformance_bench import (
    NUM_SLOTS,
    EngineBench,
    greedy,
    reference_canary,
    response_logprobs,
    tokens_of,
    weights_of,
)
from served_engines import GREEDILY, TOLERANCE, check, check_computed, largest_difference, prompt_of
from tiny_models import VOCAB_SIZE

from penstock.backends.weights.network import LANDING, Landing
from penstock.backends.weights.pushing import PushExporter
from penstock.messages.arrays import floats_view
from penstock.messages.canary import canary_difference
from penstock.messages.local import GenerationAdvanced, GenerationEnded, WeightsSwapped
from penstock.messages.samples import Cancelled, InfraError, Part
from penstock.messages.training import UpdateMode
from penstock.messages.weights import WeightSource
from penstock.runtime.scenario.resolve import LOOSE_CANARY

if TYPE_CHECKING:
    from collections.abc import Callable

    from served_engines import Served

    Tensors = dict[str, torch.Tensor]

    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import SampleKey

pytestmark = pytest.mark.sglang


def long_running(bench: EngineBench, prompts: list[list[int]]) -> list[SampleKey]:
    """Requests, all of which have reported tokens."""
    keys = [bench.generate(prompt) for prompt in prompts]
    waiting = set(keys)
    while waiting:
        event = bench.next_said()
        if isinstance(event, GenerationAdvanced):
            waiting.discard(event.key)
        elif isinstance(event, GenerationEnded):  # an early end token: another in its place
            place = keys.index(event.key)
            waiting.discard(event.key)
            prompts[place] = prompt_of(10_000 + place + len(prompts) * tokens_of(event.part)[0])
            keys[place] = bench.generate(prompts[place])
            waiting.add(keys[place])
    return keys


# --- log-probs ------------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(served: Served) -> None:
    prompts = [prompt_of(seed, num_tokens=3 + 5 * seed) for seed in range(NUM_SLOTS)]
    keys = [served.bench.generate(prompt, dataset=GREEDILY) for prompt in prompts]
    for prompt, ended in zip(prompts, served.bench.ends(*keys), strict=True):
        tokens = tokens_of(ended.part)
        assert tokens == greedy(served.model, prompt, len(tokens))
        expected = response_logprobs(served.model, prompt, tokens)  # of temperature 1
        found = floats_view(ended.part.logprobs).tolist()
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE


def test_logprobs_are_of_the_whole_vocabulary_at_the_temperature_of_sampling(served: Served) -> None:
    """Before top-p, top-k and min-p, which the sampling of this engine has all of."""
    prompts = [prompt_of(seed) for seed in range(2 * NUM_SLOTS)]
    keys = [served.bench.generate(prompt) for prompt in prompts]
    for prompt, ended in zip(prompts, served.bench.ends(*keys), strict=True):
        check(served.model, prompt, ended, served.bench.version)


def test_reports_and_the_end_have_the_same_tokens(served: Served) -> None:
    key = long_running(served.bench, [prompt_of(3)])[0]
    event: LocalEvent = served.bench.next_said()
    reported: list[int] = []
    while not isinstance(event, GenerationEnded):
        assert isinstance(event, GenerationAdvanced)
        reported = reported or [0] * event.from_token  # those that were heard above
        assert event.from_token == len(reported)
        reported += tokens_of(event.chunk)
        event = served.bench.next_said()
    assert event.key == key
    tokens = tokens_of(event.part)
    assert len(reported) <= len(tokens)
    assert [a for a, b in zip(reported, tokens, strict=False) if a not in (b, 0)] == []


# --- ends -----------------------------------------------------------------------------------------------------------


def test_an_abort_returns_what_there_is(served: Served) -> None:
    prompt = prompt_of(11)
    prompts = [prompt]
    key = long_running(served.bench, prompts)[0]
    served.bench.abort(key)
    (ended,) = served.bench.ends(key)
    if isinstance(ended.outcome, Cancelled):  # else it was faster than the abort
        assert ended.outcome.cause == "aborted"
    assert ended.part.num_tokens >= 1
    check_computed(served.model, prompts[0], ended.part)


def test_an_interruption_ends_everything_with_what_there_is(served: Served) -> None:
    prompts = [prompt_of(20 + seed) for seed in range(4)]
    keys = long_running(served.bench, prompts)
    served.bench.interrupt()
    for prompt, ended in zip(prompts, served.bench.ends(*keys), strict=True):
        check_computed(served.model, prompt, ended.part)
        if isinstance(ended.outcome, Cancelled):
            assert ended.outcome.cause == "interrupted"


def test_a_response_goes_on_from_a_prefix_without_a_seam(served: Served) -> None:
    prompt = prompt_of(31)
    whole = next(ended.part for _ in range(20) if (ended := served.bench.ended(prompt)).part.num_tokens >= 40)
    prefix = Part(
        tokens=whole.tokens[: 20 * 4], logprobs=whole.logprobs[: 20 * 4], spans=(whole.spans[0].__class__(0, 20),)
    )
    ended = served.bench.ended(prompt, prefix)
    assert tokens_of(ended.part)[:20] == tokens_of(whole)[:20]
    assert ended.part.num_tokens > 20
    assert ended.part.spans[0].version == 0
    check_computed(served.model, prompt, ended.part)


def test_a_token_outside_the_vocabulary_is_refused_and_the_engine_goes_on(served: Served) -> None:
    for bad in (VOCAB_SIZE, -1, 1 << 30):
        ended = served.bench.ended([5, bad, 7])
        assert isinstance(ended.outcome, InfraError)
        assert str(bad) in ended.outcome.detail
    check(served.model, prompt_of(40), served.bench.ended(prompt_of(40)), served.bench.version)


# --- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_after_an_update_a_prompt_that_was_cached_is_computed_anew(served: Served, mode: UpdateMode) -> None:
    prompt = prompt_of(50, num_tokens=64)
    check(served.model, prompt, served.bench.ended(prompt), served.bench.version)
    served.update(mode)
    check(served.model, prompt, served.bench.ended(prompt), served.bench.version)


def test_an_update_in_flight_changes_the_logprobs_of_later_tokens_only(served: Served) -> None:
    prompts = [prompt_of(60 + seed) for seed in range(4)]
    new = served.next_model()
    manifest = served.bench.stage(new)
    keys = long_running(served.bench, prompts)
    served.bench.apply(manifest, UpdateMode.IN_FLIGHT)
    assert served.bench.hear(WeightsSwapped).digest == manifest.digest
    late = prompt_of(60)
    check(new, late, served.bench.ended(late), manifest.version)
    changed = 0
    for prompt, ended in zip(prompts, served.bench.ends(*keys), strict=True):
        before = sum(span.num_tokens for span in ended.part.spans if span.version < manifest.version)
        check_computed(served.model, prompt, ended.part, end=before)
        if before < ended.part.num_tokens:
            assert ended.part.spans[-1].version == manifest.version
            changed += largest_difference(served.model, prompt, ended.part, begin=before) > 0.01
    assert changed, "some had not ended at the swap"
    served.model = new
    for prompt in prompts:  # what the old weights had cached is not found again
        check(new, prompt, served.bench.ended(prompt), manifest.version)


def test_an_update_that_interrupts_computes_what_ran_again_under_the_new_weights(served: Served) -> None:
    prompts = [prompt_of(70 + seed) for seed in range(4)]
    new = served.next_model()
    manifest = served.bench.stage(new)
    old_version = served.bench.version - 1
    keys = long_running(served.bench, prompts)
    ends: dict[SampleKey, GenerationEnded] = {}
    if served.bench.kind == "torch":  # it is interrupted first, and what it had is submitted again afterwards
        served.bench.interrupt()
        interrupted = dict(zip(keys, served.bench.ends(*keys), strict=True))
        served.bench.apply(manifest, UpdateMode.INTERRUPT)
        assert served.bench.hear(WeightsSwapped).digest == manifest.digest
        for key, prompt in zip(keys, prompts, strict=True):
            ends[key] = interrupted[key]
            if isinstance(interrupted[key].outcome, Cancelled):
                ends[key] = served.bench.ended(prompt, interrupted[key].part)
    else:
        served.bench.apply(manifest, UpdateMode.INTERRUPT)
        assert served.bench.hear(WeightsSwapped).digest == manifest.digest
        ends = dict(zip(keys, served.bench.ends(*keys), strict=True))
    old, served.model = served.model, new
    num_across = 0
    for prompt, key in zip(prompts, keys, strict=True):
        part = ends[key].part
        before = sum(span.num_tokens for span in part.spans if span.version == old_version)
        check_computed(old, prompt, part, end=before)
        if before < part.num_tokens:
            num_across += 1
            check_computed(new, prompt, part, begin=before)
    assert num_across


# --- weights that cannot be served ----------------------------------------------------------------------------------


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


NORM = "model.norm.weight"
SURPRISE = "model.layers.0.mlp.surprise.weight"
WRONG: dict[str, tuple[Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "shape": (lambda tensors: {**tensors, NORM: torch.ones(7)}, (NORM, "7")),
    "missing": (lambda tensors: without(tensors, NORM), (NORM,)),
    "unknown": (lambda tensors: {**tensors, SURPRISE: torch.ones(3)}, (SURPRISE,)),
    "nan": (lambda tensors: {**tensors, NORM: tensors[NORM] * float("nan")}, ("not finite",)),
}


@pytest.mark.parametrize("what", WRONG)
def test_weights_of_another_model_are_refused_and_the_engine_goes_on(served: Served, what: str) -> None:
    change, words = WRONG[what]
    version = served.bench.version
    staged = served.bench.fetch(served.bench.export(change(weights_of(served.model))))
    assert not staged.digest
    assert all(word in staged.error for word in words), staged.error
    check(served.model, prompt_of(80), served.bench.ended(prompt_of(80)), version)
    served.update(UpdateMode.DRAIN)


@pytest.mark.parametrize("damage", ["digest", "truncated", "gone"])
def test_weights_that_were_damaged_on_the_way_are_refused_and_the_engine_goes_on(served: Served, damage: str) -> None:
    version = served.bench.version
    manifest = served.bench.export(weights_of(served.model))
    file = Path(manifest.location) / "model.safetensors"
    match damage:
        case "digest":
            manifest = msgspec.structs.replace(manifest, digest="0" * 64)
        case "truncated":
            with file.open("r+b") as opened:
                opened.truncate(manifest.size_bytes - 100)
        case _:
            file.unlink()
    staged = served.bench.fetch(manifest)
    assert not staged.digest
    assert staged.error
    check(served.model, prompt_of(81), served.bench.ended(prompt_of(81)), version)
    served.update(UpdateMode.DRAIN)


def test_weights_that_another_engine_passes_on_are_those_of_the_learner(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LANDING, "_last", None)  # a process of a run has one learner, and this one has had others
    caplog.set_level("INFO", "penstock.backends.weights.network")
    bench, other = served.bench, Landing()
    disk, bench.exporter = bench.exporter, PushExporter("network", 1, "127.0.0.1")
    try:
        source = WeightSource("engine/1", 0, other.pass_on("engine/1", "127.0.0.1"))
        for _ in range(2):  # whole, and then what has changed since
            served.model = served.next_model()
            manifest = msgspec.structs.replace(bench.export(weights_of(served.model)), sources=(source,))
            other.land(manifest)
            caplog.clear()
            staged = bench.fetch(manifest)
            assert (staged.digest, staged.error) == (manifest.digest, "")
            assert ": 0 bytes came from the learner" in caplog.text
            bench.apply(manifest, UpdateMode.DRAIN)
            assert bench.hear(WeightsSwapped).digest == manifest.digest
            check(served.model, prompt_of(82), bench.ended(prompt_of(82)), manifest.version)
    finally:
        other.stop()
        bench.exporter.close()
        bench.exporter = disk
    served.update(UpdateMode.DRAIN)


def test_the_canary_is_scored_with_the_weights_that_were_loaded(served: Served) -> None:
    canary = prompt_of(90, num_tokens=16)
    new = served.next_model()
    manifest = served.bench.stage(new, canary)
    served.bench.apply(manifest, UpdateMode.DRAIN)
    swapped = served.bench.hear(WeightsSwapped)
    assert manifest.canary is not None
    assert canary_difference(manifest.canary, swapped.canary_logprobs) < TOLERANCE
    assert canary_difference(reference_canary(served.model, canary), swapped.canary_logprobs) > LOOSE_CANARY
    served.model = new
