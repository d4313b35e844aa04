"""The tokens of a sample one by one, from the files of trained samples or from the ledger while it has them."""

from __future__ import annotations

import math
from contextlib import closing
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.data.problems import DataError
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.ledger.archive import archived_steps
from penstock.backends.ledger.archived_groups import read_archived_group
from penstock.backends.ledger.protocol import LedgerStoreError, PayloadGoneError
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.errors import UserFault
from penstock.runtime.launch.runs import model_folder
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from penstock.messages.samples import Group, Sample
    from penstock.runtime.observability.lives import Fate

MAX_TOKENS: Final = 3000
"""Of one answer; the page asks for the next ones."""
SAMPLES_FOLDER: Final = "samples"


class TokenStrip(msgspec.Struct, frozen=True, kw_only=True):
    """Some of its tokens in order, with one entry a token in each list."""

    source: str
    """Where they were found."""
    num_tokens: int
    """In all."""
    first: int
    texts: list[str]
    logprobs: list[float | None]
    """As the engine sampled them; null where nobody has."""
    teacher_logprobs: list[float | None]
    """Empty: no teacher was asked."""
    versions: list[int]
    is_made: list[bool]
    """Whether the model made it; others are not trained."""
    starts: list[int]
    """Of the parts of an episode, counted from the first token of all."""


def whole_group(run_folder: Path, fate: Fate) -> tuple[str, Group | None]:
    """The group with its tokens, and where it was found."""
    file = None if fate.version is None else archived_steps(run_folder / SAMPLES_FOLDER).get(fate.version)
    if file is not None and (group := read_archived_group(file, fate.group_id)) is not None:
        return str(file.relative_to(run_folder)), group
    try:
        with closing(SqliteReader(run_folder / LEDGER_FILE)) as reader:
            return LEDGER_FILE, reader.payloads([fate.group_id])[0]
    except PayloadGoneError:
        return "", None
    except LedgerStoreError as error:
        raise UserFault(str(error)) from None


def token_strip(sample: Sample, source: str, first: int, tokenizer: TextTokenizer | None) -> TokenStrip:
    parts, end = sample.parts, first + MAX_TOKENS
    ids = list(chain.from_iterable(tokens_view(part.tokens) for part in parts))
    versions = list(chain.from_iterable([span.version] * span.num_tokens for span in sample.spans))
    made = b"".join(part.loss_mask or b"\x01" * part.num_tokens for part in parts)
    has_teacher = any(part.teacher_logprobs for part in parts)
    nothing = b"\x00\x00\xc0\x7f"  # NaN
    teacher = b"".join(part.teacher_logprobs or nothing * part.num_tokens for part in parts) if has_teacher else b""
    return TokenStrip(
        source=source,
        num_tokens=len(ids),
        first=first,
        texts=[_token_text(token, tokenizer) for token in ids[first:end]],
        logprobs=_finite(floats_view(b"".join(part.logprobs for part in parts))[first:end]),
        teacher_logprobs=_finite(floats_view(teacher)[first:end]),
        versions=versions[first:end],
        is_made=[bool(one) for one in made[first:end]],
        starts=_starts([part.num_tokens for part in parts]),
    )


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:place]) for place in range(len(lengths))]


def _finite(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _token_text(token: int, tokenizer: TextTokenizer | None) -> str:
    if tokenizer is None:
        return f"{token} "
    return terminal_lines(tokenizer.decode([token]) or tokenizer.token_text(token) or f"{token}")


def tokenizer_of(run_folder: Path) -> TextTokenizer | None:
    """Of its newest checkpoint; None where the run's folder has none (any more), and tokens are shown as ids."""
    try:
        return _opened(model_folder(run_folder, None))
    except (UserFault, DataError):
        return None


@lru_cache(maxsize=4)
def _opened(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)
