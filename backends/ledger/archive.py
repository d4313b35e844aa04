"""Trained samples as Parquet files that outlive the ledger's payloads.

Invariants:

* A file is written beside its name and renamed when every byte is on disk, so whoever sees the name sees a whole file.
* A batch is in one file: a file takes the place of those whose steps it covers, which a crash before the
  acknowledgement may have left.
* One batch at a time is in memory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import numpy as np

from penstock.backends.durable import sync
from penstock.messages.samples import Completed, PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from penstock.backends.ledger.protocol import LedgerReader
    from penstock.messages.base import Metric
    from penstock.messages.kept_tokens import KeptTokens
    from penstock.messages.samples import ExpertChoices, Group, Media, Part, Sample

_NAME: Final = re.compile(r"steps-(\d{7,})-(\d{7,})\.parquet")
COLLECTED_NAME: Final = "collected.parquet"
"""Name of the archive of groups that were not trained."""
GROUPS_AT_ONCE: Final = 64

COLUMNS: Final = {
    "group_id": "int64; the group",
    "sample_index": "int32; in its group",
    "version": "int32; the version that training it made; null where the run trained nothing",
    "staleness": "int32; age of its oldest token when it was trained, in versions; null without tokens or training",
    "attempt": "int32; how often it was issued again",
    "engine": "string; which engine finished it",
    "row": "int64; of the dataset, from 0",
    "epoch": "int32; pass over the dataset",
    "prompt": "string; the prompt's text, where the dataset had one",
    "prompt_tokens": "list of int32",
    "label": "string; what the reward function compared with",
    "metadata": "string; the row's further columns as JSON",
    "response_tokens": "list of int32; all parts, one after the other",
    "logprobs": "list of float; of the response tokens, as the engine sampled them",
    "teacher_logprobs": "list of float; of the same tokens under a teacher, NaN in parts without; null: none was asked",
    "loss_mask": "list of uint8; 0 where the model did not make the token; null: it made all",
    "spans": "list of {version, num_tokens}; which weights made which tokens",
    "part_lengths": "list of int32; response tokens of each part; one part unless it was an episode",
    "part_contexts": "list of lists of int32; what stands before each part; null: the prompt before all",
    "part_experts": "list of {num_layers, per_token, id_bytes, ids}; the experts that each part's inputs went to, "
    "as the engine chose them; null: not recorded",
    "part_kept": "list of {counts, ids}; the tokens that each part's tokens were drawn from (sampling.replay_kept): "
    "uint16 counts of each token, and the int32 ids of all of them; null: not recorded",
    "prompt_media": "list of {kind, reference, digest, at, num_tokens}; images that came with the prompt, of which "
    "`num_tokens` of its tokens from `at` on stand for each; null: none",
    "part_media": "list of lists of such images; those that came with each part, `at` counted from its first response "
    "token; null: none",
    "outcome": "string; `completed`, `truncated` or `policy_error`",
    "outcome_detail": "string; why a completed one stopped, what a policy error was",
    "loss": "string; what the sample is trained by where it is not the objective: `sft`",
    "reward": "double",
    "reward_components": "map of string to double",
    "counted": "list of {sample_index, reward, components}; samples of its group that were dropped after the "
    "statistics: their rewards count in mean and spread; the same in each row of a group, null: none",
}
"""Name, and type with meaning."""


def file_name(first_version: int, last_version: int) -> str:
    """Of the samples that these steps trained; names sort as steps do."""
    return f"steps-{first_version:07d}-{last_version:07d}.parquet"


def archive_samples(reader: LedgerReader, folder: Path, first_version: int, last_version: int) -> Path | None:
    """Write the samples that these steps trained to a file in ``folder``; None when there is no such step.

    Raises:
        LedgerStoreError: their payloads cannot be read.
        OSError: the file cannot be written. None of its name is left.
    """
    receipts = reader.receipts(first_version, last_version)
    if not receipts:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / file_name(receipts[0].version, receipts[-1].version)
    partial = folder / f".{target.name}.partial"
    _write(partial, reader, ((receipt.version, receipt.group_ids) for receipt in receipts))
    sync(partial)
    partial.replace(target)
    sync(folder)
    for covered in _covered(folder, target):
        covered.unlink()
    return target


def archive_groups(reader: LedgerReader, folder: Path, group_ids: Sequence[int]) -> Path:
    """Write the samples of groups that were collected and not trained to a file in ``folder``, in this order.

    Raises:
        LedgerStoreError: a payload cannot be read.
        OSError: the file cannot be written. None of its name is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / COLLECTED_NAME
    partial = folder / f".{target.name}.partial"
    parts = (group_ids[start : start + GROUPS_AT_ONCE] for start in range(0, len(group_ids), GROUPS_AT_ONCE))
    _write(partial, reader, ((None, part) for part in parts))
    sync(partial)
    partial.replace(target)
    sync(folder)
    return target


