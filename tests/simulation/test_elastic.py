"""Engines that join and leave while a run goes on, at any moment, and whatever dies meanwhile."""
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from trials.draws import draw_trial
from trials.elastic_watch import ElasticWatch
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun, UnfinishedError, fails, living_engines, several
from trials.requests import Request as Asked
from trials.trial import LONG_RESPONSES, Trial

from penstock.actors.buffer.operator_side import OperatorSide
from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.prompt_source.leaving import Leaving
from penstock.actors.prompt_source.routing import EngineView, Router
from penstock.actors.weight_publisher.engines import EngineState
from penstock.actors.weight_publisher.phases import Phase
from penstock.messages.ledger import EnginesRecorded, GroupRecorded
from penstock.messages.operator import EnginesAsked
from penstock.messages.training import UpdateMode
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel, Supervisor
from penstock.runtime.shell.engine_membership import EngineMembership

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    from penstock.actors.buffer.settings import ElasticEngines
    from penstock.actors.engine_worker.requests import Request
    from penstock.actors.prompt_source.census import Found
    from penstock.messages.membership import ActorEpoch
    from penstock.messages.samples import Part, SampleKey

POLICIES = ("fully_async", "one_step_off", "sync")
MAX_TRIALS = 1200
"""Of all kinds; about one of seven has engines that join and leave."""


def elastic_trials(*first: int) -> Iterator[Trial]:
    """Those of these numbers, before all in their order."""
    for number in (*first, *range(MAX_TRIALS)):
        trial = draw_trial(POLICIES[number % len(POLICIES)], number)
        if trial.max_engines is not None or trial.has_notices:
            yield trial


# --- planted bugs: one of each rule -----------------------------------------------------------------------------------


def issues_to_a_leaver() -> AbstractContextManager[Any]:
    def ignores(self: Router, name: str) -> None:
        pass

    return patch.object(Router, "retire", ignores)


def keeps_its_last_tokens() -> AbstractContextManager[Any]:
    """What PromptSource lacks of a response is not told before it is handed back."""
    report = EngineWorker._report

    def silent(self: EngineWorker, request: Request, from_token: int, chunk: Part) -> None:
        if not self._is_leaving:
            report(self, request, from_token, chunk)

    return patch.object(EngineWorker, "_report", silent)


def lets_go_too_early() -> AbstractContextManager[Any]:
    """Who has nothing to generate goes, whatever is on its way to the Scorer."""

    def trusts(self: Leaving, name: str, key: SampleKey, found: Found) -> bool:
        return False

    return patch.object(Leaving, "_is_alone", trusts)


def takes_a_leave_for_a_death() -> AbstractContextManager[Any]:
    gone = Leaving.gone

    def deadly(self: Leaving, name: str) -> bool:
        gone(self, name)
        return False

    return patch.object(Leaving, "gone", deadly)


def sends_to_a_newcomer_at_once() -> AbstractContextManager[Any]:
    has_room = property(lambda self: self.load < self.capacity)
    return patch.object(EngineView, "has_room", has_room)


def counts_a_newcomer_at_once() -> AbstractContextManager[Any]:
    is_ready = property(lambda self: self.phase not in (Phase.STARTING, Phase.QUARANTINED))
    return patch.object(EngineState, "is_ready", is_ready)


def does_not_come_back() -> AbstractContextManager[Any]:
    """The place of an engine that went with its machine stays empty."""
    return patch.object(EngineMembership, "returns", lambda self: [])


def says_once_that_one_is_given_up() -> AbstractContextManager[Any]:
    """If the Buffer is not there then, it never hears."""
    tell = Supervisor.tell_given_up

    def once(self: Supervisor, drive: int) -> None:
        if not hasattr(self, "has_told"):
            self.has_told = True  # type: ignore[attr-defined]
            tell(self, drive)

    return patch.object(Supervisor, "tell_given_up", once)


def starts_who_is_given_up() -> AbstractContextManager[Any]:
    """The word of a Buffer that has not heard of it is enough."""

    def missing(self: EngineMembership, present: Collection[str]) -> list[str]:
        return sorted((self._wanted or frozenset()).difference(present))

    def is_wanted(self: EngineMembership, name: str) -> bool:
        return self._wanted is None or not name.startswith("engine/") or name in self._wanted

    return several(
        patch.object(EngineMembership, "missing", missing), patch.object(EngineMembership, "is_wanted", is_wanted)
    )


