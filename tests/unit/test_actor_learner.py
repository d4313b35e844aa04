"""The Learner: the order of training, publishing and checkpoints, receipts, and the bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from engine_bench import manifest

from penstock.actors.learner.machine import DEADLINE, Learner
from penstock.actors.learner.publishing import PUBLISH_DEADLINE, PUBLISHES_PER_EPOCH
from penstock.actors.learner.saving import SAVE_DEADLINE
from penstock.actors.learner.settings import LearnerSettings
from penstock.messages.base import Metric
from penstock.messages.commands import (
    DeleteCheckpoints,
    FailRun,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    ReplaceActor,
    SaveCheckpoint,
    Send,
    StartTimer,
    StopTimer,
    Train,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    Started,
    TimerFired,
    WeightsCopied,
    WeightsPublished,
)
from penstock.messages.names import LEARNER, SUPERVISOR
from penstock.messages.training import (
    Activity,
    BatchReady,
    CheckpointDemanded,
    CheckpointNamed,
    CheckpointSaved,
    CheckpointsKept,
    LearnerReady,
    NoticeGiven,
    StepFinished,
    UpdateMode,
)
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import PublishFailed, VersionAnnounced, WeightsExported

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand


class LearnerBench:
    """A Learner; its backend and the Buffer are played by hand."""

    def __init__(
        self,
        *,
        publish_every: int = 1,
        publishes: bool = True,
        save_every: int = 1000,
        epoch: int = 0,
        saves_first: bool = False,
    ) -> None:
        settings = LearnerSettings(
            epoch=epoch,
            publish_every=publish_every,
            publishes=publishes,
            save_every=save_every,
            saves_first=saves_first,
            step_timeout_s=50.0,
            start_timeout_s=900.0,
        )
        self.driver = drive.Driver(Learner(settings))

    @property
    def learner(self) -> Learner:
        return self.driver.machine

    def hear(self, *events: Event) -> list[AnyCommand]:
        return self.driver.hear(*events)

    def activity(self) -> Activity:
        return self.learner.shows[0]

    def opened(self, version: int = 0) -> LearnerBench:
        """Open, with its first weights published."""
        self.loaded(version)
        self.published(version)
        return self

    def loaded(self, version: int = 0, *, announced: int = -1) -> list[AnyCommand]:
        """The Buffer names the checkpoint of this version, and it is loaded; the first Learner makes version 0."""
        epoch = self.learner.settings.epoch
        path = "c" if version or epoch else ""
        named = CheckpointNamed(learner_epoch=epoch, version=version, path=path, announced_version=announced)
        return self.hear(Started(epoch=epoch), named, LearnerOpened(version=version))

    def trained(self, version: int, *notices: str) -> list[AnyCommand]:
        return self.hear(
            BatchTrained(
                version=version,
                num_trained_tokens=90,
                num_masked_tokens=3,
                metrics=(Metric("train/loss", 0.5),),
                notices=notices,
            )
        )

    def published(self, version: int) -> list[AnyCommand]:
        return self.hear(WeightsPublished(manifest=manifest(version)))

    def copied(self, version: int) -> list[AnyCommand]:
        return self.hear(WeightsCopied(version=version, size_bytes=1))

    def step(self, version: int, *, announced: int = 0) -> list[AnyCommand]:
        """Train this batch."""
        self.hear(batch(version, announced=announced))
        return self.trained(version)


def batch(
    version: int,
    *spans: tuple[int, int],
    max_staleness: int = 2,
    announced: int = 0,
    masks: bool = False,
    is_last: bool = False,
) -> BatchReady:
    """The batch that makes this version; its tokens are of the version before, unless told."""
    return BatchReady(
        version=version,
        groups=(drive.group(7, (version - 1, 4)), drive.group(9, *(spans or ((version - 1, 4),)))),
        announced_version=announced,
        max_staleness=max_staleness,
        mask_stale=masks,
        update_mode=UpdateMode.INTERRUPT,
        is_last=is_last,
    )


# --- start --------------------------------------------------------------------------------------------------------


def named(epoch: int, version: int = 0, path: str = "", announced: int = -1) -> CheckpointNamed:
    return CheckpointNamed(learner_epoch=epoch, version=version, path=path, announced_version=announced)


def test_what_people_should_know_of_a_start_is_told() -> None:
    bench = LearnerBench()
    named = CheckpointNamed(learner_epoch=0, version=0, path="", announced_version=-1)
    commands = bench.hear(Started(epoch=0), named, LearnerOpened(version=0, notices=("it was kept",)))
    notice = NoticeGiven(name=LEARNER, text="it was kept", is_warning=True)
    assert [each for each in commands if isinstance(each, Send) and each.to == SUPERVISOR] == [Send(SUPERVISOR, notice)]


def test_a_learner_asks_which_checkpoint_to_load_and_waits_for_it_within_a_deadline() -> None:
    bench = LearnerBench(epoch=3)
    assert bench.hear(Started(epoch=3)) == [
        Send("buffer", LearnerReady(epoch=3, version=-1)),
        StartTimer(DEADLINE, 900.0),
    ]
    assert bench.hear(named(3, 8, "c8", 9)) == [OpenLearner(version=8, path="c8")]
    assert bench.activity() is Activity.STARTING


def test_only_the_first_name_counts_and_only_for_the_incarnation_that_asked() -> None:
    bench = LearnerBench(epoch=3)
    bench.hear(Started(epoch=3))
    bench.driver.ignores(named(2, 8, "c8"))
    bench.hear(named(3, 8, "c8"))
    bench.driver.ignores(named(3, 9, "c9"))


def test_what_was_offered_to_a_predecessor_is_not_trained() -> None:
    bench = LearnerBench(epoch=1)
    bench.hear(Started(epoch=1))
    bench.driver.ignores(batch(1))
    bench.hear(named(1))
    bench.driver.ignores(batch(1))


def test_a_learner_that_is_older_than_what_engines_serve_publishes_nothing_until_it_has_caught_up() -> None:
    bench = LearnerBench(epoch=1)
    assert drive.every(bench.loaded(4, announced=6), PublishWeights) == []
    assert not publishes(bench, 5, announced=6)
    assert publishes(bench, 6, announced=6)


def test_a_learner_that_stands_where_engines_are_publishes_at_once() -> None:
    assert drive.one(LearnerBench(epoch=1).loaded(6, announced=6), PublishWeights).version == 6


def test_a_long_way_to_version_0_is_saved() -> None:
    bench = LearnerBench(saves_first=True)
    bench.loaded(0)
    assert drive.one(bench.published(0), SaveCheckpoint) == SaveCheckpoint(0)


@pytest.mark.parametrize("version", [0, 4])
def test_a_checkpoint_that_was_loaded_is_not_written_again_because_the_way_to_version_0_was_long(version: int) -> None:
    bench = LearnerBench(saves_first=True, epoch=1)
    assert drive.every([*bench.loaded(version), *bench.published(version)], SaveCheckpoint) == []


def test_when_it_is_open_it_says_where_it_stands_and_publishes_that() -> None:
    bench = LearnerBench(epoch=2)
    commands = bench.loaded(5)
    assert StopTimer(DEADLINE) in commands
    commands = [command for command in commands if command != Send("buffer", LearnerReady(epoch=2, version=-1))]
    assert drive.one_sent(commands, LearnerReady, to="buffer") == LearnerReady(epoch=2, version=5)
    assert drive.one(commands, PublishWeights) == PublishWeights(5, 2 * PUBLISHES_PER_EPOCH)
    assert bench.activity() is Activity.PUBLISHING


def test_publish_numbers_go_up_over_incarnations_too() -> None:
    first, second = LearnerBench().opened(), LearnerBench(epoch=1)
    last = [drive.one(first.step(version), PublishWeights).publish for version in (1,)]
    assert drive.one(second.loaded(0), PublishWeights).publish > max(last)


def test_a_batch_that_comes_while_the_first_weights_are_exported_is_trained_afterwards() -> None:
    bench = LearnerBench()
    bench.loaded(0)
    assert bench.hear(batch(1)) == []
    assert drive.one(bench.published(0), Train).version == 1


# --- training -----------------------------------------------------------------------------------------------------


def test_a_batch_is_trained_as_it_was_offered() -> None:
    bench = LearnerBench().opened()
    event = batch(1)
    assert bench.hear(event) == [
        StartTimer(DEADLINE, 50.0),
        Train(version=1, groups=event.groups, min_token_version=0),
    ]
    assert bench.activity() is Activity.WORKING


def test_the_receipt_names_groups_tokens_and_the_largest_age() -> None:
    bench = LearnerBench().opened(version=4)
    assert drive.one(bench.hear(batch(5, (2, 1), (4, 3))), Train).min_token_version == 0, "nothing is masked"
    commands = bench.trained(5)
    receipt = StepFinished(
        version=5,
        group_ids=(7, 9),
        num_trained_tokens=90,
        num_masked_tokens=3,
        max_staleness=2,
        metrics=(Metric("train/loss", 0.5),),
    )
    assert drive.sent(commands, StepFinished, to="buffer") == [receipt]
    assert drive.sent(commands, StepFinished, to="weight_publisher") == [receipt]


@pytest.mark.parametrize("publishes", [True, False])
def test_what_people_should_know_of_a_step_is_told_and_of_tokens_of_others_after_the_first_one_nothing(
    publishes: bool,
) -> None:
    """Figures of a batch that another run has made are its Learner's only as long as that has trained nothing."""
    bench = LearnerBench(publishes=publishes, publish_every=9)
    bench.loaded(0)
    if publishes:
        bench.published(0)
    told: list[str] = []
    for version in (1, 2):
        bench.hear(batch(version))
        told += [notice.text for notice in drive.sent(bench.trained(version, f"look at {version}"), NoticeGiven)]
    assert told == ["look at 1", "look at 2"][: 1 + publishes]


