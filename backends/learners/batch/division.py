"""The micro-batches of one optimizer step, divided over ranks.

Invariants:

* Each sequence is in exactly one micro-batch of exactly one rank, whole.
* Every rank has equally many micro-batches, of which some may be empty: ranks that gather their weights do so together.
  Micro-batches of one round cost about the same, so that no rank waits long for another.
* The division is a function of its arguments alone, so every rank finds the same one and nothing is sent.
* One rank has the micro-batches of :func:`.split_into_micro_batches`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.learners.batch.packing import in_packing_order, split_into_micro_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backends.learners.batch.sequences import TrainSequence

MicroBatch = list["TrainSequence"]


class Division(NamedTuple):
    """The micro-batches of one optimizer step."""

    ranks: list[list[MicroBatch]]
    """By rank and round; an empty list where a rank has nothing to do in a round."""

    @property
    def in_order(self) -> list[MicroBatch]:
        """Those of all ranks that are not empty, round by round."""
        return [part for parts in zip(*self.ranks, strict=True) for part in parts if part]

    @property
    def is_finest(self) -> bool:
        """Whether each sequence is alone, so that smaller micro-batches would be the same ones."""
        return all(len(part) <= 1 for parts in self.ranks for part in parts)


def divide_over_ranks(
    sequences: Sequence[TrainSequence], *, num_ranks: int, max_tokens: int, hidden_size: int
) -> Division:
    """Few rounds of micro-batches with at most ``max_tokens`` inputs each.

    Two ways are tried, and the one with the smaller sum over the rounds of their dearest micro-batch is taken: to cut
    the sequences in the order of packing, which keeps shared contexts together, and to deal them out by cost, which is
    more even where they are few and long.

    Args:
        sequences: at least one.
        num_ranks: at least 1.
        max_tokens: of a micro-batch; a sequence that is longer is alone in its own.
        hidden_size: of the model; see :func:`sequence_cost`.
    """
    if num_ranks == 1:
        return Division([split_into_micro_batches(sequences, max_tokens)])
    ordered = in_packing_order(sequences)
    fewest = len(split_into_micro_batches(sequences, max_tokens))
    num_rounds = -(-fewest // num_ranks)
    cut = _cut(ordered, num_rounds * num_ranks, max_tokens, hidden_size)
    dealt = _deal(ordered, num_rounds * num_ranks, max_tokens, hidden_size)
    divisions = [_by_rank(parts, num_ranks, hidden_size) for parts in (cut, dealt) if parts is not None]
    return min(divisions, key=lambda division: _duration(division, hidden_size))


def sequence_cost(num_inputs: int, *, hidden_size: int) -> float:
    """Of training on a sequence, in tokens: attention computes ``2 · L · H · n`` products a token where all matrices
    together compute about ``12 · L · H²``, with L layers, H the width and n the mean number of tokens seen, half of
    the sequence."""
    return num_inputs + num_inputs**2 / (12 * hidden_size)


def micro_batch_cost(part: Iterable[TrainSequence], *, hidden_size: int) -> float:
    """Of a micro-batch: as of its sequences, with each shared context once in everything but attention."""
    cost, seen = 0.0, set[int]()
    for sequence in part:
        cost += sequence_cost(_num_inputs(sequence), hidden_size=hidden_size)
        if sequence.prompt in seen:
            cost -= sequence.num_context
        seen.add(sequence.prompt)
    return cost


def _num_inputs(sequence: TrainSequence) -> int:
    return len(sequence.tokens) - 1


def _cut(ordered: Sequence[TrainSequence], num_parts: int, max_tokens: int, hidden_size: int) -> list[MicroBatch]:
    """Stretches of the order, the dearest of which is as cheap as it can be with that many of them."""
    costs = [sequence_cost(_num_inputs(sequence), hidden_size=hidden_size) for sequence in ordered]
    low, high = max(costs), sum(costs)
    best = _stretches(ordered, costs, high, max_tokens)
    # The cheapest bound is a sum of costs; this close to it no other sum is below.
    while high - low > 0.25:
        middle = (low + high) / 2
        found = _stretches(ordered, costs, middle, max_tokens)
        if len(found) <= num_parts:
            best, high = found, middle
        else:
            low = middle
    return best


def _stretches(
    ordered: Sequence[TrainSequence], costs: Sequence[float], max_cost: float, max_tokens: int
) -> list[MicroBatch]:
    parts: list[MicroBatch] = []
    tokens, cost = max_tokens + 1, 0.0
    for sequence, own_cost in zip(ordered, costs, strict=True):
        own = _num_inputs(sequence)
        if tokens + own > max_tokens or cost + own_cost > max_cost:
            parts.append([])
            tokens, cost = 0, 0.0
        parts[-1].append(sequence)
        tokens, cost = tokens + own, cost + own_cost
    return parts


def _deal(
    ordered: Sequence[TrainSequence], num_parts: int, max_tokens: int, hidden_size: int
) -> list[MicroBatch] | None:
    """Each sequence, the dearest first, to the cheapest micro-batch that has room; None where one finds none."""
    parts: list[MicroBatch] = [[] for _ in range(num_parts)]
    tokens, costs = [0] * num_parts, [0.0] * num_parts
    for sequence in sorted(ordered, key=lambda sequence: -_num_inputs(sequence)):
        own = _num_inputs(sequence)
        roomy = [part for part in range(num_parts) if not parts[part] or tokens[part] + own <= max_tokens]
        if not roomy:
            return None
        part = min(roomy, key=lambda part: costs[part])
        parts[part].append(sequence)
        tokens[part] += own
        costs[part] += sequence_cost(own, hidden_size=hidden_size)
    return [part for part in parts if part]


def _by_rank(parts: Sequence[MicroBatch], num_ranks: int, hidden_size: int) -> Division:
    """The dearest micro-batches in the first round, and so on; within a round the dearest to the rank that has the
    least to do so far."""
    costs = [micro_batch_cost(part, hidden_size=hidden_size) for part in parts]
    order = sorted(range(len(parts)), key=lambda part: (-costs[part], part))
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        taken = order[start : start + num_ranks]
        seats = sorted(range(num_ranks), key=lambda rank: (loads[rank], rank))
        for seat, rank in enumerate(seats):
            part = taken[seat] if seat < len(taken) else None
            ranks[rank].append([] if part is None else list(parts[part]))
            loads[rank] += 0.0 if part is None else costs[part]
    return Division(ranks)


def _duration(division: Division, hidden_size: int) -> float:
    rounds = zip(*division.ranks, strict=True)
    return sum(max(micro_batch_cost(part, hidden_size=hidden_size) for part in parts) for parts in rounds)
