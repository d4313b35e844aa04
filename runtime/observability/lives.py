"""The lives of samples: what the ledger knows of each, joined with the spans that the actors recorded.

Invariants:

* What became of a sample, and why, is what the ledger says. Spans say when, and by whom.
* A sample that came through a stage has that stage in its life. The spans of an actor's last half second go with it
  when it is killed; such a stage stands between what is known before and after it, from other actors' spans and the
  ledger's times, and is marked as not recorded. Its time is then an upper bound.
* All attempts of a sample are in its life. Stages of the last one alone are added so: nobody knows how far an earlier
  one came.
* An episode's turns are in its life, each in the attempt that made it. A trained sample that went on from a save point
  has turns of an earlier attempt; one of those that the killed engine took along is marked as not recorded likewise.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.ledger.sqlite import asked_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.samples import TerminalState, evaluation_group_id, group_name
from penstock.runtime.observability.samples import DROPPED, IN_THE_SYSTEM, fate_text
from penstock.runtime.observability.spans import CHAT, AttributeValue, is_episode_step, trace_id_of
from penstock.runtime.observability.traces import SpanRow, each_span, run_salt, spans_by_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

STAGES: Final = ("issue", "queue", "generate", "score", "filter", "buffer_wait", "train")
"""In the order in which a sample comes through them."""
OF_ATTEMPT: Final = STAGES[:3]
_NAME: Final = re.compile(r"(e?)(\d{1,18})/(\d{1,9})")
_LAST_STAGE: Final = {
    TerminalState.TRAINED: "train",
    TerminalState.EVALUATED: "filter",
    TerminalState.FILTERED: "filter",
}
"""Up to where a sample with a response came for certain, by its terminal state."""
_AT: Final[dict[str, str]] = dict(
    zip(STAGES, ("prompt_source", "", "", "scorer", "filter", "buffer", "learner"), strict=True)  # "": its engine
)
_SELECT: Final = """
SELECT s.group_id, s.sample_index, coalesce(s.state, ''), coalesce(s.cause, ''), coalesce(r.reason, ''), s.version,
    s.attempt, coalesce(s.engine, ''), coalesce(s.num_tokens, 0), s.oldest_version, s.newest_version,
    coalesce(g.granted_at, e.opened_at), g.admitted_at, b.leased_at, t.recorded_at, coalesce(g.ended_at, v.ended_at)
FROM samples s LEFT JOIN groups g USING (group_id) LEFT JOIN evaluation_groups v USING (group_id)
    LEFT JOIN evaluations e ON e.number = v.evaluation LEFT JOIN batches b ON b.version = s.version
    LEFT JOIN steps t ON t.version = s.version LEFT JOIN reasons r USING (group_id, sample_index)
"""


class Fate(msgspec.Struct, frozen=True):
    """What the ledger says of a sample. Times are Unix seconds, None of what did not happen."""

    group_id: int
    index: int
    state: str = ""
    """Terminal state; empty while it is in the system."""
    cause: str = ""
    reason: str = ""
    """What went wrong, in words. Part of it is foreign text."""
    version: int | None = None
    """That training on it made."""
    attempt: int | None = None
    """None where no response came."""
    engine: str = ""
    num_tokens: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    granted_at: float | None = None
    admitted_at: float | None = None
    leased_at: float | None = None
    trained_at: float | None = None
    ended_at: float | None = None

    @property
    def name(self) -> str:
        """As everywhere: ``12/3``, ``e4/0``."""
        return f"{group_name(self.group_id)}/{self.index}"

    @property
    def text(self) -> str:
        """In words: ``trained at step 4``, ``failed: scoring_failed``."""
        state = self.state or (IN_THE_SYSTEM if self.version is None else "in the batch")
        return fate_text(state, self.cause, self.version)

    def marks(self) -> Iterable[tuple[int, int]]:
        """What the ledger says of when: the place in ``STAGES`` before which a time lies, and the time in
        nanoseconds."""
        at = (self.granted_at, self.admitted_at, self.leased_at, self.trained_at, self.ended_at)
        return ((place, round(1e9 * time)) for place, time in zip((0, 5, 6, 7, 7), at, strict=True) if time is not None)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a life, or one turn or call of an episode."""

    name: str
    actor: str
    start_ns: int
    """Unix time, as ``end_ns``."""
    end_ns: int
    attempt: int | None = None
    """Of issue, queue and generate, and of turns and calls."""
    attributes: dict[str, AttributeValue] = {}
    is_recorded: bool = True
    """False: no span of it is left, and it lies somewhere between these times."""
    span_id: str = ""
    parent_id: str = ""
    """Of a turn or call: the ``generate`` that it belongs to, whose span may not be there."""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """A sample from its grant to its end."""

    fate: Fate
    stages: tuple[Stage, ...]
    """By their start."""
    steps: tuple[Stage, ...] = ()
    """Turns of the model and calls of tools, where an episode was played, by their start."""
    is_traced: bool

    @property
    def start_ns(self) -> int:
        return min((stage.start_ns for stage in self.stages), default=0)

    @property
    def end_ns(self) -> int:
        return max((stage.end_ns for stage in self.stages), default=0)

    @property
    def duration_s(self) -> float:
        """From its grant to the end of its last stage."""
        return (self.end_ns - self.start_ns) / 1e9


