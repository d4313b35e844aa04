"""*Flow*: the seven actors, what goes from one to the next, where it is held up, who waits for whom, what was lost."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, WEIGHT_PUBLISHER, is_engine
from penstock.messages.texts import counted, does
from penstock.messages.training import Balance
from penstock.runtime.dashboard.book import book_of
from penstock.runtime.dashboard.routes import Query, Route, View
from penstock.runtime.observability.actors_file import ACTORS_FILE, ANSWERED, ISSUED, ActorNow, Loss, read_actors
from penstock.runtime.observability.figures import CPU_SECONDS, GENERATED_TOKENS, RUNNING
from penstock.runtime.observability.plots import RATE_STEPS
from penstock.runtime.observability.summary import generated_tokens, trained_tokens
from penstock.runtime.observability.trackers import METRICS_FILE
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.runtime.observability.trackers import StepRow

ENGINES: Final = "engines"
MAX_ACTORS: Final = 100
"""In the table; those that are down or were replaced come first."""
QUEUED: Final = "engine/queued"
OCCUPANCY: Final = "engine/occupancy"
_GROUPS: Final = "buffer/ready_groups"
_OUT: Final = "buffer/outstanding_groups"
_TARGET: Final = "buffer/target_outstanding"
_TITLES: Final = {
    PROMPT_SOURCE: "PromptSource",
    ENGINES: "Engines",
    SCORER: "Scorer",
    FILTER: "Filter",
    BUFFER: "Buffer",
    LEARNER: "Learner",
    WEIGHT_PUBLISHER: "WeightPublisher",
}


class Figure(msgspec.Struct, frozen=True):
    """A number with its words."""

    label: str
    value: float | None
    unit: str = ""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One actor; all engines are one."""

    name: str
    title: str
    states: dict[str, int]
    """What they do now, in their own word or as an activity of the lanes → how many."""
    num_down: int
    num_restarts: int
    figures: list[Figure]
    pressure: str
    """What is held up here, in a sentence; empty where nothing is."""


class Edge(msgspec.Struct, frozen=True):
    """What goes from one to the next."""

    start: str
    end: str
    what: Figure


class ActorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One actor in the table."""

    name: str
    state: str
    is_down: bool
    num_restarts: int
    silent_s: float
    """Since it reported last, at the moment of the newest report of all."""
    cpu: float | None
    """Cores that it uses."""
    memory_bytes: float | None
    running: float | None
    queued: float | None
    tokens_per_s: float | None


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the view."""

    at_s: float | None
    """Of what the actors said; None of a run that did not write it down (before ``actors.json``)."""
    nodes: list[Node]
    edges: list[Edge]
    balance: Balance | None
    waits: str
    losses: list[Loss]
    actors: list[ActorLine]
    num_actors: int


def answer_flow(folder: Path, query: Query) -> Flow:
    """How a run stands now, or stood when it ended."""
    now, steps = read_actors(folder), book_of(folder).steps()
    actors = now.actors if now else []
    at_s = now.at_s if now else 0.0
    shown = sorted(actors, key=lambda actor: (not actor.is_down, -actor.num_restarts, _order(actor.name)))[:MAX_ACTORS]
    return Flow(
        at_s=now.at_s if now else None,
        nodes=[_node(name, [actor for actor in actors if _node_of(actor.name) == name], steps) for name in _TITLES],
        edges=_edges(actors, steps),
        balance=steps[-1].balance if steps else None,
        waits=terminal_lines(now.waits) if now else "",
        losses=[Loss(each.at_s, each.name, terminal_lines(each.story)) for each in now.losses] if now else [],
        actors=[_line(actor, at_s) for actor in shown],
        num_actors=len(actors),
    )


def _node_of(actor: str) -> str:
    return ENGINES if is_engine(actor) else actor


def _order(actor: str) -> tuple[int, str, int]:
    head, _, tail = actor.rpartition("/")
    names = list(_TITLES)
    node = _node_of(actor)
    return names.index(node) if node in names else len(names), head, int(tail) if tail.isdecimal() else 0


