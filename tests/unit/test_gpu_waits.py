"""Engines whose GPUs are still to come: when they are started, what is told meanwhile, and when they are given up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest

from penstock.messages.membership import EngineEmptied, EngineGivenUp, EngineNoticed, EnginesWanted
from penstock.messages.names import BUFFER, SUPERVISOR
from penstock.runtime.hosts.processes.directory import Directory
from penstock.runtime.hosts.processes.engine_crew import EngineCrew
from penstock.runtime.hosts.processes.gpu_waits import TOLD_AFTER_S
from penstock.runtime.hosts.processes.incarnations import Incarnation
from penstock.runtime.hosts.processes.ports import SupervisorSettings

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.training import ActorReported
    from penstock.runtime.hosts.processes.ports import Launcher, RunSink

TIMEOUT_S = 600.0
LACKS = "a node with 2 GPUs"


class Bench:
    """An EngineCrew whose launcher, sink and supervisor write down what they are told."""

    def __init__(self, *, fewest: int = 1) -> None:
        self.lacking: dict[str, str] = {}
        self.reserved: list[str] = []
        self.ended: list[str] = []
        self.started: list[tuple[str, int]] = []
        self.said: list[Event] = []
        self.notices: list[str] = []
        self.reports: list[ActorReported] = []
        self.states: list[tuple[str, int, str]] = []
        self.failed: list[str] = []
        self.crew: dict[str, Incarnation] = {"engine/0": Incarnation("engine/0", 1, 0.0)}
        self.buffer = Incarnation(BUFFER, 1, 0.0)
        self.due: dict[str, tuple[float, int]] = {}
        self.directory = Directory()
        self.engines = EngineCrew(
            SupervisorSettings(
                names=(BUFFER, "engine/0"),
                heartbeat_timeout_s=10.0,
                max_restarts=3,
                gpu_timeout_s=TIMEOUT_S,
                fewest_engines=fewest,
            ),
            self.directory,
            self.crew,
            self.due,
            start=self.start,
            end=lambda incarnation, now_s, then: then(now_s),
            part_from=self.part_from,
            launcher=cast("Launcher", self),
            broadcast=lambda change: None,
            ask=self.said.append,
            forget=lambda name: None,
            fail=self.failed.append,
            sink=cast("RunSink", self),
        )

    def start(self, name: str, epoch: int) -> None:
        self.started.append((name, epoch))

    def part_from(self, incarnation: Incarnation) -> None:
        """Nothing: no test here has one leave."""

    # --- as a Launcher

    def reserve(self, name: str) -> None:
        self.reserved.append(name)

    def lacks(self, name: str) -> str:
        return self.lacking.get(name, "")

    def end_left(self, name: str) -> None:
        self.ended.append(name)

    # --- as a RunSink

    def on_notice(self, name: str, text: str, **_: Any) -> None:  # noqa: ANN401
        assert name == SUPERVISOR
        self.notices.append(text)

    def on_report(self, report: ActorReported) -> None:
        self.reports.append(report)

    def on_actor(self, name: str, epoch: int, state: str) -> None:
        self.states.append((name, epoch, state))

    # --- for tests

    def want(self, *engines: str, now_s: float = 0.0) -> None:
        self.engines.hear(EnginesWanted(engines=engines), self.buffer, now_s)


def test_an_engine_for_which_there_is_room_is_started_at_once() -> None:
    bench = Bench()
    bench.want("engine/0", "engine/1")
    assert (bench.reserved, bench.started) == (["engine/1"], [("engine/1", 1)])
    assert bench.notices == []


def test_one_that_waits_is_started_when_its_gpus_have_come_and_not_twice() -> None:
    bench = Bench()
    bench.lacking["engine/1"] = LACKS
    bench.want("engine/0", "engine/1")
    bench.want("engine/0", "engine/1", now_s=1.0)  # a Buffer says so again
    bench.engines.look(1.0)
    assert (bench.reserved, bench.started, bench.reports) == (["engine/1"], [], [])
    for now_s in (TOLD_AFTER_S, 40.0, 40.2):
        bench.engines.look(now_s)
    states = [f"waits for {LACKS}, for {at} s" for at in (3, 40)]
    assert [report.state for report in bench.reports] == states
    del bench.lacking["engine/1"]
    bench.engines.look(43.0)
    bench.engines.look(43.2)
    assert bench.started == [("engine/1", 1)]
    assert [report.state for report in bench.reports] == [*states, "starting"]
    told = [f"it waits for {LACKS}, 600 s at most", "its GPUs have come, after 43 s"]
    assert bench.notices == [f"engine/1: {text}" for text in told]
    assert bench.said == [EngineNoticed(engine="engine/1", engine_epoch=1, text=text) for text in told]


def test_others_are_started_while_one_waits() -> None:
    bench = Bench()
    bench.lacking["engine/1"] = LACKS
    bench.want("engine/0", "engine/1", "engine/2")
    assert bench.started == [("engine/2", 1)]
    bench.engines.start(BUFFER, 2, 1.0)
    assert bench.started == [("engine/2", 1), (BUFFER, 2)]


def test_one_that_waits_too_long_is_given_up_with_the_reason_and_may_be_asked_for_again() -> None:
    bench = Bench()
    bench.lacking["engine/1"] = LACKS
    bench.want("engine/0", "engine/1")
    bench.engines.look(TIMEOUT_S - 0.1)
    assert bench.states == []
    bench.engines.look(TIMEOUT_S)
    story = f"{LACKS} has not come within engines.gpu_timeout_s = 600"
    given_up = EngineGivenUp(engine="engine/1", engine_epoch=1, reason=story)
    assert bench.said[-1] == given_up
    assert bench.notices[-1] == f"the run goes on without engine/1: {story}"
    assert (bench.states, bench.ended) == ([("engine/1", 1, "left")], ["engine/1"])
    bench.want("engine/0", now_s=TIMEOUT_S + 1)
    bench.want("engine/0", "engine/1", now_s=TIMEOUT_S + 2)
    bench.engines.look(2 * TIMEOUT_S + 2)
    # Word on each incarnation is heard once by the Buffer, so this one has to be another.
    assert bench.said[-1] == EngineGivenUp(engine="engine/1", engine_epoch=2, reason=story)
    assert (bench.started, bench.failed) == ([], [])


def test_gpus_that_have_come_at_the_last_moment_are_taken() -> None:
    """A supervisor that was stopped for long looks at what is there first."""
    bench = Bench()
    bench.lacking["engine/1"] = LACKS
    bench.want("engine/0", "engine/1")
    del bench.lacking["engine/1"]
    bench.engines.look(5 * TIMEOUT_S)
    assert bench.started == [("engine/1", 1)]


def test_one_that_is_not_wanted_any_more_is_not_waited_for() -> None:
    bench = Bench()
    bench.lacking["engine/1"] = LACKS
    bench.want("engine/0", "engine/1")
    bench.want("engine/0", now_s=5.0)
    assert (bench.states, bench.ended) == ([("engine/1", 1, "left")], ["engine/1"])
    assert bench.notices == ["engine/1 is not waited for any more"]
    bench.lacking.clear()
    bench.engines.look(6.0)
    assert bench.started == []


def test_one_that_is_let_go_before_its_restart_leaves_nothing_behind() -> None:
    """It was lost, and its successor is due in a moment: what it has left, and its GPUs, wait for that one."""
    bench = Bench()
    bench.want("engine/0", "engine/1")
    bench.due["engine/1"] = (5.0, 2)
    bench.want("engine/0", now_s=4.0)
    assert (bench.due, bench.ended) == ({}, ["engine/1"])
    assert bench.states == [("engine/1", 2, "left")]
    bench.want("engine/0", "engine/1", now_s=6.0)
    assert bench.started == [("engine/1", 1), ("engine/1", 3)]


@pytest.mark.parametrize("fewest", [1, 2])
def test_one_that_comes_back_waits_likewise_and_the_run_ends_where_it_cannot_do_without(fewest: int) -> None:
    bench = Bench(fewest=fewest)
    bench.want("engine/0", "engine/1")
    bench.started.clear()
    bench.lacking["engine/1"] = LACKS  # its node is gone
    bench.engines.start("engine/1", 2, 10.0)
    bench.engines.look(10.0 + TIMEOUT_S)
    assert bench.started == []
    assert bool(bench.failed) == (fewest == 2)
    if bench.failed:
        assert bench.failed == [f"engine/1: {LACKS} has not come within engines.gpu_timeout_s = 600"]


# --- anything, in any order -------------------------------------------------------------------------------------------


class Play(Bench):
    """A Bench that keeps the crew as the supervisor does, while engines are asked for, die, wait and leave."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.now_s = rng, 0.0
        self.left: set[str] = {"engine/0"}
        """Names of which a process, what it has left to a successor, or a reservation is there."""
        self.wanted: tuple[str, ...] = ("engine/0",)
        self.want("engine/0")

    def reserve(self, name: str) -> None:
        super().reserve(name)
        self.left.add(name)

    def end_left(self, name: str) -> None:
        super().end_left(name)
        self.left.discard(name)

    def start(self, name: str, epoch: int) -> None:
        assert name in self.wanted, f"{name} is started, and wanted are {self.wanted}"
        assert name not in self.lacking, f"{name} is started without its GPUs"
        assert name not in self.crew, f"{name} is started twice"
        assert all(epoch > before for known, before in self.started if known == name), "an epoch comes again"
        super().start(name, epoch)
        self.crew[name] = Incarnation(name, epoch, self.now_s)

    def part_from(self, incarnation: Incarnation) -> None:
        self.engines.membership.gone(incarnation.name)
        del self.crew[incarnation.name]
        self.directory.give_up(incarnation.name, incarnation.epoch)

    def act(self) -> None:
        kinds = ("want", "lack", "record", "wait", "wait", *(("die", "empty") if self.crew else ()))
        match self.rng.choice(kinds):
            case "want":
                others = self.rng.sample(["engine/1", "engine/2", "engine/3"], self.rng.randint(0, 3))
                self.wanted = ("engine/0", *sorted(others))
                self.want(*self.wanted, now_s=self.now_s)
            case "lack":
                name = self.rng.choice(["engine/1", "engine/2", "engine/3"])
                if self.lacking.pop(name, None) is None and name not in self.crew:
                    self.lacking[name] = LACKS
            case "die":
                self.die(self.rng.choice(list(self.crew.values())))
            case "empty":
                one = self.rng.choice(list(self.crew.values()))
                empty = EngineEmptied(engine=one.name, engine_epoch=one.epoch)
                self.engines.hear(empty, self.buffer, self.now_s)
            case "record":  # the Buffer has heard of those that are given up
                gone = {event.engine for event in self.engines.membership.unrecorded()}
                self.wanted = tuple(name for name in self.wanted if name not in gone)
                self.want(*self.wanted, now_s=self.now_s)
            case _:
                self.now_s += self.rng.choice((0.2, 5.0, 40.0, TIMEOUT_S))
        self.turn()

    def die(self, one: Incarnation) -> None:
        """As ``Supervisor._follow`` has it."""
        is_replaced = self.engines.membership.is_replaced(one.name)
        self.part_from(one)
        if not is_replaced:
            self.engines.has_gone(one.name, one.epoch)
            self.engines.match(self.now_s)
        elif one.name == "engine/0" or self.rng.random() < 0.8:
            self.due[one.name] = (self.now_s + self.rng.choice((0.0, 30.0)), one.epoch + 1)
        else:
            assert self.engines.gives_up(one.name, one.epoch, "lost too often", self.now_s)

    def turn(self) -> None:
        self.engines.look(self.now_s)
        for name, (due_s, epoch) in list(self.due.items()):
            if due_s <= self.now_s:
                del self.due[name]
                self.engines.start(name, epoch, self.now_s)
        for name, incarnation in self.crew.items():  # they announce themselves
            incarnation.process = cast("Any", name)

    def check(self) -> None:
        waiting = self.engines._waits.names  # pyright: ignore[reportPrivateUsage]
        assert not self.crew.keys() & self.due.keys()
        assert not waiting & (self.crew.keys() | self.due.keys())
        there = self.crew.keys() | self.due.keys() | waiting
        assert self.left <= there, f"{sorted(self.left - there)} has left something that nobody ends"
        given_up = {event.engine for event in self.engines.membership.unrecorded()}
        assert set(self.wanted) - given_up <= there
        assert not waiting & given_up


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_who_is_wanted_comes_and_nobody_leaves_anything_behind(seed: int) -> None:
    play = Play(random.Random(seed))
    for _ in range(60):
        play.act()
        play.check()
    assert play.failed == []
    play.lacking.clear()
    for _ in range(4):
        play.now_s += TIMEOUT_S
        play.turn()
    given_up = {event.engine for event in play.engines.membership.unrecorded()}
    assert set(play.wanted) - given_up == play.crew.keys()
