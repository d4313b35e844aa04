"""What a fork is made of: a shell that retraces, an engine that takes over, decisions that are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from penstock.backends.engines.options import EnginesOptions, LatencyOptions
from penstock.backends.simulated.engine import SimulatedEngine
from penstock.backends.simulated.lengths import num_tokens_of
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Event
from penstock.messages.commands import ApplyWeights, Generate, Record, Send, StartTimer
from penstock.messages.flow import DemandGranted, SamplesSettled, SettledState
from penstock.messages.ledger import PolicyRecorded, VersionRecorded
from penstock.messages.local import GenerationEnded, TimerFired, WeightsSwapped
from penstock.messages.membership import ActorReturned
from penstock.messages.samples import Part, Prompt, Purpose, SampleKey, VersionSpan
from penstock.messages.training import OnStale, UpdateMode
from penstock.messages.weights import Canary, WeightManifest
from penstock.messages.wire import Header
from penstock.runtime.prediction.forking.decisions import Decisions, first_difference
from penstock.runtime.shell.shell import Shell, ShellSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.commands import AnyCommand

SETTLED = SettledState(1, 0, ())
GRANTED = DemandGranted(total=4, spans=(), settled=SETTLED)


class Clock:
    """Timers of a backend, put forward by hand."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now = now_s
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def now_s(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.waiting.append((self.now + delay_s, callback))

    def run(self, until_s: float) -> None:
        """Let everything happen up to then."""
        while self.waiting and min(at_s for at_s, _ in self.waiting) <= until_s:
            first = min(self.waiting, key=lambda each: each[0])
            self.waiting.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = until_s


# --- the engine -------------------------------------------------------------------------------------------------------

OPTIONS = EnginesOptions(
    backend="simulated",
    slots=2,
    progress_tokens=8,
    simulated=LatencyOptions(prefill_s=0.0, token_s=0.1, token_load_s=0.0),
)


def generate(index: int, num_made: int = 0) -> Generate:
    part = Part(
        tokens=pack_tokens(range(num_made)), logprobs=pack_floats([0.0] * num_made), spans=(VersionSpan(3, num_made),)
    )
    return Generate(
        key=SampleKey(1, index),
        attempt=0,
        purpose=Purpose.TRAIN,
        prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([1])),
        seed=index,
        deadline_version=9,
        prefix=part if num_made else None,
    )


def taken_over(begun: list[tuple[Generate, float]], until_s: float) -> dict[SampleKey, tuple[float, Part]]:
    """When each request has ended, with its response, on an engine that takes over at 50 s."""
    clock, ended = Clock(50.0), dict[SampleKey, tuple[float, Part]]()

    def emit(event: Any) -> None:  # noqa: ANN401 - any event
        if isinstance(event, GenerationEnded):
            ended[event.key] = clock.now, event.part

    engine = SimulatedEngine(OPTIONS, max_response_tokens=1000, timers=clock)
    engine.start(emit, lambda error: pytest.fail(str(error)))
    engine.take_over(3, (), begun)
    clock.run(until_s)
    return ended


def test_an_engine_goes_on_from_what_was_reported_and_what_was_made_since() -> None:
    length = num_tokens_of(OPTIONS.simulated, 1000, generate(0), run_seed=0)
    ended = taken_over([(generate(0, num_made=16), 0.3)], 1000.0)
    at_s, part = ended[SampleKey(1, 0)]
    assert part.num_tokens == length
    assert sum(span.num_tokens for span in part.spans) == length
    assert at_s == pytest.approx(50.0 + (length - 16 - 3) * 0.1, abs=0.11)


def test_what_is_beyond_its_slots_waits_there_too() -> None:
    ended = taken_over([(generate(index, num_made=8), 0.0) for index in range(2)] + [(generate(2), 0.0)], 1000.0)
    first_s = min(ended[SampleKey(1, 0)][0], ended[SampleKey(1, 1)][0])
    length = num_tokens_of(OPTIONS.simulated, 1000, generate(2), run_seed=0)
    assert ended[SampleKey(1, 2)][0] == pytest.approx(first_s + length * 0.1, abs=0.11)