def _node(name: str, actors: Sequence[ActorNow], steps: Sequence[StepRow]) -> Node:
    last = steps[-1].metrics if steps else {}
    figures, pressure = _FIGURES[name](actors, last, steps)
    return Node(
        name=name,
        title=_TITLES[name],
        states=dict(Counter(terminal_text(actor.activity or actor.state) for actor in actors if not actor.is_down)),
        num_down=sum(actor.is_down for actor in actors),
        num_restarts=sum(actor.num_restarts for actor in actors),
        figures=[figure for figure in figures if figure.value is not None],
        pressure=pressure,
    )


# --- the figures of each ---------------------------------------------------------------------------------------------

_Last = dict[str, float | None]


def _of_source(actors: Sequence[ActorNow], last: _Last, _steps: Sequence[StepRow]) -> tuple[list[Figure], str]:
    out, target = last.get(_OUT), last.get(_TARGET)
    is_full = out is not None and target is not None and out >= target
    told = f"all {target:.0f} groups that may be under way are" if is_full and target else ""
    issued, again = _total(actors, ISSUED), _total(actors, "prompt_source/reissued")
    if issued is None:
        issued, again = last.get(ISSUED), last.get("prompt_source/reissued")
    return [Figure("issued", issued), Figure("issued again", again)], told


def _of_engines(actors: Sequence[ActorNow], _last: _Last, _steps: Sequence[StepRow]) -> tuple[list[Figure], str]:
    running, queued, occupancy = (_total(actors, name) for name in (RUNNING, QUEUED, OCCUPANCY))
    slots = None if occupancy is None else 100 * occupancy / sum(OCCUPANCY in actor.metrics for actor in actors)
    told = ""
    if queued and running and queued > running:
        told = f"{counted(round(queued), 'request')} {does(round(queued), 'wait')} for a slot"
    return [Figure("running", running), Figure("queued", queued), Figure("slots in use", slots, "%")], told


def _of_scorer(actors: Sequence[ActorNow], _last: _Last, _steps: Sequence[StepRow]) -> tuple[list[Figure], str]:
    waiting, running = _total(actors, "reward/waiting"), _total(actors, "reward/running")
    told = f"{waiting:.0f} reward calls wait for a worker" if waiting and waiting > (running or 0) else ""
    failed = _total(actors, "reward/failed")
    return [Figure("rewards running", running), Figure("waiting", waiting), Figure("failed", failed)], told


def _of_filter(actors: Sequence[ActorNow], _last: _Last, steps: Sequence[StepRow]) -> tuple[list[Figure], str]:
    waiting = _total(actors, "filter/waiting")
    kept = _kept(steps)
    told = f"{100 - kept:.0f} % of what ended was turned away" if kept is not None and kept < 50 else ""
    return [Figure("kept", kept, "%"), Figure("hooks waiting", waiting)], told


def _of_buffer(_actors: Sequence[ActorNow], last: _Last, _steps: Sequence[StepRow]) -> tuple[list[Figure], str]:
    ready, out, target = (last.get(name) for name in (_GROUPS, _OUT, _TARGET))
    figures = [Figure("groups ready", ready), Figure("under way", out), Figure("of at most", target)]
    told = f"{ready:.0f} complete groups wait for the Learner" if ready and target and ready > target / 2 else ""
    return figures, told


def _of_learner(_actors: Sequence[ActorNow], last: _Last, steps: Sequence[StepRow]) -> tuple[list[Figure], str]:
    version = float(steps[-1].version) if steps else None
    wait = last.get("perf/wait_time_ratio")
    return [
        Figure("version", version),
        Figure("time of a step", last.get("perf/step_time"), "s"),
        Figure("waiting", None if wait is None else 100 * wait, "%"),
    ], ""


def _of_publisher(actors: Sequence[ActorNow], last: _Last, _steps: Sequence[StepRow]) -> tuple[list[Figure], str]:
    lag = last.get("buffer/announced_lag")
    return [
        Figure("versions behind", lag),
        Figure("failed publishes", _total(actors, "weight_publisher/failed_publishes")),
        Figure("quarantines", _total(actors, "weight_publisher/quarantines")),
    ], ""


