"""The shell: fences, order of effects, timers, the census and what peers hear again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.messages.base import Metric
from penstock.messages.commands import Record, ReleaseWeights, ReplaceActor, Send, StartTimer, StopTimer
from penstock.messages.flow import SampleGenerated, SamplesSettled, SettledState
from penstock.messages.ledger import VersionRecorded
from penstock.messages.local import Started, TimerFired, WeightsPublished
from penstock.messages.membership import (
    ActorEpoch,
    ActorLost,
    ActorReturned,
    EngineJoined,
    EngineLost,
    HeldLease,
    LeasesAsked,
    LeasesHeld,
    LeaseStage,
)
from penstock.messages.samples import Completed, Part, Prompt, Sample, SampleKey, VersionSpan
from penstock.messages.training import NoticeGiven, StopAsked
from penstock.messages.waits import OverdueWait, Wait, WaitsReported
from penstock.messages.weights import VersionAnnounced, WeightManifest
from penstock.messages.wire import Envelope, Header, InboxDecoder, encode_event, encode_pack
from penstock.runtime.shell.shell import IDLE_S, Shell, ShellSettings
from penstock.runtime.shell.watchdog import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand, BackendCommand, FailRun
    from penstock.messages.ledger import LedgerEntry

RECORD = Record((VersionRecorded(version=1),))
PEERS = frozenset((ActorLost, ActorReturned, EngineJoined, EngineLost))


class Scripted:
    """A machine that answers each event with what the test wrote down for its class, and remembers what it heard."""

    def __init__(self) -> None:
        self.answers: dict[type[Event], list[AnyCommand]] = {}
        self.heard: list[Event] = []
        self.held: tuple[HeldLease, ...] = ()
        self.is_valid = True
        self.waited: tuple[Wait, ...] = ()

    def handle(self, event: Event) -> list[AnyCommand]:
        self.heard.append(event)
        return list(self.answers.get(type(event), []))

    def validate(self) -> None:
        assert self.is_valid

    def leases(self) -> tuple[HeldLease, ...]:
        return self.held

    def waits(self) -> tuple[Wait, ...]:
        return self.waited

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (Metric("scripted/heard", len(self.heard)),)

    @property
    def state(self) -> str:
        return "scripted"


class Journal:
    """A host that writes down, in order, what its shell asks of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[tuple[str, object]] = []
        self.packs: list[tuple[str, list[Envelope]]] = []

    def now_s(self) -> float:
        return self.now

    def commit(self, entries: Sequence[LedgerEntry]) -> None:
        self.done.append(("commit", tuple(entries)))

    def transmit(self, to: str, envelopes: list[Envelope]) -> None:
        self.done.append((to, envelopes))
        self.packs.append((to, envelopes))

    def execute(self, command: BackendCommand) -> None:
        self.done.append(("execute", command))

    def ask_supervisor(self, command: ReplaceActor | FailRun) -> None:
        self.done.append(("supervisor", command))

    def sent(self, to: str) -> list[Event]:
        """Every event that went to this peer."""
        return [event for name, pack in self.packs if name == to for _, event in pack]

    def headers(self, to: str) -> list[Header]:
        return [header for name, pack in self.packs if name == to for header, _ in pack]


