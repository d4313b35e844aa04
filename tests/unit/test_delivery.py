"""Delivery: kept until settled, handed on once, control events in order."""

from __future__ import annotations

import gc
import math
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire import EVENTS, example_event

from penstock.messages.base import Delivery as Kind
from penstock.messages.flow import (
    DemandGranted,
    GenerationClosed,
    GroupAdmitted,
    GroupRejected,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    SamplesSettled,
    SettledState,
)
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.samples import (
    Completed,
    Group,
    InfraError,
    Part,
    Prompt,
    Sample,
    SampleEnd,
    SampleKey,
    TerminalState,
    VersionSpan,
)
from penstock.messages.weights import VersionAnnounced
from penstock.messages.wire import EncodedEvent, encode_event
from penstock.runtime.shell.delivery import MAX_BACKOFF, Delivery, Outgoing

if TYPE_CHECKING:
    from penstock.messages.base import Event

PROMPT = Prompt(row=0, epoch=0, tokens=b"")
RESEND_S = 5.0


def sample(group_id: int, index: int, attempt: int = 0) -> Sample:
    part = Part(tokens=b"\0" * 8, logprobs=b"\0" * 8, spans=(VersionSpan(0, 2),))
    return Sample(key=SampleKey(group_id, index), attempt=attempt, parts=(part,), outcome=Completed())


def generated(group_id: int, index: int = 0, attempt: int = 0) -> SampleGenerated:
    return SampleGenerated(sample=sample(group_id, index, attempt), group_size=2, prompt=PROMPT)


def scored(group_id: int, index: int = 0) -> SampleScored:
    return SampleScored(sample=sample(group_id, index), group_size=2, prompt=PROMPT)


def failed(group_id: int, index: int = 0) -> SampleFailed:
    key = SampleKey(group_id, index)
    return SampleFailed(key=key, attempt=2, group_size=2, prompt=PROMPT, reason="no engine", num_tokens=5)


def closed(group_id: int, attempt: int) -> GenerationClosed:
    key = SampleKey(group_id, 0)
    return GenerationClosed(engine="engine/0", key=key, attempt=attempt, outcome=InfraError(detail=""), num_tokens=0)


def announced(version: int) -> VersionAnnounced:
    return VersionAnnounced(version=version, publish=version)


def settled(sequence: int, floor: int, above: tuple[int, ...] = ()) -> SamplesSettled:
    return SamplesSettled(settled=SettledState(sequence, floor, above))


class Sender:
    """A delivery with a counter of messages."""

    def __init__(self, *, keeps_encoded: bool = False) -> None:
        self.delivery = Delivery(resend_after_s=RESEND_S, keeps_encoded=keeps_encoded)
        self.message_id = 0

    def send(self, to: str, event: Event, now_s: float = 0.0) -> Outgoing:
        self.message_id += 1
        outgoing = Outgoing(to, event, self.message_id)
        self.delivery.sent(outgoing, now_s)
        return outgoing


# --- keeping ----------------------------------------------------------------------------------------------------------


def test_data_is_repeated_with_growing_pauses_until_it_is_settled() -> None:
    sender = Sender()
    outgoing = sender.send("scorer", generated(0))
    times = [now for now in range(400) if sender.delivery.overdue(float(now)) == [outgoing]]
    assert times == [5, 15, 35, 75, 135, 195, 255, 315, 375]
    assert times[-1] - times[-2] == MAX_BACKOFF * RESEND_S
    sender.delivery.settle(SettledState(1, 1, ()))
    assert sender.delivery.overdue(1000.0) == []
    assert sender.delivery.num_kept == 0


def test_next_due_never_comes_after_what_is_overdue() -> None:
    sender = Sender()
    assert sender.delivery.next_due_s == math.inf
    sender.send("scorer", generated(0), 1.0)
    assert sender.delivery.next_due_s == 6.0
    sender.delivery.overdue(6.0)
    assert sender.delivery.next_due_s == 16.0


def test_peer_that_was_replaced_hears_everything_again_in_order_and_nobody_else_does() -> None:
    sender = Sender()
    first = sender.send("scorer", generated(0))
    sender.send("prompt_source", closed(0, 0))
    second = sender.send("scorer", generated(1))
    assert sender.delivery.returned("scorer", 3.0) == [first, second]
    assert [o.to for o in sender.delivery.overdue(5.0)] == ["prompt_source"]
    assert sender.delivery.overdue(8.0) == [first, second]


def test_what_is_above_the_floor_is_kept_unless_it_is_listed() -> None:
    sender = Sender()
    for group_id in range(5):
        sender.send("scorer", generated(group_id))
    sender.delivery.settle(SettledState(1, 2, (3,)))
    assert [lease.key.group_id for lease in sender.delivery.leases()] == [2, 4]


