"""How micro-batches are divided over ranks."""

from __future__ import annotations

import random

import pytest

from penstock.backends.learners.batch.packing import (
    _deal,  # pyright: ignore[reportPrivateUsage]
    divide_over_ranks,
    micro_batch_cost,
    sequence_cost,
    split_into_micro_batches,
)
from penstock.backends.learners.batch.padded_division import divide_padded
from penstock.backends.learners.batch.sequences import TrainSequence, demonstration_sequence
from penstock.backends.learners.batch.step_load import SequenceLength, step_load

HIDDEN = 64


def make_sequences(seed: int, count: int, longest: int = 200) -> list[TrainSequence]:
    draw = random.Random(seed)
    found: list[TrainSequence] = []
    for sample in range(count):
        length = min(longest, 1 + int(draw.lognormvariate(3.0, 1.0)))
        one = demonstration_sequence([1] * (1 + sample % 3), [2] * length, sample=sample)
        found.append(one._replace(prompt=sample // 4, first=sample))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_is_on_one_rank_and_every_rank_has_as_many_micro_batches(seed: int, num_ranks: int) -> None:
    sequences = make_sequences(seed, random.Random(seed).randint(1, 60))
    division = divide_over_ranks(sequences, num_ranks=num_ranks, max_tokens=256, hidden_size=HIDDEN)
    assert len(division.ranks) == num_ranks
    assert len({len(parts) for parts in division.ranks}) == 1
    assert sorted(s.first for part in division.in_order for s in part) == list(range(len(sequences)))
    assert all(sum(len(s.tokens) - 1 for s in part) <= 256 or len(part) == 1 for part in division.in_order)
    # Nowhere two ranks wait while others work that could have shared it.
    fewest = len(split_into_micro_batches(sequences, 256))
    assert len(division.ranks[0]) <= -(-fewest // num_ranks) + 1
    assert division == divide_over_ranks(sequences, num_ranks=num_ranks, max_tokens=256, hidden_size=HIDDEN)


@pytest.mark.parametrize("seed", range(20))
def test_sequences_are_dealt_to_the_cheapest_that_has_room(seed: int) -> None:
    """As it reads in one line, where the heap must not differ: real learners divide by it, each rank for itself."""
    sequences = make_sequences(seed, 60)
    num_parts = random.Random(seed).choice([3, 8, 16, 40])
    parts: list[list[TrainSequence]] = [[] for _ in range(num_parts)]
    costs = [0.0] * num_parts
    wanted: list[list[TrainSequence]] | None = parts
    for sequence in sorted(sequences, key=lambda each: -len(each.tokens)):
        own = len(sequence.tokens) - 1
        roomy = [n for n, part in enumerate(parts) if not part or sum(len(s.tokens) - 1 for s in part) + own <= 256]
        if not roomy:
            wanted = None
            break
        cheapest = min(roomy, key=lambda part: costs[part])
        parts[cheapest].append(sequence)
        costs[cheapest] += sequence_cost(own, hidden_size=HIDDEN)
    assert _deal(sequences, num_parts, 256, HIDDEN) == (wanted and [part for part in wanted if part])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(20))
def test_padded_rows_stand_beside_others_of_like_length(seed: int, num_ranks: int) -> None:
    sequences = make_sequences(seed, random.Random(seed).randint(1, 60))
    division = divide_padded(sequences, num_ranks=num_ranks, max_tokens=256)
    assert len(division.ranks) == num_ranks
    assert len({len(parts) for parts in division.ranks}) == 1
    parts = division.in_order
    assert sorted(s.first for part in parts for s in part) == list(range(len(sequences)))
    lengths = [[len(s.tokens) - 1 for s in part] for part in parts]
    assert all(len(part) * max(part) <= 256 or len(part) == 1 for part in lengths)
    in_order = [length for part in lengths for length in part]
    assert in_order == sorted(in_order, reverse=True)
    # Fewer rounds would take fuller micro-batches than are allowed.
    greedy = [[10_000]]
    for length in in_order:
        if (len(greedy[-1]) + 1) * greedy[-1][0] > 256:
            greedy.append([])
        greedy[-1].append(length)
    assert len(division.ranks[0]) == -(-(len(greedy) - 1) // num_ranks)
    assert len(parts) <= len(division.ranks[0]) * num_ranks


def test_the_load_of_a_step_is_that_of_its_division() -> None:
    sequences = make_sequences(7, 40)
    lengths = [SequenceLength(s.prompt, s.num_context, len(s.tokens) - s.num_context) for s in sequences]
    alone = step_load(lengths, num_ranks=1, max_tokens=256)
    assert alone == (len(split_into_micro_batches(sequences, 256)), 1.0)
    two = step_load(lengths, num_ranks=2, max_tokens=256)
    assert alone.num_rounds / 2 <= two.num_rounds < alone.num_rounds
    assert 1.0 <= two.imbalance < 1.5
    # One long sequence is whole on one rank, and the other three wait.
    assert step_load([SequenceLength(0, 10, 91)], num_ranks=4, max_tokens=256) == (1, 4.0)
    assert step_load([SequenceLength(0, 10, 0)], num_ranks=4, max_tokens=256) == (0, 1.0)


def test_few_padded_rows_are_shared_by_the_ranks() -> None:
    sequences = make_sequences(3, 8, longest=20)
    assert len(divide_padded(sequences, num_ranks=1, max_tokens=1000).ranks[0]) == 1
    assert all(parts[0] for parts in divide_padded(sequences, num_ranks=2, max_tokens=1000).ranks)


def test_one_rank_has_the_micro_batches_that_it_always_had() -> None:
    sequences = make_sequences(1, 40)
    division = divide_over_ranks(sequences, num_ranks=1, max_tokens=100, hidden_size=HIDDEN)
    assert division.ranks == [split_into_micro_batches(sequences, 100)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_about_the_same_to_do_in_every_round(seed: int, num_ranks: int) -> None:
    sequences = make_sequences(seed, 64)
    division = divide_over_ranks(sequences, num_ranks=num_ranks, max_tokens=512, hidden_size=HIDDEN)
    costs = [[micro_batch_cost(part, hidden_size=HIDDEN) for part in parts] for parts in division.ranks]
    needed = sum(max(each) for each in zip(*costs, strict=True)) * num_ranks
    assert sum(map(sum, costs)) / needed > 0.85


def test_long_sequences_are_dealt_out_by_cost() -> None:
    """Cut in order, the best would be 190 against 130."""
    sequences = [
        demonstration_sequence([1], [2] * length, sample=index)._replace(first=index)
        for index, length in enumerate([100, 90, 80, 10, 10, 10, 10, 10])
    ]
    division = divide_over_ranks(sequences, num_ranks=2, max_tokens=1000, hidden_size=HIDDEN)
    loads = [sum(len(s.tokens) - 1 for s in parts[0]) for parts in division.ranks]
    assert sorted(loads) == [150, 170]


def test_ranks_without_a_sequence_have_empty_micro_batches() -> None:
    division = divide_over_ranks(make_sequences(1, 2), num_ranks=3, max_tokens=1000, hidden_size=HIDDEN)
    assert sorted(len(parts[0]) for parts in division.ranks) == [0, 1, 1]
    assert division.is_finest


def test_attention_makes_one_long_sequence_dearer_than_two_short_ones() -> None:
    assert sequence_cost(2000, hidden_size=HIDDEN) > 2 * sequence_cost(1000, hidden_size=HIDDEN)
    assert sequence_cost(10, hidden_size=4096) == pytest.approx(10, rel=1e-3)
