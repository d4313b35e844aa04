"""Learner, engines and publisher where devices are shared: whose turn it is, and who waits for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from engine_bench import EngineBench, issued, manifest, submitted
from msgspec.structs import replace
from test_actor_learner import batch

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.settings import EngineWorkerSettings
from penstock.actors.learner.machine import DEADLINE, YIELD_DEADLINE, Learner
from penstock.actors.learner.settings import LearnerSettings
from penstock.actors.learner.turns import TURNS_PER_EPOCH
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.actors.weight_publisher.settings import WeightPublisherSettings
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    InterruptGenerations,
    OpenEngine,
    OpenLearner,
    PublishWeights,
    ReplaceActor,
    SaveCheckpoint,
    Send,
    SleepEngine,
    SleepLearner,
    StartTimer,
    StopTimer,
    Train,
    WakeLearner,
)
from penstock.messages.flow import SampleRevoked
from penstock.messages.local import (
    BatchTrained,
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
from penstock.messages.membership import EngineJoined, EngineLost
from penstock.messages.samples import SampleKey, evaluation_group_id
from penstock.messages.training import (
    Activity,
    CheckpointDemanded,
    CheckpointNamed,
    DeviceTurned,
    DeviceYielded,
    Holder,
    UpdateMode,
)
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import EngineOpening, EngineReady, PublishFailed, WeightsExported

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand

ENGINES = ("engine/0", "engine/1")


# --- the Learner ------------------------------------------------------------------------------------------------------


class Learning:
    """A Learner that shares devices with two engines, which are played by hand."""

    def __init__(
        self, epoch: int = 0, *, lend_after_s: float | None = None, publish_every: int = 1, save_every: int = 1000
    ) -> None:
        settings = LearnerSettings(
            epoch=epoch,
            lend_after_s=lend_after_s,
            publish_every=publish_every,
            save_every=save_every,
            shares_with=ENGINES,
            yield_timeout_s=70.0,
            step_timeout_s=50.0,
            start_timeout_s=900.0,
        )
        self.driver = drive.Driver(Learner(settings))
        self.epoch = epoch

    @property
    def learner(self) -> Learner:
        return self.driver.machine

    def hear(self, *events: Event) -> list[AnyCommand]:
        return self.driver.hear(*events)

    def activity(self) -> Activity:
        return self.learner.shows[0]

    def join(self, name: str = "engine/0", epoch: int = 0) -> list[AnyCommand]:
        return self.hear(EngineJoined(name=name, epoch=epoch))

    def yields(self, name: str = "engine/0", epoch: int = 0, turn: int | None = None) -> list[AnyCommand]:
        turn = self.learner.turns.turn if turn is None else turn
        return self.hear(DeviceYielded(engine=name, engine_epoch=epoch, turn=turn))

    def name(self) -> list[AnyCommand]:
        return self.hear(CheckpointNamed(learner_epoch=self.epoch, version=0, path="", announced_version=-1))

    def trained(self, version: int) -> list[AnyCommand]:
        return self.hear(BatchTrained(version=version, num_trained_tokens=1, num_masked_tokens=0, metrics=()))

    def asleep(self) -> Learning:
        """Both engines live; version 0 is published; it is the engines' turn."""
        self.hear(Started(epoch=self.epoch))
        for name in ENGINES:
            self.join(name)
            self.yields(name)
        self.name()
        self.hear(LearnerOpened(version=0), WeightsPublished(manifest=manifest(0)), LearnerSlept())
        return self

    def training(self) -> Learning:
        """In a turn of its own."""
        self.asleep()
        self.hear(batch(1))
        for name in ENGINES:
            self.yields(name)
        self.hear(LearnerWoken())
        return self


def turns(commands: list[AnyCommand]) -> list[tuple[str, Holder]]:
    """Who is told whose turn it is."""
    return [(s.to, s.event.holder) for s in drive.every(commands, Send) if isinstance(s.event, DeviceTurned)]


def test_nothing_is_loaded_before_every_engine_that_lives_has_yielded() -> None:
    bench = Learning()
    bench.hear(Started(epoch=0))
    assert turns(bench.join("engine/0")) == [("engine/0", Holder.LEARNER)]
    bench.join("engine/1")
    assert drive.every(bench.name(), OpenLearner) == []
    assert bench.activity() is Activity.STARTING
    assert drive.every(bench.yields("engine/1"), OpenLearner) == []
    commands = bench.yields("engine/0")
    assert drive.one(commands, OpenLearner) == OpenLearner(version=0, path="")
    assert drive.one(commands, StartTimer) == StartTimer(DEADLINE, 900.0)


