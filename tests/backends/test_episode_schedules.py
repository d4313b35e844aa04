"""Episodes under schedules that nobody has thought of: whatever engine, weights and PromptSource do meanwhile, a token
is trained if and only if the model made it in a turn whose end the function has heard, in a conversation that is
trained.

Between the real EngineWorker and an engine that a seed decides about stands the real backend of episodes. Functions
hold up to three conversations, the third of which is not trained, and save where they may. Weights are swapped in every
mode, some of them wrong; turns end as they are interrupted; attempts are revoked, and engines die, after which the
samples go on from what PromptSource knows of them.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Final, cast

import pytest

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.engine_worker.settings import EngineWorkerSettings
from penstock.actors.prompt_source.leases import Lease
from penstock.backends.episodes.backend import EpisodeBackend
from penstock.backends.episodes.protocol import EpisodeOverError, TurnRequest
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens, tokens_view
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    Send,
)
from penstock.messages.flow import (
    GenerationClosed,
    GenerationProgressed,
    SampleGenerated,
    SampleIssued,
    SampleRevoked,
)
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
    Part,
    Prompt,
    SampleKey,
    StopReason,
    Truncated,
    VersionSpan,
)
from penstock.messages.training import UpdateMode
from penstock.messages.weights import WeightManifest, WeightsCommitted, WeightsStaged

if TYPE_CHECKING:
    from penstock.backends.episodes.protocol import Episode
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.base import Event, Metric
    from penstock.messages.commands import EngineCommand
    from penstock.messages.inboxes import EngineWorkerEvent
    from penstock.messages.samples import Outcome

PROMPT: Final = [1, 2, 3]
NUM_SAMPLES: Final = 4
MAX_TURNS: Final = 5
LIMIT: Final = 6
MAIN, OTHER, JUDGE = range(3)
NUM_STEPS: Final = 400
NUM_SCHEDULES: Final = 40
RIGHT, WRONG = "right", "wrong"
NOTHING_TRAINED: Final = "the episode ended without one token of the model that may be trained"


class Generation:
    """One that runs in the engine."""

    def __init__(self, asked: Generate) -> None:
        self.asked = asked
        self.part = asked.prefix or Part()
        self.num_told = self.part.num_tokens
        self.is_to_end: Cancelled | None = None


class DrawnEngine:
    """An engine whose every move the seed decides."""

    def __init__(self, draw: random.Random, ids: itertools.count[int], *, errs: bool) -> None:
        self.draw = draw
        self.ids = ids
        self.errs = errs
        """Some of the weights that it loads are wrong."""
        self.running: dict[int, Generation] = {}
        self.applying: WeightManifest | None = None
        self.version = -1

    def start(self, emit: Emit, fail: Fail) -> None:
        self.emit = emit

    def execute(self, command: EngineCommand, /) -> None:
        match command:
            case Generate():
                assert self.applying is None, "it takes new weights"
                self.running[command.attempt] = Generation(command)
            case AbortGeneration():
                if (generation := self.running.get(command.attempt)) is not None:
                    generation.is_to_end = Cancelled(cause="aborted")
            case InterruptGenerations():
                for generation in self.running.values():
                    generation.is_to_end = generation.is_to_end or Cancelled(cause="interrupted")
            case ApplyWeights():
                self.applying = command.manifest
            case FetchWeights():
                manifest = command.manifest
                self.emit(WeightsStagedLocally(version=manifest.version, publish=manifest.publish, digest=RIGHT))
            case _:
                pass

    def gauges(self) -> tuple[Metric, ...]:
        return ()

    def close(self, timeout_s: float) -> None:
        pass

    def move(self) -> None:
        """One generation goes on, or ends."""
        if not self.running:
            return
        generation = self.draw.choice(list(self.running.values()))
        if self.version >= 0 and self.draw.random() < 0.7:
            self._make(generation, self.draw.randint(1, 3))
        if generation.is_to_end is not None and self.draw.random() < 0.8:
            self._end(generation, generation.is_to_end)
        elif generation.part.num_tokens and self.draw.random() < 0.4:
            is_full = generation.part.num_tokens >= (generation.asked.max_new_tokens or 0)
            self._end(generation, Truncated() if is_full else Completed(stop=StopReason.END_TOKEN))
        elif generation.part.num_tokens > generation.num_told:
            self._tell(generation)

    def swap(self) -> None:
        """New weights are in place, or wrong ones."""
        manifest, self.applying = self.applying, None
        if manifest is not None:
            self.version = manifest.version
            digest = WRONG if self.errs and self.draw.random() < 0.2 else RIGHT
            self.emit(WeightsSwapped(version=manifest.version, publish=manifest.publish, digest=digest))

    def _make(self, generation: Generation, count: int) -> None:
        old, ids = generation.part, [next(self.ids) for _ in range(count)]
        generation.part = Part(
            tokens=old.tokens + pack_tokens(ids),
            logprobs=old.logprobs + pack_floats([-float(i) for i in ids]),
            spans=(*old.spans, VersionSpan(self.version, count)),
        )

    def _tell(self, generation: Generation) -> None:
        begin, generation.num_told = generation.num_told, generation.part.num_tokens
        ids = tokens_view(generation.part.tokens).tolist()[begin:]
        versions = [span.version for span in generation.part.spans for _ in range(span.num_tokens)][begin:]
        chunk = Part(
            tokens=pack_tokens(ids),
            logprobs=pack_floats([-float(i) for i in ids]),
            spans=tuple(VersionSpan(version, 1) for version in versions),
        )
        asked = generation.asked
        self.emit(GenerationAdvanced(key=asked.key, attempt=asked.attempt, from_token=begin, chunk=chunk))

    def _end(self, generation: Generation, outcome: Outcome) -> None:
        asked = generation.asked
        del self.running[asked.attempt]
        self.emit(GenerationEnded(key=asked.key, attempt=asked.attempt, outcome=outcome, part=generation.part))


class Function:
    """One attempt of one sample, as its function knows it."""

    def __init__(self, episode: Episode, said: dict[int, list[int]], num_turns: int) -> None:
        self.episode = episode
        self.said = said
        """What stands in each conversation after its context, as far as the function has heard."""
        self.num_turns = num_turns
        self.is_over = False
        self.speaks: int | None = None
        """The conversation in which the model makes a turn."""
        self.foreign: list[int] = []


class Turn:
    """Hears of one turn for its function."""

    def __init__(self, world: World, function: Function, conversation: int) -> None:
        self.world = world
        self.function = function
        self.conversation = conversation
        self.stop = world.draw.randint(1, LIMIT + 2)
        """With so many tokens it has a stop string."""
        self.num_watched = 0

    def watch(self, new: Part) -> int | None:
        self.num_watched += new.num_tokens
        return self.stop if self.num_watched >= self.stop else None

    def advanced(self, new: Part) -> None:
        pass

    def ended(self, turn: Part, outcome: Outcome) -> None:
        function, ids = self.function, tokens_view(turn.tokens).tolist()
        function.speaks = None
        if isinstance(outcome, Cancelled | InfraError):
            return
        said = function.said.setdefault(self.conversation, [])
        said += [*function.foreign, *ids] if said else ids
        if self.conversation != JUDGE:
            self.world.trained.update(ids)


class World:
    """PromptSource, WeightPublisher, functions and engine around the real actor and the real backend."""

    def __init__(self, seed: int, *, errs: bool) -> None:
        self.draw = random.Random(seed)
        self.errs = errs
        self.ids = itertools.count(100)
        self.trained: set[int] = set()
        """Ids of tokens that must be trained where they are; every token has an id of its own."""
        self.leases = {SampleKey(0, index): Lease(key=SampleKey(0, index), attempt=-1) for index in range(NUM_SAMPLES)}
        self.saved: dict[bytes, tuple[list[int], int]] = {}
        self.generated: dict[SampleKey, int] = {}
        self.publish = -1
        self.num_deaths = 0
        self.begin_engine()

    # --- the actor --------------------------------------------------------------------------------------------

    def begin_engine(self) -> None:
        """One that takes another's place."""
        self.worker = EngineWorker(EngineWorkerSettings(name="engine/0", epoch=self.num_deaths, check_canary=False))
        self.engine = DrawnEngine(self.draw, self.ids, errs=self.errs)
        self.functions: list[Function] = []
        self.again: list[SampleKey] = []
        """Samples whose last attempt has failed."""
        self.said: list[Event] = []
        self.backend = EpisodeBackend(self.engine, self)
        self.backend.start(self.said.append, lambda error: pytest.fail(str(error)))
        self.hand_in(Started(epoch=0), EngineOpened(num_slots=3))
        self.publish_weights()
        self.engine.swap()
        self.hand_in()
        for key in [key for key in self.leases if key not in self.generated]:
            self.issue(key)

    def hand_in(self, *events: Event) -> None:
        """And all that comes of them."""
        waiting = [*events]
        while waiting or self.said:
            waiting += self.said
            self.said.clear()
            commands = self.worker.handle(cast("EngineWorkerEvent", waiting.pop(0)))
            self.worker.validate()
            for command in commands:
                if isinstance(command, Send):
                    self.hear(command.event)
                else:
                    self.backend.execute(cast("EngineCommand", command))

    def hear(self, event: Event) -> None:
        """What the EngineWorker says to others."""
        match event:
            case GenerationProgressed():
                lease = self.leases[event.key]
                if event.attempt == lease.attempt:
                    lease.add_progress(event.from_token, event.chunk)
            case GenerationClosed() if isinstance(event.outcome, InfraError):
                assert self.errs or event.outcome.detail == NOTHING_TRAINED, event
                if event.attempt == self.leases[event.key].attempt:
                    self.again.append(event.key)
            case SampleGenerated():
                self.check(event)
            case _:
                pass

    # --- PromptSource and WeightPublisher ---------------------------------------------------------------------

    def issue(self, key: SampleKey) -> None:
        """The next attempt, from where an episode can go on."""
        lease = self.leases[key]
        lease.attempt += 1
        lease.back_to_save_point()
        self.hand_in(
            SampleIssued(
                key=key, attempt=lease.attempt, group_size=NUM_SAMPLES, min_version=0, deadline_version=9,
                prompt=Prompt(row=0, epoch=0, tokens=pack_tokens(PROMPT)), seed=1, prefix=lease.prefix(),
            )
        )  # fmt: skip

    def revoke(self) -> None:
        """An attempt has stood still, as far as is known; it goes on, here again."""
        open_ones = [key for key in self.leases if key not in self.generated and key not in self.again]
        if open_ones:
            key = self.draw.choice(open_ones)
            if self.draw.random() < 0.5:
                self.hand_in(SampleRevoked(key=key, attempt=self.leases[key].attempt))
            self.issue(key)

    def publish_weights(self) -> None:
        self.publish += 1
        manifest = WeightManifest(
            version=self.publish, publish=self.publish, learner_epoch=0, transport="none", location="", size_bytes=1,
            digest=RIGHT,
        )  # fmt: skip
        mode = self.draw.choice(list(UpdateMode))
        self.hand_in(WeightsStaged(manifest=manifest))
        self.hand_in(WeightsCommitted(version=manifest.version, publish=manifest.publish, update_mode=mode))

    # --- functions; the backend's driver ----------------------------------------------------------------------

    def start(self, fail: Fail) -> None:
        pass

    def opened(self, episode: Episode) -> None:
        prefix = episode.issued.prefix
        point = None if prefix is None else prefix.save_point
        said, num_turns = ([], 0) if point is None else self.saved[point.state]
        self.functions.append(Function(episode, {MAIN: [*said]} if said else {}, num_turns))

    def resumed(self, episode: Episode) -> None:
        pass

    def closed(self, episode: Episode, reason: str) -> None:
        for function in self.functions:
            function.is_over |= function.episode is episode

    def gauges(self) -> tuple[Metric, ...]:
        return ()

    def close(self, timeout_s: float) -> None:
        pass

    def play(self, function: Function) -> None:
        """A function does its next thing."""
        if function.is_over:
            return
        is_enough = function.num_turns >= MAX_TURNS or (function.num_turns > 1 and self.draw.random() < 0.2)
        if is_enough and (function.speaks is None or self.draw.random() < 0.1):
            function.is_over = True
            function.episode.end(Completed(stop=StopReason.EPISODE))
        elif function.speaks is None and set(function.said) == {MAIN} and self.draw.random() < 0.4:
            self.save(function)
        elif function.speaks is None:
            self.begin_turn(function, self.draw.choice((MAIN, MAIN, OTHER, JUDGE) if function.said else (MAIN, JUDGE)))

    def begin_turn(self, function: Function, conversation: int) -> None:
        begins = not function.episode.num_turns_of(conversation)
        foreign = [next(self.ids) for _ in range(self.draw.randint(0, 3))]
        context = PROMPT if conversation == MAIN else [conversation, *foreign]
        function.foreign, function.speaks, function.num_turns = foreign, conversation, function.num_turns + 1
        turn = Turn(self, function, conversation)
        request = TurnRequest(
            pack_tokens(context if begins else foreign),
            LIMIT,
            turn,
            turn.watch if self.draw.random() < 0.3 else None,
            conversation=conversation,
            is_trained=conversation != JUDGE,
        )
        try:
            function.episode.begin_turn(request)
        except EpisodeOverError:
            function.is_over = True

    def save(self, function: Function) -> None:
        state = str(len(self.saved)).encode()
        self.saved[state] = ([*function.said[MAIN]], function.num_turns)
        function.episode.saved(state)

    # --- what must hold ---------------------------------------------------------------------------------------

    def check(self, event: SampleGenerated) -> None:
        sample = event.sample
        assert sample.key not in self.generated
        self.generated[sample.key] = sample.attempt
        (function,) = [
            function
            for function in self.functions
            if (function.episode.issued.key, function.episode.issued.attempt) == (sample.key, sample.attempt)
        ]
        known = [function.said[number] for number in sorted(function.said)]
        for part in sample.parts:
            ids = tokens_view(part.tokens).tolist()
            mask = list(part.loss_mask or b"\1" * len(ids))
            assert mask == [int(token in self.trained) for token in ids], sample
            logprobs = dict(zip(ids, floats_view(part.logprobs).tolist(), strict=True))
            assert all(logprobs[token] == -token for token in ids if token in self.trained)
        found = [tokens_view(part.tokens).tolist() for part in sample.parts]
        for said in known:
            (whole,) = [ids for ids in found if ids[: len(said)] == said]
            assert not any(token in self.trained for token in whole[len(said) :])

    # --- the schedule -----------------------------------------------------------------------------------------

    def move(self) -> None:
        """One thing happens."""
        chance = self.draw.random()
        if chance < 0.4:
            self.engine.move()
        elif chance < 0.7 and self.functions:
            self.play(self.draw.choice(self.functions))
        elif chance < 0.8:
            self.engine.swap()
        elif chance < 0.86:
            self.publish_weights()
        elif chance < 0.96:
            if self.again:
                self.issue(self.again.pop(0))
        elif chance < 0.98:
            self.revoke()
        elif chance < 0.985:
            self.num_deaths += 1
            self.begin_engine()
        self.hand_in()


@pytest.mark.parametrize("errs", [False, True], ids=["weights are right", "some weights are wrong"])
def test_a_token_is_trained_if_the_model_said_it_where_it_is_trained_and_was_heard(*, errs: bool) -> None:
    num_generated = 0
    for seed in range(NUM_SCHEDULES):
        world = World(seed, errs=errs)
        for _ in range(NUM_STEPS):
            world.move()
        num_generated += len(world.generated)
    assert num_generated > NUM_SCHEDULES
