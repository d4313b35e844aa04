"""The WeightPublisher: who goes first, who is late, and when a version is announced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import actor_driver as drive
import pytest
from engine_bench import CANARY, canary_logprobs, manifest

from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.actors.weight_publisher.settings import WeightPublisherSettings
from penstock.messages.arrays import pack_floats
from penstock.messages.commands import FailRun, ReplaceActor, Send, StartTimer, StopTimer
from penstock.messages.local import Started, TimerFired
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.training import NoticeGiven, StepFinished, UpdateMode
from penstock.messages.weights import (
    Canary,
    DrainFinished,
    EngineReady,
    PublishFailed,
    VersionAnnounced,
    WeightsApplied,
    WeightsCommitted,
    WeightsExported,
    WeightsFetched,
    WeightsStaged,
)

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand


class PublisherBench:
    """A WeightPublisher; Learner and engines are played by hand."""

    def __init__(
        self, *, announce_fraction: float = 0.5, check_canary: bool = True, max_failed_publishes: int = 3
    ) -> None:
        self.driver = drive.Driver(
            WeightPublisher(
                WeightPublisherSettings(
                    options=WeightsOptions(
                        stage_timeout_s=10.0,
                        commit_timeout_s=20.0,
                        drain_timeout_s=300.0,
                        announce_fraction=announce_fraction,
                        canary=check_canary,
                        canary_tolerance=0.05,
                        max_failed_publishes=max_failed_publishes,
                    ),
                    max_fetch_retries=2,
                )
            )
        )
        self.epochs: dict[str, int] = {}

    @property
    def publisher(self) -> WeightPublisher:
        return self.driver.machine

    def hear(self, *events: Event) -> list[AnyCommand]:
        return self.driver.hear(*events)

    def ready(self, *engines: int, epoch: int = 0) -> list[AnyCommand]:
        """These engines join and open."""
        commands: list[AnyCommand] = []
        for index in engines:
            name = f"engine/{index}"
            self.epochs[name] = epoch
            joined = EngineJoined(name=name, epoch=epoch)
            commands += self.hear(joined, EngineReady(engine=name, engine_epoch=epoch, num_slots=4))
        return commands

    def with_engines(self, *engines: int) -> Self:
        """These are open."""
        self.ready(*engines)
        return self

    def with_export(self, publish: int, mode: UpdateMode = UpdateMode.IN_FLIGHT, version: int | None = None) -> Self:
        """Those that are open were told to stage this."""
        self.export(publish, mode, version)
        return self

    def serving(self, publish: int, *engines: int) -> Self:
        """These have taken it."""
        self.takes(publish, *engines)
        return self

    def lose(self, index: int) -> list[AnyCommand]:
        name = f"engine/{index}"
        return self.hear(EngineLost(name=name, epoch=self.epochs.pop(name)))

    def export(
        self, publish: int, mode: UpdateMode = UpdateMode.IN_FLIGHT, version: int | None = None
    ) -> list[AnyCommand]:
        return self.hear(WeightsExported(manifest=manifest(publish, version), update_mode=mode))

    def fetched(
        self, index: int, publish: int, *, digest: str | None = None, error: str = "", version: int | None = None
    ) -> list[AnyCommand]:
        return self.hear(
            WeightsFetched(
                engine=f"engine/{index}",
                engine_epoch=self.epochs[f"engine/{index}"],
                version=publish if version is None else version,
                publish=publish,
                digest=f"digest-{publish}" if digest is None else digest,
                error=error,
            )
        )

    def applied(
        self,
        index: int,
        publish: int,
        *,
        digest: str | None = None,
        logprobs: bytes = CANARY.logprobs,
        epoch: int | None = None,
        version: int | None = None,
        layout: str = "",
        checksum: str = "",
    ) -> list[AnyCommand]:
        return self.hear(
            WeightsApplied(
                engine=f"engine/{index}",
                engine_epoch=self.epochs[f"engine/{index}"] if epoch is None else epoch,
                version=publish if version is None else version,
                publish=publish,
                digest=f"digest-{publish}" if digest is None else digest,
                canary_logprobs=logprobs,
                layout=layout,
                checksum=checksum,
            )
        )

    def takes(self, publish: int, *indices: int) -> list[AnyCommand]:
        """These engines fetch, and swap as soon as they are told to."""
        commands: list[AnyCommand] = []
        for index in indices:
            commands += self.fetched(index, publish)
        waiting = list(indices)
        told = commits(commands)
        while told:
            index = told.pop(0)
            waiting.remove(index)
            new = self.applied(index, publish)
            told += commits(new)
            commands += new
        assert waiting == []
        return commands


def index_of(name: str) -> int:
    return int(name.removeprefix("engine/"))


def stages(commands: list[AnyCommand]) -> list[tuple[int, int]]:
    """(engine, publish) that are told to stage."""
    sends = drive.every(commands, Send)
    return [(index_of(s.to), s.event.manifest.publish) for s in sends if isinstance(s.event, WeightsStaged)]


def commits(commands: list[AnyCommand]) -> list[int]:
    """Engines that are told to swap."""
    return [index_of(s.to) for s in drive.every(commands, Send) if isinstance(s.event, WeightsCommitted)]


def announcements(commands: list[AnyCommand]) -> list[int]:
    """Versions that the Buffer is told."""
    return [event.version for event in drive.sent(commands, VersionAnnounced, to="buffer")]


def replaced(commands: list[AnyCommand]) -> list[tuple[str, int]]:
    return [(command.name, command.epoch) for command in drive.every(commands, ReplaceActor)]


# --- the usual course ---------------------------------------------------------------------------------------------


def test_every_ready_engine_is_told_to_stage_a_new_publish() -> None:
    bench = PublisherBench()
    bench.hear(Started(epoch=0), EngineJoined(name="engine/9", epoch=0))
    bench.ready(0, 1)
    commands = bench.export(0)
    assert stages(commands) == [(0, 0), (1, 0)]
    assert drive.every(commands, StartTimer) == [StartTimer("engine/0", 10.0), StartTimer("engine/1", 10.0)]
    bench.driver.ignores(WeightsExported(manifest=manifest(0), update_mode=UpdateMode.IN_FLIGHT))


def test_one_engine_commits_first_and_the_others_follow_when_its_canary_is_right() -> None:
    bench = PublisherBench().with_engines(0, 1, 2).with_export(0)
    commands = bench.fetched(1, 0)
    assert commits(commands) == [1]
    assert commands[0] == StopTimer("engine/1")
    assert drive.one(commands, StartTimer) == StartTimer("engine/1", 20.0)
    assert commits(bench.fetched(0, 0)) == []
    assert commits(bench.applied(1, 0)) == [0]
    assert commits(bench.fetched(2, 0)) == [2]


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_a_commit_names_the_policys_update_mode_and_a_drain_has_a_deadline_of_its_own(mode: UpdateMode) -> None:
    bench = PublisherBench().with_engines(0).with_export(0, mode)
    commands = bench.fetched(0, 0)
    assert drive.one_sent(commands, WeightsCommitted).update_mode is mode
    assert drive.one(commands, StartTimer).delay_s == (300.0 if mode is UpdateMode.DRAIN else 20.0)


def test_after_a_drain_the_deadline_of_the_commit_counts_from_when_the_engine_is_idle() -> None:
    bench = PublisherBench().with_engines(0).with_export(0, UpdateMode.DRAIN)
    bench.fetched(0, 0)
    drained = DrainFinished(engine="engine/0", engine_epoch=0, version=0, publish=0)
    assert bench.hear(drained) == [StartTimer("engine/0", 20.0)]
    bench.driver.ignores(DrainFinished(engine="engine/0", engine_epoch=0, version=7, publish=7))
    bench.applied(0, 0)
    bench.driver.ignores(drained)


def test_an_engine_that_is_busy_with_one_publish_takes_the_newest_next() -> None:
    bench = PublisherBench().with_engines(0).with_export(0)
    assert stages(bench.export(1)) == []
    assert stages(bench.export(2)) == []
    assert commits(bench.fetched(0, 0)) == [0]
    assert stages(bench.applied(0, 0)) == [(0, 2)]


def test_an_engine_that_joins_later_catches_up_without_a_canary_of_its_own() -> None:
    bench = PublisherBench().with_engines(0).with_export(3).serving(3, 0)
    assert stages(bench.ready(1)) == [(1, 3)]
    assert commits(bench.fetched(1, 3)) == [1]


def test_an_older_version_under_a_newer_number_is_not_staged_where_a_newer_one_is_served() -> None:
    bench = PublisherBench().with_engines(0).with_export(5).serving(5, 0)
    assert stages(bench.export(1_000_000, version=3)) == []
    assert stages(bench.ready(1)) == [(1, 5)], "a new engine takes the newest version, whoever published it"
    bench.takes(5, 1)
    assert stages(bench.export(1_000_001, version=5)) == [(0, 1_000_001), (1, 1_000_001)]


def test_an_engine_that_goes_first_takes_the_newest_version_and_not_the_newest_publish() -> None:
    bench = PublisherBench().with_engines(0).with_export(5).serving(5, 0)
    bench.lose(0)
    bench.export(1_000_000, version=3)
    assert stages(bench.ready(1)) == [(1, 5)], "a learner goes over old batches again, and 5 has passed"


def test_a_new_engine_takes_the_older_version_when_the_newer_one_has_gone_with_its_learner() -> None:
    bench = PublisherBench().with_engines(0).with_export(5).serving(5, 0)
    bench.export(1_000_000, version=3)
    bench.ready(1)
    for _ in range(2):
        assert stages(bench.fetched(1, 5, error="gone")) == [(1, 5)]
    commands = bench.fetched(1, 5, error="gone")
    assert stages(commands) == [(1, 1_000_000)]
    assert replaced(commands) == []
    assert bench.publisher.announced == 5
    bench.fetched(1, 1_000_000, version=3)
    assert announcements(bench.applied(1, 1_000_000, version=3)) == []
    assert bench.publisher.announced == 5, "announced never goes down"
    bench.applied(0, 5)
    assert stages(bench.ready(2)) == [(2, 1_000_000)], "what could not be fetched is not tried anew"


def test_the_learners_version_is_known_from_its_receipts() -> None:
    bench = PublisherBench()
    for version in (1, 3, 2):
        bench.hear(StepFinished(version=version, group_ids=(), num_trained_tokens=0, max_staleness=0))
    assert bench.publisher.learner_version == 3


# --- announcing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_engines", "fraction", "needed"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (4, 0.5, 2), (4, 1.0, 4), (4, 0.01, 1), (20, 0.55, 11), (10, 0.3, 3)],
)
def test_a_version_is_announced_when_enough_of_the_ready_engines_serve_it(
    num_engines: int, fraction: float, needed: int
) -> None:
    bench = PublisherBench(announce_fraction=fraction)
    bench.hear(EngineJoined(name="engine/99", epoch=0))
    bench.ready(*range(num_engines))
    bench.export(0)
    for index in range(num_engines):
        bench.fetched(index, 0)
    for index in range(num_engines):
        assert announcements(bench.applied(index, 0)) == ([0] if index + 1 == needed else [])


def test_an_announcement_goes_to_buffer_prompt_source_and_learner() -> None:
    bench = PublisherBench(announce_fraction=0.1).with_engines(0, 1).with_export(4)
    commands = bench.takes(4, 0)
    event = VersionAnnounced(version=4, publish=4)
    assert [(s.to, s.event) for s in drive.every(commands, Send) if isinstance(s.event, VersionAnnounced)] == [
        ("prompt_source", event),
        ("buffer", event),
        ("learner", event),
    ]


def test_a_version_is_announced_once_however_many_serve_it_later() -> None:
    bench = PublisherBench(announce_fraction=0.1).with_engines(0, 1).with_export(4).serving(4, 0)
    assert drive.sent(bench.takes(4, 1), VersionAnnounced) == []


def test_the_announced_version_never_goes_down() -> None:
    bench = PublisherBench(announce_fraction=1.0).with_engines(0, 1).with_export(0).serving(0, 0, 1)
    bench.export(1)
    bench.takes(1, 0, 1)
    assert bench.publisher.announced == 1
    bench.lose(0)
    bench.ready(0, epoch=1)
    assert bench.publisher.announced == 1


def test_it_does_not_go_down_either_where_fewer_serve_it_than_were_needed() -> None:
    """The newer weights went with their Learner, so an engine that came anew serves the older ones."""
    bench = PublisherBench(announce_fraction=1.0).with_engines(0).with_export(5).serving(5, 0)
    bench.export(1_000_000, version=3)
    bench.ready(1)
    for _ in range(3):
        bench.fetched(1, 5, error="gone")
    bench.fetched(1, 1_000_000, version=3)
    assert drive.sent(bench.applied(1, 1_000_000, version=3), VersionAnnounced) == []
    assert bench.publisher.announced == 5


def test_the_loss_of_a_late_engine_may_complete_the_quorum() -> None:
    bench = PublisherBench(announce_fraction=1.0).with_engines(0, 1).with_export(0)
    assert announcements(bench.takes(0, 0)) == []
    assert announcements(bench.lose(1)) == [0]


# --- late and wrong -----------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_open_is_replaced() -> None:
    bench = PublisherBench()
    bench.epochs["engine/0"] = 0
    commands = bench.hear(EngineJoined(name="engine/0", epoch=0))
    assert drive.one(commands, StartTimer) == StartTimer("engine/0", 120.0)
    commands = bench.hear(TimerFired(key="engine/0"))
    assert drive.one(commands, ReplaceActor) == ReplaceActor("engine/0", 0, "not open after 120 s")
    bench.lose(0)
    assert StopTimer("engine/0") in bench.ready(0, epoch=1)


def test_an_engine_that_is_late_with_fetching_is_replaced_once() -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0)
    commands = bench.hear(TimerFired(key="engine/0"))
    assert replaced(commands) == [("engine/0", 0)]
    assert drive.one(commands, ReplaceActor).cause == "late with fetching version 0"
    assert "engine/0 is replaced: late" in drive.one_sent(commands, NoticeGiven, to="supervisor").text
    assert commands[0] == StopTimer("engine/0")
    bench.driver.ignores(TimerFired(key="engine/0"))
    assert bench.fetched(0, 0) == []
    assert bench.applied(0, 0) == []


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_an_engine_that_is_late_with_its_swap_is_replaced(mode: UpdateMode) -> None:
    bench = PublisherBench().with_engines(0).with_export(0, mode)
    bench.fetched(0, 0)
    assert drive.one(bench.hear(TimerFired(key="engine/0")), ReplaceActor).cause == "late with taking version 0"


def test_a_timer_that_fires_while_nothing_is_asked_of_the_engine_changes_nothing() -> None:
    bench = PublisherBench().with_engines(0)
    bench.driver.ignores(TimerFired(key="engine/0"))
    bench.driver.ignores(TimerFired(key="engine/7"))
    bench.export(0)
    bench.takes(0, 0)
    bench.driver.ignores(TimerFired(key="engine/0"))


def test_when_the_canary_is_late_another_engine_goes_first() -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0)
    bench.fetched(0, 0)
    bench.fetched(1, 0)
    assert commits(bench.hear(TimerFired(key="engine/0"))) == [1]


def test_when_the_canary_dies_another_engine_goes_first() -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0)
    bench.fetched(0, 0)
    bench.fetched(1, 0)
    assert commits(bench.lose(0)) == [1]


def test_a_quarantined_engine_starts_over_as_a_new_incarnation() -> None:
    bench = PublisherBench().with_engines(0).with_export(0)
    bench.hear(TimerFired(key="engine/0"))
    bench.lose(0)
    assert stages(bench.ready(0, epoch=1)) == [(0, 0)]
    assert bench.applied(0, 0, epoch=0) == []
    assert announcements(bench.takes(0, 0)) == [0]


def test_a_fetch_that_failed_is_tried_again_and_then_the_engine_is_replaced() -> None:
    bench = PublisherBench().with_engines(0).with_export(0)
    for _ in range(2):
        commands = bench.fetched(0, 0, digest="", error="no such file")
        assert stages(commands) == [(0, 0)]
        assert replaced(commands) == []
    commands = bench.fetched(0, 0, digest="", error="no such file")
    assert replaced(commands) == [("engine/0", 0)]
    assert drive.one(commands, ReplaceActor).cause == "cannot fetch version 0: no such file"


def test_a_fetch_of_other_bytes_than_were_exported_counts_as_failed() -> None:
    bench = PublisherBench().with_engines(0).with_export(0)
    commands = bench.fetched(0, 0, digest="other")
    assert commits(commands) == []
    assert stages(commands) == [(0, 0)]


def test_a_failed_fetch_of_weights_that_were_superseded_is_no_fault_of_the_engine() -> None:
    """The exporter lets old weights go when newer ones are announced."""
    bench = PublisherBench().with_engines(0)
    for publish in range(8):
        bench.export(publish)
        bench.export(publish + 1)
        assert replaced(bench.fetched(0, publish, error="gone")) == []


def test_what_is_said_of_another_publish_or_incarnation_changes_nothing() -> None:
    bench = PublisherBench()
    bench.ready(0, epoch=2)
    bench.export(3)
    for epoch, publish in ((1, 3), (3, 3), (2, 2)):
        fetched = WeightsFetched(
            engine="engine/0", engine_epoch=epoch, version=publish, publish=publish, digest=f"digest-{publish}"
        )
        bench.driver.ignores(fetched)
    bench.driver.ignores(EngineReady(engine="engine/0", engine_epoch=1, num_slots=4))
    bench.driver.ignores(EngineJoined(name="engine/0", epoch=2))
    bench.driver.ignores(EngineJoined(name="engine/0", epoch=1))
    bench.driver.ignores(EngineLost(name="engine/0", epoch=1))
    bench.driver.ignores(EngineLost(name="engine/5", epoch=0))


@pytest.mark.parametrize(
    ("digest", "logprobs", "why"),
    [
        ("other", CANARY.logprobs, "it loaded the digest other, digest-0 was exported"),
        (None, canary_logprobs(off=0.25), "its canary is off by 0.25 of its spread, 0.05 is allowed"),
        (None, b"", "its canary is off by inf of its spread, 0.05 is allowed"),
    ],
)
def test_a_canary_that_serves_something_else_than_was_exported_announces_nothing_and_the_publish_has_failed(
    digest: str | None, logprobs: bytes, why: str
) -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0)
    bench.fetched(0, 0)
    bench.fetched(1, 0)
    commands = bench.applied(0, 0, digest=digest, logprobs=logprobs)
    assert drive.every(commands, ReplaceActor) == [], "it may be the weights"
    assert announcements(commands) == []
    failed = drive.one_sent(commands, PublishFailed, to="learner")
    assert (failed.version, failed.publish, failed.cause) == (0, 0, f"engine/0: {why}")
    assert drive.sent(commands, NoticeGiven)[-1].text == (
        f"version 0 failed on engine/0 ({why}); no version is served yet, the Learner publishes again"
    )
    assert not commits(commands) + [index for index, _ in stages(commands)], "nobody is given it any more"


def test_a_policy_that_has_blown_up_is_called_diverged_and_not_a_fault_of_the_engine() -> None:
    """After a step with a learning rate of 100, the text that the model found likely at first is impossible to it."""
    canary = Canary(tokens=CANARY.tokens, logprobs=pack_floats([-5.0, -1e5, -2.0, -1.0, -4.0, -3e5]))
    first = PublisherBench(max_failed_publishes=1)
    first.ready(0)
    first.hear(WeightsExported(manifest=manifest(1, canary=canary), update_mode=UpdateMode.IN_FLIGHT))
    first.fetched(0, 1)
    assert drive.one(first.applied(0, 1, logprobs=canary_logprobs()), FailRun).has_diverged
    bench = PublisherBench().with_engines(0)
    bench.hear(WeightsExported(manifest=manifest(1, canary=canary), update_mode=UpdateMode.IN_FLIGHT))
    bench.fetched(0, 1)
    cause = drive.one_sent(bench.applied(0, 1, logprobs=canary_logprobs()), PublishFailed, to="learner").cause
    assert "the policy has diverged" in cause
    assert "a mean log-prob of -2e+05" in cause
    assert "a lower learner.learning_rate" in cause
    assert "canary" not in cause


def test_while_a_publish_has_failed_the_last_good_one_is_served_and_staged() -> None:
    bench = PublisherBench(announce_fraction=1.0).with_engines(0, 1).with_export(0).serving(0, 0, 1)
    bench.export(1)
    assert stages(bench.ready(2)) == [(2, 0)], "it has just come, so it takes what has passed"
    bench.fetched(0, 1)
    commands = bench.applied(0, 1, logprobs=canary_logprobs(off=9.0))
    assert drive.sent(commands, NoticeGiven)[-1].text.endswith(
        "; version 0 is served again, the Learner publishes again"
    )
    assert stages(commands) == [(0, 0)], "engine/0 loads it again"
    assert stages(bench.ready(3)) == [(3, 0)], "and so does whoever joins"
    bench.lose(0)
    assert stages(bench.ready(0, epoch=1)) == [(0, 0)]
    bench.fetched(1, 1)  # was on its way
    assert commits(bench.takes(0, 0, 2, 3)) == [0, 2, 3]
    assert bench.publisher.announced == 0
    assert sorted(stages(bench.export(2, version=1))) == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_an_engine_that_is_wrong_with_what_another_has_passed_is_replaced() -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0).serving(0, 0)
    bench.fetched(1, 0)
    commands = bench.applied(1, 0, digest="other")
    assert drive.one(commands, ReplaceActor).cause.startswith("version 0: it loaded the digest other")
    assert drive.sent(commands, PublishFailed) == []


def test_engines_that_are_laid_out_alike_must_have_loaded_the_same() -> None:
    bench = PublisherBench().with_engines(0, 1, 2, 3).with_export(0)
    for index in range(4):
        bench.fetched(index, 0)
    bench.applied(0, 0, layout="2 ranks", checksum="a")
    assert drive.every(bench.applied(1, 0, layout="1 rank", checksum="b"), ReplaceActor) == []
    assert drive.every(bench.applied(2, 0, layout="2 ranks", checksum="a"), ReplaceActor) == []
    cause = drive.one(bench.applied(3, 0, layout="2 ranks", checksum="c"), ReplaceActor).cause
    assert cause == "version 0: what it loaded has the checksum c, on engines that are laid out alike it is a"


def test_weights_that_another_learner_made_again_are_compared_with_that_publish_only() -> None:
    """A GPU derives a version anew with other last bits, so neither digest nor checksum is that of the first time."""
    bench = PublisherBench().with_engines(0, 1).with_export(5)
    bench.fetched(0, 5)
    bench.applied(0, 5, layout="2 ranks", checksum="a")
    bench.export(1_000_000, version=5)
    bench.fetched(0, 1_000_000, version=5)
    commands = bench.applied(0, 1_000_000, version=5, layout="2 ranks", checksum="b")
    assert replaced(commands) == []
    assert drive.sent(commands, PublishFailed) == []
    bench.fetched(1, 5)
    bench.fetched(1, 1_000_000, version=5)
    commands = bench.applied(1, 1_000_000, version=5, layout="2 ranks", checksum="a")
    assert replaced(commands) == [("engine/1", 0)], "that of the other publish is wrong in this one"


def test_an_engine_that_is_wrong_twice_in_a_row_is_replaced_though_the_publish_may_be_at_fault() -> None:
    bench = PublisherBench().with_engines(0).with_export(0)
    bench.fetched(0, 0)
    assert drive.every(bench.applied(0, 0, digest="other"), ReplaceActor) == []
    bench.export(1, version=0)
    bench.fetched(0, 1, version=0)
    commands = bench.applied(0, 1, version=0, digest="other")
    assert drive.one(commands, ReplaceActor).name == "engine/0"
    assert drive.one_sent(commands, PublishFailed).publish == 1


def test_an_engine_that_failed_does_not_go_first_again_while_there_is_another() -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0)
    bench.fetched(0, 0)
    bench.applied(0, 0, digest="bad")
    bench.lose(0)
    bench.ready(0, epoch=1)
    bench.export(1, version=0)
    assert commits(bench.fetched(0, 1)) == []
    assert commits(bench.fetched(1, 1, version=0)) == [1]
    assert commits(bench.applied(1, 1, version=0)) == [0]


def test_an_engine_that_failed_goes_first_when_the_other_is_lost() -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0)
    bench.fetched(0, 0)
    bench.applied(0, 0, digest="bad")
    bench.lose(0)
    bench.ready(0, epoch=1)
    bench.export(1, version=0)
    bench.fetched(0, 1)
    assert commits(bench.lose(1)) == [0]


def test_a_publish_that_two_engines_cannot_fetch_has_failed() -> None:
    bench = PublisherBench().with_engines(0).with_export(0)
    for _ in range(2):
        bench.fetched(0, 0, error="the bytes were changed on the way")
    commands = bench.fetched(0, 0, error="the bytes were changed on the way")
    assert replaced(commands) == [("engine/0", 0)]
    assert drive.sent(commands, PublishFailed) == [], "it may be the engine"
    bench.lose(0)
    bench.ready(0, epoch=1)
    for _ in range(2):
        bench.fetched(0, 0, error="the bytes were changed on the way")
    commands = bench.fetched(0, 0, error="the bytes were changed on the way")
    assert drive.one_sent(commands, PublishFailed).publish == 0


def test_without_a_check_of_canaries_the_digest_alone_decides() -> None:
    bench = PublisherBench(check_canary=False).with_engines(0).with_export(0)
    bench.fetched(0, 0)
    assert announcements(bench.applied(0, 0, logprobs=b"")) == [0]


def test_publishes_that_fail_one_after_the_other_stop_the_run() -> None:
    bench = PublisherBench(max_failed_publishes=2).with_engines(0, 1).with_export(0)
    bench.fetched(0, 0)
    assert drive.every(bench.applied(0, 0, digest="bad"), FailRun) == []
    bench.export(1, version=0)
    bench.fetched(1, 1)
    failed = drive.one(bench.applied(1, 1, digest="worse"), FailRun)
    assert not failed.has_diverged
    assert failed.story.startswith(
        "2 publishes in a row failed, the last, version 0, on engine/1: it loaded the digest worse"
    )


def test_a_publish_that_passes_between_two_that_fail_lets_the_run_go_on() -> None:
    bench = PublisherBench(max_failed_publishes=2).with_engines(0, 1, 2)
    for publish in range(0, 6, 2):
        bench.export(publish)
        bench.fetched(publish // 2, publish)
        assert drive.every(bench.applied(publish // 2, publish, digest="bad"), FailRun) == []
        bench.lose(publish // 2)
        bench.export(publish + 1)
        bench.takes(publish + 1, *({0, 1, 2} - {publish // 2}))
        bench.ready(publish // 2, epoch=1)
        bench.takes(publish + 1, publish // 2)


def test_an_engine_that_fails_where_others_have_passed_does_not_stop_the_run() -> None:
    bench = PublisherBench(max_failed_publishes=1).with_engines(0, 1).with_export(0).serving(0, 0)
    bench.fetched(1, 0)
    commands = bench.applied(1, 0, digest="bad")
    assert replaced(commands) == [("engine/1", 0)]
    assert drive.every(commands, FailRun) == []


# --- a replacement ------------------------------------------------------------------------------------------------


def test_a_publisher_that_was_replaced_recovers_from_what_is_repeated_to_it() -> None:
    bench = PublisherBench(announce_fraction=1.0).with_engines(0, 1).with_export(7)
    commands = bench.applied(0, 7)
    assert commands[0] == StopTimer("engine/0")
    assert commits(commands) == []
    assert announcements(bench.applied(1, 7)) == [7]


def test_what_it_hears_before_it_knows_the_publish_builds_nothing_and_is_asked_for_again() -> None:
    """The engine answers the staging of what it serves already with what it serves."""
    bench = PublisherBench().with_engines(0)
    assert bench.applied(0, 7) == []
    assert stages(bench.export(7)) == [(0, 7)]
    assert announcements(bench.applied(0, 7)) == [7]


def test_an_engine_that_serves_something_newer_than_a_new_publisher_knows_is_not_waited_for() -> None:
    """The Learner has gone back to a checkpoint, and the publisher that knew the newer version is gone too."""
    bench = PublisherBench().with_engines(0)
    assert stages(bench.export(1_000_000, version=5)) == [(0, 1_000_000)]
    commands = bench.applied(0, 7)
    assert commands == [StopTimer("engine/0")]
    assert bench.publisher.announced == -1
    assert stages(bench.export(1_000_001, version=6)) == []
    assert stages(bench.export(1_000_002, version=7)) == [(0, 1_000_002)]


def test_an_engine_in_the_middle_of_a_swap_is_found_again() -> None:
    """It had been told to commit by the publisher before this one."""
    bench = PublisherBench().with_engines(0, 1).with_export(7)
    bench.applied(0, 7)
    assert commits(bench.fetched(1, 7)) == [1]


# --- leaks --------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_of_publishes_that_nobody_serves_or_takes() -> None:
    bench = PublisherBench(announce_fraction=1.0).with_engines(0, 1)
    sizes: list[int] = []
    for publish in range(1, 9):
        bench.export(publish)
        bench.takes(publish, 0, 1)
        sizes.append(len(str(drive.snapshot(bench.publisher))))
    assert set(sizes[2:]) == {sizes[2]}


def test_a_newcomer_counts_in_no_quorum_before_it_serves() -> None:
    bench = PublisherBench(announce_fraction=1.0).with_engines(0).with_export(0).serving(0, 0)
    assert stages(bench.ready(1)) == [(1, 0)]
    commands = bench.export(1)
    assert stages(commands) == [(0, 1)]
    commands += bench.takes(1, 0)
    assert [event.version for event in drive.sent(commands, VersionAnnounced)][-1] == 1
    bench.fetched(1, 0)
    bench.applied(1, 0)
    bench.export(2)
    assert announcements(bench.takes(2, 0)) == [], "it counts now"


def test_what_a_lent_engine_takes_late_of_an_earlier_turn_counts_for_nothing() -> None:
    """It was told to take version 0 and had to give its device back; when it takes that in its next turn nobody else
    does any more, and its publish is let go."""
    bench = PublisherBench(announce_fraction=1.0).with_engines(0).with_export(0).serving(0, 0)
    assert stages(bench.ready(1)) == [(1, 0)]
    assert commits(bench.fetched(1, 0)) == [1]
    bench.hear(EngineReady(engine="engine/1", engine_epoch=0, num_slots=0, turn=1))
    assert announcements(bench.with_export(1).takes(1, 0)) == [1]
    assert stages(bench.export(2)) == [(0, 2)]
    assert stages(bench.hear(EngineReady(engine="engine/1", engine_epoch=0, num_slots=4, turn=2))) == [(1, 1)]
    assert bench.applied(1, 0) == [], "it serves what cannot be checked any more"
    assert announcements(bench.takes(2, 0)) == [2], "it is not waited for"


def test_a_newcomer_does_not_go_first_while_another_engine_can() -> None:
    bench = PublisherBench().with_engines(0).with_export(0).serving(0, 0)
    bench.export(1)
    assert stages(bench.ready(1)) == [(1, 0)], "version 1 has not passed on any engine"
    assert commits(bench.fetched(1, 0)) == [1]
    assert stages(bench.lose(0)) == []
    assert stages(bench.applied(1, 0)) == [(1, 1)], "there is no other"
    assert commits(bench.fetched(1, 1)) == [1]


def test_who_is_to_leave_takes_part_in_nothing() -> None:
    bench = PublisherBench(announce_fraction=1.0).with_engines(0, 1).with_export(0).serving(0, 0)
    assert announcements(bench.hear(EngineLeaving(name="engine/1", epoch=0))) == [0]
    assert bench.fetched(1, 0) == []
    assert stages(bench.export(1)) == [(0, 1)]


def newcomer_that_waits() -> PublisherBench:
    """Engine 1 waits for engine 0 to go first with publish 1."""
    bench = PublisherBench().with_engines(0).with_export(0).serving(0, 0)
    assert stages(bench.ready(1)) == [(1, 0)]
    says_newer(bench, 1)
    return bench


def says_newer(bench: PublisherBench, index: int) -> None:
    """It serves version 1 since before this publisher was there."""
    name = f"engine/{index}"
    bench.hear(WeightsApplied(engine=name, engine_epoch=0, version=1, publish=10_000, digest="digest"))


def test_a_newcomer_goes_first_itself_when_the_engine_that_it_waited_for_leaves() -> None:
    bench = newcomer_that_waits()
    assert stages(bench.export(1)) == [(0, 1)]
    says_newer(bench, 0)
    assert stages(bench.hear(EngineLeaving(name="engine/0", epoch=0))) == [(1, 1)]


def test_a_newcomer_goes_first_itself_when_the_engine_that_it_waited_for_is_another_by_now() -> None:
    bench = newcomer_that_waits()
    assert stages(bench.export(1)) == [(0, 1)]
    assert stages(bench.hear(EngineJoined(name="engine/0", epoch=1))) == [(1, 1)]


def test_a_newcomer_goes_first_itself_when_the_engine_that_it_waited_for_is_late() -> None:
    bench = newcomer_that_waits()
    assert stages(bench.export(1)) == [(0, 1)]
    assert stages(bench.hear(TimerFired(key="engine/0"))) == [(1, 1)]


def test_the_next_goes_first_when_the_canary_is_to_leave() -> None:
    bench = PublisherBench().with_engines(0, 1).with_export(0)
    assert commits(bench.fetched(0, 0)) == [0]
    assert commits(bench.fetched(1, 0)) == []
    assert commits(bench.hear(EngineLeaving(name="engine/0", epoch=0))) == [1]


def test_an_engine_that_has_taken_wrong_what_others_serve_is_replaced_however_far_it_is_with_the_next() -> None:
    for has_fetched in (False, True):
        bench = PublisherBench().with_engines(0, 1).with_export(1).serving(1, 0, 1).with_export(2)
        (canary,) = commits(bench.fetched(0, 2))
        other = 1 - canary
        if has_fetched:
            assert commits(bench.fetched(other, 2)) == [], "the first has not passed yet"
        assert replaced(bench.applied(other, 1, digest="another")) == [(f"engine/{other}", 0)]