def test_without_engines_the_learner_opens_at_once() -> None:
    bench = Learning()
    bench.hear(Started(epoch=0))
    assert drive.one(bench.name(), OpenLearner)


def test_what_is_published_is_told_when_the_learner_sleeps_and_then_it_is_the_engines_turn() -> None:
    bench = Learning()
    bench.hear(Started(epoch=0))
    bench.join()
    bench.yields()
    bench.name()
    assert drive.one(bench.hear(LearnerOpened(version=0)), PublishWeights)
    bench.driver.ignores(WeightsCopied(version=0, size_bytes=1))  # its turn ends with the publish: nothing to train
    commands = bench.hear(WeightsPublished(manifest=manifest(0)))
    assert drive.one(commands, SleepLearner)
    assert StartTimer(DEADLINE, 50.0) in commands
    assert drive.sent(commands, WeightsExported) == []
    commands = bench.hear(LearnerSlept())
    assert drive.one_sent(commands, WeightsExported).manifest == manifest(0)
    assert turns(commands) == [("engine/0", Holder.ENGINES)]
    assert bench.activity() is Activity.ASLEEP
    assert bench.learner.state == "asleep"


def test_a_batch_is_trained_when_all_engines_have_yielded_and_the_learner_is_awake() -> None:
    bench = Learning().asleep()
    commands = bench.hear(batch(1))
    assert turns(commands) == [(name, Holder.LEARNER) for name in ENGINES]
    assert drive.one(commands, StartTimer) == StartTimer(YIELD_DEADLINE, 70.0)
    assert bench.activity() is Activity.ASLEEP
    assert [(wait.what, wait.on) for wait in bench.learner.waits()] == [("yield of", name) for name in ENGINES]
    assert bench.yields("engine/0") == []
    commands = bench.yields("engine/1")
    assert drive.one(commands, WakeLearner)
    assert StopTimer(YIELD_DEADLINE) in commands
    assert drive.one(bench.hear(LearnerWoken()), Train).version == 1
    assert bench.activity() is Activity.WORKING
    assert drive.one(bench.trained(1), PublishWeights)


@pytest.mark.parametrize("mode", [UpdateMode.DRAIN, UpdateMode.INTERRUPT])
def test_the_policy_of_the_batch_says_whether_what_runs_is_broken_off(mode: UpdateMode) -> None:
    bench = Learning().asleep()
    commands = bench.hear(replace(batch(1), update_mode=mode))
    told = [command.event for command in drive.every(commands, Send) if isinstance(command.event, DeviceTurned)]
    assert [event.interrupts for event in told] == [mode is UpdateMode.INTERRUPT] * 2


def test_only_this_turn_and_this_incarnation_count_as_yielded() -> None:
    bench = Learning().asleep()
    before = bench.learner.turns.turn
    bench.hear(batch(1))
    bench.yields("engine/1")
    assert bench.yields("engine/0", turn=before) == []
    assert bench.yields("engine/0", epoch=1) == []
    assert drive.one(bench.yields("engine/0"), WakeLearner)


def test_an_engine_that_is_lost_while_it_is_asked_is_not_waited_for() -> None:
    bench = Learning().asleep()
    bench.hear(batch(1))
    bench.yields("engine/1")
    assert drive.one(bench.hear(EngineLost(name="engine/0", epoch=0)), WakeLearner)


def test_its_successor_is_told_whose_turn_it_is_and_asked_like_the_others() -> None:
    bench = Learning().asleep()
    bench.hear(batch(1), EngineLost(name="engine/0", epoch=0))
    assert turns(bench.join("engine/0", epoch=1)) == [("engine/0", Holder.LEARNER)]
    assert bench.yields("engine/1") == []
    assert drive.one(bench.yields("engine/0", epoch=1), WakeLearner)


def test_an_engine_that_joins_in_the_engines_turn_is_told_so_and_nobody_waits_for_it() -> None:
    bench = Learning().asleep()
    bench.hear(EngineLost(name="engine/0", epoch=0))
    assert turns(bench.join("engine/0", epoch=1)) == [("engine/0", Holder.ENGINES)]
    assert bench.learner.waits() == (Wait("offer of", "batch 1", "buffer"),)


