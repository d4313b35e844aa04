"""What a server's model takes: names, shapes and dtypes, read from the folder that the server was started from.

Invariants:

* Only headers are read, never a tensor.
* What passes ``check_tensors`` can be loaded by that server. It checks little or nothing itself: a wrong shape or a
  file that was cut short ends it, a name that it does not know is passed over, and one that lacks keeps its old value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.checkpoint.hf_config import HfConfig, find_weight_map, read_config
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.tensor_file import DTYPE_NAMES, LENGTH_BYTES, MAX_HEADER_BYTES, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from penstock.backends.weights.tensor_file import Layout

HEAD: Final = "lm_head.weight"
SINGLE_FILE: Final = "model.safetensors"
NUM_NAMED: Final = 5
"""So many offending tensors are named in an error."""
PLAIN_FLOATS: Final = frozenset({"F32", "BF16", "F16"})
"""A server casts between these when it loads; anything else has to be what the folder has."""

_DTYPES_BY_OPTION: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class UnfitWeightsError(WeightFetchError):
    """These tensors are not the parameters of the model that the server runs."""


class TensorSpec(NamedTuple):
    """What one tensor is, without its values."""

    dtype: str
    """As safetensors calls it: ``F32``, ``BF16``."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a model takes."""

    source: str
    """Where the expectation was read, for messages."""
    tensors: Mapping[str, TensorSpec]
    optional: frozenset[str]
    """May lack: of layers that only a draft model has, and buffers that every loader computes itself."""
    tied_head: bool
    """The head is the embedding: it may lack, or be there as another name of it."""
    dtype: str | None = None
    """Of every plain float; None takes any of them."""


def expect_model(folder: Path, dtype: str | None = None) -> Expectation:
    """Read what the model of this folder takes; ``dtype`` (``float32``, ``bfloat16``) demands one of its floats.

    Raises:
        WeightFetchError: the folder has no safetensors files, or one is damaged.
        UserFault: so is its ``config.json``.
    """
    if dtype is not None and dtype not in _DTYPES_BY_OPTION:
        raise ValueError(f"dtype: expected one of {', '.join(_DTYPES_BY_OPTION)}, got {dtype!r}")
    tensors = read_table(folder)
    config = read_config(folder, HfConfig)
    num_layers = config.num_hidden_layers or None
    return Expectation(
        source=str(folder),
        tensors=tensors,
        optional=frozenset(name for name in tensors if _is_optional(name, num_layers)),
        tied_head=config.tie_word_embeddings or HEAD not in tensors,
        dtype=None if dtype is None else _DTYPES_BY_OPTION[dtype],
    )


def read_table(folder: Path) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of the weights that lie in a folder, as a loader would find them.

    Raises:
        WeightFetchError: there are none, or a file is damaged or was cut short.
        UserFault: their index is damaged.
    """
    table: dict[str, TensorSpec] = {}
    for path in _weight_files(folder):
        table |= table_of(_read_header(path))
    return table


def table_of(layout: Layout) -> dict[str, TensorSpec]:
    """Names, dtypes and shapes of a tensor file, further names of shared tensors among them."""
    table = {tensor.name: TensorSpec(DTYPE_NAMES[tensor.dtype], tensor.shape) for tensor in layout.placed}
    return table | {alias: table[name] for alias, name in layout.aliases.items()}


def check_tensors(table: Mapping[str, TensorSpec], expected: Expectation) -> None:
    """Raise unless a server that runs the expected model can load exactly these.

    Raises:
        UnfitWeightsError: names what is unknown, missing, of another shape or of another dtype.
    """
    missing = expected.tensors.keys() - table.keys() - expected.optional
    unknown = {name for name in table.keys() - expected.tensors.keys() if not _is_optional(name, None)}
    if expected.tied_head:
        missing -= {HEAD}
        unknown -= {HEAD}
    stories = [f"{what} {_some(names)}" for what, names in (("lack", missing), ("have unknown", unknown)) if names]
    if stories:
        raise UnfitWeightsError(
            f"these weights are not those of the model in {expected.source}, which the server runs: they "
            f"{' and '.join(stories)}"
        )
    for name, spec in table.items():
        if name in expected.tensors:
            _check_one(name, spec, expected)


def _check_one(name: str, spec: TensorSpec, expected: Expectation) -> None:
    wanted = expected.tensors[name]
    if spec.shape != wanted.shape:
        raise UnfitWeightsError(
            f"{name}: expected shape {list(wanted.shape)}, as in {expected.source}, found {list(spec.shape)}"
        )
    are_floats = {spec.dtype, wanted.dtype} <= PLAIN_FLOATS
    wanted_dtype = (expected.dtype or spec.dtype) if are_floats else wanted.dtype
    if spec.dtype != wanted_dtype:
        reason = "as the server was asked for" if are_floats else f"as in {expected.source}"
        raise UnfitWeightsError(f"{name}: expected dtype {wanted_dtype}, {reason}, found {spec.dtype}")


def _is_optional(name: str, num_layers: int | None) -> bool:
    if name.endswith("rotary_emb.inv_freq") or name.startswith("mtp."):
        return True
    layer = _LAYER.search(name)
    return layer is not None and num_layers is not None and int(layer[1]) >= num_layers


def _weight_files(folder: Path) -> list[Path]:
    if (weight_map := find_weight_map(folder)) is not None:
        return [folder / name for name in sorted(set(weight_map.values()))]
    single = folder / SINGLE_FILE
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightFetchError(f"{folder} has no *.safetensors file; a server is updated from safetensors only")
    return files


def _read_header(path: Path) -> Layout:
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length_field = file.read(LENGTH_BYTES)
            length = min(int.from_bytes(length_field, "little"), MAX_HEADER_BYTES)
            layout = parse_header(memoryview(length_field + file.read(length)))
    except OSError as error:
        raise WeightFetchError(f"{path} cannot be read: {error.strerror}") from error
    except WeightFetchError as error:
        raise WeightFetchError(f"{path} is no safetensors file, or it was cut short: {error}") from None
    if layout.size_bytes != size_bytes:
        raise WeightFetchError(
            f"{path} was cut short or changed: its header describes {layout.size_bytes} bytes, found {size_bytes}"
        )
    return layout


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = len(listed) - NUM_NAMED
    return ", ".join(listed[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
