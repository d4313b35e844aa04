"""Episodes in front of an engine that says what the test says: what the actor hears, and what the engine is asked
for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import msgspec
import pytest

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.settings import EngineWorkerSettings
from penstock.backends.episodes.backend import EpisodeBackend
from penstock.backends.episodes.episode import MAX_PAUSE_S
from penstock.backends.episodes.protocol import EpisodeOverError, TurnRequest
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens, tokens_view
from penstock.messages.base import Command, Event, Metric
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
    Send,
)
from penstock.messages.flow import GenerationProgressed, SampleGenerated, SampleIssued
from penstock.messages.local import (
    EngineOpened,
    GenerationAdvanced,
    GenerationEnded,
    Started,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import (
    Cancelled,
    Completed,
    InfraError,
    Outcome,
    Part,
    PolicyError,
    Prompt,
    Purpose,
    Reward,
    SampleKey,
    StopReason,
    Truncated,
    VersionSpan,
)
from penstock.messages.training import UpdateMode
from penstock.messages.turn_sampling import TurnSampling
from penstock.messages.weights import WeightManifest, WeightsCommitted, WeightsStaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.episodes.protocol import Episode
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import EngineCommand
    from penstock.messages.inboxes import EngineWorkerEvent

KEY = SampleKey(3, 1)
PROMPT = [5, 6]
INTERRUPTED = Cancelled(cause="interrupted")
ABORTED = Cancelled(cause="aborted")
DONE = Completed(stop=StopReason.END_TOKEN)
EPISODE = Completed(stop=StopReason.EPISODE)
CommandT = TypeVar("CommandT", bound=Command)
EventT = TypeVar("EventT", bound=Event)


def part(ids: list[int], version: int = 0) -> Part:
    """Tokens that the model made: the log-prob of token n is −n."""
    spans = (VersionSpan(version, len(ids)),) if ids else ()
    return Part(tokens=pack_tokens(ids), logprobs=pack_floats([-float(i) for i in ids]), spans=spans)


def ids_of(found: Part) -> list[int]:
    return tokens_view(found.tokens).tolist()


class ScriptedEngine:
    """Notes what it is asked for and says nothing of its own accord."""

    def __init__(self) -> None:
        self.commands: list[EngineCommand] = []

    def start(self, emit: Emit, fail: Fail) -> None:
        self.emit = emit

    def execute(self, command: EngineCommand, /) -> None:
        self.commands.append(command)

    def gauges(self) -> tuple[Metric, ...]:
        return (Metric("engine/running", 1.0),)

    def close(self, timeout_s: float) -> None:
        self.commands.clear()

    def asked(self, kind: type[CommandT]) -> list[CommandT]:
        """What it was asked for of this kind since the last look at that kind."""
        found: list[CommandT] = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found

    def advance(self, generate: Generate, new: list[int], *, from_token: int = 0, version: int = 0) -> None:
        chunk = part(new, version)
        self.emit(GenerationAdvanced(key=generate.key, attempt=generate.attempt, from_token=from_token, chunk=chunk))

    def end(self, generate: Generate, whole: Part, outcome: Outcome = DONE) -> None:
        self.emit(GenerationEnded(key=generate.key, attempt=generate.attempt, outcome=outcome, part=whole))


class NotedDriver:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []
        self.resumptions: list[Episode] = []
        self.closings: list[tuple[Episode, str]] = []

    def start(self, fail: Fail) -> None:
        pass

    def opened(self, episode: Episode) -> None:
        self.episodes.append(episode)

    def resumed(self, episode: Episode) -> None:
        self.resumptions.append(episode)

    def closed(self, episode: Episode, reason: str) -> None:
        self.closings.append((episode, reason))

    def gauges(self) -> tuple[Metric, ...]:
        return (Metric("gateway/open", 2.0),)

    def close(self, timeout_s: float) -> None:
        pass


class TurnEnd(NamedTuple):
    ids: list[int]
    outcome: Outcome


class Heard:
    """A listener to one turn."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends: list[TurnEnd] = []

    def advanced(self, new: Part) -> None:
        self.ids += ids_of(new)

    def ended(self, turn: Part, outcome: Outcome) -> None:
        self.ends.append(TurnEnd(ids_of(turn), outcome))


