"""What has changed between two versions of the weights."""

# torch is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.weights.changes import apply_changes, changes_between


def applied(before: torch.Tensor, changes: bytes, num_words: int) -> torch.Tensor:
    made = before.clone()
    apply_changes(made.numpy().data, changes, num_words)
    return made


@given(st.integers(0, 3000), st.lists(st.tuples(st.integers(0, 10**6), st.integers(-(2**15), 2**15 - 1)), max_size=60))
def test_changes_make_the_new_bytes_of_the_old(num_words: int, edits: list[tuple[int, int]]) -> None:
    before = torch.arange(num_words, dtype=torch.int16)
    after = before.clone()
    for place, value in edits:
        if num_words:
            after[place % num_words] = value
    found = changes_between(before.view(torch.uint8), after.view(torch.uint8))
    changed = int((before != after).sum())
    if found is None:
        assert 3 * changed + 11 + num_words // 255 >= 2 * num_words  # there is no gain in it
        return
    assert found.num_words == changed
    assert torch.equal(applied(before.view(torch.uint8), found.data, found.num_words), after.view(torch.uint8))


def test_a_step_at_the_usual_rate_of_learning_is_a_small_share_of_the_bytes() -> None:
    torch.manual_seed(0)
    master = torch.randn(1_000_000) * 0.02
    after = (master + 1e-6 * torch.sign(torch.randn(1_000_000))).bfloat16().view(torch.uint8)
    found = changes_between(master.bfloat16().view(torch.uint8), after)
    assert found is not None
    assert 0 < len(found.data) < 0.05 * len(after)


@pytest.mark.parametrize(
    ("changes", "num_words"),
    [
        (b"", 1),
        (zlib.compress(b"\x00\x01"), 1),
        (zlib.compress(b"\x05\x00\x00"), 1),
        (zlib.compress(b"\xff\x00\x00"), 1),
        (zlib.compress(b"\x00\x00\x00"), -1),
        (zlib.compress(b"\x00\x00\x00\x00"), 1),
        (zlib.compress(b"\x00" * 18), 6),
        (zlib.compress(b"\xff" * 1_000_000), 1),
        (zlib.compress(b"\x00\x01\x00")[:-1], 1),
        (b"\x00\x01\x00", 1),
    ],
)
def test_what_are_no_changes_of_these_bytes_is_refused(changes: bytes, num_words: int) -> None:
    data = bytearray(10)
    with pytest.raises(ValueError, match="change"):
        apply_changes(memoryview(data), changes, num_words)
    assert data == bytearray(10)
