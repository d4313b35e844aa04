"""The Buffer and its operator: what is answered, what is done once, what the next Buffer knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from buffer_bench import Bench, announced
from test_actor_buffer_recovery import Ledgered

from penstock.actors.buffer.goals import Evaluate
from penstock.actors.buffer.phases import Phase
from penstock.actors.buffer.settings import ElasticEngines
from penstock.messages.commands import Record
from penstock.messages.ledger import EngineNoted, EnginesRecorded, GroupsGranted, PauseRecorded
from penstock.messages.local import Started
from penstock.messages.membership import ActorEpoch, EngineGivenUp, EngineNoticed, EnginesWanted
from penstock.messages.operator import EnginesAsked, GrantsPaused, OperatorAnswered, PolicyChanged, SaveAsked
from penstock.messages.training import (
    CheckpointDemanded,
    CheckpointSaved,
    LearnerReady,
    NoticeGiven,
    OnStale,
    StopAsked,
    UpdateMode,
)
from penstock.messages.waits import OPERATOR

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand
    from penstock.messages.operator import OperatorEvent

WIDER = PolicyChanged(policy="fully_async", max_staleness=4, update_mode=UpdateMode.IN_FLIGHT, request=1)
PAUSE = GrantsPaused(is_paused=True, request=2)
GO_ON = GrantsPaused(is_paused=False, request=3)
SAVE = SaveAsked(request=4)
FOUR = tuple(f"engine/{index}" for index in range(4))


def answer(commands: list[AnyCommand]) -> OperatorAnswered:
    return drive.one_sent(commands, OperatorAnswered, to="supervisor")


def test_a_switch_is_answered_after_its_record_and_repeated_without_another() -> None:
    bench = Bench(eta=1, groups_per_batch=1).started()
    commands = bench.hear(WIDER)
    given = answer(commands)
    assert (given.accepted, given.request, given.is_final) == (True, 1, True)
    assert "fully_async with max_staleness 4" in given.text
    again = bench.hear(WIDER)
    assert drive.every(again, Record) == []
    assert answer(again) == given
    same = bench.hear(PolicyChanged(policy="fully_async", max_staleness=4, update_mode=UpdateMode.IN_FLIGHT, request=9))
    assert drive.every(same, Record) == []
    assert answer(same).text.endswith("holds already")


def test_a_refusal_says_why_to_whoever_asked() -> None:
    bench = Bench(eta=2, publish_every=2).started()
    asked = PolicyChanged(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN, request=5)
    given = answer(bench.hear(asked))
    assert not given.accepted
    assert "publish_every is 2" in given.text


@pytest.mark.parametrize("event", [WIDER, PAUSE, GO_ON, SAVE])
def test_a_run_that_is_ending_or_grants_nothing_refuses(event: OperatorEvent) -> None:
    bench = Bench().started()
    bench.admit(0)
    bench.admit(1)
    bench.hear(StopAsked(reason="enough"))
    given = answer(bench.hear(event))
    assert (given.accepted, "stopping" in given.text) == (False, True)
    assert not answer(Bench(goal=Evaluate()).started().hear(event)).accepted


@pytest.mark.parametrize(("event", "what"), [(WIDER, "switch"), (PAUSE, "pause")])
def test_a_run_that_only_evaluates_says_before_it_begins_that_it_grants_nothing(
    event: OperatorEvent, what: str
) -> None:
    bench = Bench(goal=Evaluate())
    bench.hear(Started(epoch=0))
    text = f"this run grants nothing for training, so there is nothing to {what}"
    assert answer(bench.hear(event)) == OperatorAnswered(request=event.request, accepted=False, text=text)


def test_under_a_pause_nothing_is_granted_and_what_is_out_is_trained() -> None:
    bench = Bench(eta=1, groups_per_batch=1).started()
    commands = bench.hear(PAUSE)
    assert drive.recorded(commands, PauseRecorded) == [PauseRecorded(is_paused=True)]
    assert "the 2 groups that are out" in answer(commands).text
    bench.train_in_order()
    bench.hear(announced(1))
    bench.train_in_order()
    bench.hear(announced(2))
    assert (bench.granted, bench.outstanding, bench.buffer.version) == (2, 0, 2)
    assert bench.buffer.state == "new grants are paused by the operator"
    assert [wait.on for wait in bench.buffer.waits()] == [OPERATOR]
    target = bench.buffer.target.value
    commands = bench.hear(GO_ON)
    assert drive.recorded(commands, PauseRecorded) == [PauseRecorded(is_paused=False)]
    assert drive.recorded(commands, GroupsGranted)
    assert bench.buffer.target.value == target, "the Learner did not wait for engines"
    assert bench.buffer.state == "running"


def test_how_an_engine_came_up_is_recorded_and_changes_nothing() -> None:
    bench = Bench().started()
    before = bench.buffer.state, bench.granted, bench.outstanding
    commands = bench.hear(EngineNoticed(engine="engine/1", engine_epoch=2, text="its server is started anew: why"))
    noted = EngineNoted(engine="engine/1", engine_epoch=2, text="its server is started anew: why")
    assert drive.recorded(commands, EngineNoted) == [noted]
    assert len(commands) == 1
    assert (bench.buffer.state, bench.granted, bench.outstanding) == before


def test_what_holds_already_is_accepted_without_a_record() -> None:
    bench = Bench().started()
    commands = bench.hear(GO_ON)
    assert answer(commands).accepted
    assert drive.every(commands, Record) == []


def test_the_next_buffer_knows_policy_and_pause() -> None:
    run = Ledgered(Bench(eta=1, groups_per_batch=1))
    run.bench.started()
    run.bench.hear(WIDER)
    run.bench.hear(PAUSE)
    successor = run.restarted()
    assert successor.policy.max_staleness == 4
    assert successor.books.policy_name == "fully_async"
    assert successor.books.is_paused
    run.bench.driver = drive.Driver(successor)
    told = [event.text for event in drive.sent(run.bench.hear(Started(epoch=1)), NoticeGiven, to="supervisor")]
    assert ["fully_async" in told[0], "paused" in told[1]] == [True, True]
    commands = run.bench.hear(PAUSE)  # whose answer was lost with the one before
    assert answer(commands).accepted
    assert drive.every(commands, Record) == []


def test_a_checkpoint_is_asked_for_once_and_answered_when_it_is_recorded() -> None:
    bench = Bench(groups_per_batch=1).started()
    assert "nothing to save" in answer(bench.hear(SaveAsked(request=7))).text
    bench.train_in_order()
    commands = bench.hear(SAVE)
    demanded = drive.one_sent(commands, CheckpointDemanded, to="learner")
    assert demanded == CheckpointDemanded(version=1), "nothing ends with it"
    assert not answer(commands).is_final
    again = bench.hear(SAVE)
    assert drive.sent(again, CheckpointDemanded, to="learner") == []
    given = answer(bench.hear(CheckpointSaved(version=1, path="c1")))
    assert (given.accepted, given.is_final, given.text) == (True, True, "version 1 is saved: c1")
    assert answer(bench.hear(SaveAsked(request=8))).text == "version 1 is saved: c1"
    assert bench.buffer.run.phase is Phase.RUNNING, "a run that is saved goes on"


def test_who_asks_for_what_is_saved_already_is_answered_once() -> None:
    bench = Bench().started()
    bench.train_in_order()
    bench.hear(CheckpointSaved(version=1, path="c1"))
    assert answer(bench.hear(SAVE)).text == "version 1 is saved: c1"
    bench.train_in_order()
    assert drive.sent(bench.hear(CheckpointSaved(version=2, path="c2")), OperatorAnswered) == []


def test_a_stop_whose_learner_has_died_promises_no_checkpoint_any_more() -> None:
    bench = Bench().started()
    bench.train_in_order()
    assert not answer(bench.hear(SAVE)).is_final
    bench.hear(StopAsked(reason="enough"), LearnerReady(epoch=1, version=-1))
    given = answer(bench.hear(SAVE))
    assert (given.accepted, given.text) == (False, "the run is stopped")


def test_a_stop_does_not_take_back_a_checkpoint_that_was_promised() -> None:
    bench = Bench(eta=0, groups_per_batch=2).started()
    bench.admit(0)
    bench.admit(1)
    bench.train()
    assert not answer(bench.hear(SAVE)).is_final
    bench.hear(StopAsked(reason="ctrl-c"))
    again = answer(bench.hear(SAVE))  # asked again while the stop waits for that very checkpoint
    assert (again.accepted, again.is_final) == (True, False)
    assert "stopping" in answer(bench.hear(SaveAsked(request=7))).text
    assert answer(bench.hear(CheckpointSaved(version=1, path="c1"))).text == "version 1 is saved: c1"


def test_the_next_buffer_does_not_take_back_a_checkpoint_that_was_promised() -> None:
    run = Ledgered(Bench(groups_per_batch=1))
    run.bench.started()
    run.bench.train_in_order()
    assert not answer(run.bench.hear(SAVE)).is_final
    run.bench.driver = drive.Driver(run.restarted())
    run.bench.hear(Started(epoch=1))
    promised = answer(run.bench.hear(SAVE))
    assert (promised.accepted, promised.is_final) == (True, False), "no Learner has reported to this one yet"
    run.bench.hear(LearnerReady(epoch=0, version=1))
    demanded = drive.one_sent(run.bench.hear(SAVE), CheckpointDemanded, to="learner")
    assert demanded.version == 1
    assert answer(run.bench.hear(CheckpointSaved(version=1, path="c1"))).text == "version 1 is saved: c1"


def test_under_mask_each_group_keeps_the_bound_that_it_was_granted_under() -> None:
    """A group that was granted under 0 is not trained with older tokens because a later policy allows them."""
    bench = Bench(eta=0, groups_per_batch=1, on_stale=OnStale.MASK, over_sampling=2.0).started()
    wider = PolicyChanged(
        policy="fully_async", max_staleness=3, update_mode=UpdateMode.IN_FLIGHT, on_stale=OnStale.MASK, request=1
    )
    bench.hear(wider)
    bench.train_in_order()
    bench.admit(1)
    assert bench.buffer.books.table.get(1) is None, "all its tokens are older than its own bound"


def test_under_mask_a_batch_has_the_strictest_bound_of_its_groups() -> None:
    bench = Bench(eta=0, groups_per_batch=2, on_stale=OnStale.MASK).started()
    bench.hear(
        PolicyChanged(policy="fully_async", max_staleness=3, update_mode=UpdateMode.IN_FLIGHT, on_stale=OnStale.MASK)
    )
    bench.admit(0)
    bench.admit(2)
    assert bench.batch() == (0, 2)
    lease = bench.buffer.books.open_lease
    assert lease is not None
    assert (lease.mask_stale, lease.max_staleness) == (True, 0)


def test_an_engine_that_is_given_up_leaves_once_and_with_its_reason() -> None:
    first = ("engine/0", "engine/1", "engine/2")
    bench = Bench(engines=first, elastic=ElasticEngines(first=first, fewest=2, num_slots=4)).started()
    given_up = EngineGivenUp(engine="engine/1", engine_epoch=5, reason="it dies")
    commands = bench.hear(given_up)
    left = ("engine/0", "engine/2")
    assert drive.recorded(commands, EnginesRecorded) == [EnginesRecorded(engines=left, reason="it dies")]
    assert drive.one_sent(commands, EnginesWanted, to="supervisor").engines == left
    bench.hear(EnginesAsked(engines=first, request=7))
    again = bench.hear(given_up)
    assert drive.recorded(again, EnginesRecorded) == [], "an operator has had it back since"
    assert drive.one_sent(again, EnginesWanted, to="supervisor").engines == first
    later = bench.hear(EngineGivenUp(engine="engine/1", engine_epoch=9, reason="it dies"))
    assert len(drive.recorded(later, EnginesRecorded)) == 1
    last = bench.hear(EngineGivenUp(engine="engine/2", engine_epoch=5, reason="it dies"))
    assert drive.recorded(last, EnginesRecorded) == [], "engines.min are left"
    assert drive.one_sent(last, EnginesWanted, to="supervisor").engines == left


def test_who_is_asked_for_again_at_once_is_said_to_have_been_given_up() -> None:
    """Of what is wanted the supervisor hears the last alone: without that it says for ever that the engine is given up,
    and never starts it."""
    first = ("engine/0", "engine/1")
    bench = Bench(engines=first, elastic=ElasticEngines(first=first, fewest=1, num_slots=4)).started()
    given_up = EngineGivenUp(engine="engine/1", engine_epoch=4, reason="its GPUs have not come")
    commands = bench.hear(given_up, EnginesAsked(engines=first))
    assert [entry.engines for entry in drive.recorded(commands, EnginesRecorded)] == [("engine/0",), first]
    said = EnginesWanted(engines=first, given_up=(ActorEpoch("engine/1", 4),))
    assert drive.sent(commands, EnginesWanted)[-1] == said
    assert drive.one_sent(bench.hear(given_up), EnginesWanted, to="supervisor") == said


def elastic_run() -> Ledgered:
    """Two engines of four slots; there may be two to four."""
    run = Ledgered(Bench(engines=FOUR, elastic=ElasticEngines(first=FOUR[:2], fewest=2, num_slots=4)))
    run.bench.started()
    return run


@pytest.mark.parametrize(
    ("engines", "accepted", "told"),
    [
        (FOUR[:1], False, "1 engine would be left, and engines.min is 2"),
        ((*FOUR, "engine/4"), False, "engine/4 would be more than engines.max allows, which is 4"),
        (FOUR[:2], True, "the run has these engines already: engine/0, engine/1"),
    ],
)
def test_engines_that_cannot_be_had_or_are_there_already_are_not_recorded(
    engines: tuple[str, ...], accepted: bool, told: str
) -> None:
    commands = elastic_run().bench.hear(EnginesAsked(engines=engines, request=7))
    given = answer(commands)
    assert (given.accepted, told in given.text) == (accepted, True)
    assert drive.recorded(commands, EnginesRecorded) == []


def test_engines_that_are_asked_for_are_recorded_wanted_and_what_the_target_may_rise_to() -> None:
    run = elastic_run()
    assert run.bench.buffer.target.ceiling == 8, "two engines hold four groups, and two batches come on top"
    commands = run.bench.hear(EnginesAsked(engines=FOUR[::-1], request=7))
    assert drive.recorded(commands, EnginesRecorded) == [EnginesRecorded(engines=FOUR)]
    assert drive.one_sent(commands, EnginesWanted, to="supervisor").engines == FOUR
    assert "the engines are engine/0, engine/1, engine/2, engine/3 from here on" in answer(commands).text
    assert answer(commands).text in [notice.text for notice in drive.sent(commands, NoticeGiven)]
    assert run.bench.buffer.target.ceiling == 12
    successor = drive.Driver(run.restarted())
    said = successor.hear(Started(epoch=1))
    assert drive.one_sent(said, EnginesWanted, to="supervisor").engines == FOUR
    assert successor.machine.target.ceiling == 12
    assert [notice.text for notice in drive.sent(said, NoticeGiven)] == [
        f"the engines are {', '.join(FOUR)}, as is recorded"
    ]


def test_a_target_that_more_engines_allowed_comes_down_with_them() -> None:
    bench = elastic_run().bench
    bench.hear(EnginesAsked(engines=FOUR, request=7))
    bench.buffer.target.value = 12
    bench.hear(EnginesAsked(engines=FOUR[:2], request=8))
    assert bench.buffer.target.value == 8


def test_engines_of_a_run_that_ends_or_has_no_bounds_stay_as_they_are() -> None:
    asked = EnginesAsked(engines=FOUR, request=7)
    assert "are fixed" in answer(Bench().started().hear(asked)).text
    bench = elastic_run().bench
    bench.train_in_order()
    bench.hear(StopAsked(reason="enough"))
    assert "the run is stopping: no engine joins or leaves any more" in answer(bench.hear(asked)).text


def test_where_engines_are_fixed_or_the_run_ends_none_is_given_up() -> None:
    given_up = EngineGivenUp(engine="engine/1", engine_epoch=5, reason="it dies")
    assert Bench().started().hear(given_up) == []
    first = ("engine/0", "engine/1")
    bench = Bench(engines=first, elastic=ElasticEngines(first=first, fewest=1, num_slots=4)).started()
    bench.admit(0)
    bench.admit(1)
    bench.hear(StopAsked(reason="enough"))
    assert drive.recorded(bench.hear(given_up), EnginesRecorded) == []
