"""The virtual host itself, with two small machines: time, order, turns, and every fault by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from trials.faults import Fault, FaultKind, inject

from penstock.messages.commands import FailRun, JudgeGroup, Record, ReplaceActor, Send, StartTimer
from penstock.messages.ledger import VersionRecorded
from penstock.messages.local import GroupJudged, Started, TimerFired
from penstock.messages.names import FILTER, SCORER
from penstock.messages.samples import Group, Prompt
from penstock.messages.training import CheckpointSaved, NoticeGiven
from penstock.runtime.hosts.virtual.clock import VirtualClock
from penstock.runtime.hosts.virtual.event_digest import EventDigest
from penstock.runtime.hosts.virtual.host import HostSettings, IdleWatcher, VirtualHost
from penstock.runtime.hosts.virtual.links import LinkModel
from penstock.runtime.hosts.virtual.process import Player, Process, Status
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Emit, Fail, Timers
    from penstock.messages.base import Event, Metric
    from penstock.messages.commands import AnyCommand, FilterCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.membership import HeldLease
    from penstock.messages.waits import Wait
    from penstock.messages.wire import Header

PERIOD_S = 1.0
GROUP = Group(group_id=0, prompt=Prompt(row=0, epoch=0, tokens=b""), samples=())


class Ticker:
    """The machine of the Scorer here: sends a numbered notice to the Filter every second, and a control event."""

    def __init__(self) -> None:
        self.num_ticks = 0

    def handle(self, event: Event) -> list[AnyCommand]:
        if not isinstance(event, Started | TimerFired):
            return []
        self.num_ticks += 1
        return [
            Send(FILTER, NoticeGiven(name=SCORER, text=str(self.num_ticks))),
            Send(FILTER, CheckpointSaved(version=self.num_ticks, path="")),
            StartTimer("tick", PERIOD_S),
        ]

    def validate(self) -> None:
        assert self.num_ticks >= 0

    def leases(self) -> tuple[HeldLease, ...]:
        return ()

    def waits(self) -> tuple[Wait, ...]:
        return ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return ()

    @property
    def state(self) -> str:
        return f"tick {self.num_ticks}"


class Listener(Ticker):
    """The machine of the Filter here: has its backend judge something for every notice."""

    def handle(self, event: Event) -> list[AnyCommand]:
        if isinstance(event, NoticeGiven):
            self.num_ticks += 1
            return [Record((VersionRecorded(version=int(event.text)),)), JudgeGroup(GROUP)]
        return []


class Judge:
    """A backend that takes half a second."""

    def __init__(self, timers: Timers) -> None:
        self.timers = timers

    def start(self, emit: Emit, fail: Fail) -> None:
        self.emit = emit

    def execute(self, command: FilterCommand, /) -> None:
        self.timers.call_later(0.5, lambda: self.emit(GroupJudged(group_id=0, keep=True)))

    def gauges(self) -> tuple[Metric, ...]:
        return ()

    def close(self, timeout_s: float) -> None:
        pass


def cast(name: str, epoch: int, timers: Timers, store: LedgerStore | None = None) -> Player:
    if name == SCORER:
        return Player(machine=Ticker(), hears=frozenset(), inbox=NoticeGiven)
    return Player(machine=Listener(), hears=frozenset(), inbox=NoticeGiven | CheckpointSaved, backend=Judge(timers))


class Diary(IdleWatcher):
    """What the Filter handled, with the time; and what was recorded."""

    def __init__(self, host: VirtualHost) -> None:
        self.host = host
        self.handled_at: list[tuple[float, Event]] = []
        self.recorded: list[int] = []
        self.losses: list[str] = []
        self.told: list[Event] = []
        host.watch(self)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if process.name == FILTER:
            self.handled_at.append((self.host.clock.now_s, event))

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        self.recorded.extend(entry.version for entry in entries if isinstance(entry, VersionRecorded))

    def heard_of(self, kind: type[Event]) -> list[tuple[float, Event]]:
        return [(at_s, event) for at_s, event in self.handled_at if isinstance(event, kind)]

    def ticks(self) -> list[int]:
        return [int(event.text) for _, event in self.handled_at if isinstance(event, NoticeGiven)]

    def versions(self) -> list[int]:
        return [event.version for _, event in self.handled_at if isinstance(event, CheckpointSaved)]

    def heard(self, process: Process, event: Event) -> None:
        self.told.append(event)

    def lost(self, name: str, cause: str) -> None:
        self.losses.append(f"{name}: {cause}")


def made(*faults: Fault, **settings: Any) -> tuple[VirtualHost, Diary]:  # noqa: ANN401 - of the host
    """A host on which everything starts at once."""
    supervision = settings.pop("supervision", SupervisionModel(start_s=0.0))
    host = VirtualHost((FILTER, SCORER), cast, HostSettings(supervision=supervision, validate=True, **settings))
    inject(host, faults)
    return host, Diary(host)


def link_fault(kind: FaultKind, at_s: float, amount: float = 0.0, duration_s: float | None = None) -> Fault:
    return Fault(at_s=at_s, kind=kind, target=SCORER, peer=FILTER, amount=amount, duration_s=duration_s)


# --- time, order, digest ----------------------------------------------------------------------------------------------


def test_time_passes_only_between_events_and_stands_where_it_was_told_to() -> None:
    host, diary = made()
    assert host.run(10.5) is None
    assert host.clock.now_s == 10.5
    assert diary.ticks() == list(range(1, 12))
    assert [round(at_s) for at_s, _ in diary.heard_of(NoticeGiven)] == list(range(11))


def test_what_falls_due_together_happens_in_the_order_in_which_it_was_asked_for() -> None:
    clock, heard = VirtualClock(), list[tuple[str, float]]()

    def hear(what: str, _: object) -> None:
        heard.append((what, clock.now_s))

    def ask_again(what: str, at_s: float) -> None:
        clock.at(at_s, hear, what, None)

    clock.at(5.0, hear, "long before", None)
    clock.at(4.9995, ask_again, "just before", 5.0)
    clock.at(0.001, hear, "soon", None)
    clock.at(5.0, hear, "long before too", None)
    clock.run(10.0)
    assert heard == [("soon", 0.001), ("long before", 5.0), ("long before too", 5.0), ("just before", 5.0)]


def test_backend_answers_on_the_virtual_clock() -> None:
    host, diary = made()
    host.run(3.2)
    delays = [
        judged - heard
        for (judged, _), (heard, _) in zip(diary.heard_of(GroupJudged), diary.heard_of(NoticeGiven), strict=False)
    ]
    assert delays == pytest.approx([0.5] * 3)


def test_running_in_slices_is_the_same_as_running_at_once() -> None:
    digests: set[str] = set()
    for slices in ([30.0], [1.0, 1.5, 7.25, 30.0]):
        digest = EventDigest()
        host = VirtualHost((FILTER, SCORER), cast, HostSettings(seed=3), digest=digest)
        for until_s in slices:
            host.run(until_s)
        digests.add(digest.digest)
    assert len(digests) == 1


def test_watching_changes_nothing() -> None:
    digests: set[str] = set()
    for watched in (True, False):
        digest = EventDigest()
        host = VirtualHost((FILTER, SCORER), cast, HostSettings(seed=3), digest=digest)
        if watched:
            Diary(host)
        host.run(20.0)
        digests.add(digest.digest)
    assert len(digests) == 1


def test_order_of_a_link_is_kept_although_delays_vary() -> None:
    host, diary = made(link=LinkModel(min_delay_s=0.0, max_delay_s=5.0))
    host.run(100.0)
    assert diary.ticks() == sorted(diary.ticks())


def test_error_in_an_actor_ends_the_run_with_what_everyone_was_doing() -> None:
    class Broken(Ticker):
        def validate(self) -> None:
            assert self.num_ticks < 3, "three ticks are too many"

    def cast_broken(name: str, epoch: int, timers: Timers, store: LedgerStore | None = None) -> Player:
        player = cast(name, epoch, timers)
        return player if name == FILTER else Player(machine=Broken(), hears=frozenset(), inbox=NoticeGiven)

    host = VirtualHost((FILTER, SCORER), cast_broken, HostSettings(validate=True))
    with pytest.raises(AssertionError, match="three ticks") as caught:
        host.run(10.0)
    assert "scorer (epoch 0, running): tick 3" in "".join(caught.value.__notes__)


# --- faults of processes ----------------------------------------------------------------------------------------------


def test_kill_takes_the_process_and_another_takes_its_place() -> None:
    host, diary = made(Fault(at_s=2.5, kind=FaultKind.KILL, target=SCORER))
    host.run(6.0)
    assert diary.losses == ["scorer: ended"]
    assert host.supervisor.processes[SCORER].epoch == 1
    assert diary.ticks()[:5] == [1, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("after_effects", "recorded", "judged"), [(0, [1, 2], 2), (1, [1, 2, 3], 2), (2, [1, 2, 3], 3)]
)
def test_kill_within_a_turn_leaves_the_effects_before_it_and_none_after(
    after_effects: int, recorded: list[int], judged: int
) -> None:
    """The Filter's turn: first the record, then the command to its backend."""
    kill = Fault(at_s=1.9, kind=FaultKind.KILL, target=FILTER, after_effects=after_effects)
    host, diary = made(kill, supervision=SupervisionModel(start_s=0.0, notice_s=5.0))
    commanded = 0
    execute = Judge.execute

    def count(self: Judge, command: FilterCommand, /) -> None:
        nonlocal commanded
        commanded += 1
        execute(self, command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "execute", count)
        host.run(2.8)
    assert diary.recorded == recorded
    assert commanded == judged