def test_a_batch_that_is_trained_already_is_answered_with_its_receipt() -> None:
    bench = LearnerBench(publish_every=9).opened()
    receipt = drive.one_sent(bench.step(1), StepFinished, to="buffer")
    commands = bench.hear(batch(1))
    assert drive.every(commands, Train) == []
    assert drive.one_sent(commands, StepFinished, to="buffer") == receipt


def test_a_batch_that_is_being_trained_is_not_trained_twice() -> None:
    bench = LearnerBench().opened()
    bench.hear(batch(1))
    bench.driver.ignores(batch(1))


@pytest.mark.parametrize("version", [5, 9])
def test_a_batch_that_comes_too_early_changes_nothing(version: int) -> None:
    bench = LearnerBench().opened(version=3)
    bench.driver.ignores(batch(version))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_batch_from_before_its_checkpoint_is_answered_with_where_it_stands(version: int) -> None:
    bench = LearnerBench().opened(version=3)
    assert bench.hear(batch(version)) == [Send("buffer", LearnerReady(epoch=0, version=3))]
    receipt = drive.one_sent(bench.step(4), StepFinished, to="buffer")
    assert bench.hear(batch(version)) == [Send("buffer", receipt)]


@pytest.mark.parametrize("age", range(5))
def test_a_token_beyond_the_bound_stops_the_run_and_is_not_trained(age: int) -> None:
    bench = LearnerBench().opened(version=8)
    commands = bench.hear(batch(9, (8, 1), (8 - age, 1), max_staleness=2))
    if age <= 2:
        assert drive.one(commands, Train).version == 9
    else:
        assert drive.every(commands, Train) == []
        assert drive.one(commands, FailRun).story == f"batch 9 holds a token of age {age}, the bound is 2"


