"""What SGLang's ``/update_weights_from_tensor`` takes, written without SGLang.

The server reads a pickle with a list of allowed globals. Its form for a bucket is a dict of ``flattened_tensor``
(uint8) and ``metadata``, a list of objects of which it reads six attributes; ``SimpleNamespace`` is allowed, so the
server's own class is not needed here. This module only writes such payloads. Nothing of ours reads one.

Two kinds:

* By value: the bytes are in the payload. A tensor on the CPU must go this way: by torch's own reduction it is a file
  descriptor, which the server cannot receive, and it ends for that.
* By handle: the payload names memory of this process's GPU (CUDA IPC), for a server on the same machine. The device
  is named by its UUID, because the two processes may number devices differently. Each rank needs a payload of its own:
  torch counts references per payload, and by them keeps the memory until the server has let go of it, also beyond a
  release.
"""

# torch's reductions and ForkingPickler are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import reduce_tensor

from penstock.backends.weights.tensor_file import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.weights.service_messages import PackedTensor

PICKLE_PROTOCOL: Final = 4
DEVICE_ARGUMENT: Final = 6
"""Where torch's reduction of a CUDA tensor has the number of the device."""


def pack_bucket(data: torch.Tensor, tensors: Sequence[PackedTensor], *, by_handle: bool) -> bytes:
    """One payload for one rank: ``data`` (uint8) is cut into these tensors, one behind the other."""
    metadata: list[SimpleNamespace] = []
    end = 0
    for name, dtype, shape, size_bytes in ((t.name, t.dtype, t.shape, t.size_bytes) for t in tensors):
        start, end = end, end + size_bytes
        entry = SimpleNamespace(
            name=name, shape=torch.Size(shape), dtype=DTYPES[dtype], start_idx=start, end_idx=end,
            numel=size_bytes,
        )  # fmt: skip
        metadata.append(entry)
    # By value a view would carry the whole memory that it is a view on.
    flattened = data if by_handle else data.to("cpu", copy=True)
    written = io.BytesIO()
    _PayloadWriter(written, PICKLE_PROTOCOL).dump({"flattened_tensor": flattened, "metadata": metadata})
    return written.getvalue()


class _PayloadWriter(ForkingPickler):
    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 - what a reducer returns has no type
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            rebuild, arguments = reduce_tensor(obj)  # type: ignore[no-untyped-call]
            device = str(torch.cuda.get_device_properties(obj.device).uuid)
            return rebuild, (*arguments[:DEVICE_ARGUMENT], device, *arguments[DEVICE_ARGUMENT + 1 :])
        if isinstance(obj, torch.Tensor):
            return obj.__reduce_ex__(PICKLE_PROTOCOL)  # type: ignore[no-untyped-call]
        if isinstance(obj, torch.storage.TypedStorage):  # of a tensor by value; by torch's own reduction a descriptor
            return obj.__reduce__()  # type: ignore[no-untyped-call]
        return NotImplemented