def test_what_is_sent_about_a_settled_group_is_not_kept() -> None:
    sender = Sender()
    sender.delivery.settle(SettledState(1, 2, ()))
    sender.send("scorer", generated(1))
    assert sender.delivery.num_kept == 0
    assert sender.delivery.next_due_s == math.inf


def test_settlement_that_comes_late_changes_nothing() -> None:
    sender = Sender()
    sender.delivery.settle(SettledState(2, 0, ()))
    sender.send("scorer", generated(0))
    sender.delivery.settle(SettledState(1, 5, ()))
    assert sender.delivery.num_kept == 1
    assert sender.delivery.settled.sequence == 2


def test_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    sender = Sender()
    sender.send("prompt_source", closed(0, 0))
    later = sender.send("prompt_source", closed(0, 1))
    assert sender.delivery.overdue(5.0) == [later]


def test_newest_control_event_of_each_topic_is_repeated_to_each_receiver() -> None:
    sender = Sender()
    sender.send("buffer", announced(1))
    other = sender.send("learner", announced(1))
    newest = sender.send("buffer", announced(2))
    assert sender.delivery.overdue(5.0) == [other, newest]
    assert sender.delivery.returned("buffer", 6.0) == [newest]


@pytest.mark.parametrize("event", [settled(1, 1), DemandGranted(total=1, spans=(), settled=SettledState(1, 1, ()))])
def test_whoever_tells_a_settlement_knows_it(event: Event) -> None:
    sender = Sender()
    sender.send("prompt_source", event)
    assert 0 in sender.delivery.settled
    assert 1 not in sender.delivery.settled


# --- as bytes ---------------------------------------------------------------------------------------------------------


def test_data_that_is_kept_as_bytes_is_said_again_byte_by_byte_to_a_peer_that_was_replaced() -> None:
    sender, event = Sender(keeps_encoded=True), generated(0)
    outgoing = sender.send("scorer", event)
    assert outgoing.event == EncodedEvent(body=encode_event(event))
    assert sender.delivery.returned("scorer", 3.0) == [outgoing]
    assert sender.delivery.overdue(8.0) == [outgoing]


def test_only_data_that_is_kept_becomes_bytes() -> None:
    sender, event = Sender(keeps_encoded=True), announced(1)
    assert sender.send("buffer", event).event is event
    sender.delivery.settle(SettledState(1, 1, ()))
    assert sender.send("scorer", generated(0)).event == generated(0)
    assert sender.delivery.num_kept == 0


def test_bytes_take_less_than_the_events_and_go_with_their_settlement() -> None:
    num_groups, left, taken = 500, 0, list[int]()
    for keeps_encoded in (False, True):
        sender = Sender(keeps_encoded=keeps_encoded)
        gc.collect()  # also empties the free lists of tuples and dicts, which hold what other tests have left there
        tracemalloc.start()
        try:
            for group_id in range(num_groups):
                sender.send("scorer", generated(group_id))
            taken.append(tracemalloc.get_traced_memory()[0])
            sender.delivery.settle(SettledState(1, num_groups, ()))
            gc.collect()
            left = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert taken[1] < 0.8 * taken[0]
    assert left < 0.1 * taken[1]


# --- accepting --------------------------------------------------------------------------------------------------------


def test_first_result_wins_whatever_its_attempt_and_the_other_is_counted_as_waste() -> None:
    delivery = Delivery(resend_after_s=RESEND_S)
    assert delivery.accepts(generated(0, 0, attempt=1), "engine/1", 0, 1)
    assert not delivery.accepts(generated(0, 0, attempt=0), "engine/0", 0, 7)
    assert (delivery.num_duplicates, delivery.num_duplicate_tokens) == (1, 2)


def test_repeat_on_the_wire_is_no_waste() -> None:
    delivery = Delivery(resend_after_s=RESEND_S)
    delivery.accepts(generated(0), "engine/0", 0, 1)
    assert not delivery.accepts(generated(0), "engine/0", 0, 1)
    assert delivery.num_duplicates == 0


def test_failure_that_comes_after_the_response_is_dropped_and_the_other_way_round() -> None:
    delivery = Delivery(resend_after_s=RESEND_S)
    assert delivery.accepts(generated(0, 0), "engine/0", 0, 1)
    assert not delivery.accepts(failed(0, 0), "prompt_source", 0, 1)
    assert delivery.accepts(failed(0, 1), "prompt_source", 0, 2)
    assert not delivery.accepts(generated(0, 1), "engine/0", 0, 2)


def test_group_is_admitted_or_rejected_once() -> None:
    delivery = Delivery(resend_after_s=RESEND_S)
    group = Group(group_id=3, prompt=PROMPT, samples=(sample(3, 0),))
    assert delivery.accepts(GroupRejected(group_id=3, cause="", ended=()), "filter", 0, 1)
    assert not delivery.accepts(GroupAdmitted(group=group), "filter", 1, 1)


