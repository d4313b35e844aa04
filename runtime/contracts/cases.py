"""Groups as a run would have them: usual ones, and every awkward shape that is allowed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.samples import (
    Completed,
    CountedSample,
    Group,
    Part,
    PolicyError,
    Prompt,
    Reward,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    Truncated,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION: Final = 6
"""Of the policy that trains them; their tokens are of the versions 4 to 6."""
VOCAB: Final = 1000


class Case(NamedTuple):
    """Groups that come together, with what their responses say."""

    name: str
    groups: tuple[Group, ...]
    responses: tuple[tuple[str, ...], ...]
    """Responses by group and by sample."""


def cases() -> tuple[Case, ...]:
    """All of them, the same at each call."""
    return (
        _case("two groups of four", [[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 1.0, 0.0]]),
        _case("a group of one sample", [[0.5]]),
        _case("equal rewards", [[1.0, 1.0, 1.0]]),
        _case("an empty response", [[0.0, 1.0, 0.5]], lengths=[0, 7, 3]),
        _case("responses of one token", [[1.0, 0.0]], lengths=[1, 1]),
        _case("tokens that the model did not make", [[1.0, 0.0, 0.5]], masked=True),
        _case("several parts", [[1.0, 0.0]], num_parts=3),
        _case("no label and no metadata", [[0.0, 1.0]], label="", metadata=None),
        _case("a truncated response and an error of the model", [[0.0, 0.0, 1.0]], outcomes=True),
        _case("negative and large rewards", [[-5.0, 1e6, 0.0]]),
        _case("a sample that a filter dropped", [[1.0, 0.0, 0.5]], counted=0.75),
        _case("a group of 128 samples", [[index % 7 / 7 for index in range(128)]]),
    )


def texts() -> tuple[tuple[str, str], ...]:
    """Responses of all kinds, by what is unusual about them; the label is 42."""
    return (
        ("the right answer", "The answer is \\boxed{42}."),
        ("a wrong answer", "The answer is \\boxed{7}."),
        ("the label alone", "42"),
        ("an empty response", ""),
        ("white space only", " \n\t "),
        ("no answer in it", "I do not know."),
        ("two answers", "\\boxed{42} or \\boxed{43}"),
        ("unbalanced braces", "\\boxed{{{42"),
        ("other alphabets and signs", "答えは４２です \N{ROCKET} \x00 \ufffd"),
        ("100,000 characters", "42 " * 33_334),
        ("JSON that is none", '{"answer": 42'),
    )


def _case(
    name: str,
    rewards: Sequence[Sequence[float]],
    *,
    lengths: Sequence[int] | None = None,
    masked: bool = False,
    num_parts: int = 1,
    label: str = "42",
    metadata: dict[str, object] | None = {"source": "contract", "level": 3},  # noqa: B006  # only read
    outcomes: bool = False,
    counted: float | None = None,
) -> Case:
    draw = random.Random(name)
    groups: list[Group] = []
    for number, row in enumerate(rewards):
        samples = tuple(
            _sample(
                draw,
                SampleKey(3 + 4 * number, index),
                reward,
                length=draw.randrange(2, 24) if lengths is None else lengths[index],
                masked=masked,
                num_parts=num_parts,
                outcome=index if outcomes else 0,
            )
            for index, reward in enumerate(row)
        )
        prompt = Prompt(
            row=17 + number,
            epoch=0,
            tokens=pack_tokens(draw.randrange(VOCAB) for _ in range(9)),
            text="What is 6 · 7?",
            label=label,
            metadata=b"" if metadata is None else msgspec.json.encode(metadata),
        )
        ended, dropped = _dropped(3 + 4 * number, len(row), counted)
        groups.append(Group(group_id=3 + 4 * number, prompt=prompt, samples=samples, ended=ended, counted=dropped))
    said = [text for _, text in texts()]
    responses = tuple(
        tuple("" if not sample.num_tokens else said[index % len(said)] for index, sample in enumerate(group.samples))
        for group in groups
    )
    return Case(name, tuple(groups), responses)


def _dropped(
    group_id: int, index: int, reward: float | None
) -> tuple[tuple[SampleEnd, ...], tuple[CountedSample, ...]]:
    if reward is None:
        return (), ()
    end = SampleEnd(key=SampleKey(group_id, index), state=TerminalState.FILTERED, cause="sample_filter", num_tokens=5)
    return (end,), (CountedSample(index, reward),)


def _sample(
    draw: random.Random, key: SampleKey, reward: float, *, length: int, masked: bool, num_parts: int, outcome: int
) -> Sample:
    parts = tuple(_part(draw, length, masked=masked, has_context=number > 0) for number in range(num_parts))
    given = Reward(value=reward, components=(Metric("format", 0.5),))
    match outcome % 3:
        case 1:
            return Sample(key=key, parts=parts, outcome=Truncated(reward=given))
        case 2:
            return Sample(key=key, parts=parts, outcome=PolicyError(detail="a malformed call", reward=given))
        case _:
            return Sample(key=key, parts=parts, outcome=Completed(reward=given))


def _part(draw: random.Random, length: int, *, masked: bool, has_context: bool) -> Part:
    mask = bytes(0 if masked and place % 3 == 1 else 1 for place in range(length))
    first = length // 2
    spans = [(VERSION - 2, first), (VERSION, length - first)]
    return Part(
        tokens=pack_tokens(draw.randrange(VOCAB) for _ in range(length)),
        logprobs=pack_floats(-draw.expovariate(1.0) if made else 0.0 for made in mask),
        spans=tuple(VersionSpan(version, count) for version, count in spans if count),
        loss_mask=mask if masked else b"",
        context_tokens=pack_tokens(draw.randrange(VOCAB) for _ in range(5)) if has_context else b"",
    )
