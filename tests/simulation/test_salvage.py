"""Engines that die or hang in the middle of long responses: what they had made is not made again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import LONG_RESPONSES, Trial

from penstock.actors.prompt_source.machine import PromptSource
from penstock.messages.commands import Send
from penstock.messages.flow import SampleGenerated, SampleIssued
from penstock.messages.membership import LeasesHeld
from penstock.messages.names import PROMPT_SOURCE, is_engine
from penstock.messages.training import NoticeGiven, UpdateMode
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.backends.simulated.engine import SimulatedEngine
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


def trial(*faults: Fault, **fields: Any) -> Trial:  # noqa: ANN401 - fields of a trial
    values: dict[str, Any] = {
        "seed": 5,
        "policy": "fully_async",
        "max_staleness": 2,
        "update_mode": UpdateMode.IN_FLIGHT,
        "num_steps": 3,
        "groups_per_batch": 4,
        "num_engines": 2,
        "num_slots": 8,
        "latency": LONG_RESPONSES,
        "faults": faults,
    }
    return Trial(**(values | fields))


class Watch(IdleWatcher):
    """What PromptSource issued, what came of it, and the notices."""

    def __init__(self, run: TrialRun) -> None:
        self.issued: list[SampleIssued] = []
        self.generated: list[SampleGenerated] = []
        self.notices: list[NoticeGiven] = []
        self.lost_causes: list[str] = []
        run.host.watch(self)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        for command in commands:
            match command:
                case Send(event=SampleIssued() as issued):
                    self.issued.append(issued)
                case Send(event=SampleGenerated() as generated):
                    self.generated.append(generated)
                case _:
                    pass

    def heard(self, process: Process, event: Event) -> None:
        if isinstance(event, NoticeGiven):
            self.notices.append(event)

    def lost(self, name: str, cause: str) -> None:
        self.lost_causes.append(f"{name}: {cause}")


def ran(one: Trial) -> tuple[TrialRun, Watch]:
    run = TrialRun(one, with_digest=False)
    watch = Watch(run)
    run.run()
    return run, watch


def again(watch: Watch) -> list[SampleIssued]:
    return [issued for issued in watch.issued if issued.attempt]


def engine_of(run: TrialRun, name: str) -> SimulatedEngine:
    return cast("SimulatedEngine", run.host.supervisor.processes[name].backend)


def source_of(run: TrialRun) -> PromptSource:
    source = run.host.supervisor.processes[PROMPT_SOURCE].shell.machine
    assert isinstance(source, PromptSource)
    return source


@pytest.mark.parametrize("at_s", [8.0, 14.0, 20.0])
def test_what_a_killed_engine_had_reported_is_not_made_again(at_s: float) -> None:
    run, watch = ran(trial(Fault(at_s=at_s, kind=FaultKind.KILL, target="engine/0")))
    saved = sum(issued.prefix.num_tokens for issued in again(watch) if issued.prefix is not None)
    assert saved > 0
    assert source_of(run).issuing.num_salvaged_tokens == saved
    assert any(f"{saved:,} tokens saved" in notice.text for notice in watch.notices)


def test_versions_of_a_continued_response_are_those_that_made_its_tokens() -> None:
    """Killed after a swap in flight, so that prefixes are of two versions; the oracle checks the tokens themselves."""
    uneven = msgspec.structs.replace(LONG_RESPONSES, response_tokens_median=30.0, response_tokens_sigma=0.4)
    _, watch = ran(trial(Fault(at_s=32.0, kind=FaultKind.KILL, target="engine/0"), num_steps=8, latency=uneven))
    prefixes = {(issued.key, issued.attempt): issued.prefix for issued in again(watch) if issued.prefix}
    assert any(len(prefix.spans) > 1 for prefix in prefixes.values())
    continued = [g.sample for g in watch.generated if (g.sample.key, g.sample.attempt) in prefixes]
    assert continued
    for sample in continued:
        prefix, (whole,) = prefixes[sample.key, sample.attempt], sample.parts
        versions = [span.version for span in whole.spans for _ in range(span.num_tokens)]
        assert versions[: prefix.num_tokens] == [s.version for s in prefix.spans for _ in range(s.num_tokens)]


def test_a_promptsource_that_was_replaced_saves_what_was_made_before_it_came() -> None:
    """Every response is begun before PromptSource dies, and its engine dies after the successor's census."""
    faults = (
        Fault(at_s=10.0, kind=FaultKind.KILL, target=PROMPT_SOURCE),
        Fault(at_s=17.0, kind=FaultKind.KILL, target="engine/0"),
    )
    run, watch = ran(trial(*faults))
    assert source_of(run).settings.epoch == 1
    saved = [issued.prefix.num_tokens for issued in again(watch) if issued.prefix is not None]
    assert saved
    assert max(saved) > 16, "more than the eight or sixteen tokens that were made since"


def test_125_of_128_arrive_and_three_hang() -> None:
    """Three requests of one group of 128 stand still while their engine goes on with others."""
    one = trial(
        num_steps=1,
        groups_per_batch=1,
        samples_per_group=128,
        max_staleness=1,
        num_slots=16,
        lease_timeout_s=60.0,
    )
    run = TrialRun(one, with_digest=False)
    watch = Watch(run)
    run.host.run(1.0)
    engine_of(run, "engine/0").num_hangs = 3
    run.run()
    assert not watch.lost_causes or all("no progress" in cause for cause in watch.lost_causes)
    hung = again(watch)
    assert len(hung) == 3
    assert all(issued.prefix is not None for issued in hung)
    assert run.oracle.num_generated_twice == 0


def test_a_few_that_hang_beside_others_cost_no_engine() -> None:
    one = trial(num_steps=8, lease_timeout_s=60.0)
    run = TrialRun(one, with_digest=False)
    watch = Watch(run)
    run.host.run(1.0)
    for name in one.engines:
        engine_of(run, name).num_hangs = 2
    run.run()
    assert not watch.lost_causes
    assert len(again(watch)) == 4
    assert any("stood still and go" in notice.text for notice in watch.notices)


def test_an_engine_whose_backend_hangs_is_replaced() -> None:
    one = trial(num_steps=4, lease_timeout_s=60.0)
    run = TrialRun(one, with_digest=False)
    watch = Watch(run)
    run.host.run(6.0)
    engine_of(run, "engine/1").is_frozen = True
    run.is_calm = False
    run.run()
    assert [cause.split(" on ")[0] for cause in watch.lost_causes] == ["engine/1: no progress"]


def test_prefixes_travel_only_to_a_promptsource_that_is_new() -> None:
    faults = (
        Fault(at_s=12.0, kind=FaultKind.KILL, target="engine/0"),
        Fault(at_s=16.0, kind=FaultKind.KILL, target=PROMPT_SOURCE),
        Fault(at_s=22.0, kind=FaultKind.KILL, target="engine/1"),
    )
    run = TrialRun(trial(*faults), with_digest=False)
    told: set[tuple[int, int, bool]] = set()

    class Sizes(Watch):
        def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
            if isinstance(event, LeasesHeld) and is_engine(event.actor.name):
                told.update((event.asker_epoch, event.round, lease.prefix is not None) for lease in event.leases)

    Sizes(run)
    run.run()
    assert (1, 1, True) in told
    assert {(epoch, number) for epoch, number, has_prefix in told if has_prefix} == {(1, 1)}
    assert {epoch for epoch, _, has_prefix in told if not has_prefix} == {0, 1}
