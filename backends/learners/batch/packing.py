"""The micro-batches of one optimizer step, each of a bounded number of tokens packed end to end without padding, and
how they are divided over ranks.

Axis letters: ``N`` input tokens of a micro-batch, ``B`` sequences of it, ``P`` positions of the longest of them,
``T`` its trained tokens.

Invariants:

* Each sequence is in exactly one micro-batch, whole. One that is longer than the bound is alone in its own.
* The last token of a sequence is predicted and predicts nothing, so it is no input and costs nothing.
* Sequences of a micro-batch that have the same context have its tokens among the inputs once, and so do those whose
  responses begin alike the tokens before they part: what comes of a token depends on those before it alone. Each sees
  its own tokens and nothing else; :attr:`PackedTokens.rows` says what that is.
* Each sequence is in exactly one micro-batch of exactly one rank, whole.
* Every rank has equally many micro-batches, of which some may be empty: ranks that gather their weights do so together.
  Micro-batches of one round cost about the same, so that no rank waits long for another.
* The division is a function of its arguments alone, so every rank finds the same one and nothing is sent.
* One rank alone has the micro-batches of :func:`split_into_micro_batches`.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.backends.learners.batch.kept_sets import kept_of
from penstock.backends.learners.batch.sequences import teacher_top_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.messages.samples import Media


_NOWHERE: Final[NDArray[np.int64]] = np.zeros(0, dtype=np.int64)


class Look(NamedTuple):
    """A context, or a response, with images."""

    start: int
    """Index of its first token among the inputs."""
    num_tokens: int
    media: tuple[Media, ...]
    """Counted from that token."""
    context_start: int
    """Where its context begins; itself, if it is one."""


class PackedTokens(NamedTuple):
    """One micro-batch."""

    input_ids: NDArray[np.int64]
    """``[N]``"""
    position_ids: NDArray[np.int64]
    """Position of each input in its sequence ``[N]``."""
    rows: NDArray[np.int64]
    """Index among the inputs of each position of each sequence ``[B, P]``; 0 past the end of a sequence. One that
    another begins with has no row."""
    places: NDArray[np.int64]
    """Of each input, one place in the flattened rows where it stands ``[N]``."""
    predicted_at: NDArray[np.int64]
    """Index ``[T]`` of the input whose next token is trained."""
    targets: NDArray[np.int64]
    """That next token ``[T]``."""
    rollout_logprobs: NDArray[np.float32]
    """``[T]``"""
    lengths: NDArray[np.int64]
    """Positions of each row ``[B]``, shared ones counted."""
    top_ids: NDArray[np.int64] | None = None
    """Tokens whose log-probs are wanted beside the target's ``[T, k]``; None: none are."""
    kept_ids: NDArray[np.int64] | None = None
    """Tokens that the log-prob of each target is taken over ``[T, W]``, −1 behind them; all −1: over the vocabulary.
    None: all are."""
    looks: tuple[Look, ...] = ()
    """Of the contexts and responses that have images, a context before its responses."""
    context_starts: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    """Where the context of each input begins ``[N]``."""


def split_into_micro_batches(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[TrainSequence]]:
    """Few micro-batches of at most ``max_tokens`` inputs each, all about equally full.

    Sequences with the same context stay together, so that they can share it, and so do those of like length, since
    attention pads to the longest. Shared contexts count for each sequence, as they do in attention.
    """
    ordered = in_packing_order(sequences)
    lengths = [len(sequence.tokens) - 1 for sequence in ordered]
    bound = _even_share(lengths, max_tokens)
    parts: list[list[TrainSequence]] = []
    room = 0
    for sequence, length in zip(ordered, lengths, strict=True):
        if length > room:
            parts.append([])
            room = bound
        parts[-1].append(sequence)
        room -= length
    return parts


