"""The weights of all ranks as they are published: gathered on the first one bucket by bucket, while it writes.

Invariants:

* Names, values and order are the same however many ranks there are; so is a digest of them.
* Each part of a weight is sent once, straight to its place in the whole, in the dtype of the model.
* At most two buckets are under way: while one is written the next one arrives. Other ranks than the first have their
  parts only.

| wait | who ends it |
|---|---|
| for the parts of a bucket | the ranks that have them, which go through it too; at the latest the group's timeout |
| for a bucket to have been sent | the first rank, when its caller asks for the next; at the latest that timeout |
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.backends.learners.checkpoints.shards import RowGather, is_divided, shard_of
from penstock.backends.learners.torch.parallel import is_sharded
from penstock.backends.weights.stream import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from penstock.backends.learners.worker_group.workers import WorkerGroup


class Names(Protocol):
    """See :class:`.CheckpointNames`."""

    @property
    def can_rename_one_by_one(self) -> bool: ...

    def rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class WeightSource(Protocol):
    """What is gathered; a :class:`.PackedModel`, or a part of one."""

    @property
    def model(self) -> nn.Module:
        """Divided over ranks, or whole."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """In which weights of which ranks have parts are published."""
        ...

    @property
    def checkpoint_names(self) -> Names: ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`.PackedModel.weights`."""
        ...

    def bare_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As ``weights``, with any values."""
        ...


class GatheredWeights:
    """See :class:`.WeightStream`; every rank has one, and goes through it when the others do."""

    def __init__(self, model: WeightSource, workers: WorkerGroup, *, max_bucket_bytes: int = BUCKET_BYTES) -> None:
        """
        Args:
            model: whose weights they are.
            workers: the ranks that it is divided over, or that have it whole.
            max_bucket_bytes: of what is gathered at once; a larger weight comes alone.
        """
        self._model = model
        self._workers = workers
        self._max_bucket_bytes = max_bucket_bytes
        self._tensors = self._renamed() if workers.is_first or is_sharded(model.model) else iter(())

    @property
    def shapes(self) -> Mapping[str, Tensor]:
        """See :class:`.WeightStream`."""
        planned = {
            name: torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta")
            for name, tensor in self._model.bare_weights()
        }
        return self._model.checkpoint_names.rename(planned)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`.WeightStream`. On other ranks than the first none."""
        return self._tensors

    def finish(self) -> None:
        """Take part in what nobody has asked for: other ranks send it, and wait until they have."""
        deque(self._tensors, maxlen=0)

    def _renamed(self) -> Iterator[tuple[str, Tensor]]:
        names = self._model.checkpoint_names
        if names.can_rename_one_by_one:
            for name, tensor in self._whole():
                yield from names.rename({name: tensor}).items()
            return
        # transformers puts weights of this architecture together from several, so it is given all of them.
        is_copied = is_sharded(self._model.model)
        kept = {name: tensor.cpu() if is_copied else tensor for name, tensor in self._whole()}
        if self._workers.is_first:
            yield from names.rename(kept).items()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """By names in memory; on the first rank."""
        buckets = self._buckets()
        bucket = next(buckets, None)
        while bucket is not None:
            tensors = bucket.arrived()
            # When the next is asked for, nothing of the bucket before this one is in use any more.
            yield from itertools.islice(tensors, 1)
            bucket = next(buckets, None)
            yield from tensors

    @torch.no_grad()
    def _buckets(self) -> Iterator[RowGather]:
        """Each is under way when it is given out."""
        bucket, room = self._new_bucket(), self._max_bucket_bytes
        for name, tensor in self._model.weights():
            shard, dtype = shard_of(tensor), self._dtype_of(tensor)
            size_bytes = tensor.numel() * dtype.itemsize
            if size_bytes > room and room < self._max_bucket_bytes:
                yield bucket.begun()
                bucket, room = self._new_bucket(), self._max_bucket_bytes
            bucket.add(name, shard._replace(local=shard.local.to(dtype)))
            room -= size_bytes
        yield bucket.begun()

    def _new_bucket(self) -> RowGather:
        return RowGather(self._workers.rank, self._workers.num_ranks, self._workers.tensors)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Parts are more exact than the model that they belong to."""
        return self._model.dtype if is_divided(tensor) and tensor.is_floating_point() else tensor.dtype
