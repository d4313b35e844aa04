"""The sources of a dataset, and how many prompts come from each.

Invariants:

* Whatever a source leaves open is as the ``data:`` block says; nobody else looks at a source's own options.
* Shares are whole numbers, so that what they mean is the same on every machine.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.data.options import DataOptions, SourceOptions
from penstock.backends.data.sources import parse_source

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PERIOD: Final = 10_000
"""Shares are exact where they can be written with whole numbers that add up to this, and rounded to it otherwise."""

_TAKEN_OVER: Final = ("path", "name", "weight", "label_key", "metadata", "system_prompt", "tools_key")


class NamedSource(NamedTuple):
    """One source with all its options."""

    name: str
    key: str
    """Of its path in the scenario, for messages."""
    path: str
    options: DataOptions
    """``path`` is that of the source, and ``sources`` is empty."""
    weight: float | None = None


def named_sources(data: DataOptions) -> tuple[NamedSource, ...]:
    """The sources of a ``data:`` block that its rules have passed."""
    if data.source is not None:
        file, _, name = data.source.rpartition(":")
        return (NamedSource(name, "data.source", file, data),)
    if data.path is not None:
        return (NamedSource(_stem(data.path), "data.path", data.path, data),)
    return tuple(
        NamedSource(
            source.name or _stem(source.path),
            f"data.sources[{index}].path",
            source.path,
            _merged(data, source),
            source.weight,
        )
        for index, source in enumerate(data.sources)
    )


def shares_of(weights: Sequence[float | None]) -> tuple[int, ...]:
    """The least whole numbers in the same proportions, or the nearest that add up to :data:`MAX_PERIOD`; zeros where
    there are no weights."""
    given = [Fraction(str(weight)) for weight in weights if weight is not None]
    if len(given) < max(2, len(weights)):
        return (0,) * len(weights)
    common = math.lcm(*(weight.denominator for weight in given))
    whole = [int(weight * common) for weight in given]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    if sum(whole) <= MAX_PERIOD:
        return tuple(whole)
    exact = [weight * MAX_PERIOD / sum(given) for weight in given]
    rounded = [max(1, int(share)) for share in exact]
    # What rounding down has left goes to those that lost most; the order settles ties.
    for index in sorted(range(len(exact)), key=lambda i: rounded[i] - exact[i])[: max(0, MAX_PERIOD - sum(rounded))]:
        rounded[index] += 1
    return tuple(rounded)


def _merged(data: DataOptions, source: SourceOptions) -> DataOptions:
    own = {
        name: value
        for name in SourceOptions.__struct_fields__
        if name not in _TAKEN_OVER and (value := getattr(source, name)) is not None
    }
    texts = {
        name: value or None
        for name in ("label_key", "system_prompt", "tools_key")
        if (value := getattr(source, name)) is not None
    }
    metadata = {**data.metadata, **(source.metadata or {})}
    return msgspec.structs.replace(data, path=source.path, sources=(), metadata=metadata, **own, **texts)


def _stem(path: str) -> str:
    """``lines`` of ``lines:256``, ``rows`` of ``folder/rows.jsonl.gz@[0:9]``."""
    return Path(parse_source(path).path).name.split(":")[0].split(".")[0] or "data"
