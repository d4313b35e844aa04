"""A torch learner that tests drive command by command, and batches for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.backends.checkpoint.make import END_ID, SYMBOLS, character_tokenizer
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.plan import ExportPlan, LearnerPlan, pack_demonstrations
from penstock.backends.learners.torch.backend import open_torch_learner
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.commands import LearnerCommand, Train
from penstock.messages.local import LocalEvent, WeightsCopied
from penstock.messages.samples import (
    Completed,
    Group,
    Part,
    Prompt,
    Reward,
    Sample,
    SampleKey,
    Truncated,
    VersionSpan,
)
from penstock.messages.weights import Canary, WeightManifest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from penstock.backends.protocol import Backend
    from penstock.backends.weights.stream import AnyWeights

WAIT_S = 60.0
EventT = TypeVar("EventT", bound=LocalEvent)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class HeldWeights:
    """An exporter that keeps a copy of each publish in memory."""

    def __init__(self) -> None:
        self.published: list[dict[str, torch.Tensor]] = []
        self.canaries: list[Canary] = []
        self.released: list[int] = []
        self.num_closes = 0

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        assert canary is not None
        named = tensors.items() if isinstance(tensors, Mapping) else tensors.tensors()
        self.published.append({name: tensor.clone() for name, tensor in named})
        self.canaries.append(canary)
        return WeightManifest(
            version=version,
            publish=publish,
            learner_epoch=0,
            transport="held",
            location="",
            size_bytes=0,
            digest="",
            canary=canary,
        )

    def release(self, below_version: int) -> None:
        self.released.append(below_version)

    def close(self) -> None:
        self.num_closes += 1


class RunningLearner:
    """A started learner whose answers are read one by one."""

    def __init__(self, backend: Backend[LearnerCommand], weights: HeldWeights) -> None:
        self.backend = backend
        self.weights = weights
        self._closed = self._failed = False
        self._answers: SimpleQueue[LocalEvent | BaseException] = SimpleQueue()
        backend.start(self._answers.put, self._answers.put)

    def ask(self, command: LearnerCommand, answer: type[EventT]) -> EventT:
        self.backend.execute(command)
        return self.next(answer)

    def next(self, answer: type[EventT]) -> EventT:
        while True:
            event = self._answers.get(timeout=WAIT_S)
            if isinstance(event, BaseException):
                self._failed = True
                raise event
            if isinstance(event, answer):
                return event
            assert isinstance(event, WeightsCopied), "it stands before what is waited for"

    def error(self, *commands: LearnerCommand) -> BaseException:
        for command in commands:
            self.backend.execute(command)
        while not isinstance(event := self._answers.get(timeout=WAIT_S), BaseException):
            pass
        self._failed = True
        return event

    def close(self) -> None:
        """Once, however often it is called; the weights are let go of, unless the learner has failed."""
        if not self._closed:
            self._closed = True
            self.backend.close(WAIT_S)
            assert self.weights.num_closes == (0 if self._failed else 1)

    def gauge(self, name: str) -> float:
        return {metric.name: metric.value for metric in self.backend.gauges()}[name]


def learner_plan(model_folder: Path, checkpoints_folder: Path, options: LearnerOptions, **others: Any) -> LearnerPlan:  # noqa: ANN401 - fields of it
    """Of a run with ten batches, unless told; it publishes nowhere, unless told."""
    usual: dict[str, Any] = {
        "temperature": 1.0,
        "dtype": "float32",
        "seed": 0,
        "num_steps": 10,
        "epoch": 1,
        "export": ExportPlan(transport="disk", run_id="", folder="", host="127.0.0.1"),
    }
    return LearnerPlan(
        model_folder=str(model_folder), checkpoints_folder=str(checkpoints_folder), options=options, **(usual | others)
    )


def open_learner(
    model_folder: Path,
    checkpoints_folder: Path,
    options: LearnerOptions | None = None,
    *,
    demonstrations: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    dtype: str = "float32",
    seed: int = 0,
    temperature: float = 1.0,
    epoch: int = 1,
) -> RunningLearner:
    """Of a run with ten batches, started and not opened yet."""
    weights = HeldWeights()
    plan = learner_plan(
        model_folder,
        checkpoints_folder,
        options or LearnerOptions(learning_rate=1e-3),
        dtype=dtype,
        seed=seed,
        temperature=temperature,
        epoch=epoch,
        demonstrations=None if demonstrations is None else pack_demonstrations(demonstrations),
    )
    return RunningLearner(open_torch_learner(plan, weights), weights)


def make_groups(rewards: Sequence[Sequence[float]] = ((1.0, 0.0), (0.5, 0.5, 0.0))) -> tuple[Group, ...]:
    """One group for each row of rewards; sample ``i`` has ``3 + i`` tokens, the last sample of a group is cut off."""
    groups: list[Group] = []
    for group_id, row in enumerate(rewards):
        samples: list[Sample] = []
        for index, reward in enumerate(row):
            num_tokens = 3 + index
            outcome = Truncated if index == len(row) - 1 else Completed
            part = Part(
                tokens=pack_tokens((2 + group_id + 5 * index + place) % len(SYMBOLS) for place in range(num_tokens)),
                logprobs=pack_floats([-4.0] * num_tokens),
                spans=(VersionSpan(0, 1), VersionSpan(1, num_tokens - 1)),
            )
            key = SampleKey(group_id, index)
            samples.append(Sample(key=key, parts=(part,), outcome=outcome(reward=Reward(value=reward))))
        prompt = Prompt(row=group_id, epoch=0, tokens=pack_tokens([10, 11 + group_id]))
        groups.append(Group(group_id=group_id, prompt=prompt, samples=tuple(samples)))
    return tuple(groups)


def train_command(version: int = 1, min_token_version: int = 0, groups: tuple[Group, ...] | None = None) -> Train:
    return Train(version=version, groups=groups or make_groups(), min_token_version=min_token_version)


def demonstrations(text: str = "abA=Aab") -> list[tuple[list[int], list[int]]]:
    tokenizer = character_tokenizer()
    prompt, _, answer = text.partition("=")
    return [(tokenizer.encode(prompt + "=").ids, [*tokenizer.encode(answer).ids, END_ID])] * 3
