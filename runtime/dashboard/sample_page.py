"""One sample: what it was asked and wrote, its tokens one by one, its group, and its life.

What a run keeps of a sample stands in several places, and of most samples not in all of them. Each part that is missing
is named with the key that keeps it.
"""

from __future__ import annotations

import sqlite3
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from penstock.backends.extras import missing_extra
from penstock.backends.ledger.evaluation_answers import FOLDER, outcome_words, response_text
from penstock.backends.ledger.kept_samples import KeptSample, clipped, read_kept_of
from penstock.backends.ledger.sqlite import asked_ledger
from penstock.messages.base import UNREADABLE
from penstock.messages.engine_counts import in_words
from penstock.messages.errors import UserFault
from penstock.messages.samples import Group, Sample, SampleKey, is_evaluation
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.dashboard.sample_tokens import (
    TokenStrip,
    dumped_rows,
    dumped_strip,
    token_strip,
    tokenizer_of,
    whole_group,
    with_learner,
)
from penstock.runtime.launch.runs import ledger_file
from penstock.runtime.observability.lives import Fate, Stage, read_fates, read_lives, sample_key
from penstock.runtime.observability.removed import SPANS, removed_text
from penstock.runtime.observability.texts import told
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.backends.learners.step_dumps import DumpedSequence
    from penstock.messages.samples import Media

MAX_GROUP: Final = 256
MAX_IMAGES: Final = 4
"""Of which a sample's page has pictures."""
UNSHOWN: Final = "the file is not there any more, is not the image that it was, or is too large for a small picture."
NOT_KEPT_TEXT: Final = (
    "What it was asked and what it wrote was not kept as text. observability.samples keeps the newest so many samples "
    "and the oddest; run.keep_samples=true keeps every sample that is trained."
)
NOT_KEPT_TOKENS: Final = (
    "Its tokens, log-probs, mask and weight versions were not kept. run.keep_samples=true keeps those of every sample "
    "that is trained; the ledger has them only until its step is in a checkpoint."
)
NOT_KEPT_LEARNER: Final = (
    "The learner's own log-probs, ratios and advantages of its tokens were not written down: learner.dump does so for "
    "the steps that it names. Their means over each step are in the Learning view."
)


class SampleQuery(Query, frozen=True, kw_only=True):
    """Which sample."""

    sample: Annotated[str, msgspec.Meta(max_length=40)]
    """Such as ``12/3`` or ``e4/0``."""
    first_token: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0


