"""Which engine gets a sample: sticky, prefix-affine, least loaded, under a cap."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_bench import SourceBench, held, keys

from penstock.actors.prompt_source.policies import ConsistentHash, RoundRobin, RoutedEngine, RoutedSample
from penstock.actors.prompt_source.routing import Cache, EngineView, Router
from penstock.messages.commands import Send
from penstock.messages.flow import (
    DemandGranted,
    GenerationClosed,
    GrantSpan,
    SampleIssued,
    SamplesSettled,
    SettledState,
)
from penstock.messages.membership import EngineLeaving, LeaseStage
from penstock.messages.samples import Cancelled, InfraError, SampleKey
from penstock.messages.weights import EngineReady

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.commands import AnyCommand

FIRST = SampleKey(0, 0)


def ready(name: str, epoch: int, num_slots: int, *, version: int = -1) -> EngineReady:
    return EngineReady(engine=name, engine_epoch=epoch, num_slots=num_slots, version=version)


def counts(commands: list[AnyCommand]) -> dict[str, int]:
    """Samples issued to each engine."""
    return dict(Counter(send.to for send in drive.every(commands, Send) if isinstance(send.event, SampleIssued)))


def failed_after(bench: SourceBench, engine: str, num_tokens: int, attempt: int = 0) -> list[AnyCommand]:
    """The first sample fails at this engine when it has made so many tokens."""
    outcome = InfraError(detail="broke")
    return bench.hear(
        GenerationClosed(engine=engine, key=FIRST, attempt=attempt, outcome=outcome, num_tokens=num_tokens)
    )


# --- prefix-affine ------------------------------------------------------------------------------------------------


def test_a_group_that_is_larger_than_the_room_spreads_and_does_not_queue_where_others_idle() -> None:
    bench = SourceBench(num_samples=6).started(num_engines=3, num_slots=4)
    issued = bench.grant(1)
    assert keys(issued, "engine/0") == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert keys(issued, "engine/1") == [(0, 4), (0, 5)]


def test_what_is_beyond_the_free_slots_waits_for_the_slot_that_gets_free_first() -> None:
    bench = SourceBench(num_samples=4, max_load=2.0).started(num_engines=2, num_slots=4)
    assert counts(bench.grant(3)) == {"engine/0": 4, "engine/1": 4}
    assert [keys(bench.closed("engine/1", SampleKey(1, index)), "engine/1") for index in range(4)] == [
        [(2, index)] for index in range(4)
    ]


def test_engines_queue_while_behind_it_all_other_slots_could_be_filled() -> None:
    bench = SourceBench(num_samples=1, max_load=1.5).started(num_engines=2, num_slots=4)
    assert counts(bench.grant(12)) == {"engine/0": 4, "engine/1": 4}
    assert counts(bench.grant(13)) == {"engine/0": 1}
    assert counts(bench.grant(40)) == {"engine/0": 1, "engine/1": 2}  # the cap


def test_a_second_round_at_an_engine_needs_a_second_one_behind_it() -> None:
    bench = SourceBench(num_samples=1, max_load=3.0).started(num_engines=2, num_slots=2)
    assert counts(bench.grant(9)) == {"engine/0": 4, "engine/1": 3}  # more than two wait before each that queues
    assert counts(bench.grant(11)) == {"engine/1": 1}
    assert counts(bench.grant(14)) == {"engine/0": 1, "engine/1": 1}


def test_an_only_engine_queues_up_to_the_cap() -> None:
    bench = SourceBench(num_samples=3, max_load=1.5).started(num_engines=1, num_slots=4)
    assert keys(bench.grant(3)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_nothing_queues_at_an_engine_while_others_are_still_to_come() -> None:
    router = Router(is_affine=True, max_load=2.0, num_engines=2)
    router.join("engine/0", 0, load=0)
    router.ready(ready("engine/0", 0, 1), 0)
    assert router.has_room(1), "what starts at once does not queue"
    router.load("engine/0", 1)
    assert not router.has_room(100)
    router.join("engine/1", 0, load=1)
    assert not router.has_room(100)
    router.ready(ready("engine/1", 0, 1), 0)
    assert router.has_room(100)
    router.lose("engine/1")
    assert not router.has_room(100)
    router.validate({"engine/0": 1})


def test_an_engine_that_comes_back_has_the_load_that_is_still_known_to_be_at_it() -> None:
    router = Router(is_affine=True, max_load=1.0)
    router.join("engine/0", 0, load=router.load_at("engine/0"))
    router.ready(ready("engine/0", 0, 4), 0)
    for _ in range(3):
        router.load("engine/0", 1)
    router.lose("engine/0")
    router.load("engine/0", -1)
    assert router.load_at("engine/0") == 2
    router.join("engine/0", 1, load=router.load_at("engine/0"))
    assert router.engines["engine/0"].load == router.load_at("engine/0") == 2
    router.validate({"engine/0": 2})


def test_an_engine_is_a_newcomer_only_while_another_serves() -> None:
    router = Router(is_affine=True, max_load=1.0)
    router.join("engine/0", 0, load=0)
    router.ready(ready("engine/0", 0, 4, version=3), 0)
    router.join("engine/1", 0, load=0)
    router.lose("engine/0")
    router.join("engine/2", 0, load=0)
    assert [router.engines[name].is_newcomer for name in ("engine/1", "engine/2")] == [True, False]


def test_an_engine_whose_device_was_taken_back_is_a_newcomer_in_its_next_turn() -> None:
    router = Router(is_affine=True, max_load=1.0)
    for index in range(2):
        router.join(f"engine/{index}", 0, load=0)
    for index in range(2):
        router.ready(EngineReady(engine=f"engine/{index}", engine_epoch=0, num_slots=4, version=0, turn=1), 0)
    router.ready(EngineReady(engine="engine/1", engine_epoch=0, num_slots=4, version=-1, turn=3), 0)
    assert not router.engines["engine/1"].has_room
    router.ready(EngineReady(engine="engine/1", engine_epoch=0, num_slots=4, version=0, turn=3), 0)
    assert router.engines["engine/1"].has_room


def test_a_free_slot_takes_the_next_of_the_group_that_was_begun_there() -> None:
    bench = SourceBench(num_samples=3, max_load=1.0).started(num_engines=2, num_slots=2)
    issued = bench.grant(4)
    assert (keys(issued, "engine/0"), keys(issued, "engine/1")) == ([(0, 0), (0, 1)], [(1, 0), (1, 1)])
    assert keys(bench.closed("engine/1", SampleKey(1, 0)), "engine/1") == [(1, 2)]
    assert keys(bench.closed("engine/1", SampleKey(1, 1)), "engine/1") == [(2, 0)]
    assert keys(bench.closed("engine/0", FIRST), "engine/0") == [(0, 2)]
    assert keys(bench.closed("engine/0", SampleKey(0, 1)), "engine/0") == [(3, 0)]


def test_a_group_that_is_settled_before_it_is_begun_is_begun_nowhere() -> None:
    bench = SourceBench(max_load=1.0).started(num_engines=1, num_slots=1)
    assert keys(bench.grant(3)) == [(0, 0)]
    bench.hear(SamplesSettled(settled=SettledState(1, 0, (1,))))
    assert keys(bench.joins("engine/1", num_slots=1)) == [(2, 0)], "0/1 waits for the engine of its group"


def test_at_the_end_of_the_supply_it_takes_one_of_a_group_that_was_begun_elsewhere() -> None:
    bench = SourceBench(num_samples=4, max_load=1.0).started(num_engines=2, num_slots=2)
    bench.grant(2)
    for index in range(2):
        bench.closed("engine/1", SampleKey(1, index))
    assert keys(bench.closed("engine/1", SampleKey(1, 2)), "engine/1") == [(0, 2)]
    assert keys(bench.closed("engine/1", SampleKey(1, 3)), "engine/1") == [(0, 3)]


def test_what_waits_for_an_engine_that_is_gone_goes_first_elsewhere() -> None:
    bench = SourceBench(num_samples=3, max_load=1.0).started(num_engines=2, num_slots=2)
    bench.grant(9)
    bench.loses("engine/0")
    assert keys(bench.closed("engine/1", SampleKey(1, 0)), "engine/1") == [(1, 2)]
    assert keys(bench.closed("engine/1", SampleKey(1, 1)), "engine/1") == [(0, 2)]


def test_what_waits_for_an_engine_that_stands_still_goes_elsewhere_after_twice_as_many_groups_as_engines() -> None:
    bench = SourceBench(num_samples=3, max_load=1.0).started(num_engines=2, num_slots=2)
    bench.grant(20)
    at_engine, then = [(1, 0), (1, 1)], list[tuple[int, int]]()
    while (0, 2) not in then:
        key = at_engine.pop(0)
        [new] = keys(bench.closed("engine/1", SampleKey(*key)), "engine/1")
        at_engine.append(new)
        then.append(new)
    assert {group_id for group_id, _ in then} == {0, 1, 2, 3, 4, 5}


def test_a_sample_that_avoids_an_engine_queues_elsewhere_and_holds_up_nobody() -> None:
    bench = SourceBench(num_samples=1, max_load=1.5).started(num_engines=2, num_slots=2)
    bench.grant(6)
    commands = failed_after(bench, "engine/0", 0)
    assert (keys(commands, "engine/1"), keys(commands, "engine/0")) == ([(0, 0)], [(4, 0)])


def test_least_loaded_gives_every_sample_to_the_engine_with_the_smallest_share_taken() -> None:
    bench = SourceBench(num_samples=6, routing="least_loaded").started(num_engines=3, num_slots=4)
    assert counts(bench.grant(1)) == {"engine/0": 2, "engine/1": 2, "engine/2": 2}


@pytest.mark.parametrize("routing", ["least_loaded", "prefix_affine"])
def test_engines_of_unequal_size_are_loaded_in_proportion(routing: str) -> None:
    bench = SourceBench(num_samples=4, routing=routing)
    bench.joins("engine/0", num_slots=16)
    bench.joins("engine/1", num_slots=64)
    bench.joins("engine/2", num_slots=48)
    assert counts(bench.grant(16)) == {"engine/0": 8, "engine/1": 32, "engine/2": 24}


def test_without_affinity_the_oldest_group_goes_first() -> None:
    bench = SourceBench(num_samples=4, routing="least_loaded", max_load=1.0).started(num_engines=2, num_slots=1)
    assert keys(bench.grant(2)) == [(0, 0), (0, 1)]
    assert keys(bench.closed("engine/0", FIRST)) == [(0, 2)]


# --- sticky -------------------------------------------------------------------------------------------------------


def test_a_sample_that_failed_after_some_tokens_goes_on_where_they_were_made() -> None:
    bench = SourceBench(num_samples=1, num_retries=3).started(num_engines=3)
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    assert keys(failed_after(bench, "engine/0", 5), "engine/0") == [(0, 0)]


def three_at_two_engines() -> SourceBench:
    """0/0 and 2/0 are at engine/0, which has made five tokens of the first; engine/1 has nothing."""
    bench = SourceBench(num_samples=1, num_retries=3, routing="least_loaded").started(num_engines=2)
    bench.grant(3)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    bench.closed("engine/1", SampleKey(1, 0))
    return bench


def test_a_sample_goes_back_to_its_cache_past_an_engine_that_has_less_to_do() -> None:
    assert keys(failed_after(three_at_two_engines(), "engine/0", 5), "engine/0") == [(0, 0)]
    bench = three_at_two_engines()
    bench.loses("filter")
    bench.returns("filter", epoch=1)
    held_elsewhere = {"engine_0": (held(2, 0),), "scorer": (held(1, 0, LeaseStage.PASSED_ON),)}
    assert keys(bench.answers(**held_elsewhere), "engine/0") == [(0, 0)], "word of it was lost on the way"


def test_nothing_goes_back_to_the_successor_of_the_engine_that_died_with_its_cache() -> None:
    bench = SourceBench(num_samples=1, routing="least_loaded").started(num_engines=2)
    bench.grant(2)
    bench.progressed("engine/1", SampleKey(1, 0), 0, drive.part((0, 5)))
    bench.closed("engine/0", FIRST)
    bench.loses("engine/1")
    bench.joins("engine/1", epoch=1)
    assert keys(bench.answers(scorer=(held(0, 0, LeaseStage.PASSED_ON),)), "engine/0") == [(1, 0)]


def test_a_sample_that_failed_without_a_token_goes_elsewhere_and_does_not_come_back() -> None:
    """An engine that fails at once has the smallest load, and would be given everything."""
    bench = SourceBench(num_samples=1, num_retries=3).started(num_engines=2)
    bench.grant(1)
    assert keys(failed_after(bench, "engine/0", 0), "engine/1") == [(0, 0)]
    bench.progressed("engine/1", FIRST, 0, drive.part((0, 5)), attempt=1)
    assert keys(failed_after(bench, "engine/1", 5, attempt=1), "engine/1") == [(0, 0)]
    assert keys(failed_after(bench, "engine/1", 5, attempt=2), "engine/0") == [(0, 0)]


def test_a_sample_does_not_queue_for_its_cache_where_another_engine_is_idle() -> None:
    router = Router(is_affine=True, max_load=1.5)
    for name, load in (("engine/0", 4), ("engine/1", 3)):
        router.join(name, 1, load=load)
        router.ready(ready(name, 1, 4), 0)
    assert chosen(router, cache=Cache("engine/0", 1)) == "engine/1"
    router.load("engine/1", 1)
    assert chosen(router, cache=Cache("engine/0", 1)) == "engine/0"  # it queues anywhere


def test_a_cache_is_gone_with_its_incarnation() -> None:
    router = Router(is_affine=True, max_load=1.5)
    router.join("engine/0", 1, load=3)
    router.ready(ready("engine/0", 1, 4), 0)
    router.join("engine/1", 1, load=0)
    router.ready(ready("engine/1", 1, 4), 0)
    assert chosen(router, cache=Cache("engine/0", 1)) == "engine/0"
    assert chosen(router, cache=Cache("engine/0", 0)) == "engine/1"
    assert chosen(router, cache=Cache("engine/7", 1)) == "engine/1"


def test_word_of_a_sample_that_was_lost_brings_it_back_to_the_engine_that_has_its_cache() -> None:
    bench = SourceBench(num_samples=1).started(num_engines=2)
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    bench.loses("filter")
    bench.returns("filter", epoch=1)
    assert keys(bench.answers(), "engine/0") == [(0, 0)]


# --- engines whose weights come late ------------------------------------------------------------------------------


def both_serve(version: int, *, num_samples: int = 1, num_slots: int = 2) -> SourceBench:
    """Two engines that serve the version that is announced."""
    bench = SourceBench(num_samples=num_samples, max_load=1.0).started(num_engines=2, num_slots=num_slots)
    bench.announced(version)
    for engine in ("engine/0", "engine/1"):
        bench.serves(engine, version)
    return bench


def late_by(lag: int) -> SourceBench:
    """Both serve version 5; engine/1 took it when so many more were announced, and version 6 is at engine/0."""
    bench = both_serve(4)
    bench.serves("engine/0", 6)
    bench.announced(5 + lag)
    bench.serves("engine/1", 5)
    return bench


def test_a_sample_waits_for_weights_where_they_should_come_a_version_before_its_deadline() -> None:
    for lag, waits in ((0, True), (1, True), (2, False), (3, False)):
        issued = late_by(lag).grant(3, min_version=6)  # due at version 8
        assert keys(issued, "engine/0") == [(0, 0), (1, 0)]
        assert keys(issued, "engine/1") == ([(2, 0)] if waits else [])


def test_what_waits_here_for_weights_goes_out_when_an_engine_has_them() -> None:
    bench = late_by(2)
    bench.grant(4, min_version=6)
    assert keys(bench.closed("engine/0", FIRST), "engine/0") == [(2, 0)]
    assert keys(bench.serves("engine/1", 6), "engine/1") == [(3, 0)]


def test_a_late_engine_makes_what_its_weights_can_make() -> None:
    bench = late_by(2)
    assert keys(bench.grant(2, min_version=5), "engine/1") == [(1, 0)]


def test_an_old_sample_passes_one_that_is_issued_again_and_waits_for_weights() -> None:
    bench = SourceBench(num_samples=1, max_load=1.0).started(num_engines=3, num_slots=1)
    bench.announced(9)
    for engine, version in (("engine/0", 6), ("engine/1", 5), ("engine/2", 6)):
        bench.serves(engine, version)
    spans = (GrantSpan(0, 2, 0, 6, 8), GrantSpan(2, 2, 2, 5, 7))
    issued = bench.hear(DemandGranted(total=4, spans=spans, settled=SettledState(0, 0, ())))
    assert [keys(issued, f"engine/{index}") for index in range(3)] == [[(0, 0)], [(2, 0)], [(1, 0)]]
    bench.hear(EngineLeaving(name="engine/2", epoch=0))
    assert keys(bench.closed("engine/2", SampleKey(1, 0), Cancelled(cause="handed back"))) == []
    assert keys(bench.closed("engine/1", SampleKey(2, 0)), "engine/1") == [(3, 0)]
    assert keys(bench.closed("engine/0", FIRST), "engine/0") == [(1, 0)]


def test_one_that_is_issued_again_goes_before_older_ones_where_its_weights_are() -> None:
    bench = SourceBench(num_samples=1, num_retries=3, max_load=1.0).started(num_engines=1, num_slots=1)
    bench.announced(6)
    bench.serves("engine/0", 6)
    spans = (GrantSpan(0, 1, 0, 6, 8), GrantSpan(1, 1, 1, 5, 7))
    assert keys(bench.hear(DemandGranted(total=2, spans=spans, settled=SettledState(0, 0, ())))) == [(0, 0)]
    assert keys(failed_after(bench, "engine/0", 5)) == [(0, 0)]


def test_a_sample_that_is_sent_to_wait_for_weights_counts_for_the_swap_that_brings_them() -> None:
    bench = late_by(1)
    assert keys(bench.grant(3, min_version=6), "engine/1") == [(2, 0)]
    bench.serves("engine/1", 6)
    assert bench.source.table.router.engines["engine/1"].lag == 1


def test_a_swap_for_which_samples_have_waited_makes_no_engine_less_late() -> None:
    router = Router(is_affine=True, max_load=1.0)
    router.join("engine/0", 0, load=0)
    router.announced(4)
    router.ready(ready("engine/0", 0, 4, version=2), 0)
    view = router.engines["engine/0"]
    assert view.lag == 2
    view.awaited = 4
    router.ready(ready("engine/0", 0, 4, version=4), 0)
    assert view.lag == 2, "the versions may have waited too"
    router.announced(6)
    router.ready(ready("engine/0", 0, 4, version=5), 0)
    assert view.lag == 1, "nothing waited"


def test_wrong_weights_are_none() -> None:
    bench = both_serve(5)
    bench.serves("engine/1", -1)
    assert keys(bench.grant(2, min_version=5), "engine/0") == [(0, 0), (1, 0)]


def test_a_sample_that_avoids_the_only_engine_with_its_weights_waits_for_them_elsewhere() -> None:
    bench = late_by(3)
    bench.grant(1, min_version=6)
    assert keys(failed_after(bench, "engine/0", 0), "engine/1") == [(0, 0)]


def test_a_policy_is_not_asked_about_engines_with_older_weights_while_others_have_room() -> None:
    router = Router(is_affine=False, max_load=1.0, policy=RoundRobin())
    for name, version in (("engine/0", 5), ("engine/1", 1)):
        router.join(name, 0, load=0)
        router.announced(5)
        router.ready(ready(name, 0, 9, version=version), 0)
    for eta in (2, 8):
        found = [router.choose(sample(min_version=5, eta=eta), avoids="", cache=None, num_waiting=1) for _ in range(4)]
        assert {view.name for view in found if view is not None} == {"engine/0"}
    router.load("engine/0", 9)
    assert router.choose(sample(min_version=5), avoids="", cache=None, num_waiting=1) is None
    found = [router.choose(sample(min_version=5, eta=8), avoids="", cache=None, num_waiting=1)]
    assert found == [router.engines["engine/1"]]


class Asked:
    """A policy that has no preference, and keeps which engines it was asked about."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def choose(self, sample: RoutedSample, engines: Sequence[RoutedEngine], /) -> None:
        self.names.append([engine.name for engine in engines])


