"""Prompts that come more than once, within a dataset and in two of them.

Invariants:

* A prompt is what the model sees: token ids, and what is no text. Labels do not count.
* Each prompt is kept as 64 bits of a hash, so two that differ count as the same once in 10^19 pairs.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.messages.texts import counted, does

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from penstock.messages.samples import Media

MAX_EXAMPLES: Final = 3
PASS_ROWS: Final = 1 << 22
"""Hashes that are looked at together, so that the memory does not grow with the dataset."""


class Duplicates(NamedTuple):
    """Rows whose prompt an earlier row has."""

    num_rows: int = 0
    examples: tuple[tuple[int, int], ...] = ()
    """Row, and the first row that has the same prompt; the first few, in their order."""


def prompt_hash(tokens: bytes, media: Sequence[Media] = ()) -> int:
    """64 bits of a prompt."""
    digest = blake2b(tokens, digest_size=8)
    for each in media:
        digest.update(f"\0{each.kind}\0{each.digest or each.reference}".encode())
    return int.from_bytes(digest.digest(), "little")


def duplicates_in(hashes: npt.NDArray[np.uint64], *, pass_rows: int = PASS_ROWS) -> Duplicates:
    """Those of a dataset with these hashes, which may be more than fit into memory."""
    num_passes = max(1, -(-len(hashes) // pass_rows))
    num_rows, examples = 0, list[tuple[int, int]]()
    for number in range(num_passes):
        rows, values = _part(hashes, number, num_passes, pass_rows)
        order = np.argsort(values, kind="stable")
        same = np.flatnonzero(values[order][1:] == values[order][:-1]) + 1
        num_rows += len(same)
        repeated = np.sort(rows[order[same]])[:MAX_EXAMPLES]
        for row in repeated:
            first = int(rows[np.flatnonzero(values == hashes[row])[0]])
            examples.append((int(row), first))
    return Duplicates(num_rows, tuple(sorted(examples)[:MAX_EXAMPLES]))


def rows_in_both(
    hashes: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64], *, pass_rows: int = PASS_ROWS
) -> Duplicates:
    """Rows of the second dataset whose prompt the first has, each with the row there."""
    num_rows, examples = 0, list[tuple[int, int]]()
    for start in range(0, len(hashes), pass_rows):
        part = np.asarray(hashes[start : start + pass_rows])
        found = np.flatnonzero(np.isin(others, part))
        num_rows += len(found)
        for row in found[:MAX_EXAMPLES]:
            examples.append((int(row), start + int(np.flatnonzero(part == others[row])[0])))
    return Duplicates(num_rows, tuple(sorted(examples)[:MAX_EXAMPLES]))


def duplicates_text(duplicates: Duplicates, place_of: Callable[[int], str]) -> str:
    """For people; empty where there are none."""
    if not duplicates.num_rows:
        return ""
    pairs = ", ".join(f"{place_of(row)} as {place_of(first)}" for row, first in duplicates.examples)
    more = "" if duplicates.num_rows == len(duplicates.examples) else ", …"
    number = duplicates.num_rows
    return f"{counted(number, 'row')} {does(number, 'have')} the prompt of an earlier one ({pairs}{more})"


def _part(
    hashes: npt.NDArray[np.uint64], number: int, num_parts: int, pass_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Row numbers and hashes of those of one residue."""
    if num_parts == 1:
        return np.arange(len(hashes), dtype=np.int64), np.asarray(hashes)
    rows, values = list["npt.NDArray[np.int64]"](), list["npt.NDArray[np.uint64]"]()
    for start in range(0, len(hashes), pass_rows):
        part = np.asarray(hashes[start : start + pass_rows])
        here = np.flatnonzero(part % np.uint64(num_parts) == number)
        rows.append(here + start)
        values.append(part[here])
    return np.concatenate(rows), np.concatenate(values)
