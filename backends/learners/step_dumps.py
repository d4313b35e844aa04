"""Single steps written down token by token, as Parquet: one file for each step, one row for each trained sequence.

Invariants:

* A file is written beside its name and renamed when every byte is on disk, so whoever sees the name sees a whole file.
  A step that is trained again takes the place of the first.
* Lists of a row are as long as the sequence's response; what is not known of a token (it is not trained, there is no
  reference) is null.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from penstock.backends.durable import sync
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

DUMP_FOLDER: Final = "steps"
"""In a run's folder."""
_NAME: Final = re.compile(r"step-(\d{7,})\.parquet")
FIGURES: Final = {
    "num_kept": "tokens that cut-offs left for the draw (sampling.replay_kept); null where that was not recorded",
    "rollout_logprobs": "as the engine drew the token",
    "reference_logprobs": "of the reference, where there is one",
    "proximal_logprobs": "of the policy that the trust region is around, where that is not the engine's",
    "advantages": "as the loss takes them",
    "logprobs": "of the policy before the optimizer step that trains the token first",
    "ratios": "of the policy to the proximal one, or to the engine's",
    "losses": "what the token adds to the loss of that optimizer step; null where a loss is no sum over tokens",
}
"""Columns of float, in the order in which one follows from those before."""
COLUMNS: Final = {
    "group_id": "int64; the group",
    "sample_index": "int32; in its group",
    "part": "int32; of an episode",
    "step": "int32; the version that training it makes",
    "context": "list of int32; the tokens that stand before the response",
    "tokens": "list of int32; of the response, to the last that is trained",
    "mask": "list of bool; whether the token is trained",
    "versions": "list of int32; of the weights that made the token",
    **{name: f"list of float; {meaning}" for name, meaning in FIGURES.items()},
}
"""Name, and type with meaning."""
TOKEN_BYTES: Final = 4 + 1 + 4 + 4 * len(FIGURES)
"""Of a response's token, at most and uncompressed."""
CONTEXT_BYTES: Final = 4


class DumpedSequence(NamedTuple):
    """One row."""

    group_id: int
    sample_index: int
    part: int
    context: NDArray[np.int32]
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    versions: NDArray[np.int32]
    """−1 where the token is not trained."""
    figures: Mapping[str, NDArray[np.float32]]
    """By name, NaN where it is not known."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Which part of which sample it is."""
        return self.group_id, self.sample_index, self.part

    @property
    def name(self) -> str:
        """Such as ``12/3``, or ``12/3 part 1`` beyond the first part of an episode."""
        return f"{self.group_id}/{self.sample_index}" + (f" part {self.part}" if self.part else "")


def dump_file(run_folder: Path, step: int) -> Path:
    """Of a step, whether it is there or not."""
    return run_folder / DUMP_FOLDER / f"step-{step:07d}.parquet"


def dumped_steps(run_folder: Path) -> tuple[int, ...]:
    """The steps that a run has written down, in order."""
    folder = run_folder / DUMP_FOLDER
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(int(match[1]) for match in found if match))


def write_step(run_folder: Path, step: int, rows: Sequence[DumpedSequence]) -> Path:
    """Write a step down.

    Raises:
        OSError: the file cannot be written.
    """
    import pyarrow  # takes long to load, and most runs write no steps
    import pyarrow.parquet as parquet

    pa, pq = cast("Any", pyarrow), cast("Any", parquet)  # they have no types
    tokens = {"context": pa.int32(), "tokens": pa.int32(), "mask": pa.bool_(), "versions": pa.int32()}
    table = {
        "group_id": pa.array([row.group_id for row in rows], pa.int64()),
        "sample_index": pa.array([row.sample_index for row in rows], pa.int32()),
        "part": pa.array([row.part for row in rows], pa.int32()),
        "step": pa.array([step] * len(rows), pa.int32()),
        **{name: _lists(pa, [getattr(row, name) for row in rows], kind) for name, kind in tokens.items()},
        **{name: _lists(pa, [row.figures[name] for row in rows], pa.float32()) for name in FIGURES},
    }
    target = dump_file(run_folder, step)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    pq.write_table(pa.table(table), partial, compression="zstd")
    sync(partial)
    partial.replace(target)
    sync(target.parent)
    return target


def _lists(pa: Any, parts: Sequence[NDArray[Any]], kind: Any) -> Any:  # noqa: ANN401 - as above
    offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)
    values = np.concatenate([np.zeros(0, dtype=kind.to_pandas_dtype()), *parts])
    unknown = np.isnan(values) if kind == pa.float32() else values == -1 if kind == pa.int32() else None
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind, mask=unknown))


def read_step(run_folder: Path, step: int, *, group_id: int | None = None) -> list[DumpedSequence]:
    """What a run has written down of a step, or of one group in it; empty where there is no such file.

    Raises:
        UserFault: the file cannot be read.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    pa, pq = cast("Any", pyarrow), cast("Any", parquet)
    path = dump_file(run_folder, step)
    if not path.exists():
        return []
    try:
        rows = pq.read_table(path, filters=None if group_id is None else [("group_id", "=", group_id)])
        return list(_rows(rows))
    except (OSError, KeyError, pa.ArrowException) as error:
        raise UserFault(f"{path}: is no dump of a step that can be read: {error}") from None


def _rows(table: Any) -> Iterator[DumpedSequence]:  # noqa: ANN401 - as above
    names = ("context", "tokens", "mask", "versions", *FIGURES)
    known = ("group_id", "sample_index", "part", *(name for name in names if name not in FIGURES))
    # Whoever wrote it may not have known every figure.
    known += tuple(name for name in FIGURES if name in table.column_names)
    columns = {name: table.column(name).combine_chunks() for name in known}

    def of(name: str, row: int, absent: float, dtype: type[np.generic]) -> NDArray[Any]:
        if name not in columns:
            return np.full(len(columns["tokens"][row].values), absent, dtype=dtype)
        values = columns[name][row].values.fill_null(absent)
        found: NDArray[Any] = values.to_numpy(zero_copy_only=False).astype(dtype)
        return found

    for row in range(table.num_rows):
        yield DumpedSequence(
            columns["group_id"][row].as_py(),
            columns["sample_index"][row].as_py(),
            columns["part"][row].as_py(),
            of("context", row, -1, np.int32),
            of("tokens", row, -1, np.int32),
            of("mask", row, False, np.bool_),
            of("versions", row, -1, np.int32),
            {name: of(name, row, np.nan, np.float32) for name in FIGURES},
        )