def in_packing_order(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Those with the same context one after the other, the longest first."""
    longest: dict[int, int] = {}
    for sequence in sequences:
        longest[sequence.prompt] = max(longest.get(sequence.prompt, 0), len(sequence.tokens))
    return sorted(sequences, key=lambda s: (-longest[s.prompt], s.prompt, -len(s.tokens)))


def stand_in(sequence: TrainSequence) -> PackedTokens:
    """The smallest micro-batch that a model takes, from the first two tokens of a sequence. What comes of it counts
    for nothing; it is for a rank that has nothing of its own to run while the others do."""
    return pack([tiny_sequence(sequence)])


def tiny_sequence(sequence: TrainSequence) -> TrainSequence:
    """The beginning of a sequence, with one trained token."""
    return sequence._replace(
        tokens=sequence.tokens[:2],
        num_context=1,
        trained=np.ones(1, dtype=np.int64),
        rollout_logprobs=sequence.rollout_logprobs[:1],
        positions=sequence.positions[:1],
        versions=sequence.versions[:1],
        teacher_top=None,
        media=(),
        kept=None,
    )


def pack(sequences: Sequence[TrainSequence]) -> PackedTokens:
    """Lay the inputs of these sequences end to end, what several begin with once."""
    num_positions = max(len(sequence.tokens) for sequence in sequences) - 1
    inputs: list[NDArray[np.int32]] = []
    rows: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    predicted_at: list[NDArray[np.int64]] = []
    laid: dict[int, list[Laid]] = {}
    starts: list[NDArray[np.int64]] = []
    looks: list[Look] = []
    num_inputs = 0
    for sequence in sequences:
        tokens, siblings = sequence.tokens[:-1], laid.setdefault(sequence.prompt, [])
        own = shareable(sequence) if sequence.media else tokens
        shared = longest_shared(own, siblings)
        num_shared, num_new = len(shared), len(tokens) - len(shared)
        at = np.concatenate([shared, np.arange(num_inputs, num_inputs + num_new)])
        predicted_at.append(at[sequence.trained - 1])
        if sequence.media:
            looks += _looks(sequence, at, num_shared)
        if not num_new:
            continue
        siblings.append(Laid(own, at))
        starts.append(np.full(num_new, at[0]))
        inputs.append(tokens[num_shared:])
        places.append(np.arange(num_shared, len(tokens)) + len(rows) * num_positions)
        rows.append(at)
        num_inputs += num_new
    top = teacher_top_of(sequences)
    flat_places = np.concatenate(places)
    return PackedTokens(
        input_ids=np.concatenate(inputs).astype(np.int64),
        position_ids=flat_places % num_positions,
        rows=_filled(rows, num_positions),
        places=flat_places,
        predicted_at=np.concatenate(predicted_at),
        targets=np.concatenate([sequence.tokens[sequence.trained] for sequence in sequences]).astype(np.int64),
        rollout_logprobs=np.concatenate([sequence.rollout_logprobs for sequence in sequences]),
        lengths=np.asarray([len(at) for at in rows], dtype=np.int64),
        top_ids=None if top is None else top.ids,
        kept_ids=kept_of(sequences) if any(s.kept is not None for s in sequences) else None,
        looks=tuple(looks),
        context_starts=np.concatenate(starts),
    )


def _filled(rows: Sequence[NDArray[np.int64]], num_positions: int) -> NDArray[np.int64]:
    """As rows of one table, filled up with zeros. (``numpy.pad`` takes twenty times as long for each.)"""
    table = np.zeros((len(rows), num_positions), dtype=np.int64)
    for row, at in zip(table, rows, strict=True):
        row[: len(at)] = at
    return table


def shareable(sequence: TrainSequence) -> NDArray[np.int32]:
    """The first inputs of a sequence with images, which are those of any other with the same context that begins with
    the same tokens: all of them, but where images came in the response those of the context, as the same token may
    stand for another image."""
    has_later = any(each.at >= sequence.num_context for each in sequence.media)
    return sequence.tokens[: sequence.num_context if has_later else -1]


def _looks(sequence: TrainSequence, at: NDArray[np.int64], num_shared: int) -> Iterator[Look]:
    """The images of a sequence whose inputs are at ``at``, the first ``num_shared`` of them laid before."""
    num_context = sequence.num_context
    seen = tuple(each for each in sequence.media if each.at < num_context)
    if seen and not num_shared:
        yield Look(int(at[0]), num_context, seen, int(at[0]))
    if later := tuple(each.moved(-num_context) for each in sequence.media[len(seen) :]):
        yield Look(int(at[num_context]), len(at) - num_context, later, int(at[0]))


class Laid(NamedTuple):
    """The first inputs of a sequence, which others may begin with, and where all of them are in the micro-batch."""

    tokens: NDArray[np.int32]
    at: NDArray[np.int64]


def longest_shared(tokens: NDArray[np.int32], siblings: Iterable[Laid]) -> NDArray[np.int64]:
    """Where those of ``tokens`` are with which one of the siblings begins as well."""
    longest = _NOWHERE
    for known, at in siblings:
        shorter = min(len(tokens), len(known))
        if shorter <= len(longest):
            continue
        differing = tokens[:shorter] != known[:shorter]
        first = int(differing.argmax())
        common = first if differing[first] else shorter
        if common > len(longest):
            longest = at[:common]
    return longest


def _even_share(lengths: Sequence[int], max_tokens: int) -> int:
    """The smallest bound under which the split needs no more micro-batches than under ``max_tokens``."""
    fewest = _count_parts(lengths, max_tokens)
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if _count_parts(lengths, middle) <= fewest:
            high = middle
        else:
            low = middle + 1
    return high


def _count_parts(lengths: Sequence[int], bound: int) -> int:
    count = room = 0
    for length in lengths:
        if length > room:
            count, room = count + 1, bound
        room -= length
    return count


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
    fewest = _count_parts([_num_inputs(sequence) for sequence in ordered], max_tokens)
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
    lengths = [_num_inputs(sequence) for sequence in ordered]
    own_costs = [sequence_cost(length, hidden_size=hidden_size) for length in lengths]
    tokens, costs = [0, *accumulate(lengths)], [0.0, *accumulate(own_costs)]
    low, high = max(own_costs), costs[-1]
    best = _ends(tokens, costs, max_tokens, high)
    # The cheapest bound is a sum of costs; this close to it no other sum is below.
    while high - low > 0.25:
        middle = (low + high) / 2
        found = _ends(tokens, costs, max_tokens, middle)
        if len(found) <= num_parts:
            best, high = found, middle
        else:
            low = middle
    return [list(ordered[start:end]) for start, end in pairwise([0, *best])]


def _ends(tokens: Sequence[int], costs: Sequence[float], max_tokens: int, max_cost: float) -> list[int]:
    """Where the stretches of an order end, each as long as both bounds allow, of one sequence at least.

    Args:
        tokens: of all sequences before each one, and of all.
        costs: likewise.
        max_tokens: of a stretch.
        max_cost: likewise.
    """
    ends = [0]
    while (start := ends[-1]) < len(tokens) - 1:
        by_tokens = bisect_right(tokens, tokens[start] + max_tokens, start + 1)
        ends.append(max(start + 1, bisect_right(costs, costs[start] + max_cost, start + 1, by_tokens) - 1))
    return ends[1:]


def _deal(
    ordered: Sequence[TrainSequence], num_parts: int, max_tokens: int, hidden_size: int
) -> list[MicroBatch] | None:
    """Each sequence, the dearest first, to the cheapest micro-batch that has room; None where one finds none."""
    parts: list[MicroBatch] = [[] for _ in range(num_parts)]
    tokens = [0] * num_parts
    cheapest = [(0.0, part) for part in range(num_parts)]  # a heap: thousands of samples are dealt to hundreds
    for sequence in sorted(ordered, key=lambda sequence: -_num_inputs(sequence)):
        own = _num_inputs(sequence)
        full: list[tuple[float, int]] = []
        while cheapest and parts[cheapest[0][1]] and tokens[cheapest[0][1]] + own > max_tokens:
            full.append(heappop(cheapest))
        if not cheapest:
            return None
        cost, part = cheapest[0]
        parts[part].append(sequence)
        tokens[part] += own
        heapreplace(cheapest, (cost + sequence_cost(own, hidden_size=hidden_size), part))
        for each in full:
            heappush(cheapest, each)
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