_FIGURES: Final[dict[str, Callable[[Sequence[ActorNow], _Last, Sequence[StepRow]], tuple[list[Figure], str]]]] = {
    PROMPT_SOURCE: _of_source,
    ENGINES: _of_engines,
    SCORER: _of_scorer,
    FILTER: _of_filter,
    BUFFER: _of_buffer,
    LEARNER: _of_learner,
    WEIGHT_PUBLISHER: _of_publisher,
}


def _edges(actors: Sequence[ActorNow], steps: Sequence[StepRow]) -> list[Edge]:
    """Rates of the actors themselves where they are known, of the last steps otherwise."""
    issued, made, scored = (
        sum(values) if (values := [actor.rates[name] for actor in actors if name in actor.rates]) else None
        for name in (ISSUED, GENERATED_TOKENS, ANSWERED)
    )
    if issued is None:
        issued = _growth(steps, lambda row: row.balance.issued)
    if made is None:
        made = _growth(steps, lambda row: generated_tokens(row.balance))
    trained = _growth(steps, lambda row: trained_tokens(row.balance))
    versions = _growth(steps, lambda row: row.version)
    ended = _growth(steps, lambda row: row.balance.issued - row.balance.in_system)
    return [
        Edge(PROMPT_SOURCE, ENGINES, Figure("issued", issued, "samples/s")),
        Edge(ENGINES, SCORER, Figure("generated", made, "tokens/s")),
        Edge(SCORER, FILTER, Figure("scored", scored, "samples/s")),
        Edge(FILTER, BUFFER, Figure("settled", ended, "samples/s")),
        Edge(BUFFER, LEARNER, Figure("trained", trained, "tokens/s")),
        Edge(LEARNER, WEIGHT_PUBLISHER, Figure("versions", None if versions is None else 60 * versions, "/min")),
        Edge(WEIGHT_PUBLISHER, ENGINES, Figure("weights", None)),
        Edge(BUFFER, PROMPT_SOURCE, Figure("grants", None)),
    ]


def _growth(steps: Sequence[StepRow], total: Callable[[StepRow], float]) -> float | None:
    """A second, over the last steps."""
    if len(steps) < 2:
        return None
    first, last = steps[max(0, len(steps) - 1 - RATE_STEPS)], steps[-1]
    took_s = last.at_s - first.at_s
    return (total(last) - total(first)) / took_s if took_s > 0 else None


def _kept(steps: Sequence[StepRow]) -> float | None:
    """Percent of the samples that ended within the last steps which were trained."""
    if not steps:
        return None
    first = steps[max(0, len(steps) - 1 - RATE_STEPS)].balance.ended if len(steps) > 1 else ()
    counts: Counter[bool] = Counter()
    for sign, ended in ((1, steps[-1].balance.ended), (-1, first)):
        for count in ended:
            if count.state != "evaluated":
                counts[count.state == "trained"] += sign * count.num_samples
    return 100 * counts[True] / counts.total() if counts.total() > 0 else None


def _total(actors: Sequence[ActorNow], name: str) -> float | None:
    values = [value for actor in actors if (value := actor.metrics.get(name)) is not None and math.isfinite(value)]
    return math.fsum(values) if values else None


def _line(actor: ActorNow, now_s: float) -> ActorLine:
    return ActorLine(
        name=terminal_text(actor.name),
        state=terminal_text(actor.activity or actor.state),
        is_down=actor.is_down,
        num_restarts=actor.num_restarts,
        silent_s=max(0.0, now_s - actor.at_s),
        cpu=actor.rates.get(CPU_SECONDS),
        memory_bytes=actor.metrics.get("process/resident_bytes"),
        running=actor.metrics.get(RUNNING),
        queued=actor.metrics.get(QUEUED),
        tokens_per_s=actor.rates.get(GENERATED_TOKENS),
    )


FLOW: Final = View(
    name="flow",
    title="Flow",
    files=(ACTORS_FILE, METRICS_FILE),
    routes=(Route(path="flow", query=Query, answer=answer_flow, is_shared=True),),
)