def _write(path: Path, reader: LedgerReader, parts: Iterable[tuple[int | None, Sequence[int]]]) -> None:
    """Versions and groups; those of one part are in memory at a time."""
    import pyarrow  # takes long to load, and most runs keep no samples
    import pyarrow.parquet as parquet

    pa, pq = cast("Any", pyarrow), cast("Any", parquet)  # they have no types
    schema = _schema(pa)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for version, group_ids in parts:
            rows = list(_rows(version, reader.payloads(group_ids)))
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _schema(pa: Any) -> Any:  # noqa: ANN401 - as above
    tokens, components = pa.list_(pa.int32()), pa.map_(pa.string(), pa.float64())
    types = {
        "group_id": pa.int64(), "sample_index": pa.int32(), "version": pa.int32(), "staleness": pa.int32(),
        "attempt": pa.int32(), "engine": pa.string(), "row": pa.int64(), "epoch": pa.int32(), "prompt": pa.string(),
        "prompt_tokens": tokens, "label": pa.string(), "metadata": pa.string(), "response_tokens": tokens,
        "logprobs": pa.list_(pa.float32()), "teacher_logprobs": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.uint8()),
        "spans": pa.list_(pa.struct([("version", pa.int32()), ("num_tokens", pa.int32())])),
        "part_lengths": tokens, "part_contexts": pa.list_(tokens), "part_experts": pa.list_(_experts_type(pa)),
        "part_kept": pa.list_(pa.struct([("counts", pa.binary()), ("ids", pa.binary())])),
        "prompt_media": pa.list_(_media_type(pa)), "part_media": pa.list_(pa.list_(_media_type(pa))),
        "outcome": pa.string(),
        "outcome_detail": pa.string(), "loss": pa.string(), "reward": pa.float64(),
        "reward_components": components,
        "counted": pa.list_(
            pa.struct([("sample_index", pa.int32()), ("reward", pa.float64()), ("components", components)])
        ),
    }  # fmt: skip
    return pa.schema([(name, types[name]) for name in COLUMNS])


