"""Groups as they were, from the Parquet files that ``archive.py`` writes.

Invariants:

* Tokens, log-probs, versions and rewards come back bit for bit, and so do the order of the groups and of their samples.
* A mask that says that the model made everything comes back as no mask, which means the same.
* What stands in the ledger anyway is not in the files: the samples of a group that ended otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.parts import spans_between
from penstock.messages.samples import (
    Completed,
    CountedSample,
    ExpertChoices,
    Group,
    Loss,
    Media,
    Part,
    PolicyError,
    Prompt,
    Reward,
    Sample,
    SampleKey,
    StopReason,
    Truncated,
    VersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from penstock.messages.samples import ModelOutcome

TOKENS: Final = "<i4"
LOGPROBS: Final = "<f4"
LARGE_RECORDS: Final = ("part_experts", "part_kept")
"""Columns that only a learner needs."""
_UNREADABLE: Final = "no file of samples that can be read"

Row = dict[str, Any]
"""As pyarrow gives it: foreign data, with the names of :data:`.archive.COLUMNS`."""


def read_archived_group(path: Path, group_id: int) -> Group | None:
    """One group of a file, without :data:`LARGE_RECORDS`; None where it is not in it.

    Raises:
        UserFault: the file cannot be read.
    """
    import pyarrow
    import pyarrow.parquet as parquet

    pa, pq = cast("Any", pyarrow), cast("Any", parquet)
    try:
        names = [name for name in pq.read_schema(path).names if name not in LARGE_RECORDS]
        rows = pq.read_table(path, columns=names, filters=[("group_id", "=", group_id)]).to_pylist()
        return _group([row for row in rows if row["version"] == rows[0]["version"]]) if rows else None
    except KeyError as error:
        raise UserFault(f"{path}: {_UNREADABLE}: it has no column {error}") from error
    except (OSError, pa.ArrowException) as error:
        raise UserFault(f"{path}: {_UNREADABLE}: {error}") from error


def read_archived(path: Path, versions: Iterable[int] | None = None) -> Iterator[Group]:
    """The groups of a file, in its order; those that made these versions, or all.

    Raises:
        UserFault: the file cannot be read.
    """
    import pyarrow  # takes long to load, and most runs read no samples
    import pyarrow.parquet as parquet

    pa, pq = cast("Any", pyarrow), cast("Any", parquet)  # they have no types
    wanted = None if versions is None else set(versions)
    try:
        file = pq.ParquetFile(path)
        rows: list[Row] = []
        for number in range(file.num_row_groups):
            for row in file.read_row_group(number).to_pylist():
                if wanted is not None and row["version"] not in wanted:
                    continue
                if rows and _place(rows[-1]) != _place(row):  # a group may be in several batches
                    yield _group(rows)
                    rows = []
                rows.append(row)
        if rows:
            yield _group(rows)
    except OSError as error:
        raise UserFault(f"{path}: {_UNREADABLE}: {error}") from error
    except KeyError as error:
        raise UserFault(f"{path}: {_UNREADABLE}: it has no column {error}") from error
    except pa.ArrowException as error:
        raise UserFault(f"{path}: {_UNREADABLE}") from error


def _place(row: Row) -> tuple[Any, Any]:
    return row["version"], row["group_id"]


def _group(rows: Sequence[Row]) -> Group:
    first = rows[0]
    prompt = Prompt(
        row=first["row"],
        epoch=first["epoch"],
        tokens=_bytes(first["prompt_tokens"], TOKENS),
        text=first["prompt"],
        label=first["label"],
        metadata=first["metadata"].encode(),
        media=_media(first.get("prompt_media")),
    )
    counted = tuple(
        CountedSample(item["sample_index"], item["reward"], _components(item.get("components")))
        for item in first.get("counted") or ()
    )
    return Group(group_id=first["group_id"], prompt=prompt, samples=tuple(map(_sample, rows)), counted=counted)


def _sample(row: Row) -> Sample:
    return Sample(
        key=SampleKey(row["group_id"], row["sample_index"]),
        attempt=row["attempt"],
        engine=row["engine"],
        parts=tuple(_parts(row)),
        outcome=_outcome(row),
        loss=Loss(row.get("loss") or ""),
    )


def _parts(row: Row) -> Iterator[Part]:
    tokens, logprobs, mask = row["response_tokens"], row["logprobs"], row["loss_mask"]
    teacher = row.get("teacher_logprobs")
    experts, kept, media = (row.get(f"part_{name}") for name in ("experts", "kept", "media"))
    contexts, spans = row["part_contexts"], [VersionSpan(s["version"], s["num_tokens"]) for s in row["spans"]]
    start = 0
    for number, length in enumerate(row["part_lengths"]):
        end = start + length
        made: list[int] = [] if mask is None or all(mask[start:end]) else mask[start:end]
        yield Part(
            tokens=_bytes(tokens[start:end], TOKENS),
            logprobs=_bytes(logprobs[start:end], LOGPROBS),
            teacher_logprobs=b"" if teacher is None else _teacher(teacher[start:end]),
            spans=spans_between(spans, start, end),
            loss_mask=bytes(made),
            context_tokens=b"" if contexts is None else _bytes(contexts[number], TOKENS),
            experts=None if experts is None or experts[number] is None else ExpertChoices(**experts[number]),
            kept=None if kept is None or kept[number] is None else KeptTokens(**kept[number]),
            media=_media(media and media[number]),
        )
        start = end


def _media(found: Sequence[Row] | None) -> tuple[Media, ...]:
    return tuple(Media(**each) for each in found or ())


def _teacher(logprobs: Sequence[float]) -> bytes:
    """Empty for a part without."""
    values = np.asarray(logprobs, dtype=LOGPROBS)
    return b"" if np.isnan(values).all() else values.tobytes()


def _outcome(row: Row) -> ModelOutcome:
    reward = None
    if row["reward"] is not None:
        reward = Reward(value=row["reward"], components=_components(row["reward_components"]))
    match row["outcome"]:
        case "completed":
            return Completed(stop=StopReason(row["outcome_detail"]), reward=reward)
        case "truncated":
            return Truncated(reward=reward)
        case _:
            return PolicyError(detail=row["outcome_detail"], reward=reward)


def _components(pairs: Sequence[tuple[str, float]] | None) -> tuple[Metric, ...]:
    return tuple(Metric(name, value) for name, value in pairs or ())


def _bytes(values: Sequence[float], kind: str) -> bytes:
    return np.asarray(values, dtype=kind).tobytes()