def is_never_gone() -> AbstractContextManager[Any]:
    """Who has left counts as one that leaves, however often it comes by its name again."""
    return patch.object(EngineMembership, "gone", lambda self, name: None)


def is_given_up_for_ever() -> AbstractContextManager[Any]:
    """An engine stays given up when the Buffer has recorded that, and when it is asked for again."""
    want = EngineMembership.want

    def forgets_nothing(
        self: EngineMembership, engines: Collection[str], given_up: Collection[ActorEpoch] = ()
    ) -> list[str]:
        unrecorded = dict(self._given_up)
        recorded = want(self, engines, given_up)
        self._given_up.update(unrecorded)
        return recorded

    return patch.object(EngineMembership, "want", forgets_nothing)


PLANTS = (
    is_given_up_for_ever,
    is_never_gone,
    says_once_that_one_is_given_up,
    starts_who_is_given_up,
    does_not_come_back,
    issues_to_a_leaver,
    keeps_its_last_tokens,
    lets_go_too_early,
    takes_a_leave_for_a_death,
    sends_to_a_newcomer_at_once,
    counts_a_newcomer_at_once,
)


FOUND_BY = {
    "is_given_up_for_ever": 139,
    "is_never_gone": 48,
    "says_once_that_one_is_given_up": 139,
    "does_not_come_back": 63,
    "issues_to_a_leaver": 23,
    "keeps_its_last_tokens": 74,
    "lets_go_too_early": 1288,
    "takes_a_leave_for_a_death": 345,
}
"""The trial that found it when this was written. It goes first, before all in their order."""


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    first = [FOUND_BY[plant.__name__]] if plant.__name__ in FOUND_BY else []
    with plant():
        assert any(map(fails, elastic_trials(*first)))


# --- rules that need schedules of their own ---------------------------------------------------------------------------


def scaled(*steps: tuple[float, int], seed: int = 5, faults: tuple[Fault, ...] = (), **fields: Any) -> Trial:  # noqa: ANN401 - fields of a trial
    """A run with one engine that has so many from these seconds on."""
    values: dict[str, Any] = {
        "policy": "fully_async",
        "max_staleness": 2,
        "update_mode": UpdateMode.IN_FLIGHT,
        "num_steps": 6,
        "groups_per_batch": 4,
        "num_engines": 1,
        "max_engines": 3,
        "num_slots": 4,
        "latency": LONG_RESPONSES,
        "requests": tuple(
            Asked(at_s=at_s, event=EnginesAsked(engines=tuple(f"engine/{index}" for index in range(count))))
            for at_s, count in steps
        ),
    }
    return Trial(seed=seed, faults=faults, **(values | fields))


def ran(trial: Trial) -> tuple[TrialRun, ElasticWatch]:
    run = TrialRun(trial, with_digest=False)
    watch = ElasticWatch(run.host, salvages=True, loses_nothing=True)
    run.host.watch(watch)
    run.run()
    return run, watch


def test_engines_join_and_leave_and_nothing_is_made_twice() -> None:
    run, watch = ran(scaled((30.0, 3), (75.0, 1)))
    makers = {
        sample.engine
        for entry in run.host.ledger.entries
        if isinstance(entry, GroupRecorded)
        for sample in entry.samples
    }
    assert makers >= {"engine/1", "engine/2"}
    assert (watch.num_joined, watch.num_left_early) == (2, 2)
    assert watch.num_handed_back > 0
    assert run.oracle.num_generated_twice == 0
    assert living_engines(run) == {"engine/0"}


def test_more_engines_are_faster() -> None:
    alone, _ = ran(scaled())
    three, _ = ran(scaled((10.0, 3)))
    assert three.oracle.progress_s < 0.6 * alone.oracle.progress_s


def test_a_leaver_that_does_not_answer_is_taken_when_its_time_is_up() -> None:
    """It stands still for less than makes a process count as dead, and has samples."""
    stopped = Fault(at_s=74.0, kind=FaultKind.STOP, target="engine/1", duration_s=9.0, as_zombie=True)
    supervision = SupervisionModel(leave_timeout_s=3.0)
    run, watch = ran(scaled((30.0, 2), (75.0, 1), faults=(stopped,), supervision=supervision))
    assert (watch.num_joined, watch.num_left_early) == (1, 0)
    assert run.oracle.num_generated_twice == 0
    assert living_engines(run) == {"engine/0"}