def _rows(version: int | None, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    for group in groups:
        prompt = group.prompt
        shared = {
            "group_id": group.group_id,
            "version": version,
            "row": prompt.row,
            "epoch": prompt.epoch,
            "prompt": prompt.text,
            "prompt_tokens": np.frombuffer(prompt.tokens, dtype="<i4"),
            "label": prompt.label,
            "metadata": prompt.metadata.decode(),
            "prompt_media": _media(prompt.media) or None,
            "counted": [
                {"sample_index": c.index, "reward": c.reward, "components": _pairs(c.components)} for c in group.counted
            ]
            or None,
        }
        for sample in group.samples:
            yield shared | _row(sample, version)


def _row(sample: Sample, version: int | None) -> dict[str, Any]:
    parts, outcome, oldest = sample.parts, sample.outcome, sample.oldest_version
    reward = outcome.reward
    return {
        "sample_index": sample.key.index,
        "staleness": None if oldest is None or version is None else version - 1 - oldest,
        "attempt": sample.attempt,
        "engine": sample.engine,
        "response_tokens": np.frombuffer(b"".join(part.tokens for part in parts), dtype="<i4"),
        "logprobs": np.frombuffer(b"".join(part.logprobs for part in parts), dtype="<f4"),
        "teacher_logprobs": _teacher_logprobs(parts),
        "loss_mask": _loss_mask(parts),
        "spans": [{"version": s.version, "num_tokens": s.num_tokens} for part in parts for s in part.spans],
        "part_lengths": [part.num_tokens for part in parts],
        "part_contexts": _contexts(parts),
        "part_experts": _recorded([part.experts for part in parts]),
        "part_kept": _recorded([part.kept for part in parts]),
        "part_media": [_media(part.media) for part in parts] if any(part.media for part in parts) else None,
        "outcome": outcome.__struct_config__.tag,
        "outcome_detail": _detail(sample),
        "loss": sample.loss.value,
        "reward": None if reward is None else reward.value,
        "reward_components": [] if reward is None else _pairs(reward.components),
    }


def _pairs(components: Sequence[Metric]) -> list[tuple[str, float]]:
    return [(component.name, component.value) for component in components]


def _loss_mask(parts: Sequence[Part]) -> Any:  # noqa: ANN401 - an array or nothing
    if not any(part.loss_mask for part in parts):
        return None
    whole = (part.loss_mask or b"\x01" * part.num_tokens for part in parts)
    return np.frombuffer(b"".join(whole), dtype="u1")


def _teacher_logprobs(parts: Sequence[Part]) -> Any:  # noqa: ANN401 - likewise
    if not any(part.teacher_logprobs for part in parts):
        return None
    none = np.float32("nan").tobytes()
    whole = (part.teacher_logprobs or none * part.num_tokens for part in parts)
    return np.frombuffer(b"".join(whole), dtype="<f4")


def _contexts(parts: Sequence[Part]) -> list[Any] | None:
    if not any(part.context_tokens for part in parts):
        return None
    return [np.frombuffer(part.context_tokens, dtype="<i4") for part in parts]


def _experts_type(pa: Any) -> Any:  # noqa: ANN401 - as above
    counts = [(name, pa.int32()) for name in ("num_layers", "per_token", "id_bytes")]
    return pa.struct([*counts, ("ids", pa.binary())])


def _recorded(of_parts: Sequence[ExpertChoices | KeptTokens | None]) -> list[dict[str, Any] | None] | None:
    if all(record is None for record in of_parts):
        return None
    return [None if record is None else msgspec.structs.asdict(record) for record in of_parts]


def _media_type(pa: Any) -> Any:  # noqa: ANN401 - as above
    texts, numbers = ("kind", "reference", "digest"), ("at", "num_tokens")
    return pa.struct([*((name, pa.string()) for name in texts), *((name, pa.int32()) for name in numbers)])


def _media(media: Sequence[Media]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(each) for each in media]


def _detail(sample: Sample) -> str:
    match sample.outcome:
        case Completed(stop=stop):
            return stop.value
        case PolicyError(detail=detail):
            return detail
        case _:
            return ""


def archived_steps(folder: Path) -> dict[int, Path]:
    """The file that has the samples of each step, by version; empty where nothing was kept."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("steps-*.parquet")):
        first, last = _range(path.name) or (0, -1)
        found |= dict.fromkeys(range(first, last + 1), path)
    return found


def _covered(folder: Path, target: Path) -> list[Path]:
    """Other files all of whose steps are in this one."""
    first, last = _range(target.name) or (0, -1)
    found: list[Path] = []
    for path in folder.iterdir():
        steps = _range(path.name)
        if steps is not None and path != target and first <= steps[0] and steps[1] <= last:
            found.append(path)
    return found


def _range(name: str) -> tuple[int, int] | None:
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))
