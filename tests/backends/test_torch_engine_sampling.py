"""How tokens are drawn: the stream of uniforms, the cut-offs, the log-probs."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.backends.engines.torch.sampling import (
    DRAWN_BLOCK,
    Sampler,
    SampleWords,
    as_uniforms,
    draw,
    draw_in_blocks,
    uniforms,
)

VOCAB_SIZE = 50


def _logits(rows: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * scale


def _truncated(probs: np.ndarray[tuple[int], np.dtype[np.float64]], sampler: Sampler) -> dict[int, float]:
    """What is left of one row, renormalised: top-k, then top-p, then min-p, by the book."""
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    left = ranked[: sampler.top_k] if sampler.top_k else ranked
    kept: list[int] = []
    total = sum(probs[token] for token in left)
    for token in left:
        if sum(probs[other] for other in kept) >= sampler.top_p * total:
            break
        kept.append(token)
    kept = [token for token in kept if probs[token] >= sampler.min_p * probs[ranked[0]]]
    weight = sum(probs[token] for token in kept)
    return {token: probs[token] / weight for token in kept}


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(),
        Sampler(temperature=0.6),
        Sampler(top_k=7),
        Sampler(top_k=1),
        Sampler(top_k=500),
        Sampler(top_p=0.8),
        Sampler(top_p=0.05),
        Sampler(min_p=0.1),
        Sampler(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_invert_the_truncated_cdf(sampler: Sampler) -> None:
    logits = _logits(200)
    uniform = torch.as_tensor(uniforms(3, 200))[:, None]
    tokens, logprobs = sampler(logits, uniform)
    scaled = torch.log_softmax(logits.double() / sampler.temperature, -1)
    for row in range(200):
        kept = _truncated(scaled[row].exp().numpy(), sampler)
        cumulated, target = 0.0, float(uniform[row])
        expected = -1
        for token in sorted(kept):
            cumulated += kept[token]
            if cumulated > target:
                expected = token
                break
        assert int(tokens[row]) == expected
        assert float(logprobs[row]) == pytest.approx(float(scaled[row, expected]), abs=1e-5)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    ("sampler", "warper"),
    [
        (Sampler(top_k=7), TopKLogitsWarper(7)),
        (Sampler(top_p=0.8), TopPLogitsWarper(0.8)),
        (Sampler(min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_what_is_kept_is_what_transformers_keeps(sampler: Sampler, warper: TopKLogitsWarper) -> None:
    logits = _logits(1)
    kept = {int(sampler(logits, torch.tensor([[u]], dtype=torch.float64))[0]) for u in np.linspace(0, 1 - 1e-9, 20_000)}
    expected = warper(cast("torch.LongTensor", torch.zeros(1, 1, dtype=torch.int64)), cast("torch.FloatTensor", logits))
    assert kept == {token for token in range(VOCAB_SIZE) if expected[0, token].isfinite()}


def test_frequencies_are_the_probabilities() -> None:
    logits, count = _logits(1), 200_000
    uniform = torch.as_tensor(uniforms(11, count))[:, None]
    tokens, _ = Sampler()(logits.expand(count, -1), uniform)
    probs = logits.softmax(-1)[0].double()
    frequencies = torch.bincount(tokens.flatten(), minlength=VOCAB_SIZE) / count
    assert ((frequencies - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt() + 1e-9).all()


def test_greedy_takes_the_likeliest_with_its_logprob_at_temperature_one() -> None:
    logits = _logits(20)
    tokens, logprobs = Sampler(temperature=0, top_k=3)(logits, torch.zeros(20, 1, dtype=torch.float64))
    assert torch.equal(tokens[:, 0], logits.argmax(-1))
    assert torch.allclose(logprobs[:, 0], torch.log_softmax(logits, -1).amax(-1))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_draw_tokens_that_can_come(uniform: float) -> None:
    logits = torch.full((1, VOCAB_SIZE), -200.0)
    logits[0, [3, 40]] = 0.0
    tokens, _ = Sampler()(logits, torch.tensor([[uniform]], dtype=torch.float64))
    assert int(tokens) == (3 if uniform == 0 else 40)


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -5.0]])
    for sampler in (Sampler(top_k=2), Sampler(top_p=0.5)):
        drawn = {int(sampler(logits, torch.tensor([[u]], dtype=torch.float64))[0]) for u in np.linspace(0, 0.999, 500)}
        assert drawn == {1, 2, 3}


def test_rare_tokens_at_the_end_of_a_large_vocabulary_keep_their_share() -> None:
    size = 200_000
    logits = torch.zeros(1, size)
    logits[0, 0] = 20.7  # the others have 1e-9 each, far below the resolution of float32 near 1
    probs = torch.log_softmax(logits, -1).exp().double()[0]
    rest = float(probs[1:].sum() / probs.sum())
    shares = torch.linspace(0.001, 0.999, 300, dtype=torch.float64)
    drawn = torch.cat([Sampler()(logits, (1 - rest * share).view(1, 1))[0] for share in shares]).flatten()
    assert (drawn - size * (1 - shares)).abs().max() < 3


def test_the_stream_depends_on_seed_and_place_only() -> None:
    assert np.array_equal(uniforms(5, 10), uniforms(5, 300)[:10])
    assert not np.array_equal(uniforms(5, 10), uniforms(6, 10))
    assert np.array_equal(uniforms(-1, 4), uniforms(2**64 - 1, 4))
    assert [f"{value:.15f}" for value in uniforms(1234567890123456789, 3)] == GOLDEN
    drawn = uniforms(0, 100_000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(drawn, uniforms(1, 100_000))[0, 1]) < 0.015


def test_the_words_of_a_sample_do_not_depend_on_whose_were_taken_before() -> None:
    words = SampleWords()
    for seed, count in ((7, 3), (1234567890123456789, 3), (-1, 1), (7, 300)):
        assert np.array_equal(as_uniforms(words.of(seed, count)), uniforms(seed, count))


GOLDEN = ["0.049252108454456", "0.072493465746812", "0.438914663659906"]


@pytest.mark.parametrize("size", [5, DRAWN_BLOCK, 3 * DRAWN_BLOCK + 7])
def test_drawing_in_blocks_is_drawing(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.softmax(4 * torch.randn(200, size, generator=generator), -1)
    weights[::2] *= torch.rand(100, size, generator=generator) < 0.05  # cut down, with blocks of nothing
    weights[:, size // 2] += 1e-6
    uniform = torch.rand(200, 1, dtype=torch.float64, generator=generator)
    uniform[:4, 0] = torch.tensor([0.0, 1 - 2.0**-53, 0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens = draw_in_blocks(weights, uniform)
    assert torch.equal(tokens, draw(weights, uniform))
    assert (weights.gather(1, tokens) > 0).all()


def test_a_row_of_no_numbers_draws_some_token_in_blocks_too() -> None:
    weights = torch.full((3, 2 * DRAWN_BLOCK), math.nan)
    tokens = draw_in_blocks(weights, torch.full((3, 1), 0.5, dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 2 * DRAWN_BLOCK)).all()
