"""Which engines the WeightPublisher names as sources of a publish, and what it makes of those that were no help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

import actor_driver as drive
import pytest
from engine_bench import CANARY, manifest

from penstock.actors.weight_publisher.fan_out import MOST_SOURCES, RARE_PUBLISHES
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.actors.weight_publisher.settings import WeightPublisherSettings
from penstock.backends.engines.options import EngineGroupOptions, EnginesOptions
from penstock.backends.engines.passing_on import pass_on
from penstock.messages.commands import Send
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.training import NoticeGiven, UpdateMode
from penstock.messages.weights import (
    EngineReady,
    WeightDetour,
    WeightsApplied,
    WeightsExported,
    WeightsFetched,
    WeightsStaged,
)
from penstock.runtime.run.process_table import placement
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand

QUICKSTART: Final = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"


class Bench:
    """A WeightPublisher, and engines that pass weights on."""

    def __init__(self, fan_out: Literal["tree", "direct"] = "tree") -> None:
        options = WeightsOptions(canary_tolerance=0.05, fan_out=fan_out)
        self.driver = drive.Driver(WeightPublisher(WeightPublisherSettings(options=options)))

    def hear(self, *events: Event) -> list[AnyCommand]:
        return self.driver.hear(*events)

    def ready(self, *indices: int, epoch: int = 0, passes_on: bool = True) -> dict[int, tuple[int, ...]]:
        commands: list[AnyCommand] = []
        for index in indices:
            name = f"engine/{index}"
            at = f"at {index} {epoch}" if passes_on else ""
            joined = EngineJoined(name=name, epoch=epoch)
            ready = EngineReady(engine=name, engine_epoch=epoch, num_slots=1, passes_on_at=at)
            commands += self.hear(joined, ready)
        return told(commands)

    def with_engines(self, *indices: int) -> Self:
        """These are open, and pass on what they have."""
        self.ready(*indices)
        return self

    def with_export(self, publish: int) -> Self:
        """Those that are open were told to fetch this."""
        self.export(publish)
        return self

    def export(self, publish: int) -> dict[int, tuple[int, ...]]:
        return told(self.hear(WeightsExported(manifest=manifest(publish), update_mode=UpdateMode.IN_FLIGHT)))

    def fetched(self, index: int, publish: int, *detours: WeightDetour, error: str = "") -> list[AnyCommand]:
        return self.hear(
            WeightsFetched(
                engine=f"engine/{index}",
                engine_epoch=0,
                version=publish,
                publish=publish,
                digest="" if error else f"digest-{publish}",
                error=error,
                detours=detours,
            )
        )

    def takes(self, index: int, publish: int, *detours: WeightDetour, digest: str = "") -> list[AnyCommand]:
        applied = WeightsApplied(
            engine=f"engine/{index}",
            engine_epoch=0,
            version=publish,
            publish=publish,
            digest=digest or f"digest-{publish}",
            canary_logprobs=CANARY.logprobs,
        )
        return self.fetched(index, publish, *detours) + self.hear(applied)


def told(commands: list[AnyCommand]) -> dict[int, tuple[int, ...]]:
    """By engine that is told to fetch: the engines named as sources."""
    return {
        index_of(each.to): tuple(index_of(source.engine) for source in each.event.manifest.sources)
        for each in drive.every(commands, Send)
        if isinstance(each.event, WeightsStaged)
    }


def index_of(name: str) -> int:
    return int(name.removeprefix("engine/"))


def notices(commands: list[AnyCommand]) -> list[str]:
    return [event.text for event in drive.sent(commands, NoticeGiven, to="supervisor")]


def test_engines_that_are_told_together_are_told_of_each_other() -> None:
    bench = Bench().with_engines(0, 1, 2)
    assert bench.export(0) == {0: (0, 1, 2), 1: (0, 1, 2), 2: (0, 1, 2)}


def test_a_source_is_named_with_its_epoch_and_where_it_serves() -> None:
    bench = Bench()
    bench.ready(0, 1, epoch=3)
    commands = bench.hear(WeightsExported(manifest=manifest(0), update_mode=UpdateMode.IN_FLIGHT))
    (first, *_) = drive.sent(commands, WeightsStaged, to="engine/0")
    assert [(each.engine, each.epoch, each.location) for each in first.manifest.sources] == [
        ("engine/0", 3, "at 0 3"),
        ("engine/1", 3, "at 1 3"),
    ]


def test_under_direct_nobody_is_named() -> None:
    bench = Bench("direct").with_engines(0, 1)
    assert bench.export(0) == {0: (), 1: ()}


def test_a_single_engine_takes_all_from_the_learner() -> None:
    bench = Bench().with_engines(0)
    assert bench.export(0) == {0: ()}


def test_who_passes_nothing_on_is_no_source_and_is_told_of_the_others() -> None:
    bench = Bench().with_engines(0, 1)
    bench.ready(2, passes_on=False)
    assert bench.export(0) == {0: (0, 1), 1: (0, 1), 2: (0, 1)}


def test_who_comes_later_is_told_of_all_who_have_it_or_take_it() -> None:
    bench = Bench().with_engines(0, 1).with_export(0)
    bench.takes(0, 0)
    assert bench.ready(2) == {2: (0, 1, 2)}


def test_who_is_on_its_way_to_other_weights_is_no_source_of_those_it_serves() -> None:
    bench = Bench().with_engines(0, 1).with_export(0)
    bench.takes(0, 0)
    bench.fetched(1, 0)  # and swaps
    assert bench.export(1) == {0: ()}
    assert told(bench.takes(1, 0)) == {1: (0, 1)}


@pytest.mark.parametrize("word", [EngineLost, EngineLeaving])
def test_who_is_lost_or_leaves_is_no_source(word: type[EngineLost | EngineLeaving]) -> None:
    bench = Bench().with_engines(0, 1, 2)
    bench.hear(word(name="engine/1", epoch=0))
    assert bench.export(0) == {0: (0, 2), 2: (0, 2)}


def test_who_is_given_up_is_no_source() -> None:
    bench = Bench().with_engines(0, 1, 2).with_export(0)
    for _ in range(3):
        bench.fetched(1, 0, error="no")
    assert bench.ready(3) == {3: (0, 2, 3)}


def test_who_has_to_fetch_again_takes_all_from_the_learner() -> None:
    bench = Bench().with_engines(0, 1).with_export(0)
    assert told(bench.fetched(1, 0, error="no")) == {1: ()}


def test_who_goes_back_to_what_others_fetch_still_takes_all_from_the_learner() -> None:
    bench = Bench().with_engines(0, 1, 2).with_export(0)
    bench.takes(0, 0)
    assert bench.export(1) == {0: ()}
    assert told(bench.takes(0, 1, digest="of something else")) == {0: ()}, "1 and 2 wait for its part of publish 0"


def test_more_engines_than_one_may_have_lines_to_take_it_in_groups() -> None:
    bench = Bench()
    bench.ready(*range(10, 10 + MOST_SOURCES + 2))
    found = bench.export(0)
    assert len(found[10]) == MOST_SOURCES
    assert len(found[10 + MOST_SOURCES]) == 2
    assert all(index in sources for index, sources in found.items())


def test_wrong_bytes_end_a_source_and_are_told() -> None:
    bench = Bench().with_engines(0, 1, 2).with_export(0)
    said = notices(bench.takes(0, 0, WeightDetour("engine/1", 0, "its bytes are not the learner's", is_wrong=True)))
    assert said == [
        "engine/0 took part of version 0 from the learner, not from engine/1: its bytes are not the learner's; "
        "engine/1 passes on no more weights"
    ]
    bench.takes(1, 0)
    bench.takes(2, 0)
    assert bench.export(1) == {0: (0, 2), 1: (0, 2), 2: (0, 2)}


def test_who_is_no_help_twice_is_asked_no_more() -> None:
    bench = Bench().with_engines(0, 1, 2)
    late = WeightDetour("engine/1", 0, "late")
    for publish in (0, 1):
        bench.export(publish)
        said = notices(bench.takes(0, publish, late) + bench.takes(2, publish, late) + bench.takes(1, publish))
        assert len(said) == 1  # two have said it
    assert bench.driver.machine.metrics[-1].value == 4
    assert bench.export(2) == {0: (0, 2), 1: (0, 2), 2: (0, 2)}


def test_who_is_late_now_and_then_is_asked_on() -> None:
    bench = Bench().with_engines(0, 1)
    for publish in range(0, 3 * RARE_PUBLISHES, RARE_PUBLISHES + 1):
        assert bench.export(publish) == {0: (0, 1), 1: (0, 1)}
        bench.takes(0, publish, WeightDetour("engine/1", 0, "late"))
        bench.takes(1, publish)


def test_what_is_said_of_an_incarnation_that_is_gone_is_no_fault_of_its_successor() -> None:
    bench = Bench().with_engines(0)
    bench.ready(1, epoch=2)
    bench.export(0)
    gone = WeightDetour("engine/1", 1, "it has gone", is_wrong=True)
    assert notices(bench.takes(0, 0, gone)) == [
        "engine/0 took part of version 0 from the learner, not from engine/1: it has gone"
    ]
    assert bench.ready(2) == {2: (0, 1, 2)}


@pytest.mark.parametrize(
    ("engines", "transport", "fan_out", "expected"),
    [
        (EnginesOptions(count=2), "network", "tree", True),
        (EnginesOptions(count=1), "network", "tree", False),
        (EnginesOptions(count=1, max=2), "network", "tree", True),
        (EnginesOptions(count=2), "network", "direct", False),
        (EnginesOptions(count=2), "disk", "tree", False),
        (EnginesOptions(backend="simulated", count=2), "network", "tree", False),
        (EnginesOptions(count=1, more=(EngineGroupOptions(backend="recorded"),)), "network", "tree", False),
    ],
)
def test_engines_pass_on_where_several_take_weights_over_the_network(
    engines: EnginesOptions, transport: str, fan_out: str, expected: bool
) -> None:
    assert pass_on(engines, transport=transport, fan_out=fan_out) is expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["engines.count=2"], "transport auto"),
        (["engines.count=2", "weights.transport=network"], "transport network, engines pass them on to each other"),
        (["weights.transport=network"], "transport network, all engines take them from the learner"),
        (
            ["engines.count=2", "weights.transport=network", "weights.fan_out=direct"],
            "transport network, all engines take them from the learner",
        ),
    ],
)
def test_a_dry_run_says_whether_engines_pass_weights_on(overrides: list[str], expected: str) -> None:
    rows = placement(load_scenario(QUICKSTART, ["engines.count=1", *overrides]))
    assert [row.remark for row in rows if row.name == "weight_publisher"] == [expected]
