"""One sample: what it was asked and wrote, its tokens one by one, its group, and its life.

What a run keeps of a sample stands in several places, and of most samples not in all of them. Each part that is missing
is named with the key that keeps it.
"""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from penstock.backends.data.problems import DataError
from penstock.backends.data.tokenizer import TextTokenizer
from penstock.backends.ledger.archive import archived_steps
from penstock.backends.ledger.archived_groups import read_archived_group
from penstock.backends.ledger.evaluation_answers import FOLDER, outcome_words, response_text
from penstock.backends.ledger.kept_samples import KeptSample, clipped, read_kept_of
from penstock.backends.ledger.protocol import LedgerStoreError, PayloadGoneError
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.errors import UserFault
from penstock.messages.samples import Group, Sample, SampleKey, is_evaluation
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.launch.runs import ledger_file, model_folder
from penstock.runtime.observability.lives import Fate, Stage, read_fates, read_lives, sample_key
from penstock.runtime.observability.texts import told
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MAX_TOKENS: Final = 3000
"""Of one answer; the page asks for the next ones."""
MAX_GROUP: Final = 256
SAMPLES_FOLDER: Final = "samples"
NOT_KEPT_TEXT: Final = (
    "What it was asked and what it wrote was not kept as text. observability.samples keeps the newest so many samples "
    "and the oddest; run.keep_samples=true keeps every sample that is trained."
)
NOT_KEPT_TOKENS: Final = (
    "Its tokens, log-probs, mask and weight versions were not kept. run.keep_samples=true keeps those of every sample "
    "that is trained; the ledger has them only until its step is in a checkpoint."
)
NOT_KEPT_LEARNER: Final = (
    "The learner's own log-probs, the ratios to the engine's and the advantages of single tokens are written down by "
    "no run; their means over each step are in the Learning view. So they are not drawn here."
)


class SampleQuery(Query, frozen=True, kw_only=True):
    """Which sample."""

    sample: Annotated[str, msgspec.Meta(max_length=40)]
    """Such as ``12/3`` or ``e4/0``."""
    first_token: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0


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