def sample_key(name: str) -> tuple[int, int]:
    """Group and index of a sample by its name.

    Raises:
        UserFault: it is no name of a sample.
    """
    found = _NAME.fullmatch(name)
    if not found:
        raise UserFault(f"{name!r}: a sample is named GROUP/INDEX, such as 12/3, or e4/0 of an evaluation")
    group_id = int(found[2])
    return evaluation_group_id(group_id) if found[1] else group_id, int(found[3])


def read_fates(
    run_folder: Path,
    *,
    sample: tuple[int, int] | None = None,
    group_id: int | None = None,
    step: int | None = None,
    states: Sequence[str] = (),
) -> list[Fate]:
    """What the ledger says of every sample that has come to the Buffer, or of those of these conditions.

    Raises:
        UserFault: there is no ledger, or it cannot be read.
    """
    terms = ["s.group_id = ? AND s.sample_index = ?"] if sample is not None else []
    terms += ["s.group_id = ?"] if group_id is not None else []
    terms += ["s.version = ?"] if step is not None else []
    terms += [f"s.state IN ({', '.join('?' * len(states))})"] if states else []
    values = (*(sample or ()), *(value for value in (group_id, step) if value is not None), *states)
    where = f"WHERE {' AND '.join(terms)}" if terms else ""
    file = run_folder / LEDGER_FILE
    if not file.is_file():
        raise UserFault(f"{file}: the run has no ledger (yet), so nothing is known of its samples")
    with asked_ledger(file) as database:
        rows = database.execute(f"{_SELECT} {where} ORDER BY s.group_id, s.sample_index", values).fetchall()
    return [Fate(*row) for row in rows]


def failed_or_dropped(run_folder: Path, *, failed: bool, dropped: bool) -> list[Fate]:
    """Every sample that failed, or that was filtered, stale or cancelled; as :func:`read_fates`."""
    states = ((TerminalState.FAILED.value,) if failed else ()) + (DROPPED if dropped else ())
    return read_fates(run_folder, states=states)


def slowest(run_folder: Path, limit: int) -> tuple[list[Fate], int]:
    """Of the samples that are traced and have come to the Buffer those with the longest lives, the longest first; and
    how many there are in all.

    Raises:
        UserFault: the run was not traced, or its files are damaged.
    """
    salt = run_salt(run_folder)
    fates = {trace_id_of(salt, fate.group_id, fate.index).hex(): fate for fate in read_fates(run_folder)}
    times: dict[str, tuple[int, int]] = {}
    for row in each_span(run_folder, fates.keys()):
        if row.name in STAGES:
            start_ns, end_ns = times.get(row.trace_id, (row.start_ns, row.end_ns))
            times[row.trace_id] = min(start_ns, row.start_ns), max(end_ns, row.end_ns)
    # What a killed actor took along may be a life's first or last stage, so that more are looked at than are shown.
    likely = sorted(times, key=lambda trace_id: times[trace_id][0] - times[trace_id][1])[: 4 * limit]
    lives = read_lives(run_folder, [fates[trace_id] for trace_id in likely])
    return [life.fate for life in sorted(lives, key=lambda life: -life.duration_s)[:limit]], len(times)


def read_lives(run_folder: Path, fates: Sequence[Fate]) -> list[Life]:
    """The lives of these samples, in this order. Of one that is not traced there is what the ledger knows.

    Raises:
        UserFault: the run was not traced, or a file of spans is damaged.
    """
    salt = run_salt(run_folder)
    ids = [trace_id_of(salt, fate.group_id, fate.index).hex() for fate in fates]
    spans = spans_by_trace(run_folder, ids)
    return [life_of(fate, spans[trace_id]) for fate, trace_id in zip(fates, ids, strict=True)]