@pytest.mark.parametrize("at_s", [14.0, 31.0, 40.0])
def test_a_run_that_goes_on_has_the_engines_that_are_recorded(at_s: float) -> None:
    lost = Fault(at_s=at_s, kind=FaultKind.MACHINE, target="")
    run, _ = ran(scaled((10.0, 3), (30.0, 2), faults=(lost,)))
    assert living_engines(run) == ({"engine/0", "engine/1"})

    def forgets(self: OperatorSide, elastic: ElasticEngines) -> None:
        pass

    with patch.object(OperatorSide, "_remind_engines", forgets):
        try:
            forgetful, _ = ran(scaled((10.0, 3), faults=(lost,)))
        except AssertionError:
            return
        assert living_engines(forgetful) != {"engine/0", "engine/1", "engine/2"}


def test_what_an_operator_may_not_ask_is_refused_with_the_key() -> None:
    none = scaled(requests=(Asked(at_s=5.0, event=EnginesAsked(engines=())),))
    many = scaled((5.0, 4))
    fixed = scaled((5.0, 2), max_engines=None)
    for trial, key in ((none, "engines.min"), (many, "engines.max"), (fixed, "engines.max")):
        run = TrialRun(trial, with_digest=False)
        run.run()
        answer = run.operator.answers[1]
        assert not answer.accepted
        assert key in answer.text
        assert not any(
            isinstance(entry, EnginesRecorded) and len(entry.engines) != 1 for entry in run.host.ledger.entries
        )


# --- engines that are lost too often ----------------------------------------------------------------------------------


def deaths(name: str, *at_s: float) -> tuple[Fault, ...]:
    return tuple(Fault(at_s=each, kind=FaultKind.KILL, target=name) for each in at_s)


QUICK = SupervisionModel(start_s=0.1, notice_s=0.01, max_restarts=2)


def test_an_engine_that_is_lost_too_often_leaves_the_run_which_goes_on() -> None:
    faults = deaths("engine/1", 32.0, 34.0, 36.0, 38.0)
    run, watch = ran(scaled((30.0, 2), faults=faults, supervision=QUICK))
    records = [entry for entry in run.host.ledger.entries if isinstance(entry, EnginesRecorded)]
    assert [entry.engines for entry in records] == [("engine/0",), ("engine/0", "engine/1"), ("engine/0",)]
    assert records[-1].reason == (
        "engine/1 was lost 3 times within 10 minutes, the last time because of this: ended. "
        "The limit is runtime.max_restarts = 2"
    )
    assert watch.num_given_up == 1
    assert living_engines(run) == {"engine/0"}
    assert run.oracle.num_generated_twice == 0


def test_the_last_that_engines_min_asks_for_is_not_given_up() -> None:
    faults = deaths("engine/1", 32.0, 34.0, 36.0) + deaths("engine/0", 42.0, 44.0, 46.0)
    run = TrialRun(scaled((30.0, 2), faults=faults, supervision=QUICK), with_digest=False)
    with pytest.raises(UnfinishedError, match="engine/0 was lost 3 times within 10 minutes"):
        run.run()


def test_engines_that_are_fixed_are_not_given_up() -> None:
    faults = deaths("engine/1", 2.0, 4.0, 6.0)
    run = TrialRun(scaled(faults=faults, supervision=QUICK, num_engines=2, max_engines=None), with_digest=False)
    with pytest.raises(UnfinishedError, match="engine/1 was lost 3 times within 10 minutes"):
        run.run()


def test_an_engine_that_is_asked_for_again_begins_with_all_its_restarts() -> None:
    faults = deaths("engine/1", 32.0, 34.0, 36.0, 62.0, 64.0)
    run, watch = ran(scaled((30.0, 2), (60.0, 2), faults=faults, supervision=QUICK))
    assert watch.num_given_up == 1
    assert living_engines(run) == {"engine/0", "engine/1"}


def test_while_the_buffer_is_away_nobody_starts_it_again() -> None:
    buffer = Fault(at_s=35.9, kind=FaultKind.STOP, target="buffer", duration_s=9.0)
    faults = (*deaths("engine/1", 32.0, 34.0, 36.0, 40.0, 46.0), buffer)
    run, watch = ran(scaled((30.0, 2), faults=faults, supervision=QUICK))
    assert watch.num_given_up == 1
    assert living_engines(run) == {"engine/0"}
