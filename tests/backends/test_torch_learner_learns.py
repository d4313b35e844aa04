"""Learner, weights and embedded engine together, without actors: a made model learns the quickstart's task."""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest
from learner_cases import learner_plan

from penstock.backends.checkpoint.make import END_ID, character_tokenizer, make_model
from penstock.backends.data.lines import LinesRow, lines_reward, lines_row, noisy_answer
from penstock.backends.engines.options import EnginesOptions, SamplingOptions
from penstock.backends.engines.torch.factory import open_torch_engine
from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions, LoraOptions, WarmStartOptions
from penstock.backends.learners.plan import pack_demonstrations
from penstock.backends.learners.torch.backend import open_torch_learner
from penstock.backends.weights.transports import open_exporter, open_fetcher
from penstock.messages.arrays import floats_view, pack_tokens, tokens_view
from penstock.messages.commands import (
    ApplyWeights,
    EngineCommand,
    FetchWeights,
    Generate,
    LearnerCommand,
    OpenEngine,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    Train,
)
from penstock.messages.local import (
    BatchTrained,
    EngineOpened,
    GenerationEnded,
    LearnerOpened,
    LocalEvent,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import (
    Completed,
    Group,
    Prompt,
    Purpose,
    Reward,
    Sample,
    SampleKey,
    Truncated,
)
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from penstock.backends.protocol import Backend

WAIT_S = 120.0
NUM_GROUPS = 16
GROUP_SIZE = 8
TOKENIZER = character_tokenizer()
EventT = TypeVar("EventT", bound=LocalEvent)
Answers = SimpleQueue[LocalEvent | BaseException]


class Loop:
    """A learner and an engine that take turns, each step under the newest weights."""

    def __init__(self, folder: Path, model_folder: Path, options: LearnerOptions, num_steps: int) -> None:
        self.learner: Backend[LearnerCommand] = open_torch_learner(
            learner_plan(
                model_folder,
                folder / "checkpoints",
                options,
                num_steps=num_steps,
                demonstrations=pack_demonstrations(demonstration(index) for index in range(4_000)),
            ),
            open_exporter("disk", run_id="learns", learner_epoch=0, folder=folder / "weights"),
        )
        self.engine: Backend[EngineCommand] = open_torch_engine(
            model_folder=model_folder,
            options=EnginesOptions(slots=NUM_GROUPS * GROUP_SIZE, device="cpu"),
            sampling=SamplingOptions(max_response_tokens=256),
            max_context=512,
            dtype="float32",
            fetcher=open_fetcher(),
        )
        self.learned: Answers = SimpleQueue()
        self.generated: Answers = SimpleQueue()
        self.learner.start(self.learned.put, self.learned.put)
        self.engine.start(self.generated.put, self.generated.put)
        self.learner.execute(OpenLearner())
        self.engine.execute(OpenEngine())
        answer_of(self.learned, LearnerOpened)
        answer_of(self.generated, EngineOpened)

    def close(self) -> None:
        self.learner.close(WAIT_S)
        self.engine.close(WAIT_S)

    def bring_weights(self, version: int) -> None:
        """Publish, fetch, apply; the engine's canary must give what the learner's did."""
        self.learner.execute(PublishWeights(version=version, publish=version))
        manifest = answer_of(self.learned, WeightsPublished).manifest
        self.engine.execute(FetchWeights(manifest=manifest))
        assert answer_of(self.generated, WeightsStagedLocally).error == ""
        self.engine.execute(ApplyWeights(manifest=manifest, update_mode=UpdateMode.DRAIN))
        swapped = answer_of(self.generated, WeightsSwapped)
        assert manifest.canary is not None
        expected, actual = floats_view(manifest.canary.logprobs), floats_view(swapped.canary_logprobs)
        assert list(actual) == pytest.approx(list(expected), abs=1e-4)
        self.learner.execute(ReleaseWeights(below_version=version))

    def generate(self, first_group: int, version: int) -> tuple[Group, ...]:
        """A batch of scored groups."""
        rows = {first_group + place: lines_row(1, first_group + place) for place in range(NUM_GROUPS)}
        for group_id, row in rows.items():
            for index in range(GROUP_SIZE):
                self.engine.execute(
                    Generate(
                        key=SampleKey(group_id, index),
                        attempt=0,
                        purpose=Purpose.TRAIN,
                        prompt=prompt_of(row, group_id),
                        seed=group_id * GROUP_SIZE + index,
                        deadline_version=version,
                    )
                )
        samples: dict[int, list[Sample]] = {group_id: [] for group_id in rows}
        for _ in range(NUM_GROUPS * GROUP_SIZE):
            ended = answer_of(self.generated, GenerationEnded)
            samples[ended.key.group_id].append(scored(ended, rows[ended.key.group_id]))
        return tuple(
            Group(group_id=group_id, prompt=prompt_of(row, group_id), samples=tuple(samples[group_id]))
            for group_id, row in rows.items()
        )

    def train(self, groups: tuple[Group, ...], version: int) -> dict[str, float]:
        self.learner.execute(Train(version=version, groups=groups, min_token_version=0))
        return {metric.name: metric.value for metric in answer_of(self.learned, BatchTrained).metrics}


def answer_of(answers: Answers, kind: type[EventT]) -> EventT:
    """The next answer of this kind; others are passed over, errors raised."""
    while not isinstance(event := answers.get(timeout=WAIT_S), kind):
        if isinstance(event, BaseException):
            raise event
    return event


def demonstration(index: int) -> tuple[list[int], list[int]]:
    row = lines_row(0, index)
    return TOKENIZER.encode(row.prompt).ids, [*TOKENIZER.encode(noisy_answer(row.answer, 0, index)).ids, END_ID]


def prompt_of(row: LinesRow, index: int) -> Prompt:
    return Prompt(row=index, epoch=0, tokens=pack_tokens(TOKENIZER.encode(row.prompt).ids), label=row.answer)


def scored(ended: GenerationEnded, row: LinesRow) -> Sample:
    assert isinstance(ended.outcome, Completed | Truncated)
    text = TOKENIZER.decode(list(tokens_view(ended.part.tokens)))
    reward = Reward(value=lines_reward(text, row.answer, truncated=isinstance(ended.outcome, Truncated)))
    outcome = Truncated(reward=reward) if isinstance(ended.outcome, Truncated) else Completed(reward=reward)
    return Sample(key=ended.key, parts=(ended.part,), outcome=outcome)


@contextmanager
def running_loop(
    folder: Path, *, num_warm_start_steps: int, num_steps: int, learner: LearnerOptions | None = None
) -> Generator[Loop]:
    make_model("xs", folder / "model", seed=0)
    block = WarmStartOptions(path="lines:4000", num_steps=num_warm_start_steps, learning_rate=4e-3)
    options = learner or LearnerOptions(learning_rate=1e-3, warmup_steps=5, lr_schedule="linear")
    options = msgspec.structs.replace(options, device="cpu", warm_start=block)
    loop = Loop(folder, folder / "model", options, num_steps)
    try:
        yield loop
    finally:
        loop.close()


def run(loop: Loop, num_steps: int, *, first_trained: int = 0) -> list[float]:
    """Mean reward of each batch. On each one the engine's log-probs are the learner's: the weights are the same."""
    rewards: list[float] = []
    for version in range(num_steps):
        loop.bring_weights(version)
        figures = loop.train(loop.generate(version * NUM_GROUPS, version), version + 1)
        if version >= first_trained:
            assert figures["train/train_rollout_logprob_abs_diff"] < 1e-4
            assert figures["train/ois"] == pytest.approx(1.0, abs=1e-3 if figures["train/num_updates"] == 1 else 0.2)
        rewards.append(figures["rollout/raw_reward"])
    return rewards


ADAPTED = LearnerOptions(lora=LoraOptions(), learning_rate=3e-3, warmup_steps=5, lr_schedule="linear")


@pytest.mark.parametrize("learner", [None, ADAPTED], ids=["whole", "lora"])
def test_engine_and_learner_agree_on_every_version(learner: LearnerOptions | None, tmp_path: Path) -> None:
    with running_loop(tmp_path, num_warm_start_steps=20, num_steps=3, learner=learner) as loop:
        run(loop, 3)


@pytest.mark.slow
def test_adapters_learn_the_task(tmp_path: Path) -> None:
    with running_loop(tmp_path, num_warm_start_steps=250, num_steps=50, learner=ADAPTED) as loop:
        rewards = run(loop, 50)
    assert statistics.fmean(rewards[-8:]) > statistics.fmean(rewards[:8]) + 0.1


@pytest.mark.slow
def test_a_made_model_learns_the_task(tmp_path: Path) -> None:
    with running_loop(tmp_path, num_warm_start_steps=250, num_steps=50) as loop:
        rewards = run(loop, 50)
    assert statistics.fmean(rewards[-8:]) > statistics.fmean(rewards[:8]) + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["own", "shared"])
def test_ppo_with_several_updates_learns_the_task(place: str, tmp_path: Path) -> None:
    ppo = objective("ppo", critic=place, gae_lambda=0.95, whiten=True, critic_learning_rate=2e-3, critic_only_steps=3)
    options = LearnerOptions(objective=ppo, num_updates=2, learning_rate=5e-4, warmup_steps=5, lr_schedule="linear")
    with running_loop(tmp_path, num_warm_start_steps=250, num_steps=50, learner=options) as loop:
        rewards = run(loop, 50, first_trained=ppo.critic_only_steps)
    assert statistics.fmean(rewards[-8:]) > statistics.fmean(rewards[:8]) + 0.1