def life_of(fate: Fate, spans: Sequence[SpanRow]) -> Life:
    """A life from the spans of its trace and what the ledger says."""
    stages = [_stage(row) for row in spans if row.name in STAGES]
    stages += [_unrecorded(name, stages, fate) for name in _missing(stages, fate)]
    steps = [_stage(row) for row in spans if is_episode_step(row.name)]
    steps += _lost_turns(steps, stages, fate)
    return Life(
        fate=fate,
        stages=tuple(sorted(stages, key=lambda stage: (stage.start_ns, STAGES.index(stage.name), stage.end_ns))),
        steps=tuple(sorted(steps, key=lambda step: (step.start_ns, -step.end_ns))),
        is_traced=bool(spans),
    )


def _stage(row: SpanRow) -> Stage:
    attempt = row.attributes.get("attempt")
    return Stage(
        name=row.name,
        actor=row.actor,
        start_ns=row.start_ns,
        end_ns=row.end_ns,
        attempt=attempt if isinstance(attempt, int) else None,
        attributes={name: value for name, value in row.attributes.items() if name != "attempt"},
        span_id=row.span_id,
        parent_id=row.parent_id,
    )


def _lost_turns(steps: Sequence[Stage], stages: Sequence[Stage], fate: Fate) -> list[Stage]:
    """Turns that a trained sample has for certain, as later ones of its last attempt are known, and of which no span is
    left: they were made before the save point from which the last attempt went on."""
    turns = [(number, step) for step in steps if isinstance(number := step.attributes.get("turn"), int)]
    last = [number for number, step in turns if step.attempt == fate.attempt]
    if fate.attempt is None or fate.state not in _LAST_STAGE or not last:
        return []
    known = {number for number, _ in turns}
    begun_ns = min((stage.start_ns for stage in stages), default=0)
    lost: list[Stage] = []
    for number in sorted(set(range(1, min(last))) - known):
        start_ns = max((step.end_ns for at, step in turns if at < number), default=begun_ns)
        end_ns = min(step.start_ns for at, step in turns if at > number)
        facts: dict[str, AttributeValue] = {"turn": number}
        lost.append(
            Stage(
                name=CHAT, actor="", start_ns=min(start_ns, end_ns), end_ns=end_ns, attempt=max(0, fate.attempt - 1),
                attributes=facts, is_recorded=False,
            )
        )  # fmt: skip
    return lost


def _missing(stages: Sequence[Stage], fate: Fate) -> list[str]:
    """Stages that the sample came through for certain, of which no span is left; of the last attempt where there are
    several."""
    if fate.attempt is None or fate.state not in _LAST_STAGE:
        return []
    known = {
        stage.name
        for stage in stages
        if stage.name not in OF_ATTEMPT
        or (stage.attempt == fate.attempt and stage.attributes.get("outcome") != "cancelled")
    }
    certain = STAGES[: STAGES.index(_LAST_STAGE[TerminalState(fate.state)]) + 1]
    return [name for name in certain if name not in known]


def _unrecorded(name: str, stages: Sequence[Stage], fate: Fate) -> Stage:
    """The stage between the last thing that is known before it and the first that is known after it."""
    place = STAGES.index(name)
    placed = [(STAGES.index(one.name), one) for one in stages if one.attempt in (None, fate.attempt)]
    earlier = [one.start_ns for one in stages if one.attempt not in (None, fate.attempt)]
    before = [one.end_ns for at, one in placed if at < place] + [ns for at, ns in fate.marks() if at <= place] + earlier
    after = [one.start_ns for at, one in placed if at > place] + [ns for at, ns in fate.marks() if at > place]
    start_ns = max(before, default=min(after, default=0))
    versions = (fate.oldest_version, fate.newest_version)
    told: dict[str, AttributeValue] = {"num_tokens": fate.num_tokens} if name == "generate" else {}
    if name == "generate" and None not in versions:
        told["versions"] = "–".join(dict.fromkeys(map(str, versions)))
    return Stage(
        name=name,
        actor=_AT[name] or fate.engine,
        start_ns=start_ns,
        end_ns=max(start_ns, min(after, default=start_ns)),
        attempt=fate.attempt if name in OF_ATTEMPT else None,
        attributes=told,
        is_recorded=False,
    )
