"""Attention over rows laid end to end is that over padded rows.

The kernel that takes them exists on GPUs only; on a CPU its place is taken by one sequence after the other.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.torch import attention
from penstock.backends.learners.torch.attention import PackedRows, has_uneven_kernel, packed_attention

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.batch.packing import PackedTokens

CPU = torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 4, 2, 16


def make_packed(seed: int) -> PackedTokens:
    """Sequences of uneven lengths, some of which share their context."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(9) for _ in range(draw.randint(1, 9))] for _ in range(3)]
    chosen = sorted(draw.randrange(3) for _ in range(7))
    sequences = [
        demonstration_sequence(prompts[index], [draw.randrange(9) for _ in range(draw.randint(1, 20))], sample=index)
        for index in chosen
    ]
    return pack(sequences)


SINKS = torch.linspace(-1.0, 2.0, HEADS)


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch's kernel is documented to compute."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert window_size[1] == 0
    rows: list[Tensor] = []
    for start, end in pairwise(int(place) for place in cu_seq_q):
        place = torch.arange(end - start)
        age = place[:, None] - place[None, :]
        seen = (age >= 0) & ((age <= window_size[0]) if window_size[0] >= 0 else torch.tensor(data=True))
        q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        rows.append(attended.transpose(0, 1))
    return torch.cat(rows)


def states_of(packed: PackedTokens, seed: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = len(packed.input_ids)
    return [
        torch.randn(1, heads, count, SIZE, generator=draw).to(device, dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def attended(states: list[Tensor], rows: PackedRows, window: int | None) -> tuple[Tensor, list[Tensor]]:
    """The output, and a gradient with respect to each of the states."""
    query, key, value = states
    output, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, packed_rows=rows
    )
    slopes = torch.linspace(-1.0, 1.0, output.numel(), device=output.device, dtype=output.dtype).view_as(output)
    return output, list(torch.autograd.grad((output * slopes).sum(), states))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(5))
def test_rows_end_to_end_are_padded_rows(seed: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", one_by_one)
    packed = make_packed(seed)
    states = states_of(packed, seed, CPU, torch.float32)
    padded, padded_slopes = attended(states, PackedRows.of(packed, CPU), window)
    uneven, slopes = attended(states, PackedRows.end_to_end(packed, CPU), window)
    torch.testing.assert_close(uneven, padded)
    for found, expected in zip(slopes, padded_slopes, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("seed", range(3))
def test_scores_that_are_bent_or_have_a_sink_are_computed_in_either_layout(seed: int, window: int | None) -> None:
    packed = make_packed(seed)
    states = states_of(packed, seed, CPU, torch.float32)
    q, k, v = states
    padded, end_to_end = PackedRows.of(packed, CPU), PackedRows.end_to_end(packed, CPU)
    found = {
        rows is padded: packed_attention(
            torch.nn.Identity(), q, k, v, None, sliding_window=window, packed_rows=rows, softcap=1.5, s_aux=SINKS
        )[0]
        for rows in (padded, end_to_end)
    }
    assert torch.equal(found[True], found[False])
    query, key, value = (padded.spread(tokens) for tokens in states)
    keys, values = (tokens.repeat_interleave(HEADS // KEY_HEADS, 1) for tokens in (key, value))
    wanted = torch.zeros_like(query)
    for head in range(HEADS):  # the plain formula, token by token
        for place in range(query.shape[2]):
            first = 0 if window is None else max(0, place - window + 1)
            seen = slice(first, place + 1)
            scores = (query[:, head, place, None] * keys[:, head, seen]).sum(-1) / SIZE**0.5
            weights = (1.5 * torch.tanh(scores / 1.5)).exp()
            shares = weights / (weights.sum(-1, keepdim=True) + SINKS[head].exp())
            wanted[:, head, place] = (shares[..., None] * values[:, head, seen]).sum(1)
    torch.testing.assert_close(found[True], padded.gather(wanted))


def test_what_responses_begin_with_is_among_the_inputs_once() -> None:
    responses = ([5, 6, 7, 8], [5, 6, 7], [5, 6, 1, 2], [5, 6, 7, 8], [9])
    group = [demonstration_sequence([3, 4], tokens, sample=sample) for sample, tokens in enumerate(responses)]
    group = [sequence._replace(prompt=0) for sequence in group]
    packed = pack([*group, demonstration_sequence([3, 4], [5, 6], sample=9)])
    # The last token of a response is no input; that of another context is, though its tokens are the same.
    assert packed.input_ids.tolist() == [3, 4, 5, 6, 7, 1, 3, 4, 5]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 0, 1, 2]
    assert packed.rows.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [6, 7, 8, 0, 0]]
    assert packed.lengths.tolist() == [5, 5, 3]
    assert packed.predicted_at.tolist() == [1, 2, 3, 4, 1, 2, 3, 1, 2, 3, 5, 1, 2, 3, 4, 1, 7, 8]
    assert packed.targets.tolist() == [*(token for each in responses for token in each), 5, 6]


def test_a_cpu_pads() -> None:
    assert not has_uneven_kernel(CPU, torch.bfloat16)
    assert PackedRows.of(make_packed(0), CPU, torch.bfloat16).ends is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel exists on GPUs only")
@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_of_a_gpu_computes_padded_rows(window: int | None) -> None:
    device = torch.device("cuda:0")
    packed = make_packed(1)
    states = states_of(packed, 1, device, torch.bfloat16)
    padded, padded_slopes = attended(states, PackedRows.of(packed, device, torch.float32), window)
    uneven, slopes = attended(states, PackedRows.of(packed, device, torch.bfloat16), window)
    torch.testing.assert_close(uneven, padded, atol=2e-2, rtol=2e-2)
    for found, expected in zip(slopes, padded_slopes, strict=True):
        torch.testing.assert_close(found, expected, atol=5e-2, rtol=5e-2)
