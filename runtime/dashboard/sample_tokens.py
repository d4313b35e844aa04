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
from penstock.backends.learners.step_dumps import DUMP_FOLDER, DumpedSequence, dumped_steps, read_step
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
    learner_logprobs: list[float | None] = []
    """Of the learner before it trained the token; this and the next two are empty where no dump has them."""
    ratios: list[float | None] = []
    """Of the learner to what its trust region is around."""
    advantages: list[float | None] = []


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


def dumped_rows(run_folder: Path, fate: Fate) -> list[DumpedSequence]:
    """What ``learner.dump`` has written down of a sample, part by part; empty where it has not.

    Raises:
        UserFault: the file cannot be read.
    """
    if fate.version is None or fate.version not in dumped_steps(run_folder):
        return []
    rows = read_step(run_folder, fate.version, group_id=fate.group_id)
    return sorted((row for row in rows if row.sample_index == fate.index), key=lambda row: row.part)


def with_learner(strip: TokenStrip, sample: Sample, rows: Sequence[DumpedSequence]) -> TokenStrip:
    """The strip with what the learner has computed of its tokens."""
    by_part = {row.part: row for row in rows}
    end = strip.first + MAX_TOKENS
    found: dict[str, list[float | None]] = {}
    for name in ("logprobs", "ratios", "advantages"):
        values: list[float] = []
        for place, part in enumerate(sample.parts):
            row = by_part.get(place)  # a function of the user's may have made another sequence of it
            same = row is not None and tokens_view(part.tokens)[: len(row.tokens)].tolist() == row.tokens.tolist()
            known: list[float] = row.figures[name].tolist() if row is not None and same else []
            values += [*known, *[math.nan] * (part.num_tokens - len(known))]
        found[name] = _finite(values[strip.first : end])
    return msgspec.structs.replace(
        strip, learner_logprobs=found["logprobs"], ratios=found["ratios"], advantages=found["advantages"]
    )


def dumped_strip(rows: Sequence[DumpedSequence], first: int, tokenizer: TextTokenizer | None) -> TokenStrip:
    """Of a sample of which nothing but its dump is kept."""
    end = first + MAX_TOKENS
    ids = [int(token) for row in rows for token in row.tokens]

    def all_of(name: str) -> list[float | None]:
        return _finite([float(value) for row in rows for value in row.figures[name]][first:end])

    return TokenStrip(
        source=DUMP_FOLDER,
        num_tokens=len(ids),
        first=first,
        texts=[_token_text(token, tokenizer) for token in ids[first:end]],
        logprobs=all_of("rollout_logprobs"),
        teacher_logprobs=[],
        versions=[int(version) for row in rows for version in row.versions][first:end],
        is_made=[bool(one) for row in rows for one in row.mask][first:end],
        starts=_starts([len(row.tokens) for row in rows]),
        learner_logprobs=all_of("logprobs"),
        ratios=all_of("ratios"),
        advantages=all_of("advantages"),
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