def test_no_more_is_made_since_a_report_than_would_have_been_reported() -> None:
    soon, late = (
        taken_over([(generate(0, num_made=16), since_s)], 1000.0)[SampleKey(1, 0)][0] for since_s in (0.8, 99.0)
    )
    assert soon == pytest.approx(late)


def test_a_response_that_is_longer_than_what_was_drawn_gets_a_longer_one() -> None:
    drawn = num_tokens_of(OPTIONS.simulated, 1000, generate(0), run_seed=0)
    longer = num_tokens_of(OPTIONS.simulated, 1000, generate(0, num_made=drawn + 5), run_seed=0)
    assert longer >= drawn + 5
    same = num_tokens_of(OPTIONS.simulated, 1000, generate(0, num_made=longer - 1), run_seed=0)
    assert same <= longer
    assert num_tokens_of(OPTIONS.simulated, 64, generate(0, num_made=64), run_seed=0) == 64
    quick = LatencyOptions(response_tokens_median=4, response_tokens_sigma=0.0)
    assert num_tokens_of(quick, 1000, generate(0, num_made=900), run_seed=0) == 900, "longer than all of the model"


def test_what_the_learner_of_the_run_has_said_of_its_weights_is_taken_as_right() -> None:
    clock, swapped = Clock(50.0), list[WeightsSwapped]()

    def emit(event: Any) -> None:  # noqa: ANN401 - any event
        if isinstance(event, WeightsSwapped):
            swapped.append(event)

    engine = SimulatedEngine(OPTIONS, max_response_tokens=1000, timers=clock)
    engine.start(emit, lambda error: pytest.fail(str(error)))
    canary = Canary(tokens=pack_tokens(range(3)), logprobs=pack_floats(map(float, range(6))))
    manifest = WeightManifest(
        version=4,
        publish=5,
        learner_epoch=0,
        transport="shared_memory",
        location="",
        size_bytes=1,
        digest="d",
        canary=canary,
    )
    engine.take_over(3, [(4, 5)], [(generate(0, num_made=8), 0.0)])
    engine.execute(ApplyWeights(manifest, UpdateMode.IN_FLIGHT))
    clock.run(1000.0)
    assert [(each.version, each.canary_logprobs) for each in swapped] == [(4, canary.logprobs)]


# --- the shell --------------------------------------------------------------------------------------------------------


def retracing(*commands: AnyCommand) -> tuple[Shell, Mock, Mock]:
    """A shell whose actor asks for these at every event; the actor; the host."""
    machine, host = Mock(), Mock(now_s=Mock(return_value=7.0))
    machine.handle.return_value = list(commands)
    machine.waits.return_value = ()
    hears = frozenset[type[Event]]({ActorReturned})
    shell = Shell(machine, host, settings=ShellSettings(name="buffer", epoch=0), hears=hears)
    return shell, machine, host


def test_a_shell_retraces_without_any_effect_and_then_says_again_what_it_keeps() -> None:
    shell, machine, host = retracing(Send("prompt_source", GRANTED), StartTimer("settle", 2.0))
    shell.say_above(100)
    asked = shell.retrace(ActorReturned(name="prompt_source", epoch=0), None)
    assert asked == [Send("prompt_source", GRANTED), StartTimer("settle", 2.0)]
    shell.end_turn()
    assert not [call for call in host.mock_calls if call[0] != "now_s"]
    assert shell.next_timer_s() <= 9.0
    shell.on_returned("prompt_source", 0)
    assert machine.handle.call_count == 1, "that the peer is there was heard in the past"
    shell.end_turn()
    (to, envelopes), _ = host.transmit.call_args
    assert (to, [event for _, event in envelopes]) == ("prompt_source", [GRANTED])
    assert envelopes[0][0].message_id > 100