class Mate(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of the same group."""

    name: str
    fate: str
    reward: float | None
    num_tokens: int


class Thumbnail(msgspec.Struct, frozen=True, kw_only=True):
    """A small picture of an image: pixels for the page to draw, and no format that a browser would have to decode."""

    width: int
    height: int
    pixels: bytes
    """RGBA, row by row; base64 in JSON."""


class SamplePage(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a sample."""

    name: str
    fate: str
    """In words."""
    state: str
    cause: str
    reason: str
    engine: str
    counted: str
    """By its engine, in words; empty: nothing that is known here."""
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
    images: list[Thumbnail]
    """Of the prompt; the first few that are still there."""
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
    """What the life of one sample was spent on, from its grant to its end."""

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
    fate, kept, mates = _known(run_folder, key)
    source, group = whole_group(run_folder, fate)
    sample = None if group is None else next((one for one in group.samples if one.key == SampleKey(*key)), None)
    rows = dumped_rows(run_folder, fate)
    tokenizer = tokenizer_of(run_folder) if sample is not None or rows else None
    if kept is None and sample is not None and group is not None:
        kept = _as_kept(group, sample, tokenizer)
    text = kept or KeptSample(group_id=key[0], index=key[1], kept_at=0.0, row=-1, prompt="")
    images = _thumbnails(text.media)
    average, deviation = _spread([mate.reward for mate in mates])
    trained = None not in (fate.version, fate.oldest_version)
    return SamplePage(
        name=fate.name,
        fate=terminal_text(fate.text),
        state=fate.state,
        cause=terminal_text(fate.cause),
        reason=terminal_lines(fate.reason or text.reason),
        engine=terminal_text(fate.engine),
        counted="" if sample is None else in_words(sample.counts),
        attempt=fate.attempt,
        num_tokens=fate.num_tokens,
        oldest_version=fate.oldest_version,
        newest_version=fate.newest_version,
        step=fate.version,
        age=(fate.version or 0) - 1 - (fate.oldest_version or 0) if trained else None,
        reward=next((mate.reward for mate in mates if mate.name == fate.name), text.reward),
        components={terminal_text(name): value for name, value in text.components.items()},
        outcome=terminal_text(f"{text.outcome} {text.detail}".strip()),
        row=None if kept is None else kept.row,
        prompt=terminal_lines(text.prompt),
        label=terminal_lines(text.label),
        response=terminal_lines(text.response),
        mean=average,
        deviation=deviation,
        group=mates,
        tokens=_strip(sample, source, rows, query.first_token, tokenizer),
        images=images,
        missing=_without_pictures(len(text.media), len(images))
        + ([] if kept else [_without_text(fate)])
        + ([] if rows else [NOT_KEPT_LEARNER] if sample else [NOT_KEPT_TOKENS]),
    )


def _strip(
    sample: Sample | None, source: str, rows: Sequence[DumpedSequence], first: int, tokenizer: TextTokenizer | None
) -> TokenStrip | None:
    if sample is None:
        return dumped_strip(rows, first, tokenizer) if rows else None
    strip = token_strip(sample, source, first, tokenizer)
    return with_learner(strip, sample, rows) if rows else strip


def _thumbnails(media: Sequence[Media]) -> list[Thumbnail]:
    if not media or missing_extra("PIL"):
        return []
    from penstock.backends.vision.pictures import thumbnail

    made = [found for each in media[:MAX_IMAGES] if (found := thumbnail(each)) is not None]
    return [Thumbnail(width=width, height=height, pixels=pixels) for width, height, pixels in made]


def _without_pictures(num_images: int, num_shown: int) -> list[str]:
    """Why some of its images have no picture."""
    if num_shown == num_images:
        return []
    if missing := missing_extra("PIL"):
        return [f"It has {num_images} images, which are not shown here: {missing}"]
    gone, more = min(num_images, MAX_IMAGES) - num_shown, max(0, num_images - MAX_IMAGES)
    texts = [f"{gone} of its images cannot be shown: {UNSHOWN}"] if gone else []
    return [*texts, f"{more} more images are not shown."] if more else texts


def _known(run_folder: Path, key: tuple[int, int]) -> tuple[Fate, KeptSample | None, list[Mate]]:
    """What ledger and kept samples say of it and of its group."""
    fate = (read_fates(run_folder, sample=key) or [Fate(*key)])[0]
    try:
        kept, mates = read_kept_of(run_folder, [key]).get(key), _mates(run_folder, key[0])
    except (sqlite3.Error, *UNREADABLE) as error:
        raise UserFault(f"{run_folder}: its samples cannot be read: {error}") from None
    if not fate.state and fate.attempt is None and kept is None and not mates:
        raise UserFault(
            f"{run_folder}: nothing is known of sample {fate.name}: it has not come so far, or was never issued"
        )
    return fate, kept, mates


def _spread(rewards: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and deviation; None with fewer than two."""
    values = [reward for reward in rewards if reward is not None]
    return (mean(values), stdev(values)) if len(values) > 1 else (None, None)


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
        "This sample was not traced: observability.trace_fraction keeps some groups only. The times are the ledger's."
    )  # fmt: skip
    if removed := removed_text(run_folder, SPANS, since=life.start_ns / 1e9):
        reason = f"{reason} If it was, {removed}." if reason else f"Of its spans some may be missing: {removed}."
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


def _mates(run_folder: Path, group_id: int) -> list[Mate]:
    """The samples of a group; rewards are of the ledger, or of the kept samples where it has none."""
    fates = read_fates(run_folder, group_id=group_id)[:MAX_GROUP]
    with asked_ledger(ledger_file(run_folder)) as database:
        query = "SELECT sample_index, reward FROM samples WHERE group_id = ?"
        rewards: dict[int, float | None] = dict(database.execute(query, (group_id,)).fetchall())
    kept = read_kept_of(run_folder, [(group_id, fate.index) for fate in fates if rewards.get(fate.index) is None])
    rewards |= {index: one.reward for (_, index), one in kept.items()}
    return [
        Mate(name=fate.name, fate=terminal_text(fate.text), reward=rewards.get(fate.index), num_tokens=fate.num_tokens)
        for fate in fates
    ]


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
        media=sample.images(group.prompt),
        response="" if tokenizer is None else clipped(response_text(sample, tokenizer.decode)),
        reward=None if reward is None else reward.value,
        components={} if reward is None else {component.name: component.value for component in reward.components},
        outcome=outcome,
        detail=detail,
    )
