"""The Learner: the order of training, publishing and checkpoints, receipts, and the bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from engine_bench import manifest

from penstock.actors.learner.machine import DEADLINE, PUBLISHES_PER_EPOCH, Learner
from penstock.actors.learner.settings import LearnerSettings
from penstock.messages.base import Metric
from penstock.messages.commands import (
    FailRun,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
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
    WeightsPublished,
)
from penstock.messages.training import (
    Activity,
    BatchReady,
    CheckpointDemanded,
    CheckpointSaved,
    LearnerReady,
    StepFinished,
    UpdateMode,
)
from penstock.messages.weights import VersionAnnounced, WeightsExported

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand


class LearnerBench:
    """A Learner; its backend and the Buffer are played by hand."""

    def __init__(self, *, publish_every: int = 1, epoch: int = 0) -> None:
        settings = LearnerSettings(epoch=epoch, publish_every=publish_every, step_timeout_s=50.0, start_timeout_s=900.0)
        self.driver = drive.Driver(Learner(settings))

    @property
    def learner(self) -> Learner:
        return self.driver.machine

    def hear(self, *events: Event) -> list[AnyCommand]:
        return self.driver.hear(*events)

    def activity(self) -> Activity:
        return self.learner.activity

    def opened(self, version: int = 0) -> LearnerBench:
        """Open, with its first weights published."""
        self.hear(Started(epoch=0), LearnerOpened(version=version))
        self.published(version)
        return self

    def trained(self, version: int) -> list[AnyCommand]:
        return self.hear(
            BatchTrained(
                version=version,
                num_trained_tokens=90,
                num_masked_tokens=3,
                metrics=(Metric("train/loss", 0.5),),
            )
        )

    def published(self, version: int) -> list[AnyCommand]:
        return self.hear(WeightsPublished(manifest=manifest(version)))

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


def test_a_learner_opens_its_backend_within_a_deadline() -> None:
    assert LearnerBench().hear(Started(epoch=0)) == [OpenLearner(), StartTimer(DEADLINE, 900.0)]


def test_when_it_is_open_it_says_where_it_stands_and_publishes_that() -> None:
    bench = LearnerBench(epoch=2)
    bench.hear(Started(epoch=2))
    commands = bench.hear(LearnerOpened(version=5))
    assert commands[0] == StopTimer(DEADLINE)
    assert drive.one_sent(commands, LearnerReady, to="buffer") == LearnerReady(epoch=2, version=5)
    assert drive.one(commands, PublishWeights) == PublishWeights(5, 2 * PUBLISHES_PER_EPOCH)
    assert bench.activity() is Activity.PUBLISHING


def test_publish_numbers_go_up_over_incarnations_too() -> None:
    first, second = LearnerBench().opened(), LearnerBench(epoch=1)
    last = [drive.one(first.step(version), PublishWeights).publish for version in (1,)]
    second.hear(Started(epoch=1))
    assert drive.one(second.hear(LearnerOpened(version=0)), PublishWeights).publish > max(last)


def test_a_batch_that_comes_while_the_first_weights_are_exported_is_trained_afterwards() -> None:
    bench = LearnerBench()
    bench.hear(Started(epoch=0), LearnerOpened(version=0))
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
    bench.hear(batch(5, (2, 1), (4, 3)))
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


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5, 9])
def test_a_batch_that_does_not_make_the_next_version_changes_nothing(version: int) -> None:
    bench = LearnerBench().opened(version=3)
    bench.driver.ignores(batch(version))


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
    assert bench.hear(VersionAnnounced(version=3, publish=3, serving=())) == [ReleaseWeights(3)]
    bench.driver.ignores(VersionAnnounced(version=3, publish=3, serving=()))
    bench.driver.ignores(VersionAnnounced(version=2, publish=2, serving=()))


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_demanded_checkpoint_is_written_and_told() -> None:
    bench = LearnerBench().opened(version=3)
    commands = bench.hear(CheckpointDemanded(version=3))
    assert drive.one(commands, SaveCheckpoint) == SaveCheckpoint(3)
    assert drive.one(commands, StartTimer) == StartTimer(DEADLINE, 50.0)
    assert bench.activity() is Activity.CHECKPOINTING
    commands = bench.hear(CheckpointWritten(version=3, path="checkpoints/3"))
    saved = CheckpointSaved(version=3, path="checkpoints/3")
    assert drive.sent(commands, CheckpointSaved, to="buffer") == [saved]
    assert drive.one_sent(bench.hear(CheckpointDemanded(version=3)), CheckpointSaved) == saved


def test_a_checkpoint_that_is_demanded_while_it_is_written_is_written_once() -> None:
    bench = LearnerBench().opened(version=3)
    bench.hear(CheckpointDemanded(version=3))
    assert bench.hear(CheckpointDemanded(version=3)) == []
    commands = bench.hear(CheckpointWritten(version=3, path="c"))
    assert drive.every(commands, SaveCheckpoint) == []


def test_a_checkpoint_waits_for_the_export_that_runs() -> None:
    bench = LearnerBench()
    bench.hear(Started(epoch=0), LearnerOpened(version=0))
    assert bench.hear(CheckpointDemanded(version=0)) == []
    assert drive.one(bench.published(0), SaveCheckpoint).version == 0


def test_a_checkpoint_of_a_version_to_come_waits_for_it() -> None:
    bench = LearnerBench(publish_every=9).opened()
    assert bench.hear(CheckpointDemanded(version=1)) == []
    assert drive.one(bench.step(1), SaveCheckpoint).version == 1


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["starting", "training", "publishing", "checkpointing"])
def test_a_backend_that_is_late_stops_the_run_with_what_it_was_doing(phase: str) -> None:
    bench = LearnerBench()
    if phase == "starting":
        bench.hear(Started(epoch=0))
    elif phase == "publishing":
        bench.hear(Started(epoch=0), LearnerOpened(version=0))
    else:
        bench.opened()
        bench.hear(batch(1) if phase == "training" else CheckpointDemanded(version=0))
    story = drive.one(bench.hear(TimerFired(key=DEADLINE)), FailRun).story
    assert story == f"the learner is {phase} for longer than it may; see its log"


def test_a_deadline_that_runs_out_as_the_step_ends_stops_nothing() -> None:
    bench = LearnerBench(publish_every=9).opened()
    assert StopTimer(DEADLINE) in bench.step(1)
    bench.driver.ignores(TimerFired(key=DEADLINE))
