"""The torch learner as a backend: one worker thread that carries out commands in order.

Invariants:

* Model, optimizer and exporter are touched by the worker thread only; ``execute`` puts a command in its queue.
* Each command is answered by exactly one event, in the order of the commands; ``ReleaseWeights`` by none.
* ``Train`` makes exactly the next version. What is published or saved is the current one.
* An error ends the thread through ``fail``; nothing is answered after it.

| wait | who ends it |
|---|---|
| worker, for a command | ``execute``, or ``close`` with the end mark |
| ``close``, for the worker | the worker, which looks for the end before each micro-batch; at the latest the timeout |
"""

# torch.manual_seed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, assert_never

import torch

from penstock.backends.learners.metrics import as_metrics
from penstock.backends.learners.sequences import demonstration_sequence
from penstock.backends.learners.torch.canary import canary_under, choose_canary
from penstock.backends.learners.torch.checkpoint import checkpoint_name, write_checkpoint
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import GrpoTrainer
from penstock.backends.learners.torch.warm_start import warm_start
from penstock.messages.commands import (
    LearnerCommand,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    Train,
)
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, WeightsPublished

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.protocol import Emit, Fail
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.base import Metric
    from penstock.messages.local import LocalEvent

Demonstration = tuple["Sequence[int]", "Sequence[int]"]
"""Token ids of a prompt and of a response, the end token included."""


class _LearnerClosed(Exception):  # noqa: N818  # no error: the way out of a long command
    """Unwinds the worker when ``close`` was called; never leaves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSetup:
    """What a learner is made from; see :func:`.open_torch_learner`."""

    model_folder: Path
    checkpoints_folder: Path
    options: LearnerOptions
    temperature: float
    dtype: str
    device: torch.device
    seed: int
    num_steps: int
    exporter: WeightExporter
    demonstrations: Sequence[Demonstration]


@dataclass(slots=True)
class _Opened:
    """What exists from ``OpenLearner`` on."""

    model: PackedModel
    trainer: GrpoTrainer
    canary: tuple[int, ...]
    version: int = 0


class TorchLearnerBackend:
    """Carries out the Learner's commands with torch."""

    def __init__(self, setup: LearnerSetup) -> None:
        self._setup = setup
        self._commands: SimpleQueue[LearnerCommand | None] = SimpleQueue()
        self._closing = threading.Event()
        self._worker: threading.Thread | None = None
        self._opened: _Opened | None = None
        self._figures: dict[str, float] = {}
        self._gauges: tuple[Metric, ...] = ()

    def start(self, emit: Emit, fail: Fail) -> None:
        self._worker = threading.Thread(target=self._work, args=(emit, fail), name="torch-learner", daemon=True)
        self._worker.start()

    def execute(self, command: LearnerCommand, /) -> None:
        self._commands.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        return self._gauges

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        self._commands.put(None)
        if self._worker is None:
            self._setup.exporter.close()
        else:
            self._worker.join(timeout_s)

    def _work(self, emit: Emit, fail: Fail) -> None:
        torch.set_num_threads(self._setup.options.num_threads)
        try:
            while (command := self._commands.get()) is not None:
                self._check_stop()
                answer = self._carry_out(command)
                if answer is not None:
                    emit(answer)
        except _LearnerClosed:
            pass
        except BaseException as error:
            # The thread's only way to tell: an error that ended it silently would look like a step that never ends.
            fail(error)
        finally:
            self._setup.exporter.close()

    def _carry_out(self, command: LearnerCommand) -> LocalEvent | None:
        match command:
            case OpenLearner():
                return self._open()
            case Train():
                return self._train(command)
            case PublishWeights():
                return self._publish(command)
            case ReleaseWeights():
                self._setup.exporter.release(command.below_version)
                return None
            case SaveCheckpoint():
                return self._save(command)
            case _:
                assert_never(command)

    def _open(self) -> LearnerOpened:
        setup = self._setup
        if self._opened is not None:
            raise ValueError("OpenLearner came twice; a learner is opened once")
        torch.manual_seed(setup.seed)
        model = PackedModel.load(setup.model_folder, dtype=setup.dtype, device=setup.device)
        self._warm_start(model)
        reference = None
        if setup.options.objective.kl_coef:
            reference = PackedModel(copy.deepcopy(model.model).requires_grad_(requires_grad=False), model.device)
        trainer = GrpoTrainer(
            model,
            setup.options,
            temperature=setup.temperature,
            num_steps=setup.num_steps,
            reference=reference,
            check_stop=self._check_stop,
        )
        self._opened = _Opened(model=model, trainer=trainer, canary=choose_canary(model))
        return LearnerOpened(version=0)

    def _warm_start(self, model: PackedModel) -> None:
        block = self._setup.options.warm_start
        if block is None:
            return
        sequences = [
            demonstration_sequence(prompt, response, sample=index)
            for index, (prompt, response) in enumerate(self._setup.demonstrations)
        ]
        for index, sequence in enumerate(sequences):
            model.check_length(sequence, f"demonstration {index}")
        self._report({"learner/warm_start_fraction": 0.0})
        warm_start(
            model,
            sequences,
            self._setup.options,
            block,
            seed=self._setup.seed,
            report=lambda fraction, loss: self._report(
                {"learner/warm_start_fraction": fraction, "learner/warm_start_loss": loss}
            ),
            check_stop=self._check_stop,
        )

    def _train(self, command: Train) -> BatchTrained:
        opened = self._ready(command.version - 1, "Train")
        result = opened.trainer.train(
            command.groups, version=command.version, min_token_version=command.min_token_version
        )
        opened.version = command.version
        trained_tokens = self._figures.get("learner/trained_tokens", 0.0) + result.num_trained_tokens
        self._report({"learner/trained_tokens": trained_tokens, "learner/step_time_s": result.step_time_s})
        return BatchTrained(
            version=command.version,
            num_trained_tokens=result.num_trained_tokens,
            num_masked_tokens=result.num_masked_tokens,
            metrics=result.metrics,
        )

    def _publish(self, command: PublishWeights) -> WeightsPublished:
        opened = self._ready(command.version, "PublishWeights")
        manifest = self._setup.exporter.export(
            opened.model.named_tensors(),
            version=command.version,
            publish=command.publish,
            canary=canary_under(opened.model, opened.canary),
        )
        return WeightsPublished(manifest=manifest)

    def _save(self, command: SaveCheckpoint) -> CheckpointWritten:
        opened = self._ready(command.version, "SaveCheckpoint")
        target = self._setup.checkpoints_folder / checkpoint_name(command.version)
        write_checkpoint(opened.model, source=self._setup.model_folder, target=target)
        return CheckpointWritten(version=command.version, path=str(target))

    def _ready(self, version: int, command: str) -> _Opened:
        if self._opened is None:
            raise ValueError(f"{command} came before OpenLearner")
        if self._opened.version != version:
            raise ValueError(f"{command} needs the learner at version {version}, and it is at {self._opened.version}")
        return self._opened

    def _report(self, figures: dict[str, float]) -> None:
        self._figures |= figures
        # Another thread reads the gauges; it gets this tuple or the one before, never a half of each.
        self._gauges = as_metrics(self._figures)

    def _check_stop(self) -> None:
        if self._closing.is_set():
            raise _LearnerClosed
