"""Responses that go round in circles."""

from __future__ import annotations

import random

import msgspec
import pytest
from ledger_entries import sample

from penstock.backends.learners.training.metrics import REPETITION_TOKENS, ends_in_repetition
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.samples import VersionSpan

RNG = random.Random(7)
CIRCLE = [RNG.randrange(150_000) for _ in range(12)]
PROSE = [RNG.choice(range(0, 150_000, 977)) for _ in range(2 * REPETITION_TOKENS)]


@pytest.mark.parametrize(
    ("tokens", "is_repetition"),
    [
        (PROSE + CIRCLE * (REPETITION_TOKENS // 12 + 1), True),
        (PROSE, False),
        (CIRCLE * 300 + PROSE, False),
        ([5] * REPETITION_TOKENS, True),
        ([5] * (REPETITION_TOKENS - 1), False),
    ],
)
def test_a_long_response_that_ends_in_circles_is_told_from_prose(tokens: list[int], is_repetition: bool) -> None:
    whole = sample(0, 0)
    (part,) = whole.parts
    part = msgspec.structs.replace(
        part,
        tokens=pack_tokens(tokens),
        logprobs=pack_floats([-1.0] * len(tokens)),
        spans=(VersionSpan(0, len(tokens)),),
    )
    assert ends_in_repetition(msgspec.structs.replace(whole, parts=(part,))) is is_repetition
