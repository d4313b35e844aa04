"""Working time on shared cores, and what is read from a run of who wants how many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.backends.simulated.shared_cores import SharedCores, tell_work
from penstock.messages.base import Metric
from penstock.messages.training import ActorReported
from penstock.runtime.hosts.processes.descendants import core_wait_s
from penstock.runtime.hosts.virtual.clock import VirtualClock
from penstock.runtime.observability.figures import RunFigures

if TYPE_CHECKING:
    from collections.abc import Callable


class Timers:
    """A virtual clock as a backend's."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.heard: list[tuple[str, float]] = []

    def now_s(self) -> float:
        return self.clock.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        assert delay_s >= 0
        self.clock.at(self.clock.now_s + delay_s, lambda call, _: call(), callback, None)

    def hears(self, what: str) -> Callable[[], None]:
        return lambda: self.heard.append((what, round(self.clock.now_s, 9)))


def test_who_works_beside_others_is_slower_only_where_cores_are_short() -> None:
    host, shared = Timers(), SharedCores(2.0)
    engine, learner = shared.timers_of("engine/0", host, 1.5), shared.timers_of("learner", host, 1.0)
    engine.work(True)
    engine.call_later(10.0, host.hears("engine"))
    host.clock.run(4.0)  # alone: 4 of 10 s are done
    learner.work(True)
    learner.call_later(2.0, host.hears("learner"))  # from here on all go at 2 ÷ 2.5 of their speed
    host.clock.run(6.5)
    assert host.heard == [("learner", 6.5)]
    learner.work(False)
    host.clock.run(100.0)
    assert host.heard[1] == ("engine", 10.5)  # 4 + 2 were done after 6.5 s


def test_who_finds_cold_caches_does_less_in_its_share_and_others_as_much_as_before() -> None:
    host, shared = Timers(), SharedCores(1.0)
    engine, learner = shared.timers_of("engine/0", host, 1.0, 0.5), shared.timers_of("learner", host, 1.0)
    for each, what in ((engine, "engine"), (learner, "learner")):
        each.work(True)
        each.call_later(1.0, host.hears(what))
    host.clock.run(2.0)
    assert host.heard == [("learner", 2.0)]
    learner.work(False)
    host.clock.run(10.0)
    assert host.heard[1] == ("engine", 2.2)  # in 2 s it has done 2 · 0.5 ÷ (1 + 0.5 · 0.5) of it


def test_what_falls_due_together_comes_in_its_order_and_idle_ones_want_nothing() -> None:
    host, shared = Timers(), SharedCores(1.0)
    first, second = shared.timers_of("engine/0", host, 1.0), shared.timers_of("engine/1", host, 1.0)
    first.work(True)
    for what, delay_s in (("c", 3.0), ("a", 1.0), ("b", 1.0)):
        first.call_later(delay_s, host.hears(what))
    second.work(True)
    host.clock.run(2.0)
    second.work(False)
    host.clock.run(10.0)
    assert host.heard == [("a", 2.0), ("b", 2.0), ("c", 4.0)]


def test_a_replacement_takes_the_place_of_who_was_there() -> None:
    host, shared = Timers(), SharedCores(1.0)
    engine, lost = shared.timers_of("engine/0", host, 1.0), shared.timers_of("learner", host, 3.0)
    lost.work(True)
    engine.work(True)
    engine.call_later(1.0, host.hears("engine"))
    host.clock.run(2.0)  # at a quarter of its speed: half is done
    shared.timers_of("learner", host, 3.0)
    host.clock.run(10.0)
    assert host.heard == [("engine", 2.5)]


def test_whoever_has_cores_of_its_own_tells_nobody() -> None:
    tell_work(Timers())(True)


def test_cpu_time_goes_on_between_reports_as_before_them() -> None:
    figures = RunFigures(progress_tokens=64)
    for at_s, cpu_s, wait_s in ((1.0, 2.0, 0.0), (2.0, 2.5, 1.0)):
        for name in ("engine/0", "engine/1", "filter"):
            metrics = (Metric("process/cpu_s", cpu_s), Metric("process/core_wait_s", wait_s))
            figures.actor(ActorReported(name=name, epoch=1, state="", activities=(), metrics=metrics), at_s)
    assert figures.cpu_by_role_s(2.4) == pytest.approx({"engine_worker": 5.4, "filter": 2.7})
    assert figures.core_waits_by_role_s(2.0) == pytest.approx({"engine_worker": 2.0, "filter": 1.0})


def test_a_process_knows_how_long_its_threads_have_waited_for_a_core() -> None:
    before_s = core_wait_s()
    assert 0.0 <= before_s <= core_wait_s()
