"""Gives the memory of tensors up for a while, for whoever else needs the device.

Invariants:

* Tensors, views of them and references to them stay what they are; only the memory beneath them goes and comes back.
  Nothing may read or write it in between.
* What is kept is copied to the host first, byte for byte, and copied back. What is not kept has any value afterwards.
* Memory that several tensors share goes and comes once.
"""

# torch's storages are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Block(NamedTuple):
    """One piece of memory."""

    storage: torch.UntypedStorage
    device: torch.device
    size_bytes: int
    host: torch.Tensor | None
    """The copy in host memory of what the block held."""


class ParkedMemory:
    """Memory that is given up from the construction to ``restore``."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, keeps_values: bool) -> None:
        self._blocks: dict[int, _Block] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and _identity(storage) not in self._blocks:
                host = _copied(storage, tensor.device) if keeps_values else None
                self._blocks[_identity(storage)] = _Block(storage, tensor.device, storage.nbytes(), host)
        for block in self._blocks.values():
            block.storage.resize_(0)
        self._give_back()

    @property
    def size_bytes(self) -> int:
        """That are given up."""
        return sum(block.size_bytes for block in self._blocks.values())

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this tensor holds: a view of the copy if its memory is parked here, otherwise the tensor itself."""
        block = self._blocks.get(_identity(tensor.untyped_storage()))
        if block is None:
            return tensor
        host = block.host
        assert host is not None, "its values were not kept"
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def restore(self) -> None:
        """Take the memory again."""
        for block in self._blocks.values():
            block.storage.resize_(block.size_bytes)
            if block.host is not None:
                _bytes_of(block.storage, block.device).copy_(block.host, non_blocking=True)
        for device in self._devices():
            torch.cuda.synchronize(device)

    def _give_back(self) -> None:
        """To the driver, not only to torch's own allocator: the other side is another process."""
        for device in self._devices():
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()

    def _devices(self) -> set[torch.device]:
        return {block.device for block in self._blocks.values() if block.device.type == "cuda"}


def _identity(storage: torch.UntypedStorage) -> int:
    """The same for every tensor that is a view of this memory, whether it is there or not."""
    return int(storage._cdata)  # pyright: ignore[reportPrivateUsage]  # torch has no other name for it


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
    return host.copy_(_bytes_of(storage, device))