def test_word_that_comes_late_of_the_loss_of_its_predecessor_frees_no_device() -> None:
    bench = Learning().asleep()
    bench.join("engine/0", epoch=1)
    bench.driver.ignores(EngineLost(name="engine/0", epoch=0))
    bench.hear(batch(1))
    assert bench.yields("engine/1") == []


def test_an_engine_that_joins_while_the_learner_trains_holds_nothing_up() -> None:
    bench = Learning().training()
    bench.hear(EngineLost(name="engine/0", epoch=0))
    assert turns(bench.join("engine/0", epoch=1)) == [("engine/0", Holder.LEARNER)]
    assert drive.one(bench.trained(1), PublishWeights)
    bench.hear(WeightsPublished(manifest=manifest(1)))
    assert ("engine/0", Holder.ENGINES) in turns(bench.hear(LearnerSlept()))


def test_an_engine_that_does_not_yield_in_time_is_replaced() -> None:
    bench = Learning().asleep()
    bench.hear(batch(1))
    bench.yields("engine/1")
    commands = bench.hear(TimerFired(key=YIELD_DEADLINE))
    replaced = drive.one(commands, ReplaceActor)
    assert (replaced.name, replaced.epoch) == ("engine/0", 0)
    assert drive.one(commands, StartTimer) == StartTimer(YIELD_DEADLINE, 70.0)


def test_a_turn_ends_with_a_publish_off_the_grid_too() -> None:
    """Engines that sleep wake with new weights only, and the next batch is made by them."""
    assert drive.one(Learning(publish_every=3).training().trained(1), PublishWeights).version == 1


def test_a_deadline_that_runs_out_as_the_last_engine_yields_replaces_no_newcomer() -> None:
    bench = Learning().training()
    bench.hear(EngineLost(name="engine/0", epoch=0))
    bench.join("engine/0", epoch=1)  # it has not yielded in this turn, and nobody waits for it
    bench.driver.ignores(TimerFired(key=YIELD_DEADLINE))


def test_time_that_the_learner_waits_for_engines_is_not_counted_against_it() -> None:
    bench = Learning()
    bench.hear(Started(epoch=0))
    bench.join()
    bench.name()
    assert bench.hear(TimerFired(key=DEADLINE)) == []


def test_a_successor_begins_with_a_turn_of_its_own_under_a_higher_number() -> None:
    """Its predecessor may have died in anybody's turn."""
    bench = Learning(epoch=3)
    commands = bench.join()
    assert drive.one_sent(commands, DeviceTurned) == DeviceTurned(turn=3 * TURNS_PER_EPOCH, holder=Holder.LEARNER)


def test_a_publish_that_failed_is_made_again_in_a_turn_of_the_learner() -> None:
    bench = Learning().asleep()
    commands = bench.hear(PublishFailed(version=0, publish=0, cause="canary"))
    assert turns(commands) == [(name, Holder.LEARNER) for name in ENGINES]
    assert drive.every(commands, PublishWeights) == []
    for name in ENGINES:
        bench.yields(name)
    assert drive.one(bench.hear(LearnerWoken()), PublishWeights).publish == 1


def test_a_checkpoint_is_saved_asleep() -> None:
    bench = Learning().asleep()
    commands = bench.hear(CheckpointDemanded(version=0))
    assert drive.one(commands, SaveCheckpoint) == SaveCheckpoint(0)
    assert turns(commands) == []


def test_engines_with_devices_of_their_own_are_told_nothing() -> None:
    assert Learning().join("engine/2") == []


# --- the EngineWorker -------------------------------------------------------------------------------------------------


class Sharing(EngineBench):
    """An engine that shares its device; the Learner is played by hand."""

    def __init__(self, epoch: int = 0, *, is_lent: bool = False) -> None:
        super().__init__(epoch=epoch)
        settings = EngineWorkerSettings(name="engine/0", epoch=epoch, takes_turns=True, is_lent=is_lent)
        self.driver = drive.Driver(EngineWorker(settings))
        self.turn = 0

    def turned(self, holder: Holder, *, interrupts: bool = False) -> list[AnyCommand]:
        self.turn += 1
        return self.hear(DeviceTurned(turn=self.turn, holder=holder, interrupts=interrupts))

    def opened(self, num_slots: int = 2) -> Sharing:
        self.hear(Started(epoch=0))
        self.turned(Holder.ENGINES)
        self.hear(EngineOpened(num_slots=num_slots))
        return self

    def serving(self, publish: int = 0, num_slots: int = 2) -> Sharing:
        super().serving(publish, num_slots)
        return self

    def asleep(self, publish: int = 0) -> Sharing:
        """Asleep in a turn of the learner, after it has served this."""
        self.serving(publish)
        self.turned(Holder.LEARNER)
        self.hear(EngineSlept())
        return self


