"""A second set of an engine's weights: the next version is prepared in it while the engine decodes with the first.

Fused, turned over and cast it is then in the engine's own layout, so what a swap takes is an exchange of references.
CUDA graphs hold addresses: there a swap is one copy from set to set, within the device.

Invariants:

* Only the fetching thread writes to the set, and only while it holds no version; only the decoding thread takes one,
  between two decode steps.
* It holds the newest version that was prepared. One that is prepared takes the place of an older one that was not
  swapped in: should that still be asked for, it is loaded where the engine decodes, as without a second set.
* A version goes by the digest of its bytes, so a set is never taken for another one.
* Whoever prepares goes behind whoever decodes, for the processor.

| wait | who ends it |
|---|---|
| of the fetching thread, for the set | a swap that has begun |
| of the decoding thread, for the set | the fetching one, which notes whose weights it holds |
"""

# torch.cuda is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

import psutil
import torch

from penstock.backends.engines.torch.weights import FusedWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NICENESS: Final = 5
"""Of the thread that prepares, against the others of its machine."""
LEAST_FREE: Final = 10
"""Free memory ÷ that of a set, from which on a second one is taken without being asked for: learner and other engines
start at the same time."""

_log: Final = logging.getLogger(__name__)


class WeightSet(Protocol):
    """All weights of a model, in the layout that an engine decodes with."""

    def load(self, tensors: Mapping[str, torch.Tensor], /) -> object:
        """Take these (Hugging Face names)."""
        ...

    def tensors(self) -> list[torch.Tensor]:
        """All memory of them."""
        ...


class Doubled(Protocol):
    """An engine that can decode with either of two sets."""

    def add_second(self) -> WeightSet:
        """Make the second one, unset, for another thread to fill."""
        ...

    def swap(self, version: int) -> None:
        """Serve what the second one holds."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of the set that it decodes with."""
        ...


class StoppedError(Exception):
    """The engine ends, and what was being prepared is not needed any more."""


class SecondSet:
    """Of one engine."""

    def __init__(self, engine: Doubled, device: torch.device) -> None:
        self._swap = engine.swap
        self._weights = engine.add_second()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._holds: str | None = None
        """Digest of the publish that is in it, whole."""
        self._is_behind = False

    def fill(self, tensors: Mapping[str, torch.Tensor], is_stopped: Callable[[], bool]) -> None:
        """Prepare these, on the fetching thread; what the set held is gone. The next call is :meth:`offer`, or this.

        Args:
            tensors: of a whole model, checked.
            is_stopped: asked before each of them.

        Raises:
            StoppedError: it was stopped.
        """
        if not self._is_behind:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone, on Linux
            self._is_behind = True
        with self._lock:
            self._holds = None
        stream = self._stream
        with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
            self._weights.load(_Stoppable(tensors, is_stopped))
            if stream is not None:
                stream.synchronize()

    def offer(self, digest: str) -> None:
        """What was prepared may be swapped in, and is that of this digest."""
        with self._lock:
            self._holds = digest

    def swap_in(self, digest: str, version: int) -> bool:
        """Serve the publish of this digest from the next token on, on the decoding thread; False: it is not here."""
        with self._lock:
            if self._holds != digest:
                return False
            self._holds = None
            self._swap(version)
            return True


def second_set(engine: Doubled, device: torch.device, *, is_wanted: bool | None) -> SecondSet | None:
    """A second set for an engine, or none.

    Args:
        engine: that is open.
        device: that it decodes on.
        is_wanted: None: if it pays. It does on a CPU with a core for each of the two threads, where memory is left.
    """
    if is_wanted is None:
        num_cores, free_bytes = len(os.sched_getaffinity(0)), psutil.virtual_memory().available
        is_wanted = device.type == "cpu" and num_cores > 1 and free_bytes >= LEAST_FREE * engine.weight_bytes
        _log.info(
            "%s second set of weights (%d bytes): on %s, with %d cores and %d bytes of memory free",
            "with a" if is_wanted else "without a", engine.weight_bytes, device, num_cores, free_bytes,
        )  # fmt: skip
    return SecondSet(engine, device) if is_wanted else None


def exchange(one: WeightSet, other: WeightSet) -> None:
    """Each is from now on what the other one was; nothing is copied, and whoever refers to either goes on."""
    assert type(one) is type(other)
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def copy_across(source: WeightSet, target: WeightSet) -> bool:
    """Copy from set to set within their device, where addresses have to stay; it is done when this returns, so the
    source may be written to on another stream. As :meth:`.FusedWeights.take`."""
    assert isinstance(source, FusedWeights)
    assert isinstance(target, FusedWeights)
    with torch.inference_mode():
        is_elsewhere = target.take(source)
    if target.device.type == "cuda":
        torch.cuda.current_stream(target.device).synchronize()
    return is_elsewhere


def size_of(tensors: list[torch.Tensor]) -> int:
    """Bytes of their memory; what several share counts once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}  # pyright: ignore[reportPrivateUsage]  # torch has no other name for it
    return sum(storage.nbytes() for storage in storages.values())


class _Stoppable(Mapping[str, torch.Tensor]):
    """Tensors that are to be had until somebody stops."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], is_stopped: Callable[[], bool]) -> None:
        self._tensors, self._is_stopped = tensors, is_stopped

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._is_stopped():
            raise StoppedError
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: Any) -> bool:  # noqa: ANN401 - as Mapping has it
        return name in self._tensors
