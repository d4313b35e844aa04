"""What an actor holds does not depend on how long the run has gone on: not its machine, shell or open traces."""

from __future__ import annotations

from collections import Counter, deque
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, cast
from unittest.mock import patch

import msgspec
import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import EvaluationTrial, Trial

from penstock.actors.scorer.reward_alarms import RewardAlarms
from penstock.backends.simulated.rewards import JudgingModel
from penstock.messages.names import BUFFER
from penstock.messages.training import OnStale, UpdateMode
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.generations import Open
from penstock.runtime.observability.spans import SpanRecorder
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.trace_ids import TraceIds
from penstock.runtime.observability.trackers import EventLog

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

NUM_STEPS: Final = 80
"""Of the short run, enough to fill every window of a fixed length; the long one has four times as many."""
GROUPS_PER_BATCH: Final = 2
NUM_MORE: Final = 3 * NUM_STEPS * GROUPS_PER_BATCH
"""Groups that the long run trains beyond those of the short one."""
SLACK: Final = NUM_MORE // 24
"""Entries by which a collection may differ: what was cleared last, or waited for at the last look."""
WALKED: Final = ("penstock.actors.", "penstock.runtime.shell.", "penstock.runtime.observability.stages")
BESIDE: Final = ("_host", "_observer", "settings", "_recorder", "_ids", "kept", "_heaps")
"""Not the actor's, or bounded by a number of its own (the Router's heaps are cleared of what is out of date when that
is most of them)."""
EARLY_KILLS: Final = tuple(
    Fault(at_s=4.0 + 5 * index, kind=FaultKind.KILL, target=target, after_effects=index % 3)
    for index, target in enumerate(("engine/0", "scorer", "filter", "prompt_source", "buffer", "learner"))
)
TIGHT: Final = Trial(
    seed=1,
    policy="fully_async",
    max_staleness=1,
    update_mode=UpdateMode.IN_FLIGHT,
    on_stale=OnStale.DROP,
    over_sampling=1.5,
    groups_per_batch=GROUPS_PER_BATCH,
    num_rows=1 << 20,
)
WIDE: Final = msgspec.structs.replace(TIGHT, max_staleness=4, on_stale=OnStale.WAIT, over_sampling=1.0)
CASES: Final = {
    "plain": WIDE,
    "given up": TIGHT,
    "interrupted": msgspec.structs.replace(TIGHT, update_mode=UpdateMode.INTERRUPT, num_slots=2),
    "requeued": msgspec.structs.replace(TIGHT, on_stale=OnStale.REQUEUE, max_requeues=2),
    "turned away": msgspec.structs.replace(WIDE, judging=JudgingModel(rejection_rate=0.4)),
    "unscored": msgspec.structs.replace(WIDE, judging=JudgingModel(failure_rate=0.2)),
    "scored together": msgspec.structs.replace(TIGHT, scores_groups=True),
    "used again": msgspec.structs.replace(WIDE, reuse=2),
    "evaluated": msgspec.structs.replace(WIDE, evaluation=EvaluationTrial(every=5, at_end=True)),
    "killed": msgspec.structs.replace(WIDE, faults=EARLY_KILLS),
}


class Traces(IdleWatcher):
    """Has every group of a run traced, and lets the spans go. Implements ``Watcher``."""

    def __init__(self) -> None:
        self.stages: dict[str, StageRecorder] = {}
        """Of the last incarnation of each actor."""
        self._observers: dict[tuple[str, int], EventObserver] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        who = process.name, process.epoch
        if who not in self._observers:
            stages = self.stages[process.name] = StageRecorder(SpanRecorder(max_pending=0), TraceIds(bytes(16), 1.0))
            self._observers[who] = EventObserver(
                EventLog(), name=process.name, epoch=process.epoch, now_s=lambda: 0.0, stages=stages
            )
        self._observers[who].handled(event, header, commands)


def entries_of(root: object) -> Counter[str]:
    """How many entries the collections that belong to an object have, by where they are."""
    found, seen, walked = Counter[str](), set[int](), [("", root)]
    while walked:
        where, value = walked.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: dict[str, Any] = {}
        if isinstance(value, dict | list | tuple | set | frozenset | deque | bytearray):
            held = cast("Any", value)
            found[where] += len(held)
            keys: Any = () if not isinstance(value, dict) else held.values()
            walked += [(where, each) for each in (*held, *keys) if not isinstance(each, int | str | bytes)]
        elif isinstance(value, msgspec.Struct):
            inner = {name: getattr(value, name) for name in value.__struct_fields__}
        elif isinstance(value, MethodType):
            walked.append((where, value.__self__))
        elif type(value).__module__.startswith(WALKED) and not isinstance(value, type):
            inner = {name: getattr(value, name) for name in getattr(value, "__slots__", None) or vars(value)}
        walked += [(f"{where}.{name}", each) for name, each in inner.items() if name not in BESIDE]
    return found


def held_after(trial: Trial, num_steps: int) -> dict[str, Counter[str]]:
    """By actor, when a run of so many steps is over and quiet."""
    run, traces = TrialRun(msgspec.structs.replace(trial, num_steps=num_steps), with_digest=False), Traces()
    run.host.watch(traces)
    run.run()
    processes = run.host.supervisor.processes
    return {name: entries_of([process.shell, traces.stages[name]]) for name, process in processes.items()}


def growths(trial: Trial) -> dict[str, int]:
    """The collections that have more entries in a run four times as long, and how many more."""
    short, long = held_after(trial, NUM_STEPS), held_after(trial, 4 * NUM_STEPS)
    more = {f"{name}{where}": num - short[name][where] for name in long for where, num in long[name].items()}
    return {where: num for where, num in more.items() if num > SLACK}


@pytest.mark.parametrize("case", CASES)
def test_no_actor_holds_more_after_a_run_four_times_as_long(case: str) -> None:
    assert growths(CASES[case]) == {}


@pytest.mark.parametrize(("is_own", "lists"), [(False, ("_rows", "_rewards", "_is_rejected")), (True, ("_told",))])
def test_where_rows_are_chosen_the_list_of_their_outcomes_grows_and_nothing_else(
    *, is_own: bool, lists: tuple[str, ...]
) -> None:
    trial = msgspec.structs.replace(WIDE, own_source=is_own, has_priority=not is_own)
    more = growths(trial)
    assert {where.rpartition(".")[2] for where in more} <= set(lists), more
    assert {where.partition(".")[0] for where in more} == {BUFFER}
    assert set(more.values()) == {NUM_MORE * (1 + is_own)}, "one for each admission, and one for each end"


def test_what_is_never_forgotten_is_noticed() -> None:
    def kept(*_: object) -> None:
        return

    with patch.object(RewardAlarms, "forget", kept), patch.object(Open, "settle", kept):
        found = {where.rpartition(".")[2] for where in growths(CASES["given up"])}
    assert found == {"_open", "_arrived"}
