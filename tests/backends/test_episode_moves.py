"""What the actor hears of an episode's turns and calls: for traces, and for the time that engines wait for tools."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from test_episodes_backend import ABORTED, EPISODE, INTERRUPTED, KEY, PROMPT, Bench, Heard, part

from penstock.backends.episodes.protocol import CallMade, TurnRequest
from penstock.messages.arrays import pack_tokens
from penstock.messages.commands import AbortGeneration, Generate
from penstock.messages.local import EpisodeMoved, GenerationEnded, ToolCalled, TurnTaken
from penstock.messages.samples import Completed, Part, SampleKey, StopReason, Truncated, VersionSpan

if TYPE_CHECKING:
    from penstock.backends.episodes.protocol import Episode

OTHER = SampleKey(3, 2)


class MovesBench(Bench):
    """With a clock in nanoseconds that goes on by one at each look."""

    def __init__(self) -> None:
        ticks = itertools.count(100)
        super().__init__(now_ns=lambda: next(ticks))

    def moves(self) -> list[tuple[int, str]]:
        """Since the last look: how many are outside, and what has ended."""
        return [(event.num_outside, type(event.step).__name__) for event in self.heard(EpisodeMoved)]

    def steps(self) -> list[TurnTaken | ToolCalled]:
        return [event.step for event in self.heard(EpisodeMoved) if event.step is not None]

    def gauge(self, name: str) -> float:
        return {metric.name: metric.value for metric in self.backend.gauges()}[name]


@pytest.fixture
def bench() -> MovesBench:
    return MovesBench()


def test_an_episode_is_outside_from_its_beginning_to_its_turn_and_from_its_turn_to_its_end(bench: MovesBench) -> None:
    episode = bench.issue()
    assert bench.moves() == [(1, "NoneType")]
    _, asked = bench.turn(episode, PROMPT)
    assert bench.moves() == [(0, "NoneType")]
    bench.engine.end(asked, part([10, 11]))
    assert bench.moves() == [(1, "TurnTaken")]
    bench.issue(key=OTHER)
    assert bench.moves() == [(2, "NoneType")]
    episode.end(EPISODE)
    events = [event for event in bench.said if isinstance(event, EpisodeMoved | GenerationEnded)]
    assert [type(event).__name__ for event in events] == ["EpisodeMoved", "GenerationEnded"], "first where it is"
    assert bench.moves() == [(1, "NoneType")]


def test_a_turn_is_told_with_its_times_its_context_and_its_tokens(bench: MovesBench) -> None:
    episode = bench.issue()
    _, first = bench.turn(episode, PROMPT)
    bench.engine.end(first, part([10, 11]))
    _, second = bench.turn(episode, [20])
    bench.engine.end(second, part([12], version=1), Truncated())
    one, two = bench.steps()
    assert isinstance(one, TurnTaken)
    assert (one.number, one.begin_ns, one.end_ns, one.num_context_tokens) == (1, 100, 101, len(PROMPT))
    assert (one.spans, one.ending) == ((VersionSpan(0, 2),), "end_token")
    assert isinstance(two, TurnTaken)
    assert (two.number, two.begin_ns, two.end_ns, two.num_context_tokens) == (2, 102, 103, len(PROMPT) + 3)
    assert (two.spans, two.ending, two.is_chat, two.is_trained) == ((VersionSpan(1, 1),), "length", True, True)


def test_a_turn_that_is_interrupted_is_told_in_stretches_without_the_pause(bench: MovesBench) -> None:
    episode = bench.issue()
    _, asked = bench.turn(episode, PROMPT)
    bench.heard(EpisodeMoved)
    bench.interrupt()
    bench.engine.end(asked, part([10, 11]), INTERRUPTED)
    (first,) = bench.steps()
    (paused,) = bench.heard(GenerationEnded)
    bench.issue(prefix=paused.part)
    (again,) = bench.engine.asked(Generate)
    made = Part(
        tokens=pack_tokens([10, 11, 12]), logprobs=part([10, 11, 12]).logprobs,
        spans=(VersionSpan(0, 2), VersionSpan(1, 1)),
    )  # fmt: skip
    bench.engine.end(again, made, Completed(stop=StopReason.STOP_STRING))
    (second,) = bench.steps()
    assert isinstance(first, TurnTaken)
    assert isinstance(second, TurnTaken)
    assert (first.number, first.ending, first.spans) == (1, "interrupted", (VersionSpan(0, 2),))
    assert (second.number, second.ending, second.spans) == (1, "stop_string", (VersionSpan(1, 1),))
    assert second.num_context_tokens == first.num_context_tokens + 2
    assert first.end_ns < second.begin_ns


def test_who_is_paused_is_not_outside_and_a_turn_asked_for_meanwhile_begins_after_it(bench: MovesBench) -> None:
    episode = bench.issue()
    bench.interrupt()
    assert bench.moves() == [(1, "NoneType"), (0, "NoneType")]
    episode.begin_turn(TurnRequest(pack_tokens(PROMPT), 9, Heard()))
    assert bench.moves() == []
    bench.issue(prefix=Part())
    (asked,) = bench.engine.asked(Generate)
    bench.engine.end(asked, part([10]))
    assert bench.moves() == [(1, "TurnTaken")]


@pytest.mark.parametrize("runs", [True, False])
def test_an_episode_that_is_aborted_is_outside_no_more(*, runs: bool, bench: MovesBench) -> None:
    episode = bench.issue()
    asked = bench.turn(episode, PROMPT)[1] if runs else None
    bench.heard(EpisodeMoved)
    bench.backend.execute(AbortGeneration(KEY, 0))
    if asked is not None:
        bench.engine.end(asked, part([10]), ABORTED)
    assert bench.moves() == ([(0, "TurnTaken")] if runs else [(0, "NoneType")])
    assert bench.gauge("episodes/waiting_for_tools") == 0


def test_a_call_is_told_after_its_turn_and_nothing_of_an_episode_that_is_over(bench: MovesBench) -> None:
    episode: Episode = bench.issue()
    _, asked = bench.turn(episode, PROMPT)
    bench.engine.end(asked, part([10]))
    bench.heard(EpisodeMoved)
    episode.called(CallMade("look_up", "c1", 7, 9, "ToolError"))
    assert bench.steps() == [
        ToolCalled(after_turn=1, name="look_up", call_id="c1", begin_ns=7, end_ns=9, error="ToolError")
    ]
    episode.end(EPISODE)
    bench.heard(EpisodeMoved)
    episode.called(CallMade("look_up", "c2", 7, 9, ""))
    assert bench.steps() == []


def test_time_outside_is_summed_over_episodes(bench: MovesBench) -> None:
    first = bench.issue()
    bench.now_s = 2.0
    bench.issue(key=OTHER)
    bench.now_s = 5.0
    bench.turn(first, PROMPT)
    bench.now_s = 9.0
    assert bench.gauge("episodes/tool_wait_s") == 2.0 + 2 * 3.0 + 4.0
    assert bench.gauge("episodes/waiting_for_tools") == 1