class Bench:
    """An engine, a driver, the backend between them, and what the actor heard."""

    def __init__(self, now_ns: Callable[[], int] = lambda: 1) -> None:
        self.engine = ScriptedEngine()
        self.driver = NotedDriver()
        self.now_s = 0.0
        self.backend = EpisodeBackend(self.engine, self.driver, now_s=lambda: self.now_s, now_ns=now_ns)
        self.said: list[Event] = []
        self.failures: list[BaseException] = []
        self.backend.start(lambda event: self.said.append(event), self.failures.append)

    def issue(self, *, attempt: int = 0, prefix: Part | None = None, key: SampleKey = KEY) -> Episode:
        """The actor asks for a sample; the episode that was opened last."""
        self.backend.execute(generate(attempt=attempt, prefix=prefix, key=key))
        return self.driver.episodes[-1]

    def turn(self, episode: Episode, tokens: list[int], *, limit: int = 100) -> tuple[Heard, Generate]:
        """The driver asks for a turn; who hears of it, and what the engine was asked for."""
        heard = Heard()
        episode.begin_turn(TurnRequest(pack_tokens(tokens), limit, heard))
        (asked,) = self.engine.asked(Generate)
        return heard, asked

    def heard(self, kind: type[EventT]) -> list[EventT]:
        """What the actor was told of this kind since the last look."""
        found: list[EventT] = [event for event in self.said if isinstance(event, kind)]
        self.said = [event for event in self.said if not isinstance(event, kind)]
        return found

    def interrupt(self) -> None:
        self.backend.execute(InterruptGenerations())


def generate(*, attempt: int = 0, prefix: Part | None = None, key: SampleKey = KEY) -> Generate:
    return Generate(
        key=key,
        attempt=attempt,
        purpose=Purpose.TRAIN,
        prompt=Prompt(row=0, epoch=0, tokens=pack_tokens(PROMPT), text="p"),
        seed=17,
        deadline_version=4,
        prefix=prefix,
    )


@pytest.fixture
def bench() -> Bench:
    return Bench()


def two_turns(bench: Bench) -> Episode:
    """An episode of a turn by version 0, two tokens of a tool, and a turn by version 1."""
    episode = bench.issue()
    _, first = bench.turn(episode, PROMPT)
    bench.engine.end(first, part([10, 11]))
    _, second = bench.turn(episode, [20, 21])
    bench.engine.end(second, part([12, 13, 14], version=1))
    return episode


def test_in_an_evaluation_nothing_is_masked_however_it_is_drawn(bench: Bench) -> None:
    bench.backend.execute(msgspec.structs.replace(generate(), purpose=Purpose.EVALUATE))
    episode = bench.driver.episodes[-1]
    episode.begin_turn(TurnRequest(pack_tokens(PROMPT), 9, Heard(), sampling=TurnSampling(temperature=0.0)))
    (asked,) = bench.engine.asked(Generate)
    bench.engine.end(asked, part([10, 11]))
    episode.end(EPISODE)
    (ended,) = bench.heard(GenerationEnded)
    assert (ended.outcome, ended.part.loss_mask) == (EPISODE, b"")


def test_a_turn_that_is_held_to_a_schema_does_not_go_on_from_its_middle(bench: Bench) -> None:
    episode = bench.issue()
    episode.begin_turn(TurnRequest(pack_tokens(PROMPT), 9, Heard(), sampling=TurnSampling(json_schema="{}")))
    (asked,) = bench.engine.asked(Generate)
    bench.engine.advance(asked, [10])
    bench.interrupt()
    bench.engine.end(asked, part([10, 11]), INTERRUPTED)
    (told,) = bench.heard(GenerationEnded)
    bench.issue(prefix=told.part)
    (ended,) = bench.heard(GenerationEnded)
    assert isinstance(ended.outcome, InfraError)
    assert "held to a schema" in ended.outcome.detail
    assert not bench.engine.asked(Generate)


