"""How a set of tensors lies in one run of bytes: the safetensors format, in memory and on disk alike.

Invariants:

* Larger elements come first and the header fills a multiple of 64 bytes, so every tensor is aligned to its elements
  and can be used in place.
* Tensors that share their memory are written once. The header's ``__metadata__`` maps each further name to the one
  that was written, as ``safetensors.torch.save_model`` does.
* The same tensors in the same order give the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch

from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.messages.base import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HEADER_ALIGNMENT_BYTES: Final = 64
LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
FORMAT_KEY: Final = "format"

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Placed(NamedTuple):
    """Where one tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    size_bytes: int


class Layout(NamedTuple):
    """A planned or a parsed file."""

    header: bytes
    """The first bytes of the file, its length field and padding included."""
    placed: tuple[Placed, ...]
    aliases: Mapping[str, str]
    """Further name → the name that was written."""
    size_bytes: int


def lay_out(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Plan the file of these tensors.

    Raises:
        WeightExportError: there are none, or one has a dtype without a form in the file.
    """
    if not tensors:
        raise WeightExportError("no tensors to export: the learner gave an empty set of weights")
    aliases = _aliases(tensors)
    names = [name for name in tensors if name not in aliases]
    for name in names:
        if tensors[name].dtype not in DTYPE_NAMES:
            raise WeightExportError(
                f"{name} has dtype {tensors[name].dtype}; weights travel as one of {', '.join(DTYPES)}"
            )
    names.sort(key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, _Entry] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = _Entry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), (offset, end))
        offset = end
    header = _pack_header(msgspec.json.encode({"__metadata__": {FORMAT_KEY: "pt", **aliases}, **entries}))
    placed = tuple(_place(name, entry, len(header)) for name, entry in entries.items())
    return Layout(header, placed, aliases, len(header) + offset)


def parse_layout(data: memoryview[int]) -> Layout:
    """Read the header of a whole file.

    Raises:
        WeightFetchError: it is no safetensors file, or its tensors do not fill it exactly.
    """
    layout = parse_header(data)
    if layout.size_bytes != len(data):
        raise WeightFetchError(f"the weights' header describes {layout.size_bytes} bytes, and there are {len(data)}")
    return layout


def parse_header(data: memoryview[int]) -> Layout:
    """Read the header that ``data`` begins with; what follows it is not looked at and need not be there.

    Raises:
        WeightFetchError: it is no header of a safetensors file, or part of one.
    """
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    header_bytes = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or header_bytes > len(data):
        raise WeightFetchError(f"the weights have no valid header (its length field says {length} bytes)")
    try:
        raw = msgspec.json.decode(data[LENGTH_BYTES:header_bytes], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except UNREADABLE as error:
        raise WeightFetchError(f"the header of the weights cannot be read: {error}") from None
    placed = tuple(_place(name, entry, header_bytes) for name, entry in entries.items())
    aliases = {alias: name for alias, name in metadata.items() if name in entries}
    size_bytes = header_bytes + sum(tensor.size_bytes for tensor in placed)
    return Layout(bytes(data[:header_bytes]), placed, aliases, size_bytes)


def tensor_views(layout: Layout, buffer: object) -> dict[str, torch.Tensor]:
    """Tensors ``name → view`` that use ``buffer`` in place and keep it alive."""
    views = dict(written_views(layout, buffer))
    views.update({alias: views[name] for alias, name in layout.aliases.items()})
    return views


def written_views(layout: Layout, buffer: object) -> Iterator[tuple[str, torch.Tensor]]:
    """As :func:`tensor_views`, one at a time and without the aliases."""
    yield from ((place.name, placed_view(place, buffer)) for place in layout.placed)


def placed_view(place: Placed, buffer: object) -> torch.Tensor:
    """One tensor, in place."""
    _, dtype, shape, start, size_bytes = place
    if not size_bytes:  # frombuffer refuses a length of zero
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=size_bytes // dtype.itemsize, offset=start).view(shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview[int]:
    """The bytes of a tensor in row-major order; copies only what is elsewhere or not contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    seen: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not tensor.numel() or tensor.is_meta:  # neither has memory to share
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if (first := seen.setdefault(place, name)) != name:
            aliases[name] = first
    return aliases


def _pack_header(document: bytes) -> bytes:
    padding = -(LENGTH_BYTES + len(document)) % HEADER_ALIGNMENT_BYTES
    return (len(document) + padding).to_bytes(LENGTH_BYTES, "little") + document + b" " * padding


def _place(name: str, entry: _Entry, header_bytes: int) -> Placed:
    start, end = entry.data_offsets
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightFetchError(f"{name} has the unknown dtype {entry.dtype!r}")
    count = 1
    for length in entry.shape:
        count *= length
    if end - start != count * dtype.itemsize or start < 0:
        raise WeightFetchError(f"{name}: shape {entry.shape} of {entry.dtype} does not fill {end - start} bytes")
    return Placed(name, dtype, entry.shape, header_bytes + start, end - start)
