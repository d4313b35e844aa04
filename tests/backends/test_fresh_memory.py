"""Memory whose pages are made ahead, and the check of weights that a swap waits for."""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.backends.weights import pages
from penstock.backends.weights.fetched import is_finite
from penstock.backends.weights.pages import PIECE_BYTES, PagesAhead, address_of, can_populate, fresh_copy

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def resident_pages(address: int, size_bytes: int) -> int:
    counts = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), counts) == 0
    return sum(count & 1 for count in counts)


@pytest.mark.skipif(not can_populate(), reason="this kernel makes no pages when it is asked to")
def test_all_pages_of_a_range_are_made_and_what_is_there_stays() -> None:
    size_bytes = PIECE_BYTES + 3 * mmap.PAGESIZE
    with mmap.mmap(-1, size_bytes) as mapping:
        mapping[:5] = b"there"
        assert resident_pages(address_of(mapping), size_bytes) < size_bytes // mmap.PAGESIZE
        with PagesAhead(address_of(mapping) + 7, size_bytes - 7) as ahead:
            ahead.wait(0, size_bytes - 7)
            assert resident_pages(address_of(mapping), size_bytes) == size_bytes // mmap.PAGESIZE
        assert mapping[:6] == b"there\0"


@pytest.mark.skipif(not can_populate(), reason="this kernel makes no pages when it is asked to")
def test_pages_that_cannot_be_made_are_an_error_of_who_waits_for_them(tmp_path: Path) -> None:
    file = tmp_path / "short"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        file.write_bytes(b"")  # beyond its end a touch is a SIGBUS
        with PagesAhead(address_of(mapping), mmap.PAGESIZE) as ahead, pytest.raises(OSError, match="Bad address"):
            ahead.wait(0, mmap.PAGESIZE)


def test_an_older_kernel_is_told_from_a_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> None:
        def populate(_address: int, _size_bytes: int) -> None:
            raise OSError(number, "refused")

        monkeypatch.setattr(pages, "_populate", populate)

    refuse(errno.EINVAL)
    assert not can_populate()
    assert torch.equal(fresh_copy(torch.ones(2_000_000)), torch.ones(2_000_000))
    refuse(errno.ENOMEM)
    with pytest.raises(OSError, match="refused"):
        can_populate()


@pytest.mark.parametrize("size", [0, 1, 1_500_000])
def test_a_fresh_copy_is_equal_and_its_own(size: int) -> None:
    source = torch.arange(size, dtype=torch.float32)
    copy = fresh_copy(source)
    assert torch.equal(copy, source)
    assert not size or copy.data_ptr() != source.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [1, 7, 33, 1000])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float, size: int) -> None:
    for place in {0, size // 2, size - 1}:
        tensor = torch.linspace(-3, 3, size).to(dtype)
        assert is_finite(tensor)
        tensor[place] = value
        assert not is_finite(tensor)


def test_whole_numbers_none_and_floats_of_a_byte_are_finite() -> None:
    assert is_finite(torch.ones(3, dtype=torch.int64))
    assert is_finite(torch.empty(0))
    assert is_finite(torch.ones(3).to(torch.float8_e4m3fn))