def test_an_episode_becomes_one_part_with_its_foreign_tokens_masked(bench: Bench) -> None:
    episode = two_turns(bench)
    episode.end(Completed(stop=StopReason.EPISODE, reward=Reward(value=0.5)))
    (end,) = bench.heard(GenerationEnded)
    assert (end.key, end.attempt) == (KEY, 0)
    assert end.outcome == Completed(stop=StopReason.EPISODE, reward=Reward(value=0.5))
    assert ids_of(end.part) == [10, 11, 20, 21, 12, 13, 14]
    assert end.part.loss_mask == bytes([1, 1, 0, 0, 1, 1, 1])
    assert floats_view(end.part.logprobs).tolist() == [-10, -11, 0, 0, -12, -13, -14]
    assert end.part.spans == (VersionSpan(0, 4), VersionSpan(1, 3))
    assert end.part.context_tokens == b""


def test_each_turn_gets_all_tokens_before_it_as_its_prompt_and_a_stream_of_random_numbers_of_its_own(
    bench: Bench,
) -> None:
    episode = bench.issue()
    _, first = bench.turn(episode, PROMPT, limit=7)
    bench.engine.end(first, part([10, 11]))
    _, second = bench.turn(episode, [20])
    assert tokens_view(first.prompt.tokens).tolist() == PROMPT
    assert tokens_view(second.prompt.tokens).tolist() == [*PROMPT, 10, 11, 20]
    assert (first.max_new_tokens, first.prefix, first.seed, first.key) == (7, None, 17, KEY)
    assert second.seed != first.seed
    assert second.attempt != first.attempt


def test_a_first_request_that_is_not_the_prompt_is_kept_as_the_context(bench: Bench) -> None:
    episode = bench.issue()
    _, asked = bench.turn(episode, [1, 2, 3])
    bench.engine.advance(asked, [10])
    (advanced,) = bench.heard(GenerationAdvanced)
    bench.engine.end(asked, part([10, 11]))
    episode.end(EPISODE)
    (end,) = bench.heard(GenerationEnded)
    assert tokens_view(asked.prompt.tokens).tolist() == [1, 2, 3]
    assert tokens_view(end.part.context_tokens).tolist() == [1, 2, 3]
    assert advanced.chunk.context_tokens == end.part.context_tokens


def test_the_actor_is_told_every_token_once_and_in_order(bench: Bench) -> None:
    episode = bench.issue(attempt=2)
    _, first = bench.turn(episode, PROMPT)
    bench.engine.advance(first, [10])
    bench.engine.advance(first, [11], from_token=1)
    bench.engine.end(first, part([10, 11, 12]))
    _, second = bench.turn(episode, [20, 21])
    bench.engine.end(second, part([13]))
    told = bench.heard(GenerationAdvanced)
    assert {(event.key, event.attempt) for event in told} == {(KEY, 2)}
    assert [(event.from_token, ids_of(event.chunk)) for event in told] == [
        (0, [10]),
        (1, [11]),
        (2, [12]),
        (3, [20, 21, 13]),
    ]


def test_an_interrupted_turn_goes_on_where_it_stopped_and_its_listener_waits_on(bench: Bench) -> None:
    episode = bench.issue()
    heard, asked = bench.turn(episode, PROMPT, limit=9)
    bench.engine.advance(asked, [10])
    bench.interrupt()
    assert len(bench.engine.asked(InterruptGenerations)) == 1
    assert bench.heard(GenerationEnded) == []
    bench.engine.end(asked, part([10, 11]), INTERRUPTED)
    (paused,) = bench.heard(GenerationEnded)
    assert (paused.outcome, ids_of(paused.part)) == (INTERRUPTED, [10, 11])
    assert heard.ends == []
    bench.issue(prefix=paused.part)
    assert bench.driver.episodes == [episode]
    (again,) = bench.engine.asked(Generate)
    assert again.prefix is not None
    assert ids_of(again.prefix) == [10, 11]
    assert (again.prompt, again.seed, again.max_new_tokens) == (asked.prompt, asked.seed, 9)
    assert again.attempt != asked.attempt
    made = Part(
        tokens=pack_tokens([10, 11, 12]),
        logprobs=pack_floats([-10, -11, -12]),
        spans=(VersionSpan(0, 2), VersionSpan(1, 1)),
    )
    bench.engine.end(again, made)
    assert heard.ends == [TurnEnd([10, 11, 12], DONE)]
    assert heard.ids == [10, 11, 12]
    episode.end(EPISODE)
    (end,) = bench.heard(GenerationEnded)
    assert (end.outcome, end.part.spans) == (EPISODE, (VersionSpan(0, 2), VersionSpan(1, 1)))