def yielded(commands: list[AnyCommand]) -> list[int]:
    """Turns that the Learner is told were yielded."""
    return [event.turn for event in drive.sent(commands, DeviceYielded, to="learner")]


def test_an_engine_opens_in_a_turn_of_the_engines_and_says_so() -> None:
    bench = Sharing()
    assert bench.hear(Started(epoch=0)) == []
    assert bench.activity() is Activity.ASLEEP
    assert bench.worker.waits() == (Wait("turn on", "the device", "learner"),)
    commands = bench.turned(Holder.ENGINES)
    assert drive.one(commands, OpenEngine)
    assert drive.one_sent(commands, EngineOpening, to="weight_publisher").engine_epoch == 0
    assert bench.activity() is Activity.STARTING


def test_an_engine_that_hears_of_its_turn_before_it_is_started_opens_once() -> None:
    """One that comes while the engines have the turn is told so at once; a second server would end the first."""
    bench = Sharing()
    assert drive.one(bench.turned(Holder.ENGINES), OpenEngine)
    assert bench.hear(Started(epoch=0)) == []


def test_an_engine_that_has_not_opened_yields_at_once() -> None:
    bench = Sharing()
    bench.hear(Started(epoch=0))
    assert yielded(bench.turned(Holder.LEARNER)) == [1]


def test_an_engine_that_is_opening_sleeps_as_soon_as_it_is_open() -> None:
    bench = Sharing()
    bench.hear(Started(epoch=0))
    bench.turned(Holder.ENGINES)
    assert bench.turned(Holder.LEARNER) == []
    commands = bench.hear(EngineOpened(num_slots=2))
    assert drive.one(commands, SleepEngine)
    assert drive.sent(commands, EngineReady)
    assert yielded(bench.hear(EngineSlept())) == [2]


def test_an_idle_engine_sleeps_and_yields_when_it_is_asked() -> None:
    bench = Sharing().serving()
    commands = bench.turned(Holder.LEARNER)
    assert commands == [SleepEngine()]
    assert bench.worker.waits() == (Wait("sleep of", "the engine", OWN_BACKEND),)
    assert yielded(bench.hear(EngineSlept())) == [bench.turn]
    assert bench.activity() is Activity.ASLEEP
    assert bench.worker.state == "asleep"


def test_what_runs_ends_first_and_what_waits_or_comes_in_is_not_begun() -> None:
    bench = Sharing().serving(num_slots=1)
    bench.issue(0)
    bench.issue(1)
    assert bench.turned(Holder.LEARNER) == []
    assert submitted(bench.issue(2)) == []
    assert bench.activity() is Activity.WORKING
    commands = bench.end(0)
    assert submitted(commands) == []
    assert drive.one(commands, SleepEngine)
    bench.hear(EngineSlept())
    bench.turned(Holder.ENGINES)
    bench.stage(1)
    bench.commit(1)
    assert submitted(bench.swap()) == [1]


def test_what_runs_is_broken_off_where_the_policy_says_so_and_goes_on_in_the_next_turn_of_engines() -> None:
    bench = Sharing().serving(num_slots=1)
    bench.issue(0)
    assert bench.turned(Holder.LEARNER, interrupts=True) == [InterruptGenerations()]
    assert drive.one(bench.interrupted(0, drive.part((0, 2))), SleepEngine)
    bench.hear(EngineSlept())
    bench.turned(Holder.ENGINES)
    bench.stage(1)
    bench.commit(1)
    assert submitted(bench.swap()) == [0]


def test_what_is_evaluated_is_interrupted_when_nothing_else_runs_any_more() -> None:
    bench = Sharing().serving(num_slots=2)
    evaluated = evaluation_group_id(0)
    bench.issue(evaluated)
    bench.issue(0)
    assert bench.turned(Holder.LEARNER) == []
    assert drive.one(bench.end(0), InterruptGenerations)
    assert drive.one(bench.interrupted(evaluated, drive.part((0, 2))), SleepEngine)