def test_a_span_without_tokens_has_no_age() -> None:
    bench = LearnerBench().opened(version=8)
    assert drive.every(bench.hear(batch(9, (0, 0), (8, 1))), Train) != []


def test_with_mask_old_tokens_get_no_loss_and_do_not_count_as_trained() -> None:
    bench = LearnerBench().opened(version=8)
    train = drive.one(bench.hear(batch(9, (1, 3), (7, 1), masks=True, max_staleness=2)), Train)
    assert train.min_token_version == 6
    assert drive.sent(bench.trained(9), StepFinished)[0].max_staleness == 1


def test_with_mask_nothing_is_too_old_at_the_beginning() -> None:
    bench = LearnerBench().opened()
    assert drive.one(bench.hear(batch(1, masks=True, max_staleness=4)), Train).min_token_version == 0


# --- publishing ---------------------------------------------------------------------------------------------------


def test_a_version_is_exported_before_the_next_batch_changes_it() -> None:
    bench = LearnerBench().opened()
    commands = bench.step(1)
    assert drive.one(commands, PublishWeights) == PublishWeights(1, 1)
    assert bench.hear(batch(2)) == []
    commands = bench.published(1)
    exported = drive.one_sent(commands, WeightsExported, to="weight_publisher")
    assert (exported.manifest, exported.update_mode) == (manifest(1), UpdateMode.INTERRUPT)
    assert drive.one(commands, Train).version == 2