def test_a_turn_that_ends_as_it_is_interrupted_is_delivered_and_the_episode_pauses_after_it(bench: Bench) -> None:
    episode = bench.issue()
    heard, asked = bench.turn(episode, PROMPT)
    bench.interrupt()
    bench.engine.end(asked, part([10]))
    (paused,) = bench.heard(GenerationEnded)
    assert (paused.outcome, ids_of(paused.part)) == (INTERRUPTED, [10])
    assert heard.ends == [TurnEnd([10], DONE)]


def test_an_episode_that_waits_for_its_agent_is_paused_at_once_and_its_next_turn_waits_for_the_weights(
    bench: Bench,
) -> None:
    episode = bench.issue()
    bench.interrupt()
    (paused,) = bench.heard(GenerationEnded)
    assert (paused.outcome, paused.part) == (INTERRUPTED, Part())
    heard = Heard()
    episode.begin_turn(TurnRequest(pack_tokens(PROMPT), 9, heard))
    assert episode.is_paused
    assert bench.engine.asked(Generate) == []
    bench.issue(prefix=paused.part)
    assert bench.driver.resumptions == [episode]
    (asked,) = bench.engine.asked(Generate)
    bench.engine.end(asked, part([10], version=1))
    assert heard.ends == [TurnEnd([10], DONE)]


def test_a_turn_that_begins_in_a_pause_waits_with_what_was_put_before_it(bench: Bench) -> None:
    episode = bench.issue()
    _, first = bench.turn(episode, PROMPT)
    bench.engine.end(first, part([10]))
    bench.interrupt()
    (paused,) = bench.heard(GenerationEnded)
    heard = Heard()
    episode.begin_turn(TurnRequest(pack_tokens([20, 21]), 9, heard))
    bench.issue(prefix=paused.part)
    (asked,) = bench.engine.asked(Generate)
    assert tokens_view(asked.prompt.tokens).tolist() == [*PROMPT, 10, 20, 21]
    bench.engine.end(asked, part([11], version=1))
    assert heard.ends == [TurnEnd([11], DONE)]
    episode.end(EPISODE)
    (end,) = bench.heard(GenerationEnded)
    assert (end.outcome, ids_of(end.part), end.part.loss_mask) == (EPISODE, [10, 20, 21, 11], bytes([1, 0, 0, 1]))


def test_an_episode_that_is_ended_while_it_is_paused_ends_when_the_actor_asks_again(bench: Bench) -> None:
    episode = bench.issue()
    _, asked = bench.turn(episode, PROMPT)
    bench.engine.end(asked, part([10]))
    bench.interrupt()
    (paused,) = bench.heard(GenerationEnded)
    episode.end(EPISODE)
    assert bench.heard(GenerationEnded) == []
    bench.issue(prefix=paused.part)
    (end,) = bench.heard(GenerationEnded)
    assert (end.outcome, ids_of(end.part)) == (EPISODE, [10])