def test_data_of_a_settled_group_is_late() -> None:
    delivery = Delivery(resend_after_s=RESEND_S)
    delivery.accepts(settled(1, 1), "buffer", 0, 1)
    assert not delivery.accepts(generated(0), "engine/0", 0, 1)
    assert delivery.num_late == 1


def test_what_was_heard_of_settled_groups_is_forgotten() -> None:
    delivery, num_groups = Delivery(resend_after_s=RESEND_S), 2000

    def hear_and_settle(group_id: int) -> None:
        assert delivery.accepts(generated(group_id), "engine/0", 0, group_id)
        delivery.settle(SettledState(group_id + 1, group_id + 1, ()))

    hear_and_settle(0)
    tracemalloc.start()
    try:
        for group_id in range(1, num_groups):
            hear_and_settle(group_id)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 50 * num_groups  # one table for each of them would be more than four times that


def test_every_end_of_a_generation_reaches_prompt_source_which_compares_attempts_itself() -> None:
    delivery = Delivery(resend_after_s=RESEND_S)
    assert [delivery.accepts(closed(0, attempt), "engine/0", 0, n) for n, attempt in enumerate((0, 1, 0))] == [True] * 3


def test_control_events_are_handed_on_in_order_only() -> None:
    delivery = Delivery(resend_after_s=RESEND_S)
    heard = [
        delivery.accepts(announced(1), "weight_publisher", 0, 5),
        delivery.accepts(announced(1), "weight_publisher", 0, 5),
        delivery.accepts(announced(0), "weight_publisher", 0, 4),
        delivery.accepts(announced(2), "weight_publisher", 1, 1),
        delivery.accepts(announced(9), "weight_publisher", 0, 9),
        delivery.accepts(settled(1, 0), "buffer", 0, 1),
    ]
    assert heard == [True, False, False, True, False, True]


# --- the census -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_encoded", [False, True])
def test_leases_name_every_sample_that_is_kept(keeps_encoded: bool) -> None:
    sender = Sender(keeps_encoded=keeps_encoded)
    sender.send("scorer", generated(0, 1, attempt=2))
    sender.send("filter", failed(1, 0))
    ends = (SampleEnd(key=SampleKey(2, 1), state=TerminalState.FAILED, cause="", num_tokens=3),)
    sender.send("buffer", GroupAdmitted(group=Group(group_id=2, prompt=PROMPT, samples=(sample(2, 0),), ended=ends)))
    end = SampleEnd(key=SampleKey(3, 0), state=TerminalState.FILTERED, cause="")
    sender.send("buffer", GroupRejected(group_id=3, cause="", ended=(end,)))
    sender.send("prompt_source", closed(4, 0))
    assert list(sender.delivery.leases()) == [
        HeldLease(SampleKey(0, 1), 2, LeaseStage.PASSED_ON, 2),
        HeldLease(SampleKey(1, 0), 2, LeaseStage.PASSED_ON, 5),
        HeldLease(SampleKey(2, 0), 0, LeaseStage.PASSED_ON, 2),
        HeldLease(SampleKey(2, 1), 0, LeaseStage.PASSED_ON, 3),
        HeldLease(SampleKey(3, 0), 0, LeaseStage.PASSED_ON, 0),
    ]


@pytest.mark.parametrize(
    "event", [event for event in EVENTS if event.delivery is Kind.DATA], ids=lambda event: event.__name__
)
def test_leases_are_the_same_from_bytes(event: type[Event]) -> None:
    plain, encoded = Sender(), Sender(keeps_encoded=True)
    for sender in (plain, encoded):
        sender.send("scorer", example_event(event))
        assert sender.delivery.num_kept == 1
    assert list(encoded.delivery.leases()) == list(plain.delivery.leases())


# --- together ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_everything_arrives_once_over_a_link_that_loses_doubles_and_reorders(data: st.DataObject) -> None:
    """A sender and a receiver, any fate for each message: once the link is good again, all is there, once."""
    sender, receiver = Sender(), Delivery(resend_after_s=RESEND_S)
    arrived: list[int] = []
    num_groups = data.draw(st.integers(1, 6))
    on_its_way = [sender.send("filter", scored(group_id), float(group_id)) for group_id in range(num_groups)]
    now_s = float(num_groups)
    for round_number in range(8):
        is_good = round_number >= 4
        for outgoing in data.draw(st.permutations(on_its_way)):
            copies = 1 if is_good else data.draw(st.sampled_from((0, 1, 2)))
            for _ in range(copies):
                if receiver.accepts(outgoing.event, "scorer", 0, outgoing.message_id):
                    assert isinstance(outgoing.event, SampleScored)
                    arrived.append(outgoing.event.sample.key.group_id)
        now_s += MAX_BACKOFF * RESEND_S
        on_its_way = sender.delivery.overdue(now_s)
    assert sorted(arrived) == list(range(num_groups))
    sender.delivery.settle(SettledState(1, num_groups, ()))
    assert sender.delivery.num_kept == 0