def publishes(bench: LearnerBench, version: int, announced: int = 0) -> bool:
    found = drive.every(bench.step(version, announced=announced), PublishWeights)
    for publish in found:
        bench.published(publish.version)
    return bool(found)


def test_where_no_engine_is_nothing_is_published() -> None:
    bench = LearnerBench(publishes=False)
    assert drive.every([*bench.loaded(0), *bench.step(1), *bench.step(2)], PublishWeights) == []


def test_only_every_nth_version_is_published() -> None:
    bench = LearnerBench(publish_every=3).opened()
    assert [publishes(bench, version) for version in range(1, 8)] == [False, False, True, False, False, True, False]


def test_a_learner_at_or_past_an_announced_version_that_it_has_not_published_publishes_off_the_grid() -> None:
    """It goes over old batches again, and open groups need a version that nobody may serve any more."""
    bench = LearnerBench(publish_every=4).opened(version=4)
    assert not publishes(bench, 5, announced=6)
    assert publishes(bench, 6, announced=6)
    assert not publishes(bench, 7, announced=6)


def test_the_last_version_is_not_published() -> None:
    bench = LearnerBench().opened()
    bench.hear(batch(1, is_last=True))
    assert drive.every(bench.trained(1), PublishWeights) == []
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES


def test_older_exports_are_released_when_a_newer_version_is_announced() -> None:
    bench = LearnerBench().opened()
    assert bench.hear(VersionAnnounced(version=3, publish=3)) == [ReleaseWeights(3)]
    bench.driver.ignores(VersionAnnounced(version=3, publish=3))
    bench.driver.ignores(VersionAnnounced(version=2, publish=2))


def test_the_next_batch_is_trained_while_the_copy_is_looked_at_and_engines_are_told_afterwards() -> None:
    bench = LearnerBench().opened()
    bench.step(1)
    bench.hear(batch(2))
    commands = bench.copied(1)
    assert drive.one(commands, Train).version == 2
    assert StartTimer(PUBLISH_DEADLINE, 50.0) in commands
    assert drive.sent(commands, WeightsExported) == []
    assert bench.activity() is Activity.WORKING
    commands = bench.published(1)
    assert drive.one_sent(commands, WeightsExported, to="weight_publisher").manifest.version == 1
    assert StopTimer(PUBLISH_DEADLINE) in commands
    assert bench.activity() is Activity.WORKING, "the batch goes on"


def test_a_copy_is_the_last_publish_for_the_grid() -> None:
    bench = LearnerBench(publish_every=2).opened()
    bench.step(1)
    assert drive.one(bench.step(2), PublishWeights).version == 2
    bench.copied(2)
    assert drive.every(bench.step(3), PublishWeights) == []


def test_exports_end_in_their_order() -> None:
    """The second is asked for while the first is looked at: what is published next is the first."""
    bench = LearnerBench().opened()
    bench.step(1)
    bench.copied(1)
    assert drive.one(bench.step(2), PublishWeights).version == 2
    assert drive.one_sent(bench.published(1), WeightsExported).manifest.version == 1
    assert bench.activity() is Activity.PUBLISHING
    assert drive.one_sent(bench.published(2), WeightsExported).manifest.version == 2
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES


def test_a_copy_that_is_looked_at_for_too_long_replaces_the_learner() -> None:
    bench = LearnerBench().opened()
    bench.step(1)
    bench.copied(1)
    assert Wait("digest of", "version 1", OWN_BACKEND) in bench.learner.waits()
    asked = drive.one(bench.hear(TimerFired(key=PUBLISH_DEADLINE)), ReplaceActor)
    assert asked.cause == "it is publishing for longer than it may"
    bench.published(1)
    bench.driver.ignores(TimerFired(key=PUBLISH_DEADLINE))


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_demanded_checkpoint_is_written_and_told() -> None:
    bench = LearnerBench(publish_every=99).opened(version=2)
    bench.step(3)
    commands = bench.hear(CheckpointDemanded(version=3))
    assert drive.one(commands, SaveCheckpoint) == SaveCheckpoint(3)
    assert drive.one(commands, StartTimer) == StartTimer(SAVE_DEADLINE, 50.0)
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES, "nothing waits for the disk"
    commands = bench.hear(CheckpointWritten(version=3, path="checkpoints/3"))
    saved = CheckpointSaved(version=3, path="checkpoints/3")
    assert drive.sent(commands, CheckpointSaved, to="buffer") == [saved]
    assert drive.one_sent(bench.hear(CheckpointDemanded(version=3)), CheckpointSaved) == saved


def test_a_learner_that_only_waits_for_samples_does_not_blame_the_checkpoint_that_it_writes() -> None:
    bench = LearnerBench(save_every=1, publish_every=99).opened()
    assert drive.one(bench.step(1), SaveCheckpoint).version == 1
    assert (bench.activity(), bench.learner.state) == (Activity.WAITING_FOR_SAMPLES, "idle")
    offer, writing = Wait("offer of", "batch 2", "buffer"), Wait("checkpoint of", "version 1", OWN_BACKEND)
    assert bench.learner.waits() == (offer, writing)
    bench.hear(batch(2))
    assert bench.activity() is Activity.WORKING
    bench.trained(2)
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES, "the next one is due, and keeps no batch"
    bench.hear(batch(3))
    assert (bench.activity(), bench.learner.state) == (Activity.CHECKPOINTING, "checkpointing")


@pytest.mark.parametrize("writes", [0, 1], ids=["nothing is written", "an older one is written"])
def test_the_end_of_a_run_waits_for_its_checkpoint(writes: int) -> None:
    bench = LearnerBench(save_every=1, publish_every=99).opened()
    bench.step(1)
    if not writes:
        bench.hear(CheckpointWritten(version=1, path="c1"))
    bench.hear(batch(2, is_last=True))
    bench.trained(2)
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES
    bench.hear(CheckpointDemanded(version=2, ends_run=True))
    assert bench.activity() is Activity.CHECKPOINTING
    assert bench.learner.waits() == (Wait("checkpoint of", f"version {2 - writes}", OWN_BACKEND),)
    if writes:
        assert drive.one(bench.hear(CheckpointWritten(version=1, path="c1")), SaveCheckpoint).version == 2
        assert bench.activity() is Activity.CHECKPOINTING
    bench.hear(CheckpointWritten(version=2, path="c2"))
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES
    bench.hear(CheckpointDemanded(version=2), batch(3), CheckpointDemanded(version=3))
    bench.trained(3)
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES, "somebody has asked for this one, and the run goes on"


def test_a_demand_for_what_is_saved_is_answered_while_the_next_batch_is_trained_and_saves_nothing_more() -> None:
    bench = LearnerBench(save_every=1, publish_every=9).opened()
    bench.step(1)
    bench.hear(CheckpointWritten(version=1, path="c1"), batch(2, is_last=True))
    assert bench.hear(CheckpointDemanded(version=1)) == [Send("buffer", CheckpointSaved(version=1, path="c1"))]
    assert drive.every(bench.trained(2), SaveCheckpoint) == []