def test_a_turn_that_is_cut_off_in_a_pause_is_not_trained(bench: Bench) -> None:
    episode = bench.issue()
    _, first = bench.turn(episode, PROMPT)
    bench.engine.end(first, part([10]))
    heard, second = bench.turn(episode, [20])
    bench.engine.advance(second, [11, 12])
    bench.interrupt()
    bench.engine.end(second, part([11, 12]), INTERRUPTED)
    (paused,) = bench.heard(GenerationEnded)
    episode.end(EPISODE)
    bench.issue(prefix=paused.part)
    (end,) = bench.heard(GenerationEnded)
    assert (ids_of(end.part), end.part.loss_mask) == ([10, 20, 11, 12], bytes([1, 0, 0, 0]))
    assert [outcome for _, outcome in heard.ends] == [ABORTED]


def test_an_abort_ends_the_turn_in_the_engine_before_anything_that_follows(bench: Bench) -> None:
    episode = bench.issue()
    heard, asked = bench.turn(episode, PROMPT)
    bench.backend.execute(AbortGeneration(KEY, 0))
    assert bench.engine.asked(AbortGeneration) == [AbortGeneration(KEY, asked.attempt)]
    assert [closed for closed, _ in bench.driver.closings] == [episode]
    bench.engine.end(asked, part([10]), ABORTED)
    (end,) = bench.heard(GenerationEnded)
    assert (end.outcome, ids_of(end.part)) == (ABORTED, [10])
    assert [turn.outcome for turn in heard.ends] == [ABORTED]
    with pytest.raises(EpisodeOverError):
        episode.begin_turn(TurnRequest(b"", 1, heard))


def test_an_abort_between_turns_ends_the_episode_at_once(bench: Bench) -> None:
    two_turns(bench)
    bench.backend.execute(AbortGeneration(KEY, 0))
    (end,) = bench.heard(GenerationEnded)
    assert (end.outcome, end.part.num_tokens) == (ABORTED, 7)
    bench.backend.execute(AbortGeneration(KEY, 0))
    assert bench.heard(GenerationEnded) == []


def test_a_turn_that_nobody_heard_the_end_of_is_not_trained(bench: Bench) -> None:
    episode = bench.issue()
    _, first = bench.turn(episode, PROMPT)
    bench.engine.end(first, part([10, 11]))
    _, second = bench.turn(episode, [20])
    bench.engine.advance(second, [12])
    episode.end(EPISODE)
    assert bench.engine.asked(AbortGeneration) == [AbortGeneration(KEY, second.attempt)]
    bench.engine.end(second, part([12, 13]), ABORTED)
    (end,) = bench.heard(GenerationEnded)
    assert (ids_of(end.part), end.part.loss_mask) == ([10, 11, 20, 12, 13], bytes([1, 1, 0, 0, 0]))


def test_an_error_of_the_engine_ends_the_episode_as_an_infra_error(bench: Bench) -> None:
    episode = bench.issue()
    heard, asked = bench.turn(episode, PROMPT)
    bench.engine.end(asked, part([10]), InfraError(detail="out of memory"))
    (end,) = bench.heard(GenerationEnded)
    assert end.outcome == InfraError(detail="out of memory")
    assert bench.driver.closings == [(episode, "out of memory")]
    assert [turn.outcome for turn in heard.ends] == [ABORTED]


def test_a_turn_that_the_engine_makes_none_behind_ends_the_episode_as_the_models_doing(bench: Bench) -> None:
    episode = bench.issue()
    _, first = bench.turn(episode, PROMPT)
    bench.engine.end(first, part([10, 11]))
    heard, second = bench.turn(episode, [20])
    bench.engine.end(second, part([]), PolicyError(detail="it drew an image"))
    (end,) = bench.heard(GenerationEnded)
    assert end.outcome == PolicyError(detail="it drew an image")
    assert (ids_of(end.part), end.part.loss_mask) == ([10, 11, 20], bytes([1, 1, 0]))
    assert bench.driver.closings == [(episode, "it drew an image")]
    assert [turn.outcome for turn in heard.ends] == [ABORTED]


def test_an_episode_without_a_token_of_the_model_is_never_scored(bench: Bench) -> None:
    bench.issue().end(Completed(stop=StopReason.EPISODE, reward=Reward(value=1.0)))
    (end,) = bench.heard(GenerationEnded)
    assert isinstance(end.outcome, InfraError)


