"""What an EngineWorker relies on of every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.backends.contracts.hearing import Driven
from penstock.backends.protocol import Capability
from penstock.messages.arrays import floats_view
from penstock.messages.base import Metric
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
)
from penstock.messages.local import (
    EngineOpened,
    GenerationAdvanced,
    GenerationEnded,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import Cancelled, Completed, Part, Prompt, Purpose, SampleKey, Truncated
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.engines.spec import EngineContext, EngineSpec
    from penstock.messages.weights import WeightManifest


@dataclass(frozen=True, kw_only=True)
class EngineSubject:
    """The engine that is meant, and what it can be asked."""

    spec: EngineSpec
    context: EngineContext
    export: Callable[[int, int], WeightManifest]
    """Weights that it can serve, by version and publish; with a canary where the engine says that it scores one."""
    prompt: Callable[[int], Prompt]
    """The n-th prompt. Its answers should take several steps, so that what runs can be disturbed."""
    num_prompts: int = 1 << 30
    """So many different ones there are."""
    samples_per_prompt: int = 1
    timeout_s: float = 60.0
    """How long any answer may take."""
    first_attempt: int = 0
    """Another for each test where they share an engine: it is never asked for an attempt twice."""

    def generate(self, number: int, prefix: Part | None = None, seed: int | None = None, attempt: int = 0) -> Generate:
        """The command for the number-th sample of all."""
        group, index = divmod(number, self.samples_per_prompt)
        return Generate(
            key=SampleKey(group, index),
            attempt=self.first_attempt + attempt,
            purpose=Purpose.TRAIN,
            prompt=self.prompt(group % self.num_prompts),
            seed=number if seed is None else seed,
            deadline_version=9,
            prefix=prefix,
        )


class EngineContract:
    """Derive from it, and override ``subject``."""

    @pytest.fixture
    def subject(self) -> EngineSubject:
        """The engine that is meant."""
        raise NotImplementedError("override the fixture 'subject' with the engine that is meant")

    @pytest.fixture
    def engine(self, subject: EngineSubject) -> Iterator[Driven]:
        """It, open and serving version 3."""
        driven = Driven(subject.spec.open(subject.context), subject.timeout_s)
        assert driven.ask(OpenEngine(), EngineOpened).num_slots >= 1
        serve(driven, subject.export(3, 1))
        yield driven
        driven.close()

    def test_every_request_ends_once_and_says_what_it_is(self, subject: EngineSubject, engine: Driven) -> None:
        commands = [subject.generate(number) for number in range(2 * subject.context.options.slots + 1)]
        engine.tell(*commands)
        ends = {(end.key, end.attempt): end for end in (engine.hear(GenerationEnded) for _ in commands)}
        assert ends.keys() == {(command.key, command.attempt) for command in commands}
        for end in ends.values():
            assert isinstance(end.outcome, Completed | Truncated), end.outcome
            _check(subject, end.part, {3})
            assert end.part.num_tokens <= subject.context.sampling.max_response_tokens
        assert not engine.left_over(GenerationEnded)

    def test_reports_of_progress_are_the_response_in_order(self, subject: EngineSubject, engine: Driven) -> None:
        end = _ended(engine, subject.generate(1))
        reported = b""
        for event in engine.left_over(GenerationAdvanced):
            assert (event.key, event.attempt) == (end.key, end.attempt)
            assert event.from_token * 4 == len(reported)
            reported += event.chunk.tokens
        assert end.part.tokens.startswith(reported)

    def test_weights_are_staged_and_served_as_they_were_published(self, subject: EngineSubject, engine: Driven) -> None:
        for version, publish in ((4, 2), (4, 3), (9, 4)):
            serve(engine, subject.export(version, publish))
            _check(subject, _ended(engine, subject.generate(publish)).part, {version})

    def test_weights_that_were_damaged_are_refused_and_it_goes_on(self, subject: EngineSubject, engine: Driven) -> None:
        can = subject.spec.capabilities
        if Capability.HOLDS_WEIGHTS not in can or Capability.MODELLED in can:
            pytest.skip("it fetches none")
        damaged = msgspec.structs.replace(subject.export(4, 2), digest="0" * 64)
        staged = engine.ask(FetchWeights(damaged), WeightsStagedLocally)
        assert (staged.version, staged.publish, staged.digest) == (4, 2, "")
        assert staged.error
        _check(subject, _ended(engine, subject.generate(1)).part, {3})

    def test_the_canary_is_answered_in_full(self, subject: EngineSubject, engine: Driven) -> None:
        if Capability.CANARY not in subject.spec.capabilities:
            pytest.skip("it scores none")
        manifest = subject.export(4, 2)
        assert manifest.canary is not None, "the subject exports none, and its spec says CANARY"
        swapped = serve(engine, manifest)
        assert len(swapped.canary_logprobs) == len(manifest.canary.logprobs)
        assert all(math.isfinite(each) for each in floats_view(swapped.canary_logprobs))

    @pytest.mark.parametrize("mode", UpdateMode)
    def test_a_swap_among_running_requests_stamps_each_token(
        self, subject: EngineSubject, engine: Driven, mode: UpdateMode
    ) -> None:
        can = subject.spec.capabilities
        needed = {UpdateMode.IN_FLIGHT: Capability.IN_FLIGHT, UpdateMode.INTERRUPT: Capability.INTERRUPT}.get(mode)
        if needed is not None and needed not in can:
            pytest.skip(f"it cannot do {mode}")
        manifest = subject.export(4, 2)
        engine.ask(FetchWeights(manifest), WeightsStagedLocally)
        commands = [subject.generate(number) for number in range(subject.context.options.slots)]
        engine.tell(*commands)
        ends: list[GenerationEnded] = []
        if mode is UpdateMode.DRAIN:
            ends = [engine.hear(GenerationEnded) for _ in commands]
        elif mode is UpdateMode.INTERRUPT and Capability.RETRACT not in can:
            engine.tell(InterruptGenerations())
        assert engine.ask(ApplyWeights(manifest, mode), WeightsSwapped).version == 4
        ends += [engine.hear(GenerationEnded) for _ in commands[len(ends) :]]
        for end in ends:
            if end.part.num_tokens or not isinstance(end.outcome, Cancelled):  # else it had not begun
                _check(subject, end.part, {3, 4})
        _check(subject, _ended(engine, subject.generate(99)).part, {4})

    def test_an_abort_ends_one_request_and_is_deaf_to_ended_ones(self, subject: EngineSubject, engine: Driven) -> None:
        kept, aborted = subject.generate(1), subject.generate(2)
        engine.tell(kept, aborted, AbortGeneration(aborted.key, aborted.attempt))
        ends = {end.key: end for end in (engine.hear(GenerationEnded) for _ in range(2))}
        if isinstance(outcome := ends[aborted.key].outcome, Cancelled):  # else it was faster
            assert outcome.cause == "aborted"
        assert isinstance(ends[kept.key].outcome, Completed | Truncated)
        engine.tell(AbortGeneration(aborted.key, aborted.attempt), AbortGeneration(SampleKey(1 << 40, 0), 0))
        assert _ended(engine, subject.generate(3)).key == subject.generate(3).key

    def test_an_interruption_ends_all_with_what_there_is(self, subject: EngineSubject, engine: Driven) -> None:
        if Capability.INTERRUPT not in subject.spec.capabilities:
            pytest.skip("it cannot")
        commands = [subject.generate(number) for number in range(subject.context.options.slots)]
        engine.tell(*commands, InterruptGenerations())
        for end in [engine.hear(GenerationEnded) for _ in commands]:
            if isinstance(end.outcome, Cancelled):
                assert end.outcome.cause == "interrupted"
            if end.part.num_tokens:
                _check(subject, end.part, {3})

    def test_a_response_goes_on_from_a_prefix(self, subject: EngineSubject, engine: Driven) -> None:
        if Capability.FROM_ROWS in subject.spec.capabilities:
            pytest.skip("it gives responses whole")
        whole = _ended(engine, subject.generate(1)).part
        span = whole.spans[0].__class__(3, 1)
        prefix = Part(tokens=whole.tokens[:4], logprobs=whole.logprobs[:4], spans=(span,))
        serve(engine, subject.export(4, 2))
        part = _ended(engine, subject.generate(2, prefix)).part
        _check(subject, part, {3, 4})
        assert part.tokens.startswith(prefix.tokens)
        assert part.logprobs.startswith(prefix.logprobs)
        assert part.spans[0] == span

    def test_a_sample_follows_from_its_seed(self, subject: EngineSubject, engine: Driven) -> None:
        if Capability.SEEDED_SAMPLING not in subject.spec.capabilities:
            pytest.skip("it draws by chance")
        first = _ended(engine, subject.generate(1, seed=7))
        again = _ended(engine, subject.generate(1, seed=7, attempt=1))
        assert (first.part.tokens, first.attempt + 1) == (again.part.tokens, again.attempt)

    def test_it_shows_figures_and_closes_with_work_in_hand(self, subject: EngineSubject) -> None:
        driven = Driven(subject.spec.open(subject.context), subject.timeout_s)
        driven.ask(OpenEngine(), EngineOpened)
        serve(driven, subject.export(0, 0))
        driven.tell(*(subject.generate(number) for number in range(4)))
        assert all(isinstance(gauge, Metric) for gauge in driven.backend.gauges())
        driven.close()


def serve(engine: Driven, manifest: WeightManifest) -> WeightsSwapped:
    """Have an idle engine serve these weights."""
    staged = engine.ask(FetchWeights(manifest), WeightsStagedLocally)
    assert (staged.version, staged.publish, staged.error) == (manifest.version, manifest.publish, "")
    assert staged.digest == manifest.digest
    swapped = engine.ask(ApplyWeights(manifest, UpdateMode.DRAIN), WeightsSwapped)
    assert (swapped.version, swapped.publish, swapped.digest) == (manifest.version, manifest.publish, manifest.digest)
    return swapped


def _ended(engine: Driven, command: Generate) -> GenerationEnded:
    return engine.ask(command, GenerationEnded)


def _check(subject: EngineSubject, part: Part, versions: set[int]) -> None:
    """Every token has a log-prob and a version, versions only rise, and they are among these."""
    assert part.num_tokens > 0
    logprobs = floats_view(part.logprobs)
    assert len(logprobs) == part.num_tokens
    are_known = Capability.FROM_ROWS not in subject.spec.capabilities  # rows need not hold any
    assert all(each <= 0 or (math.isnan(each) and not are_known) for each in logprobs)
    assert sum(span.num_tokens for span in part.spans) == part.num_tokens
    found = [span.version for span in part.spans]
    assert found == sorted(set(found))
    assert set(found) <= versions