def test_stopped_process_does_nothing_and_takes_everything_in_when_it_goes_on() -> None:
    stop = Fault(at_s=2.5, kind=FaultKind.STOP, target=FILTER, duration_s=4.0)
    host, diary = made(stop)
    host.run(6.4)
    assert diary.ticks() == [1, 2, 3]
    host.run(6.6)
    assert diary.ticks() == [1, 2, 3, 4, 5, 6, 7]
    assert diary.losses == []


def test_stop_without_an_end_is_ended_by_continue() -> None:
    host, diary = made(
        Fault(at_s=2.5, kind=FaultKind.STOP, target=FILTER), Fault(at_s=4.5, kind=FaultKind.CONTINUE, target=FILTER)
    )
    host.run(4.6)
    assert diary.ticks() == [1, 2, 3, 4, 5]


def test_process_that_is_silent_beyond_the_limit_is_given_up_and_killed() -> None:
    host, diary = made(Fault(at_s=2.5, kind=FaultKind.STOP, target=FILTER, duration_s=30.0))
    host.run(2.6)
    first = host.supervisor.processes[FILTER]
    host.run(40.0)
    assert diary.losses == ["filter: silent beyond the heartbeat limit"]
    assert first.status is Status.DEAD
    assert host.supervisor.processes[FILTER].epoch == 1


