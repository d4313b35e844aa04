"""Plain text in columns, and sizes for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def bytes_text(size: float) -> str:
    """In decimal units, with three digits: ``12.3 GB``."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= limit * 0.9995:
            return f"{_three_digits(size / limit)} {unit}"
    return f"{size:.0f} B"


def count_text(count: float) -> str:
    """In words: ``30.5 billion``."""
    for limit, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= limit * 0.9995:
            return f"{_three_digits(count / limit)} {word}"
    return f"{count:.0f}"


def listed(numbers: Sequence[int], most: int = 4) -> str:
    """``0, 1, 2, 3``, or ``0, 8, … 56`` where there are more."""
    if len(numbers) <= most:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".")
