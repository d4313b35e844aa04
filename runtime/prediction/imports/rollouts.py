"""Lengths, groups and rewards of single responses, from the rollouts that verl and NeMo-RL write down.

* verl, ``trainer.rollout_data_dir``: lines with ``input``, ``output`` and ``score``. Lengths are those of the texts in
  characters, scaled so that their mean is that of the log in tokens.
* NeMo-RL, ``train_data_step*.jsonl``: lines with ``token_loss_mask`` and ``rewards``; every token of the mask counts.

slime's are pickles of torch, which are programs: nobody but slime should load them. TRL's are texts in parquet.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from typing import TYPE_CHECKING, Final, cast

from penstock.messages.errors import UserFault
from penstock.runtime.prediction.imports.read import TOO_LARGE, is_cut_off, lines_of
from penstock.runtime.prediction.recorded import SampleSeen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_SAMPLES: Final = 200_000
MAX_ROLLOUT_BYTES: Final = 2 << 30
"""Of one file."""


def read_rollouts(path: Path, mean_tokens: float) -> list[SampleSeen]:
    """Up to :data:`MAX_SAMPLES` responses.

    Args:
        path: a file, or a folder with ``*.jsonl``.
        mean_tokens: of a response, as the metrics say; for lengths that are known in characters only.

    Raises:
        UserFault: there is none, or a line is not of this kind.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not path.exists():
        raise UserFault(f"{path}: is not there")
    if not files or any(file.suffix != ".jsonl" for file in files):
        raise UserFault(
            f"{path}: no *.jsonl, as verl (trainer.rollout_data_dir) and NeMo-RL (train_data_step*.jsonl) write them; "
            "slime's .pt are pickles, which are not loaded, and TRL's have no lengths in tokens"
        )
    samples: list[SampleSeen] = []
    groups: dict[tuple[int, str], int] = {}
    in_characters = False
    for step, file in enumerate(files):
        for number, row in _rows(file):
            if len(samples) >= MAX_SAMPLES:
                break
            prompt, length, reward, is_text = _sample(row, f"{file}:{number}")
            in_characters |= is_text
            group = groups.setdefault((step, prompt), len(groups))
            samples.append(
                SampleSeen(
                    group_id=group, number=number, num_tokens=length, reward=reward, state=None, version=step + 1,
                    num_read=None, num_cached=None, outcome="completed",
                )
            )  # fmt: skip
    if not samples:
        raise UserFault(f"{path}: no response is in it")
    if not in_characters:
        return samples
    scale = mean_tokens / max(1e-9, statistics.fmean(sample.num_tokens for sample in samples))
    return [sample._replace(num_tokens=max(1, round(sample.num_tokens * scale))) for sample in samples]


def _rows(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
    lines = lines_of(file, MAX_ROLLOUT_BYTES)
    for number, text in lines:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            if is_cut_off(file, lines):
                return
            row = None
        if not isinstance(row, dict):
            raise UserFault(f"{file}:{number}: expected a JSON object with one response")
        yield number, row


def _sample(row: dict[str, object], where: str) -> tuple[str, int, float | None, bool]:
    """Prompt, length, reward, and whether the length is in characters."""
    text, mask = row.get("output"), _only(row.get("token_loss_mask"))
    reward = _only(row.get("score", row.get("rewards")))
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and abs(reward) < TOO_LARGE
    number = float(cast("float", reward)) if is_number else None
    if isinstance(text, str):
        return _digest(row.get("input")), max(1, len(text)), number, True
    if isinstance(mask, list):
        marks, tokens = cast("list[object]", mask), _only(row.get("token_ids"))
        first = next((i for i, each in enumerate(marks) if each), 0)
        prompt = cast("list[object]", tokens)[:first] if isinstance(tokens, list) else None
        return _digest(prompt), max(1, sum(bool(each) for each in marks)), number, False
    raise UserFault(f"{where}: neither output, as verl writes it, nor token_loss_mask, as NeMo-RL does")


def _only(value: object) -> object:
    """NeMo-RL writes each sample as a batch of one."""
    if not isinstance(value, list):
        return value
    values = cast("list[object]", value)
    return values[0] if len(values) == 1 else values


def _digest(prompt: object) -> str:
    return hashlib.blake2b(json.dumps(prompt).encode(), digest_size=12).hexdigest()