@pytest.mark.parametrize(
    ("versions", "avoids", "given"),
    [
        ((5, 5), "", ["engine/0", "engine/1"]),
        ((5, 1), "", ["engine/0"]),
        ((5, 5), "engine/0", ["engine/1"]),
        ((5, 1), "engine/0", ["engine/1"]),  # its weights come too late for the deadline, and still it is the other one
    ],
)
def test_a_policy_is_asked_about_the_engines_that_are_as_good_as_the_least_loaded(
    versions: tuple[int, int], avoids: str, given: list[str]
) -> None:
    policy = Asked()
    router = Router(is_affine=False, max_load=1.0, policy=policy)
    router.announced(9)
    for index, version in enumerate(versions):
        router.join(f"engine/{index}", 0, load=0)
        router.ready(ready(f"engine/{index}", 0, 9, version=version), 0)
    router.choose(sample(min_version=5), avoids=avoids, cache=None, num_waiting=1)
    assert policy.names == [given]


def test_a_policy_is_not_asked_about_a_full_engine_however_much_waits() -> None:
    policy = Asked()
    router = Router(is_affine=False, max_load=1.0, policy=policy)
    for index in range(2):
        router.join(f"engine/{index}", 0, load=index)
        router.ready(ready(f"engine/{index}", 0, 1, version=0), 0)
    router.choose(sample(), avoids="", cache=None, num_waiting=99)
    assert policy.names == [["engine/0"]]