def test_a_prefix_whose_session_is_gone_is_refused(bench: Bench) -> None:
    bench.backend.execute(generate(attempt=1, prefix=part([10])))
    (end,) = bench.heard(GenerationEnded)
    assert isinstance(end.outcome, InfraError)
    assert bench.driver.episodes == []


def test_an_episode_whose_last_tokens_the_actor_has_dropped_fails(bench: Bench) -> None:
    """They were made by weights that turned out wrong, and its agent may have seen them."""
    episode = bench.issue()
    _, asked = bench.turn(episode, PROMPT)
    bench.engine.end(asked, part([10, 11]))
    bench.interrupt()
    bench.heard(GenerationEnded)
    bench.issue(prefix=part([10]))
    (end,) = bench.heard(GenerationEnded)
    assert isinstance(end.outcome, InfraError)
    assert [closed for closed, _ in bench.driver.closings] == [episode]


def test_a_later_attempt_takes_the_place_of_an_earlier_one(bench: Bench) -> None:
    first = bench.issue()
    second = bench.issue(attempt=1)
    assert [closed for closed, _ in bench.driver.closings] == [first]
    first.end(EPISODE)
    _, asked = bench.turn(second, PROMPT)
    bench.engine.end(asked, part([10]))
    second.end(EPISODE)
    ends = bench.heard(GenerationEnded)
    assert [(end.attempt, end.outcome) for end in ends] == [(0, ABORTED), (1, EPISODE)]


def test_a_turn_ends_at_its_limit_also_when_the_engine_goes_beyond(bench: Bench) -> None:
    episode = bench.issue()
    heard, asked = bench.turn(episode, PROMPT, limit=2)
    bench.engine.advance(asked, [10, 11, 12])
    assert bench.engine.asked(AbortGeneration) == [AbortGeneration(KEY, asked.attempt)]
    bench.engine.end(asked, part([10, 11, 12, 13]), ABORTED)
    assert heard.ends == [TurnEnd([10, 11], Truncated())]


@pytest.mark.parametrize("is_told_before", [False, True])
def test_a_turn_ends_where_its_watch_says(bench: Bench, is_told_before: bool) -> None:
    episode, heard, seen = bench.issue(), Heard(), list[int]()

    def stops_at(new: Part) -> int | None:
        seen.extend(ids_of(new))
        return seen.index(12) + 1 if 12 in seen else None

    episode.begin_turn(TurnRequest(pack_tokens(PROMPT), 100, heard, stops_at))
    (asked,) = bench.engine.asked(Generate)
    if is_told_before:
        bench.engine.advance(asked, [10])
        bench.engine.advance(asked, [11, 12, 13], from_token=1)
        bench.engine.end(asked, part([10, 11, 12, 13, 14]), ABORTED)
    else:
        bench.engine.end(asked, part([10, 11, 12, 13, 14]))
    assert heard.ends == [TurnEnd([10, 11, 12], Completed(stop=StopReason.STOP_STRING))]
    assert heard.ids == [10, 11, 12]
    assert [ids_of(event.chunk) for event in bench.heard(GenerationAdvanced)][-1][-1] == 12


def test_a_paused_episode_whose_sample_was_settled_is_forgotten_at_last(bench: Bench) -> None:
    episode = bench.issue()
    bench.interrupt()
    bench.heard(GenerationEnded)
    bench.now_s = MAX_PAUSE_S + 1
    bench.issue(key=SampleKey(4, 0))
    assert [closed for closed, _ in bench.driver.closings] == [episode]
    assert bench.heard(GenerationEnded) == []


def manifest(version: int) -> WeightManifest:
    return WeightManifest(
        version=version, publish=version, learner_epoch=0, transport="disk", location="x", size_bytes=1, digest="d"
    )