def test_zombie_goes_on_and_nobody_listens() -> None:
    """The Scorer cannot be killed while it is stopped. It goes on when its successor has been there for long."""
    zombie = Fault(at_s=2.5, kind=FaultKind.STOP, target=SCORER, duration_s=20.0, as_zombie=True)
    host, diary = made(zombie)
    host.run(2.6)
    old = host.supervisor.processes[SCORER]
    host.run(40.0)
    assert old.status is Status.RUNNING
    assert isinstance(old.shell.machine, Ticker)
    assert old.shell.machine.num_ticks > 3
    assert host.supervisor.processes[FILTER].shell.num_fenced > 0
    assert diary.ticks() == [1, 2, 3, *range(1, len(diary.ticks()) - 2)]


def test_slow_process_takes_as_many_times_as_long() -> None:
    host, diary = made(Fault(at_s=2.5, kind=FaultKind.SLOW, target=FILTER, amount=3.0, duration_s=2.0))
    host.run(9.0)
    judged = [at_s for at_s, _ in diary.heard_of(GroupJudged)]
    heard = [at_s for at_s, _ in diary.heard_of(NoticeGiven)]
    assert sorted(judged) == judged
    assert [round(b - a, 3) for a, b in zip(heard, judged, strict=False)][:7] == [0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 0.5]


def test_turns_that_last_take_in_together_what_came_meanwhile() -> None:
    host, diary = made()
    host.run(0.5)
    host.supervisor.processes[FILTER].turn_s = 2.6
    host.run(9.9)
    times = [round(at_s, 2) for at_s, _ in diary.heard_of(NoticeGiven)]
    assert len(times) == 9
    assert len(set(times)) <= 6
    assert diary.ticks() == sorted(diary.ticks())


# --- faults of links --------------------------------------------------------------------------------------------------


def test_cut_link_carries_nothing_until_it_is_restored_and_control_events_catch_up() -> None:
    host, diary = made(link_fault(FaultKind.CUT, 2.5), link_fault(FaultKind.RESTORE, 6.5))
    host.run(9.0)
    assert diary.ticks() == [1, 2, 3, 8, 9]
    assert diary.versions() == [1, 2, 3, 7, 8, 9], "the newest of those that were lost comes with the line"