def test_a_learner_that_has_to_come_to_the_version_that_is_demanded_waits_for_batches_and_not_for_the_disk() -> None:
    bench = LearnerBench().opened()
    bench.hear(CheckpointDemanded(version=1, ends_run=True))
    assert bench.activity() is Activity.WAITING_FOR_SAMPLES


def test_a_checkpoint_that_is_demanded_while_it_is_written_is_written_once() -> None:
    bench = LearnerBench(publish_every=99).opened(version=2)
    bench.step(3)
    bench.hear(CheckpointDemanded(version=3))
    assert bench.hear(CheckpointDemanded(version=3)) == []
    commands = bench.hear(CheckpointWritten(version=3, path="c"))
    assert drive.every(commands, SaveCheckpoint) == []


def test_a_checkpoint_waits_for_the_export_that_runs() -> None:
    bench = LearnerBench()
    bench.loaded(0)
    assert bench.hear(CheckpointDemanded(version=0)) == []
    assert drive.one(bench.published(0), SaveCheckpoint).version == 0


def test_a_checkpoint_of_a_version_to_come_waits_for_it() -> None:
    bench = LearnerBench(publish_every=9).opened()
    assert bench.hear(CheckpointDemanded(version=1)) == []
    assert drive.one(bench.step(1), SaveCheckpoint).version == 1


def test_every_nth_version_is_saved_after_it_is_published_and_before_the_next_batch() -> None:
    bench = LearnerBench(save_every=2).opened()
    assert drive.every([*bench.step(1), *bench.published(1)], SaveCheckpoint) == []
    assert drive.every(bench.step(2), SaveCheckpoint) == []
    commands = [*bench.hear(batch(3)), *bench.published(2)]
    kinds = [type(command) for command in commands if isinstance(command, SaveCheckpoint | Train)]
    assert kinds == [SaveCheckpoint, Train]
    assert bench.activity() is Activity.WORKING
    commands = bench.hear(CheckpointWritten(version=2, path="c2"))
    assert drive.one_sent(commands, CheckpointSaved, to="buffer").version == 2


def test_one_checkpoint_is_written_at_a_time_and_no_version_that_is_due_is_passed_over() -> None:
    bench = LearnerBench(save_every=1, publish_every=99).opened()
    assert drive.one(bench.step(1), SaveCheckpoint).version == 1
    assert drive.every(bench.step(2), SaveCheckpoint) == [], "it is trained while the first is written"
    assert drive.every(bench.hear(batch(3)), Train) == []
    assert bench.activity() is Activity.CHECKPOINTING
    assert bench.learner.waits() == (Wait("checkpoint of", "version 1", OWN_BACKEND),)
    commands = bench.hear(CheckpointWritten(version=1, path="c1"))
    kinds = [(type(each), each.version) for each in commands if isinstance(each, SaveCheckpoint | Train)]
    assert kinds == [(SaveCheckpoint, 2), (Train, 3)]


def test_a_checkpoint_that_is_not_written_in_time_holds_training_no_longer_than_that() -> None:
    bench = LearnerBench(save_every=1, publish_every=99).opened()
    bench.step(1)
    bench.step(2)
    bench.hear(batch(3))
    asked = drive.one(bench.hear(TimerFired(key=SAVE_DEADLINE)), ReplaceActor)
    assert asked == ReplaceActor("learner", 0, "it is checkpointing for longer than it may")


def test_a_checkpoint_that_somebody_asks_for_holds_no_training() -> None:
    bench = LearnerBench(save_every=1, publish_every=99).opened()
    bench.step(1)
    bench.hear(CheckpointDemanded(version=2))
    bench.hear(batch(2))
    assert bench.activity() is Activity.WORKING


