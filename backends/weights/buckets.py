"""Which tensors travel together: runs of bytes of the tensor file, so that no bucket has to be gathered.

Invariants:

* A bucket is one run of bytes of the file; its tensors follow one another in it without gaps.
* Within a bucket every tensor begins at a multiple of its element size: the file has larger elements first. A server
  refuses a bucket where one does not.
* Only a tensor that is larger than the bucket size makes a bucket larger than it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backends.weights.tensor_file import Layout, Placed


class Bucket(NamedTuple):
    """One run of bytes and what lies in it."""

    start: int
    """First byte, counted from the start of the file."""
    size_bytes: int
    tensors: tuple[Placed, ...]


def plan_buckets(layout: Layout, bucket_size_bytes: int, aliases: Iterable[str] = ()) -> tuple[Bucket, ...]:
    """Every tensor of a file once, and these further names of shared tensors, each in a bucket of its own."""
    buckets: list[Bucket] = []
    run: list[Placed] = []
    for tensor in sorted(layout.placed, key=lambda tensor: tensor.start):
        if not tensor.size_bytes:
            continue
        follows = bool(run) and run[-1].start + run[-1].size_bytes == tensor.start
        if run and (not follows or tensor.start + tensor.size_bytes - run[0].start > bucket_size_bytes):
            buckets.append(_bucket(run))
            run = []
        run.append(tensor)
    if run:
        buckets.append(_bucket(run))
    by_name = {tensor.name: tensor for tensor in layout.placed}
    buckets.extend(_bucket([by_name[layout.aliases[alias]]._replace(name=alias)]) for alias in aliases)
    return tuple(buckets)


def _bucket(run: list[Placed]) -> Bucket:
    start = run[0].start
    return Bucket(start, run[-1].start + run[-1].size_bytes - start, tuple(run))