def test_cut_ends_by_itself_after_its_duration() -> None:
    host, diary = made(link_fault(FaultKind.CUT, 2.5, duration_s=2.0))
    host.run(6.0)
    assert diary.ticks() == [1, 2, 3, 6]


def test_dropped_packs_are_lost_in_the_share_that_was_asked_for() -> None:
    host, diary = made(link_fault(FaultKind.DROP, 0.5, amount=0.3, duration_s=10_000.0))
    host.run(1000.0)
    assert 0.65 < len(diary.ticks()) / 1001 < 0.75
    assert host.links.num_dropped > 200


def test_duplicates_reach_the_machine_once_where_the_runtime_promises_it() -> None:
    host, diary = made(link=LinkModel(duplicate=1.0))
    host.run(10.5)
    assert diary.ticks() == sorted([*range(1, 12), *range(1, 12)])
    assert diary.versions() == list(range(1, 12))


def test_reordered_control_events_are_handed_on_in_order() -> None:
    host, diary = made(link=LinkModel(min_delay_s=0.5, max_delay_s=2.0, reorder=0.7))
    host.run(200.0)
    assert diary.ticks() != sorted(diary.ticks())
    assert diary.versions() == sorted(set(diary.versions()))


def test_delay_is_added_to_every_pack() -> None:
    host, diary = made(link_fault(FaultKind.DELAY, 2.5, amount=4.0, duration_s=2.0))
    host.run(12.0)
    heard = [round(at_s) for at_s, _ in diary.heard_of(NoticeGiven)]
    assert heard[:7] == [0, 1, 2, 7, 8, 8, 8]


def test_fault_of_an_actor_that_is_not_there_hits_nothing() -> None:
    host, diary = made(Fault(at_s=1.0, kind=FaultKind.KILL, target="engine/7"))
    host.run(3.0)
    assert diary.losses == []


# --- the supervisor ---------------------------------------------------------------------------------------------------


def cast_asking(command: AnyCommand) -> Any:  # noqa: ANN401 - a casting
    class Asking(Ticker):
        def handle(self, event: Event) -> list[AnyCommand]:
            return [command] if isinstance(event, Started) else []

    def cast_one(name: str, epoch: int, timers: Timers, store: LedgerStore | None = None) -> Player:
        if name == SCORER and epoch == 0:
            return Player(machine=Asking(), hears=frozenset(), inbox=NoticeGiven)
        return cast(name, epoch, timers)

    return cast_one


def test_replacement_is_made_on_demand_of_the_incarnation_that_was_meant() -> None:
    for epoch, num_restarts in ((0, 1), (3, 0)):
        host = VirtualHost((FILTER, SCORER), cast_asking(ReplaceActor(FILTER, epoch, "it is late")))
        diary = Diary(host)
        host.run(5.0)
        assert host.supervisor.num_restarts == num_restarts
        assert diary.losses == ["filter: it is late"] * num_restarts


def test_run_fails_with_the_story_of_whoever_asked_for_it() -> None:
    host = VirtualHost((FILTER, SCORER), cast_asking(FailRun("the disk is full")))
    ending = host.run(5.0)
    assert ending is not None
    assert (ending.completed, ending.story) == (False, "the disk is full")


def test_actor_that_is_lost_too_often_ends_the_run() -> None:
    kills = [Fault(at_s=1.0 + 40 * n, kind=FaultKind.KILL, target=SCORER) for n in range(4)]
    host, _ = made(*kills, supervision=SupervisionModel(start_s=0.0, max_restarts=3))
    ending = host.run(1000.0)
    assert ending is not None
    assert not ending.completed
    assert "scorer was lost 4 times within 10 minutes" in ending.story


def test_event_that_cannot_be_read_is_counted_and_dropped() -> None:
    """Through the codec, the Filter reads what its inbox names and nothing else."""

    def deaf(name: str, epoch: int, timers: Timers, store: LedgerStore | None = None) -> Player:
        player = cast(name, epoch, timers)
        return Player(machine=player.machine, hears=player.hears, inbox=NoticeGiven, backend=player.backend)

    host = VirtualHost((FILTER, SCORER), deaf, HostSettings(link=LinkModel(through_codec=True)))
    diary = Diary(host)
    host.run(10.9)
    assert diary.ticks() == sorted(diary.ticks())
    assert diary.versions() == []
    assert host.supervisor.processes[FILTER].num_unreadable >= len(diary.ticks())