def test_a_demand_of_a_later_version_outlives_a_checkpoint_of_an_earlier_one() -> None:
    """It is said once: to a Learner that goes over the batches since its checkpoint again."""
    bench = LearnerBench(save_every=2, publish_every=99).opened()
    bench.hear(CheckpointDemanded(version=3))
    assert drive.every(bench.step(1), SaveCheckpoint) == []
    assert drive.one(bench.step(2), SaveCheckpoint) == SaveCheckpoint(2)
    bench.hear(CheckpointWritten(version=2, path="c2"))
    assert drive.one(bench.step(3), SaveCheckpoint) == SaveCheckpoint(3)
    bench.hear(CheckpointWritten(version=3, path="c3"))
    bench.step(4)
    bench.hear(CheckpointWritten(version=4, path="c4"))
    assert drive.every(bench.step(5), SaveCheckpoint) == [], "it was met"


@pytest.mark.parametrize("demanded", [2, 3])
def test_a_demand_that_its_predecessor_has_met_is_met_by_the_checkpoint_that_is_loaded(demanded: int) -> None:
    """The last demand is repeated to each Learner that begins, however long ago it was made."""
    bench = LearnerBench(epoch=1, save_every=4)
    bench.hear(Started(epoch=1), CheckpointDemanded(version=demanded), named(1, 3, "c3", 3))
    commands = bench.hear(LearnerOpened(version=3), batch(4, announced=3), WeightsPublished(manifest=manifest(3)))
    assert drive.every(commands, SaveCheckpoint) == []
    assert drive.one_sent(commands, CheckpointSaved, to="buffer") == CheckpointSaved(version=3, path="c3")
    assert drive.one(commands, Train).version == 4
    assert drive.one(bench.trained(4), PublishWeights).version == 4
    assert drive.one(bench.published(4), SaveCheckpoint) == SaveCheckpoint(4), "it is due"


def test_a_demand_of_a_version_after_the_checkpoint_that_is_loaded_is_met_when_that_is_trained_again() -> None:
    bench = LearnerBench(epoch=1, publish_every=99)
    bench.hear(CheckpointDemanded(version=4))
    assert drive.every([*bench.loaded(3), *bench.published(3)], SaveCheckpoint) == []
    assert drive.one(bench.step(4), SaveCheckpoint) == SaveCheckpoint(4)


def test_a_demand_made_while_a_batch_is_trained_saves_the_version_that_comes_of_it() -> None:
    bench = LearnerBench(publish_every=9).opened()
    bench.hear(batch(1))
    assert bench.hear(CheckpointDemanded(version=0)) == []
    assert drive.one(bench.trained(1), SaveCheckpoint).version == 1


def test_older_checkpoints_go_when_the_buffer_says_so() -> None:
    assert LearnerBench().opened().hear(CheckpointsKept(oldest_version=4)) == [DeleteCheckpoints(4)]


def test_a_publish_that_failed_is_made_again_under_a_new_number() -> None:
    bench = LearnerBench().opened()
    commands = bench.hear(PublishFailed(version=0, publish=0, cause="canary"))
    assert drive.one(commands, PublishWeights) == PublishWeights(0, 1)
    bench.published(0)
    bench.driver.ignores(PublishFailed(version=0, publish=0, cause="canary"))  # a newer one is on its way


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["starting", "opening", "training", "publishing", "checkpointing"])
def test_a_learner_that_is_late_asks_to_be_replaced(phase: str) -> None:
    bench = LearnerBench()
    if phase == "starting":
        bench.hear(Started(epoch=0))
    elif phase == "opening":
        bench.hear(Started(epoch=0), named(0))
    elif phase == "publishing":
        bench.loaded(0)
    else:
        bench.opened()
        bench.hear(batch(1) if phase == "training" else CheckpointDemanded(version=0))
    key = SAVE_DEADLINE if phase == "checkpointing" else DEADLINE
    asked = drive.one(bench.hear(TimerFired(key=key)), ReplaceActor)
    assert asked == ReplaceActor("learner", 0, f"it is {phase} for longer than it may")


def test_a_deadline_that_runs_out_as_the_step_ends_stops_nothing() -> None:
    bench = LearnerBench(publish_every=9).opened()
    assert StopTimer(DEADLINE) in bench.step(1)
    bench.driver.ignores(TimerFired(key=DEADLINE))
    bench.driver.ignores(TimerFired(key=SAVE_DEADLINE))