def test_a_request_that_is_revoked_does_not_keep_the_engine_awake() -> None:
    bench = Sharing().serving()
    bench.issue(0)
    bench.turned(Holder.LEARNER)
    commands = bench.hear(SampleRevoked(key=SampleKey(0, 0), attempt=0))
    assert [type(command) for command in commands] == [AbortGeneration, SleepEngine]


def test_an_engine_wakes_with_the_weights_of_a_turn_of_the_engines_and_not_before() -> None:
    bench = Sharing().asleep()
    bench.stage(1)
    assert bench.commit(1, UpdateMode.DRAIN) == []
    assert bench.activity() is Activity.ASLEEP
    commands = bench.turned(Holder.ENGINES)
    assert drive.one(commands, ApplyWeights) == ApplyWeights(manifest(1), UpdateMode.DRAIN)
    assert bench.activity() is Activity.APPLYING_WEIGHTS
    assert submitted([*bench.swap(), *bench.issue(5)]) == [5]


def test_an_engine_that_has_its_turn_and_no_weights_waits_for_weights() -> None:
    bench = Sharing().asleep()
    bench.turned(Holder.ENGINES)
    assert bench.activity() is Activity.WAITING_FOR_WEIGHTS
    assert Wait("weights for", "the engine that sleeps", "weight_publisher") in bench.worker.waits()
    assert submitted(bench.hear(issued(0))) == []


def test_an_engine_that_is_asked_while_it_drains_sleeps_before_it_swaps() -> None:
    bench = Sharing().serving()
    bench.issue(0)
    bench.stage(1)
    bench.commit(1, UpdateMode.DRAIN)
    bench.turned(Holder.LEARNER)
    commands = bench.end(0)
    assert drive.one(commands, SleepEngine)
    assert drive.every(commands, ApplyWeights) == []
    bench.hear(EngineSlept())
    assert drive.one(bench.turned(Holder.ENGINES), ApplyWeights).manifest == manifest(1)


def test_an_engine_that_is_asked_while_it_swaps_sleeps_after_it() -> None:
    bench = Sharing().serving()
    bench.stage(1)
    bench.commit(1)
    assert bench.turned(Holder.LEARNER) == []
    assert drive.one(bench.swap(), SleepEngine)


def test_an_engine_that_sleeps_answers_another_learner_at_once() -> None:
    bench = Sharing().asleep()
    assert yielded(bench.turned(Holder.LEARNER)) == [bench.turn]


def test_a_turn_that_comes_back_before_the_engine_slept_leaves_it_awake() -> None:
    bench = Sharing().serving()
    bench.issue(0)
    bench.turned(Holder.LEARNER)
    bench.turned(Holder.ENGINES)
    assert drive.every(bench.end(0), SleepEngine) == []
    assert submitted(bench.issue(1)) == [1]


def test_an_engine_with_a_device_of_its_own_takes_no_turns() -> None:
    bench = EngineBench().serving()
    assert bench.hear(DeviceTurned(turn=1, holder=Holder.LEARNER)) == []
    assert submitted(bench.issue(0)) == [0]


# --- the WeightPublisher ----------------------------------------------------------------------------------------------


def test_the_start_of_an_engine_that_shares_devices_counts_from_its_turn() -> None:
    settings = WeightPublisherSettings(
        options=WeightsOptions(
            stage_timeout_s=1.0,
            commit_timeout_s=1.0,
            drain_timeout_s=1.0,
            announce_fraction=0.5,
            canary=True,
            canary_tolerance=0.1,
            max_failed_publishes=3,
        ),
        start_timeout_s=9.0,
        share_devices=("engine/0",),
    )
    driver = drive.Driver(WeightPublisher(settings))
    assert driver.hear(EngineJoined(name="engine/1", epoch=0)) == [StartTimer("engine/1", 9.0)]
    assert driver.hear(EngineJoined(name="engine/0", epoch=2)) == []
    assert driver.hear(EngineOpening(engine="engine/0", engine_epoch=1)) == []
    assert driver.hear(EngineOpening(engine="engine/0", engine_epoch=2)) == [StartTimer("engine/0", 9.0)]