class Bench:
    """A shell between a scripted machine and a journal."""

    def __init__(
        self,
        *,
        name: str = "weight_publisher",
        hears: frozenset[type[Event]] = PEERS,
        overdue_after_s: float = NEVER,
        keeps_encoded: bool = False,
    ) -> None:
        self.machine, self.host = Scripted(), Journal()
        settings = ShellSettings(
            name=name,
            epoch=1,
            heartbeat_s=1.0,
            resend_after_s=5.0,
            overdue_after_s=overdue_after_s,
            keeps_encoded=keeps_encoded,
            validate=True,
        )
        self.shell = Shell(self.machine, self.host, settings=settings, hears=hears)
        self._message_ids: dict[str, int] = {}

    def start(self) -> None:
        self.shell.start()
        self.shell.end_turn()

    def hear(self, sender: str, event: Event, epoch: int = 0, *, message_id: int = 0, link_sequence: int = 0) -> None:
        known = self._message_ids.get(sender, 0) + 1
        self._message_ids[sender] = known
        self.shell.on_frame(Header(sender, epoch, link_sequence or known, message_id or known, 0), event)

    def local(self, event: Event) -> None:
        self.shell.on_local(event)
        self.shell.end_turn()

    def advance(self, now_s: float) -> None:
        self.host.now = now_s
        self.shell.fire_timers()
        self.shell.end_turn()

    def fired(self) -> list[str]:
        return [event.key for event in self.machine.heard if isinstance(event, TimerFired)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def announced(version: int) -> VersionAnnounced:
    return VersionAnnounced(version=version, publish=version)


def generated(group_id: int) -> SampleGenerated:
    sample = Sample(key=SampleKey(group_id, 0), parts=(Part(),), outcome=Completed())
    return SampleGenerated(sample=sample, group_size=1, prompt=Prompt(row=0, epoch=0, tokens=b""))


def published() -> WeightsPublished:
    manifest = WeightManifest(version=0, publish=0, learner_epoch=0, transport="", location="", size_bytes=0, digest="")
    return WeightsPublished(manifest=manifest)


# --- order of effects -------------------------------------------------------------------------------------------------


def test_every_record_of_a_turn_is_durable_before_any_effect_of_the_turn(bench: Bench) -> None:
    bench.machine.answers[Started] = [Send("buffer", announced(1)), ReleaseWeights(1)]
    bench.machine.answers[WeightsPublished] = [RECORD, Send("buffer", StopAsked(reason=""))]
    bench.shell.start()
    bench.shell.on_local(published())
    bench.shell.end_turn()
    assert [what for what, _ in bench.host.done] == ["commit", "execute", "buffer"]
    assert bench.host.done[0] == ("commit", RECORD.entries)


def test_what_one_turn_sends_to_a_peer_is_one_pack_in_order(bench: Bench) -> None:
    bench.machine.answers[Started] = [
        Send("buffer", announced(1)),
        Send("learner", announced(1)),
        Send("buffer", StopAsked(reason="")),
    ]
    bench.start()
    assert [what for what, _ in bench.host.done] == ["buffer", "learner"]
    assert bench.host.sent("buffer") == [announced(1), StopAsked(reason="")]


def test_control_event_that_a_later_one_of_the_same_turn_replaces_is_not_sent(bench: Bench) -> None:
    bench.machine.answers[Started] = [Send("buffer", announced(1)), Send("buffer", announced(2))]
    bench.start()
    assert bench.host.sent("buffer") == [announced(2)]


def test_cause_of_an_event_is_what_was_being_handled(bench: Bench) -> None:
    bench.machine.answers[StopAsked] = [Send("learner", announced(1))]
    bench.hear("buffer", StopAsked(reason=""), message_id=41)
    bench.shell.end_turn()
    bench.machine.answers[WeightsPublished] = [Send("learner", announced(2))]
    bench.local(published())
    assert [header.cause for header in bench.host.headers("learner")] == [41, 0]


def test_requests_to_the_supervisor_go_to_the_host(bench: Bench) -> None:
    asked = ReplaceActor("engine/0", 3, "late")
    bench.machine.answers[Started] = [asked]
    bench.start()
    assert bench.host.done == [("supervisor", asked)]


def test_broken_invariant_of_the_machine_is_raised_at_the_event_that_broke_it(bench: Bench) -> None:
    bench.start()
    bench.machine.is_valid = False
    with pytest.raises(AssertionError):
        bench.shell.on_local(published())


# --- membership -------------------------------------------------------------------------------------------------------


def test_first_frame_of_a_higher_epoch_changes_the_membership_before_it_is_handled(bench: Bench) -> None:
    bench.hear("engine/0", StopAsked(reason="old"), epoch=0)
    bench.hear("engine/0", StopAsked(reason="new"), epoch=1)
    assert bench.machine.heard == [
        EngineJoined(name="engine/0", epoch=0),
        StopAsked(reason="old"),
        EngineLost(name="engine/0", epoch=0),
        EngineJoined(name="engine/0", epoch=1),
        StopAsked(reason="new"),
    ]


def test_incarnation_that_was_given_up_is_not_heard(bench: Bench) -> None:
    bench.shell.on_returned("engine/0", 0)
    bench.shell.on_lost("engine/0", 0)
    bench.machine.heard.clear()
    bench.hear("engine/0", StopAsked(reason=""), epoch=0)
    assert bench.machine.heard == []
    assert bench.shell.num_fenced == 1


def test_news_that_a_machine_does_not_hear_still_fence() -> None:
    bench = Bench(hears=frozenset())
    bench.shell.on_lost("engine/0", 2)
    bench.hear("engine/0", StopAsked(reason=""), epoch=2)
    assert bench.machine.heard == []


def test_news_of_oneself_are_ignored(bench: Bench) -> None:
    bench.shell.on_returned("weight_publisher", 1)
    bench.shell.on_lost("weight_publisher", 1)
    assert bench.machine.heard == []


def test_gaps_in_a_link_are_counted_and_overtaking_is_not_a_second_gap(bench: Bench) -> None:
    for sequence in (1, 2, 5, 4, 3, 6):
        bench.hear("buffer", NoticeGiven(name="", text=""), link_sequence=sequence)
    assert bench.shell.num_gaps == 1


# --- what peers hear again --------------------------------------------------------------------------------------------


def test_peer_that_returned_hears_again_what_is_not_settled_once_it_is_reachable(bench: Bench) -> None:
    bench.machine.answers[Started] = [Send("scorer", generated(0)), Send("scorer", announced(3))]
    bench.start()
    bench.host.packs.clear()
    bench.hear("scorer", NoticeGiven(name="", text=""), epoch=1)  # known now, but not how to reach it
    bench.shell.end_turn()
    assert bench.host.sent("scorer") == []
    bench.shell.on_returned("scorer", 1)
    bench.shell.end_turn()
    assert bench.host.sent("scorer") == [generated(0), announced(3)]


def test_peer_that_was_replaced_hears_the_same_bytes_again_under_a_new_place_in_the_line() -> None:
    bench = Bench(keeps_encoded=True)
    bench.machine.answers[Started] = [Send("scorer", generated(0))]
    bench.start()
    bench.shell.on_returned("scorer", 1)
    bench.shell.end_turn()
    first, again = (encode_pack(pack) for name, pack in bench.host.packs if name == "scorer")
    decoder = InboxDecoder[SampleGenerated](SampleGenerated)
    ((header, event),), _ = decoder.decode(first)
    ((header_again, event_again),), _ = decoder.decode(again)
    assert event == event_again == generated(0)
    assert msgspec.structs.replace(header, link_sequence=header.link_sequence + 1) == header_again
    assert first[len(first) - len(encode_event(event)) :] == again[len(again) - len(encode_event(event)) :]


def test_what_is_said_once_waits_until_the_peer_can_be_reached(bench: Bench) -> None:
    """The first frame of a new engine overtakes the word on where it is; what it is told then must not be lost."""
    notices = [NoticeGiven(name="", text=str(n)) for n in range(3)]
    bench.hear("engine/0", StopAsked(reason=""), epoch=1)
    for notice in notices[:2]:
        bench.machine.answers[WeightsPublished] = [Send("engine/0", notice), Send("engine/0", announced(1))]
        bench.local(published())
    assert bench.host.sent("engine/0") == []
    bench.shell.on_returned("engine/0", 1)
    bench.shell.end_turn()
    assert bench.host.sent("engine/0") == [announced(1), *notices[:2]]
    bench.machine.answers[WeightsPublished] = [Send("engine/0", notices[2])]
    bench.local(published())
    assert bench.host.sent("engine/0") == [announced(1), *notices]


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_what_waited_for_an_incarnation_is_not_told_to_its_successor(bench: Bench, is_lost_first: bool) -> None:
    bench.hear("engine/0", StopAsked(reason=""), epoch=1)
    bench.machine.answers[WeightsPublished] = [Send("engine/0", NoticeGiven(name="", text="for epoch 1"))]
    bench.local(published())
    if is_lost_first:
        bench.shell.on_lost("engine/0", 1)
    bench.shell.on_returned("engine/0", 2)
    bench.shell.end_turn()
    assert bench.host.sent("engine/0") == []


def test_supervisor_can_always_be_reached(bench: Bench) -> None:
    bench.hear("supervisor", StopAsked(reason=""))
    bench.machine.answers[WeightsPublished] = [Send("supervisor", NoticeGiven(name="", text=""))]
    bench.local(published())
    assert bench.host.sent("supervisor") == [NoticeGiven(name="", text="")]


def test_repeated_announcement_of_the_same_incarnation_repeats_nothing(bench: Bench) -> None:
    bench.machine.answers[Started] = [Send("scorer", announced(3))]
    bench.start()
    for _ in range(3):
        bench.shell.on_returned("scorer", 0)
        bench.shell.end_turn()
    assert bench.host.sent("scorer") == [announced(3)] * 2


def test_event_that_is_sent_again_keeps_its_message_id(bench: Bench) -> None:
    bench.machine.answers[Started] = [Send("scorer", generated(0))]
    bench.start()
    bench.advance(5.0)
    first, second = bench.host.headers("scorer")
    assert first.message_id == second.message_id
    assert (first.link_sequence, second.link_sequence) == (1, 2)


# --- timers -----------------------------------------------------------------------------------------------------------


def test_timer_fires_once_when_it_runs_out(bench: Bench) -> None:
    bench.machine.answers[Started] = [StartTimer("a", 2.5)]
    bench.start()
    for now_s in (1.0, 2.4, 2.5, 9.0):
        bench.advance(now_s)
    assert bench.fired() == ["a"]


def test_timer_started_anew_runs_from_then_on(bench: Bench) -> None:
    bench.machine.answers[Started] = [StartTimer("a", 2.0)]
    bench.machine.answers[WeightsPublished] = [StartTimer("a", 2.0)]
    bench.start()
    bench.host.now = 1.5
    bench.local(published())
    bench.advance(2.0)
    assert bench.fired() == []
    bench.advance(3.5)
    assert bench.fired() == ["a"]


@pytest.mark.parametrize("command", [StartTimer("a", 2.0), StopTimer("a")])
def test_timer_that_an_event_restarts_or_stops_does_not_fire_later_in_the_same_turn(
    bench: Bench, command: StartTimer | StopTimer
) -> None:
    bench.machine.answers[Started] = [StartTimer("a", 2.0)]
    bench.machine.answers[WeightsPublished] = [command]
    bench.start()
    bench.host.now = 2.0
    bench.shell.on_local(published())
    bench.shell.fire_timers()
    bench.shell.end_turn()
    assert bench.fired() == []


def test_next_timer_is_the_earliest_of_timers_and_repeats(bench: Bench) -> None:
    bench.start()
    assert bench.shell.next_timer_s() == 1.0 + IDLE_S
    bench.machine.answers[WeightsPublished] = [Send("scorer", generated(0)), StartTimer("a", 30.0)]
    bench.local(published())
    assert bench.shell.next_timer_s() == 5.0
    bench.machine.answers[WeightsPublished] = [StartTimer("b", 0.5), StartTimer("c", 0.1), StopTimer("c")]
    bench.local(published())
    assert bench.shell.next_timer_s() == 0.5


# --- the census -------------------------------------------------------------------------------------------------------


def ask(bench: Bench, *members: ActorEpoch, lost: tuple[ActorEpoch, ...] = (), epoch: int = 0) -> LeasesHeld:
    bench.shell.on_returned("prompt_source", epoch)
    bench.hear("prompt_source", LeasesAsked(round=4, members=members, lost=lost), epoch=epoch)
    bench.shell.end_turn()
    answer = bench.host.sent("prompt_source")[-1]
    assert isinstance(answer, LeasesHeld)
    return answer


def test_answer_to_a_census_has_what_is_worked_on_and_what_is_kept(bench: Bench) -> None:
    bench.machine.held = (HeldLease(SampleKey(7, 0), 1, LeaseStage.RUNNING, 9),)
    bench.machine.answers[Started] = [Send("scorer", generated(3))]
    bench.start()
    bench.hear("buffer", SamplesSettled(settled=SettledState(5, 2, ())))
    answer = ask(bench, epoch=2)
    assert answer == LeasesHeld(
        actor=ActorEpoch("weight_publisher", 1),
        round=4,
        asker_epoch=2,
        settled_sequence=5,
        leases=(*bench.machine.held, HeldLease(SampleKey(3, 0), 0, LeaseStage.PASSED_ON, 0)),
    )
    assert not [event for event in bench.machine.heard if isinstance(event, LeasesAsked)]


def test_census_fences_whom_the_asker_knows_to_be_lost_before_it_is_answered(bench: Bench) -> None:
    bench.shell.on_returned("engine/0", 0)
    ask(bench, ActorEpoch("engine/1", 0), lost=(ActorEpoch("engine/0", 0),))
    assert EngineLost(name="engine/0", epoch=0) in bench.machine.heard
    assert EngineJoined(name="engine/1", epoch=0) in bench.machine.heard
    assert not bench.shell.membership.admits("engine/0", 0)


def test_census_of_someone_who_has_not_heard_of_an_engine_yet_does_not_fence_it(bench: Bench) -> None:
    bench.shell.on_lost("engine/0", 0)
    bench.shell.on_returned("engine/0", 1)
    ask(bench, lost=(ActorEpoch("engine/0", 0),))
    assert bench.shell.membership.epoch_of("engine/0") == 1


def test_census_that_is_sent_names_who_was_given_up(bench: Bench) -> None:
    bench.shell.on_lost("engine/0", 3)
    bench.machine.answers[Started] = [Send("scorer", LeasesAsked(round=1, members=()))]
    bench.start()
    assert bench.host.sent("scorer") == [LeasesAsked(round=1, members=(), lost=(ActorEpoch("engine/0", 3),))]


def test_prefixes_are_told_only_to_an_asker_who_needs_them(bench: Bench) -> None:
    part = Part(tokens=b"\1\0\0\0", logprobs=b"\0\0\0\0", spans=(VersionSpan(2, 1),))
    bench.machine.held = (HeldLease(SampleKey(7, 0), 1, LeaseStage.RUNNING, 1, part),)
    assert ask(bench).leases == (HeldLease(SampleKey(7, 0), 1, LeaseStage.RUNNING, 1),)
    bench.hear("prompt_source", LeasesAsked(round=5, members=(), with_prefixes=True))
    bench.shell.end_turn()
    told = bench.host.sent("prompt_source")[-1]
    assert isinstance(told, LeasesHeld)
    assert told.leases == bench.machine.held


# --- lines and waits --------------------------------------------------------------------------------------------------


def test_when_a_line_is_restored_what_is_kept_for_the_peer_is_said_again_at_once(bench: Bench) -> None:
    bench.shell.on_returned("scorer", 0)
    bench.machine.answers[Started] = [Send("scorer", generated(3)), Send("buffer", announced(1))]
    bench.start()
    for now_s in (5.0, 15.0):
        bench.advance(now_s)
    assert len(bench.host.sent("scorer")) == 3, "the next repeat would be due at 35 s"
    bench.host.now = 16.0
    bench.shell.on_line_restored("scorer")
    bench.shell.end_turn()
    assert len(bench.host.sent("scorer")) == 4
    assert len(bench.host.sent("buffer")) == 3, "nothing is said again to others"
    bench.advance(21.0)
    assert len(bench.host.sent("scorer")) == 5, "and the pause between repeats begins anew"


def test_what_an_actor_waits_for_too_long_is_told_to_the_supervisor() -> None:
    bench = Bench(overdue_after_s=80.0)
    bench.start()
    assert bench.shell.next_timer_s() == 10.0
    bench.machine.waited = (Wait("publish", "version 0", "learner"),)
    for now_s in range(10, 90, 10):
        bench.advance(float(now_s))
    assert bench.host.sent("supervisor") == []
    bench.advance(90.0)
    (told,) = bench.host.sent("supervisor")
    assert told == WaitsReported(
        name="weight_publisher", epoch=1, at_s=90.0, waits=(OverdueWait(bench.machine.waited[0], 10.0),)
    )


def test_counters_of_the_actor_are_among_those_of_its_shell(bench: Bench) -> None:
    bench.start()
    assert Metric("scripted/heard", 1) in bench.shell.metrics
