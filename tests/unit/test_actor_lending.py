"""Devices that the learner lends while it waits: who holds them, who is counted on, and what goes on elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
from engine_bench import manifest, submitted
from msgspec.structs import replace
from test_actor_learner import batch
from test_actor_turns import ENGINES, Learning, Sharing, turns, yielded
from test_actor_weight_publisher import PublisherBench

from penstock.actors.learner.machine import LEND_TIMER
from penstock.actors.prompt_source.policies import RoutedSample
from penstock.actors.prompt_source.routing import Router
from penstock.actors.weight_publisher.phases import Phase
from penstock.messages.commands import (
    ApplyWeights,
    FetchWeights,
    InterruptGenerations,
    OpenEngine,
    PublishWeights,
    SaveCheckpoint,
    SleepEngine,
    SleepLearner,
    StartTimer,
    StopTimer,
    Train,
    WakeLearner,
)
from penstock.messages.evaluation import PublishDemanded
from penstock.messages.flow import GenerationClosed, GenerationProgressed
from penstock.messages.local import (
    CheckpointWritten,
    EngineOpened,
    EngineSlept,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    Started,
    TimerFired,
    WeightsCopied,
    WeightsPublished,
)
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.samples import Cancelled
from penstock.messages.training import CheckpointDemanded, DeviceTurned, Holder, UpdateMode
from penstock.messages.weights import (
    EngineReady,
    VersionAnnounced,
    WeightsApplied,
    WeightsCommitted,
    WeightsExported,
    WeightsStaged,
)

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand

WAIT_S = 3.0

# --- the Learner ------------------------------------------------------------------------------------------------------


def waiting(*, engines: tuple[str, ...] = ENGINES[:1], publish_every: int = 1, save_every: int = 1000) -> Learning:
    """Version 0 is published, and these engines could take the devices."""
    bench = Learning(lend_after_s=WAIT_S, publish_every=publish_every, save_every=save_every)
    bench.hear(Started(epoch=0))
    bench.name()
    bench.hear(LearnerOpened(version=0), WeightsPublished(manifest=manifest(0)))
    for name in engines:
        bench.join(name)
        bench.yields(name)
    return bench


def lent() -> Learning:
    bench = waiting()
    bench.hear(TimerFired(key=LEND_TIMER), LearnerSlept())
    return bench


def test_what_is_published_is_told_at_once_and_nobody_sleeps_for_it() -> None:
    bench = Learning(lend_after_s=WAIT_S)
    bench.hear(Started(epoch=0))
    bench.name()
    bench.hear(LearnerOpened(version=0))
    commands = bench.hear(WeightsPublished(manifest=manifest(0)))
    assert drive.one_sent(commands, WeightsExported, to="weight_publisher")
    assert drive.every(commands, SleepLearner) == []
    assert drive.every(commands, StartTimer) == [], "there is nobody to take the devices"


def test_devices_are_lent_after_a_wait_asleep_first() -> None:
    bench = Learning(lend_after_s=WAIT_S)
    bench.hear(Started(epoch=0))
    bench.name()
    bench.hear(LearnerOpened(version=0), WeightsPublished(manifest=manifest(0)))
    assert StartTimer(LEND_TIMER, WAIT_S) in bench.join()
    commands = bench.hear(TimerFired(key=LEND_TIMER))
    assert drive.one(commands, SleepLearner)
    assert turns(commands) == []
    assert turns(bench.hear(LearnerSlept())) == [(ENGINES[0], Holder.ENGINES)]
    assert not bench.learner.is_awake


def test_whatever_else_is_heard_does_not_make_the_wait_longer() -> None:
    bench = waiting()
    bench.hear(VersionAnnounced(version=0, publish=0))
    bench.driver.ignores(VersionAnnounced(version=0, publish=0))


def test_devices_that_are_lent_are_not_lent_again() -> None:
    bench = waiting()
    bench.hear(TimerFired(key=LEND_TIMER))
    assert drive.every(bench.hear(LearnerSlept()), StartTimer) == []


def test_a_learner_whose_batch_waits_for_the_disk_lends_nothing() -> None:
    bench = waiting(save_every=1, publish_every=9)
    for version in (1, 2):
        bench.hear(batch(version))
        bench.trained(version)
    commands = bench.hear(batch(3))
    assert drive.every(commands, Train) == [], "version 2 is to be saved before, and version 1 is being written"
    assert StopTimer(LEND_TIMER) in commands


def test_a_learner_that_lends_publishes_on_its_grid_and_trains_while_a_copy_is_looked_at() -> None:
    bench = waiting(publish_every=2)
    bench.hear(batch(1))
    assert drive.every(bench.trained(1), PublishWeights) == []
    bench.hear(batch(2))
    assert drive.one(bench.trained(2), PublishWeights).version == 2
    bench.hear(batch(3))
    assert drive.one(bench.hear(WeightsCopied(version=2, size_bytes=1)), Train).version == 3


def test_a_batch_that_comes_in_time_is_trained_and_the_wait_counts_anew_after_it() -> None:
    bench = waiting()
    commands = bench.hear(batch(1))
    assert drive.one(commands, Train)
    assert StopTimer(LEND_TIMER) in commands
    bench.hear(TimerFired(key=LEND_TIMER))  # it ran out meanwhile
    assert bench.learner.is_awake
    commands = bench.trained(1)
    assert drive.one(commands, PublishWeights)
    assert StartTimer(LEND_TIMER, WAIT_S) in bench.hear(WeightsPublished(manifest=manifest(1)))


def test_a_batch_takes_the_devices_back_and_is_trained_when_they_are_yielded() -> None:
    bench = lent()
    assert turns(bench.hear(batch(1))) == [(ENGINES[0], Holder.LEARNER)]
    assert drive.one(bench.yields(), WakeLearner)
    assert drive.one(bench.hear(LearnerWoken()), Train)


def test_what_runs_on_devices_that_are_taken_back_is_broken_off_whatever_the_policy() -> None:
    """It goes on elsewhere; what shares its devices in turns is drained instead."""
    told = drive.one_sent(lent().hear(replace(batch(1), update_mode=UpdateMode.DRAIN)), DeviceTurned)
    assert told.interrupts


def test_a_batch_that_comes_while_it_falls_asleep_wakes_it_again() -> None:
    bench = waiting()
    bench.hear(TimerFired(key=LEND_TIMER))
    bench.hear(batch(1))
    assert turns(bench.hear(LearnerSlept())) == [(ENGINES[0], Holder.ENGINES), (ENGINES[0], Holder.LEARNER)]
    assert drive.one(bench.yields(), WakeLearner)


def test_an_engine_that_is_lost_with_the_devices_is_waited_for_no_longer() -> None:
    bench = lent()
    bench.hear(batch(1))
    assert drive.one(bench.hear(EngineLost(name=ENGINES[0], epoch=0)), WakeLearner)


def test_a_publish_or_a_checkpoint_that_is_demanded_takes_the_devices_back() -> None:
    bench = lent()
    bench.hear(EngineLost(name=ENGINES[0], epoch=0))
    assert drive.one(bench.hear(CheckpointDemanded(version=0)), WakeLearner)
    assert drive.one(bench.hear(LearnerWoken()), SaveCheckpoint)
    bench = waiting()
    bench.hear(batch(1, is_last=True))
    bench.trained(1)
    bench.hear(TimerFired(key=LEND_TIMER), LearnerSlept(), EngineLost(name=ENGINES[0], epoch=0))
    assert drive.one(bench.hear(PublishDemanded(version=1)), WakeLearner)
    assert drive.one(bench.hear(LearnerWoken()), PublishWeights)


def test_a_checkpoint_that_is_demanded_while_another_is_written_takes_the_devices_back_after_it() -> None:
    bench = waiting()
    assert drive.one(bench.hear(CheckpointDemanded(version=0)), SaveCheckpoint)
    bench.hear(batch(1))
    bench.trained(1)
    bench.hear(WeightsPublished(manifest=manifest(1)), CheckpointDemanded(version=1))
    bench.hear(TimerFired(key=LEND_TIMER), LearnerSlept(), EngineLost(name=ENGINES[0], epoch=0))
    assert drive.one(bench.hear(CheckpointWritten(version=0, path="c")), WakeLearner)
    assert drive.one(bench.hear(LearnerWoken()), SaveCheckpoint).version == 1


def test_a_demand_that_only_a_later_version_meets_leaves_the_devices_where_they_are() -> None:
    assert lent().hear(CheckpointDemanded(version=1)) == []


def test_a_version_that_was_to_be_saved_when_the_devices_were_lent_takes_them_back_when_the_disk_is_free() -> None:
    bench = waiting(save_every=1, publish_every=9)
    for version in (1, 2):
        bench.hear(batch(version))
        bench.trained(version)
    bench.hear(TimerFired(key=LEND_TIMER), LearnerSlept(), EngineLost(name=ENGINES[0], epoch=0))
    assert drive.one(bench.hear(CheckpointWritten(version=1, path="c")), WakeLearner)
    assert drive.one(bench.hear(LearnerWoken()), SaveCheckpoint).version == 2


# --- the EngineWorker -------------------------------------------------------------------------------------------------


def serving() -> Sharing:
    return Sharing(is_lent=True).serving()


def offered(commands: list[AnyCommand]) -> list[tuple[int, int]]:
    """Slots and turn, as PromptSource is told."""
    return [(event.num_slots, event.turn) for event in drive.sent(commands, EngineReady, to="prompt_source")]


def test_a_device_that_is_taken_back_sends_what_it_had_elsewhere_with_every_token() -> None:
    bench = serving()
    bench.issue(0)
    bench.issue(1)
    bench.issue(2)
    commands = bench.turned(Holder.LEARNER)
    assert offered(commands) == [(0, 2)]
    assert [event.key.group_id for event in drive.sent(commands, GenerationClosed)] == [2], "it waited"
    assert drive.one(commands, InterruptGenerations)
    commands = bench.interrupted(0, drive.part((0, 5)))
    assert drive.one_sent(commands, GenerationProgressed).num_tokens == 5
    closed = drive.one_sent(commands, GenerationClosed)
    assert (closed.outcome, closed.num_tokens) == (Cancelled(cause="handed back"), 5)
    assert yielded(commands) == []
    assert drive.one(bench.interrupted(1, drive.part((0, 3))), SleepEngine)
    assert yielded(bench.hear(EngineSlept())) == [2]


def test_what_comes_for_an_engine_that_sleeps_is_handed_back_at_once() -> None:
    bench = serving()
    bench.turned(Holder.LEARNER)
    commands = bench.issue(0)
    assert submitted(commands) == []
    assert drive.one_sent(commands, GenerationClosed).outcome == Cancelled(cause="handed back")


def test_it_wakes_without_weights_and_takes_what_it_is_told_of_anew() -> None:
    bench = serving()
    bench.stage(1)
    bench.turned(Holder.LEARNER)
    bench.hear(EngineSlept())
    commands = bench.turned(Holder.ENGINES)
    assert offered(commands) == [(2, 3)]
    assert drive.every(commands, ApplyWeights) == []
    assert bench.worker.weights.version == -1
    assert drive.one(bench.stage(2), FetchWeights)
    assert drive.one(bench.commit(2), ApplyWeights)


def test_one_that_opens_when_the_device_is_taken_back_sleeps_as_soon_as_it_has() -> None:
    bench = Sharing(is_lent=True)
    bench.hear(Started(epoch=0))
    assert drive.one(bench.turned(Holder.ENGINES), OpenEngine)
    assert bench.turned(Holder.LEARNER) == []
    commands = bench.hear(EngineOpened(num_slots=2))
    assert offered(commands) == [(0, 2)]
    assert drive.one(commands, SleepEngine)


def test_one_that_leaves_opens_no_more() -> None:
    bench = Sharing(is_lent=True)
    bench.hear(Started(epoch=0), EngineLeaving(name="engine/0", epoch=0))
    assert bench.turned(Holder.ENGINES) == []


# --- who counts on it -------------------------------------------------------------------------------------------------


def ready(index: int, num_slots: int, turn: int = 0, version: int = -1) -> EngineReady:
    return EngineReady(engine=f"engine/{index}", engine_epoch=0, num_slots=num_slots, turn=turn, version=version)


def test_nobody_waits_for_an_engine_whose_device_is_taken_back() -> None:
    bench = PublisherBench()
    bench.ready(0, 1)
    bench.export(1)
    commands = bench.hear(ready(1, 0, turn=2))
    assert StopTimer("engine/1") in commands
    assert bench.publisher.engines.by_name["engine/1"].phase is Phase.STARTING
    bench.fetched(0, 1)
    bench.applied(0, 1)
    assert bench.publisher.announced == 1, "of one engine, all serve it"
    told = drive.one_sent(bench.hear(ready(1, 2, turn=3)), WeightsStaged, to="engine/1")
    assert told.manifest.publish == 1


def both_staged() -> PublisherBench:
    """Two engines have fetched publish 1, and the first goes first."""
    bench = PublisherBench()
    bench.ready(0, 1)
    bench.export(1)
    bench.fetched(0, 1)
    bench.fetched(1, 1)
    return bench


def test_another_engine_goes_first_where_the_device_of_the_first_is_taken_back() -> None:
    told = drive.one_sent(both_staged().hear(ready(0, 0, turn=2)), WeightsCommitted, to="engine/1")
    assert told.publish == 1


def test_one_that_waits_for_the_first_may_leave() -> None:
    bench = both_staged()
    bench.hear(EngineLeaving(name="engine/1", epoch=0))
    assert "engine/1" not in bench.publisher.engines.by_name


def test_a_newcomer_goes_first_where_the_engine_that_it_waited_for_is_lost() -> None:
    bench = PublisherBench()
    bench.ready(0)
    bench.export(1)
    bench.fetched(0, 1)
    bench.applied(0, 1)
    bench.ready(1)
    said = WeightsApplied(engine="engine/1", engine_epoch=0, version=5, publish=10_000, digest="digest")
    bench.hear(said)  # what it serves since before this publisher was there: nothing older is for it
    assert drive.sent(bench.export(2, version=5), WeightsStaged, to="engine/1") == []
    assert drive.one_sent(bench.lose(0), WeightsStaged, to="engine/1").manifest.publish == 2


def test_what_passes_no_more_is_not_waited_for_when_the_engine_that_went_first_with_it_is_gone() -> None:
    name = "engine/0"
    for gone in (
        EngineLost(name=name, epoch=1),
        EngineLeaving(name=name, epoch=1),
        EngineJoined(name=name, epoch=2),
        EngineReady(engine=name, engine_epoch=1, num_slots=0, turn=1),
        TimerFired(key=name),
    ):
        bench = PublisherBench()
        bench.ready(0)
        bench.export(0, version=0)
        bench.fetched(0, 0)
        bench.applied(0, 0, version=0)
        bench.lose(0)
        bench.export(1)
        bench.ready(0, epoch=1)
        bench.ready(1)
        bench.fetched(0, 1)
        bench.fetched(1, 1)
        bench.export(2)
        bench.ready(2)
        bench.fetched(2, 2)
        bench.applied(2, 2)
        assert bench.publisher.engines.by_name["engine/1"].phase is Phase.STAGED
        assert drive.one_sent(bench.hear(gone), WeightsStaged, to="engine/1").manifest.publish == 2


def test_a_next_turn_that_is_heard_of_first_means_that_the_last_one_is_over() -> None:
    router = Router(is_affine=False, max_load=1.0)
    for name in ("engine/0", "engine/1"):
        router.join(name, 0, 0)
    router.ready(ready(0, 1, version=0), 0)
    router.ready(ready(1, 4, turn=1, version=0), 0)
    sample = RoutedSample(group_id=0, index=0, row=0, min_version=0, deadline_version=2, num_prompt_tokens=1)
    chosen = router.choose(sample, avoids="", cache=None, num_waiting=1)
    assert chosen is not None
    assert chosen.name == "engine/1", "it has more slots"
    router.ready(ready(1, 4, turn=3), 0)
    chosen = router.choose(sample, avoids="", cache=None, num_waiting=1)
    assert chosen is not None
    assert chosen.name == "engine/0", "of the other it is not known what it serves in this turn"
    router.ready(ready(1, 4, turn=3, version=0), 0)
    chosen = router.choose(sample, avoids="", cache=None, num_waiting=1)
    assert chosen is not None
    assert chosen.name == "engine/1"


def test_an_engine_that_serves_the_same_again_after_it_slept_says_so_again() -> None:
    bench = serving()
    bench.turned(Holder.LEARNER)
    bench.hear(EngineSlept())
    bench.turned(Holder.ENGINES)
    bench.stage(1)
    bench.commit(1)
    told = drive.one_sent(bench.swap(), EngineReady, to="prompt_source")
    assert (told.num_slots, told.turn, told.version) == (2, 3, 1)


def test_one_that_swaps_while_its_device_is_taken_back_says_that_it_serves_nothing() -> None:
    bench = serving()
    bench.stage(1)
    bench.commit(1)
    assert offered(bench.turned(Holder.LEARNER)) == [(0, 2)]
    assert drive.sent(bench.swap(), EngineReady) == []