class Mate(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of the same group."""

    name: str
    fate: str
    reward: float | None
    num_tokens: int


class SamplePage(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a sample."""

    name: str
    fate: str
    """In words."""
    state: str
    cause: str
    reason: str
    engine: str
    attempt: int | None
    num_tokens: int
    oldest_version: int | None
    newest_version: int | None
    step: int | None
    age: int | None
    reward: float | None
    components: dict[str, float]
    outcome: str
    row: int | None
    prompt: str
    label: str
    response: str
    mean: float | None
    """Of its group's rewards, as its deviation; None with fewer than two of them."""
    deviation: float | None
    group: list[Mate]
    tokens: TokenStrip | None
    missing: list[str]
    """What was not kept, in sentences."""


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of its life."""

    name: str
    actor: str
    attempt: int | None
    start_s: float
    """Since its life began."""
    duration_s: float
    is_recorded: bool
    """False: it lies somewhere in this time."""
    versions: list[tuple[int, int]]
    """Which weights made how many tokens, of a generation."""
    facts: str


class LifePage(msgspec.Struct, frozen=True, kw_only=True):
    """Its life."""

    duration_s: float
    is_traced: bool
    stages: list[StageRow]
    missing: str
    """Why there is nothing to see; empty where there is."""


def answer_sample(run_folder: Path, query: SampleQuery) -> SamplePage:
    """What is known of a sample.

    Raises:
        UserFault: there is no such sample, or a file cannot be read.
    """
    key = sample_key(query.sample)
    fate = (read_fates(run_folder, sample=key) or [Fate(*key)])[0]
    try:
        kept = read_kept_of(run_folder, [key]).get(key)
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise UserFault(f"{run_folder}: its samples cannot be read: {error}") from None
    rewards = _group_rewards(run_folder, key[0])
    if not fate.state and fate.attempt is None and kept is None and not rewards:
        raise UserFault(f"{run_folder}: nothing is known of sample {query.sample}: it has not come to its end, or was "
                        "never issued")  # fmt: skip
    source, group = _whole_group(run_folder, fate)
    sample = None if group is None else next((one for one in group.samples if one.key == SampleKey(*key)), None)
    tokenizer = _tokenizer_of(run_folder) if sample is not None else None
    kept = kept or (None if sample is None or group is None else _as_kept(group, sample, tokenizer))
    values = [reward for _, _, reward, _ in rewards if reward is not None]
    mean = sum(values) / len(values) if len(values) > 1 else None
    missing = ([] if kept else [_without_text(fate)]) + ([NOT_KEPT_LEARNER] if sample else [NOT_KEPT_TOKENS])
    return SamplePage(
        name=fate.name,
        fate=terminal_text(fate.text),
        state=fate.state,
        cause=terminal_text(fate.cause),
        reason=terminal_lines(fate.reason or (kept.reason if kept else "")),
        engine=terminal_text(fate.engine),
        attempt=fate.attempt,
        num_tokens=fate.num_tokens,
        oldest_version=fate.oldest_version,
        newest_version=fate.newest_version,
        step=fate.version,
        age=None if fate.version is None or fate.oldest_version is None else fate.version - 1 - fate.oldest_version,
        reward=next((reward for name, _, reward, _ in rewards if name == fate.name), None)
        if kept is None or kept.reward is None
        else kept.reward,
        components={} if kept is None else {terminal_text(k): v for k, v in kept.components.items()},
        outcome="" if kept is None else terminal_text(f"{kept.outcome} {kept.detail}".strip()),
        row=None if kept is None else kept.row,
        prompt="" if kept is None else terminal_lines(kept.prompt),
        label="" if kept is None else terminal_lines(kept.label),
        response="" if kept is None else terminal_lines(kept.response),
        mean=mean,
        deviation=None if mean is None else math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)),
        group=[Mate(name=name, fate=fate, reward=reward, num_tokens=size) for name, fate, reward, size in rewards],
        tokens=None if sample is None else _strip(sample, source, query.first_token, tokenizer),
        missing=missing,
    )


def answer_life(run_folder: Path, query: SampleQuery) -> LifePage:
    """The stages that a sample went through.

    Raises:
        UserFault: a file of spans is damaged.
    """
    key = sample_key(query.sample)
    fates = read_fates(run_folder, sample=key) or [Fate(*key)]
    try:
        (life,) = read_lives(run_folder, fates)
    except UserFault as error:
        return LifePage(duration_s=0.0, is_traced=False, stages=[], missing=terminal_lines(str(error)))
    reason = "" if life.is_traced else (
        "This sample was not traced: observability.trace_fraction keeps a share of them. The times are the ledger's."
    )  # fmt: skip
    stages = [_stage_row(stage, life.start_ns) for stage in life.stages]
    return LifePage(duration_s=life.duration_s, is_traced=life.is_traced, stages=stages, missing=reason)


def _stage_row(stage: Stage, start_ns: int) -> StageRow:
    spans = (part.split(":") for part in str(stage.attributes.get("versions", "")).split())
    return StageRow(
        name=stage.name,
        actor=terminal_text(stage.actor),
        attempt=stage.attempt,
        start_s=(stage.start_ns - start_ns) / 1e9,
        duration_s=stage.duration_s,
        is_recorded=stage.is_recorded,
        versions=[(int(span[0]), int(span[1])) for span in spans if len(span) == 2 and all(map(str.isdecimal, span))],
        facts=terminal_text(", ".join(told(stage.attributes)), max_chars=500),
    )


def _group_rewards(run_folder: Path, group_id: int) -> list[tuple[str, str, float | None, int]]:
    """Name, fate, reward and tokens of the samples of a group, as far as the ledger or the kept samples have them."""
    fates = read_fates(run_folder, group_id=group_id)[:MAX_GROUP]
    with closing(sqlite3.connect(f"{ledger_file(run_folder).absolute().as_uri()}?mode=ro", uri=True)) as database:
        query = "SELECT sample_index, reward FROM samples WHERE group_id = ?"
        rewards: dict[int, float | None] = dict(database.execute(query, (group_id,)).fetchall())
    kept = read_kept_of(run_folder, [(group_id, fate.index) for fate in fates if rewards.get(fate.index) is None])
    rewards |= {index: one.reward for (_, index), one in kept.items()}
    return [(fate.name, terminal_text(fate.text), rewards.get(fate.index), fate.num_tokens) for fate in fates]


# --- tokens ----------------------------------------------------------------------------------------------------------


def _whole_group(run_folder: Path, fate: Fate) -> tuple[str, Group | None]:
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


def _without_text(fate: Fate) -> str:
    if is_evaluation(fate.group_id):
        return f"{NOT_KEPT_TEXT} The answers of every evaluation stand in the folder {FOLDER}/ of the run."
    return NOT_KEPT_TEXT


def _as_kept(group: Group, sample: Sample, tokenizer: TextTokenizer | None) -> KeptSample:
    """Its texts, from its tokens."""
    reward, (outcome, detail) = sample.outcome.reward, outcome_words(sample.outcome)
    return KeptSample(
        group_id=group.group_id,
        index=sample.key.index,
        kept_at=0.0,
        row=group.prompt.row,
        prompt=clipped(group.prompt.text),
        label=clipped(group.prompt.label),
        response="" if tokenizer is None else clipped(response_text(sample, tokenizer.decode)),
        reward=None if reward is None else reward.value,
        components={} if reward is None else {component.name: component.value for component in reward.components},
        outcome=outcome,
        detail=detail,
    )


def _strip(sample: Sample, source: str, first: int, tokenizer: TextTokenizer | None) -> TokenStrip:
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


def _tokenizer_of(run_folder: Path) -> TextTokenizer | None:
    """Of its newest checkpoint; None where the run's folder has none (any more), and tokens are shown as ids."""
    try:
        return _opened(model_folder(run_folder, None))
    except (UserFault, DataError):
        return None


@lru_cache(maxsize=4)
def _opened(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder)