# --- every choice, against the rules word by word -----------------------------------------------------------------


def sample(row: int = 0, *, group: str = "", min_version: int = 0, eta: int = 2) -> RoutedSample:
    return RoutedSample(
        group_id=0,
        index=0,
        row=row,
        num_prompt_tokens=3,
        min_version=min_version,
        deadline_version=min_version + eta,
        group_engine=group,
    )


def chosen(router: Router, *, cache: Cache | None = None, group: str = "") -> str:
    view = router.choose(sample(group=group), avoids="", cache=cache, num_waiting=100)
    assert view is not None
    return view.name


def may_wait(view: EngineView, asked: RoutedSample) -> bool:
    return view.version < asked.min_version and asked.min_version + view.lag <= asked.deadline_version - 1


def expected(
    views: list[EngineView], asked: RoutedSample, *, is_affine: bool, avoids: str, num_waiting: int
) -> str | None:
    """The rules, over all engines."""
    with_room = [view for view in views if view.has_room]
    in_time = [view for view in with_room if view.version >= asked.min_version or may_wait(view, asked)]
    others = [view for view in with_room if view.name != avoids] if avoids else in_time
    others = others or in_time
    if not others:
        return None
    first = min(
        others,
        key=lambda view: (
            (not view.has_free_slot, view.version < asked.min_version)
            if any(each.has_free_slot for each in others)
            else (view.version < asked.min_version, False),
            view.share,
            view.name,
        ),
    )
    num_other_slots = (sum(view.num_slots for view in views) - first.num_slots) * (first.load // first.num_slots)
    if not first.has_free_slot and num_waiting <= num_other_slots and not avoids:
        return None
    own = next((view for view in views if view.name == asked.group_engine != avoids and is_affine), None)
    if own is not None and own.version < asked.min_version:
        waits_too = first.version < asked.min_version and (may_wait(own, asked) or own is first)
        own = own if waits_too else None
    if own is not None and (own.has_free_slot or (own.has_room and not first.has_free_slot)):
        return own.name
    return first.name


@pytest.mark.parametrize("seed", range(40))
def test_whatever_has_happened_the_choice_is_that_of_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    is_affine = rng.random() < 0.5
    router = Router(is_affine=is_affine, max_load=rng.choice([1.0, 1.25, 2.0]))
    names = [f"engine/{index}" for index in range(8)]
    newest, num_choices = 0, 0
    for step in range(400):
        name = rng.choice(names)
        view = router.engines.get(name)
        match rng.randrange(8):
            case 0 if view is None:
                router.join(name, step, load=0)
                router.ready(ready(name, step, rng.choice([1, 4, 16])), 0)
            case 1 if view is not None and rng.random() < 0.3:
                router.lose(name)
            case 2:
                if view is not None:
                    router.ready(ready(name, view.epoch, view.num_slots, version=rng.randint(-1, newest)), 0)
                router.announced(rng.randint(0, newest))
            case 3 | 4 if view is not None and view.load:
                router.load(name, -1)
            case _:
                newest += rng.random() < 0.05
                avoids, group = rng.choice(["", "", name]), rng.choice(["", rng.choice(names)])
                num_waiting = rng.choice([1, 8, 32, 200])
                asked = sample(group=group, min_version=rng.randint(0, newest), eta=rng.randrange(4))
                found = router.choose(asked, avoids=avoids, cache=None, num_waiting=num_waiting)
                views = list(router.engines.values())
                wanted = expected(views, asked, is_affine=is_affine, avoids=avoids, num_waiting=num_waiting)
                assert (found.name if found else None) == wanted
                if found is not None:
                    num_choices += 1
                    router.load(found.name, 1)
        router.validate({view.name: view.load for view in router.engines.values()})
    assert num_choices > 50


# --- policies -----------------------------------------------------------------------------------------------------


def engines_of(slots: dict[str, int]) -> list[RoutedEngine]:
    return [RoutedEngine(name=name, num_slots=n, capacity=n, load=0, version=0) for name, n in slots.items()]


def test_round_robin_gives_each_engine_its_turn_and_passes_over_the_full() -> None:
    bench = SourceBench(num_samples=1, routing="round_robin", max_load=1.0)
    for index, num_slots in ((10, 4), (9, 1), (2, 4)):
        bench.joins(f"engine/{index}", num_slots=num_slots)
    sent = [send.to for send in drive.every(bench.grant(7), Send) if isinstance(send.event, SampleIssued)]
    assert sent == [f"engine/{index}" for index in (2, 9, 10, 2, 10, 2, 10)]


def test_round_robin_prefers_engines_that_serve_what_a_sample_needs() -> None:
    able = RoutedEngine(name="engine/1", num_slots=4, capacity=4, load=3, version=2)
    policy, engines = RoundRobin(), [*engines_of({"engine/0": 4}), able]
    assert [policy.choose(sample(min_version=2), engines) for _ in range(3)] == ["engine/1"] * 3


@given(
    st.dictionaries(st.integers(0, 99).map("engine/{}".format), st.sampled_from([8, 16, 64]), min_size=2, max_size=12),
    st.data(),
)
def test_when_an_engine_goes_only_its_own_rows_move(slots: dict[str, int], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(slots)))
    whole = engines_of(slots)
    left = [engine for engine in whole if engine.name != gone]
    before = {row: ConsistentHash().choose(sample(row), whole) for row in range(60)}
    after = {row: ConsistentHash().choose(sample(row), left[::-1]) for row in range(60)}
    assert all(after[row] == engine for row, engine in before.items() if engine != gone)
    assert gone not in after.values()


def test_rows_are_shared_out_in_proportion_to_slots_and_those_of_a_lost_engine_too() -> None:
    slots = {"engine/0": 8, "engine/1": 8, "engine/2": 16}
    found = Counter(ConsistentHash().choose(sample(row), engines_of(slots)) for row in range(4000))
    assert all(abs(found[name] / 4000 - num_slots / 32) < 0.03 for name, num_slots in slots.items())
    left = {name: slots[name] for name in ("engine/0", "engine/2")}
    found = Counter(ConsistentHash().choose(sample(row), engines_of(left)) for row in range(4000))
    assert abs(found["engine/2"] / 4000 - 2 / 3) < 0.03


def test_a_prompt_comes_back_to_its_engine_and_goes_on_to_the_next_where_that_is_full() -> None:
    bench = SourceBench(num_samples=3, routing="consistent_hash", max_load=1.0, num_rows=1)
    bench.started(num_engines=4, num_slots=6)
    [first] = counts(bench.grant(2))
    [second] = counts(bench.grant(4))
    assert second != first
    again = SourceBench(num_samples=3, routing="consistent_hash", num_rows=1).started(num_engines=4, num_slots=6)
    assert counts(again.grant(1)) == {first: 3}