def test_commands_and_answers_about_weights_pass_through(bench: Bench) -> None:
    commands: list[EngineCommand] = [
        OpenEngine(),
        FetchWeights(manifest(1)),
        ApplyWeights(manifest(1), UpdateMode.IN_FLIGHT),
    ]
    for command in commands:
        bench.backend.execute(command)
    assert bench.engine.commands == commands
    opened = EngineOpened(num_slots=4)
    bench.engine.emit(opened)
    assert bench.said == [opened]
    names = {"engine/running", "gateway/open", "episodes/waiting_for_tools", "episodes/tool_wait_s"}
    names |= {"episodes/masked_other_sampling", "episodes/masked_constrained", "episodes/untaken_tokens"}
    assert {metric.name for metric in bench.backend.gauges()} == names


def test_nothing_is_given_to_the_engine_while_it_takes_weights_in_flight(bench: Bench) -> None:
    episode = bench.issue()
    bench.backend.execute(ApplyWeights(manifest(1), UpdateMode.IN_FLIGHT))
    heard = Heard()
    episode.begin_turn(TurnRequest(pack_tokens(PROMPT), 9, heard))
    assert bench.engine.asked(Generate) == []
    bench.engine.emit(WeightsSwapped(version=1, publish=1, digest="d"))
    (asked,) = bench.engine.asked(Generate)
    bench.engine.end(asked, part([10], version=1))
    assert heard.ends == [TurnEnd([10], DONE)]


def test_the_actor_takes_an_episode_through_an_interrupted_swap(bench: Bench) -> None:
    """The real EngineWorker on top: its own assertions on offsets and running requests hold."""
    worker = EngineWorker(EngineWorkerSettings(name="engine/0", epoch=0, check_canary=False))
    sent: list[Event] = []

    def settle(*events: Event) -> None:
        """Hand in these events, and all that comes of them."""
        waiting = [*events]
        while waiting:
            for command in worker.handle(cast("EngineWorkerEvent", waiting.pop(0))):
                worker.validate()
                if isinstance(command, Send):
                    sent.append(command.event)
                else:
                    bench.backend.execute(cast("EngineCommand", command))
            waiting += bench.heard(Event)

    def swap(version: int) -> None:
        settle(WeightsStaged(manifest=manifest(version)))
        settle(WeightsStagedLocally(version=version, publish=version, digest="d"))
        settle(WeightsCommitted(version=version, publish=version, update_mode=UpdateMode.INTERRUPT))

    settle(Started(epoch=0), EngineOpened(num_slots=2))
    swap(0)
    bench.engine.emit(WeightsSwapped(version=0, publish=0, digest="d"))
    settle()
    issued = generate()
    settle(
        SampleIssued(key=KEY, attempt=0, group_size=2, prompt=issued.prompt, seed=1, min_version=0, deadline_version=4)
    )
    settle(*bench.heard(Event))
    (episode,) = bench.driver.episodes
    heard, asked = bench.turn(episode, [1, 2, 3])
    bench.engine.advance(asked, [10, 11])
    settle(*bench.heard(Event))
    swap(1)
    assert len(bench.engine.asked(InterruptGenerations)) == 1
    bench.engine.end(asked, part([10, 11, 12]), INTERRUPTED)
    settle(*bench.heard(Event))
    assert len(bench.engine.asked(ApplyWeights)) == 2
    bench.engine.emit(WeightsSwapped(version=1, publish=1, digest="d"))
    settle(*bench.heard(Event))
    (again,) = bench.engine.asked(Generate)
    assert again.prefix is not None
    bench.engine.end(again, part([10, 11, 12, 13]))
    episode.end(EPISODE)
    settle(*bench.heard(Event))
    assert heard.ends == [TurnEnd([10, 11, 12, 13], DONE)]
    (generated,) = [event for event in sent if isinstance(event, SampleGenerated)]
    assert ids_of(generated.sample.parts[0]) == [10, 11, 12, 13]
    assert tokens_view(generated.sample.parts[0].context_tokens).tolist() == [1, 2, 3]
    told = [event for event in sent if isinstance(event, GenerationProgressed)]
    assert [(event.from_token, ids_of(event.chunk)) for event in told] == [(0, [10, 11]), (2, [12]), (3, [13])]