def test_a_timer_that_has_fired_does_not_fire_again_and_one_that_has_not_does() -> None:
    shell, machine, host = retracing()
    machine.handle.return_value = [StartTimer("one", 1.0), StartTimer("other", 1.0)]
    shell.retrace(TimerFired(key="start"), None)
    machine.handle.return_value = []
    shell.retrace(TimerFired(key="one"), None)
    host.now_s.return_value = 8.5
    shell.fire_timers()
    fired = [call.args[0] for call in machine.handle.call_args_list[2:]]
    assert fired == [TimerFired(key="other")]


def test_what_was_heard_in_the_past_is_no_news_after_it() -> None:
    shell, machine, _ = retracing()
    settled = SamplesSettled(settled=SETTLED)
    shell.retrace(settled, Header("filter", 0, 0, 5, 0))
    shell.on_frame(Header("filter", 0, 0, 5, 0), settled)
    shell.on_frame(Header("filter", 0, 0, 4, 0), settled)
    assert machine.handle.call_count == 1
    shell.on_frame(Header("filter", 0, 0, 6, 0), settled)
    assert machine.handle.call_count == 2


# --- decisions --------------------------------------------------------------------------------------------------------

RECORDED = Record((VersionRecorded(version=1),))
POLICY = PolicyRecorded(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)


def future(*decided: tuple[float, str, AnyCommand]) -> Decisions:
    """What two actors have decided."""
    decisions = Decisions(["buffer", "filter"])
    for at_s, name, command in decided:
        process = Mock(epoch=0, now_s=Mock(return_value=at_s))
        process.name = name
        decisions.handled(process, TimerFired(key="x"), None, [command])
    return decisions


def difference(first: Decisions, second: Decisions, *, has_ended: bool) -> tuple[float | None, float | None] | None:
    """When each side decides what the other does not."""
    found = first_difference(first, second, ["buffer", "filter"], has_ended=has_ended)
    return None if found is None else (found.first and found.first.at_s, found.second and found.second.at_s)


def test_the_same_later_is_no_difference_and_other_content_is() -> None:
    assert difference(future((1.0, "buffer", RECORDED)), future((2.0, "buffer", RECORDED)), has_ended=True) is None
    send = Send("filter", GRANTED)
    assert difference(future((1.0, "buffer", RECORDED)), future((2.0, "buffer", send)), has_ended=False) == (1.0, 2.0)


def test_an_earlier_decision_that_may_still_come_is_waited_for() -> None:
    send, other = Send("filter", GRANTED), Send("buffer", GRANTED)
    first = future((1.0, "buffer", RECORDED), (2.0, "filter", send))
    second = future((2.5, "filter", other))
    assert difference(first, second, has_ended=False) is None, "the Buffer's may come a little later"
    assert difference(first, second, has_ended=True) == (1.0, None)


@pytest.mark.parametrize(
    "command",
    [Record((POLICY,)), Send("supervisor", GRANTED), Send("engine/9", GRANTED), StartTimer("settle", 1.0)],
    ids=lambda command: type(command).__name__,
)
def test_what_was_asked_for_at_the_fork_is_no_decision(command: AnyCommand) -> None:
    assert difference(future((1.0, "buffer", command)), future(), has_ended=True) is None


def test_of_a_record_the_rest_counts() -> None:
    both = Record((POLICY, VersionRecorded(version=1)))
    assert difference(future((1.0, "buffer", both)), future((1.0, "buffer", RECORDED)), has_ended=True) is None


def test_the_story_has_what_the_actor_heard_and_what_was_about_the_same() -> None:
    first = future((1.0, "filter", RECORDED), (2.0, "buffer", RECORDED), (3.0, "buffer", RECORDED))
    second = future((2.0, "filter", RECORDED))
    found = first_difference(first, second, ["buffer", "filter"], has_ended=True)
    assert found is not None
    assert found.first is not None
    assert [line.at_s for line in first.story_of(found.first, frozenset())] == [2.0]
    assert [line.at_s for line in first.story_of(found.first, frozenset({""}))] == [1.0, 2.0]
