"""What ranks do in the tests of a critic on ranks of its own. Imported by ranks only."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from critic_rank_plan import Told
from torch import nn
from trainer_cases import workers_of

sys.path.append(str(Path(__file__).parents[1] / "backends"))

from worker_host import Host

from penstock.backends.learners.megatron.critic import OwnCritic
from penstock.backends.learners.megatron.model.build import close_groups
from penstock.backends.learners.megatron.trainer import MegatronTrainer
from penstock.backends.learners.megatron.worker import MegatronWorker
from penstock.backends.learners.training.step import BatchTokens
from penstock.backends.learners.worker_group.workers import is_peer_lost
from penstock.messages.local import BatchTrained, CheckpointWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from critic_rank_plan import Short

    from penstock.backends.learners.megatron.opened import OpenedLearner
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.messages.commands import LearnerCommand


def carried_out(
    rank: int, plan: LearnerPlan, num_ranks: int, commands: Sequence[LearnerCommand], short: Short | None = None
) -> Told:
    """Commands, and what became of them; with a critic on ranks of its own once in the life of a process."""
    before = {id(each) for each in _parameters()}
    host, known = Host(), list[BatchTokens]()
    open_batch = MegatronTrainer._open

    def opening(self: MegatronTrainer, *given: Any, **keys: Any) -> BatchTokens:  # noqa: ANN401 - as it is called
        known.append(open_batch(self, *given, **keys))
        return known[-1]

    MegatronTrainer._open = opening  # type: ignore[method-assign]
    worker = MegatronWorker(plan, workers_of(rank, num_ranks), host, None)
    answers, num_held = list[Any](), 0
    for number, command in enumerate(commands):
        answers.append(worker.carry_out(command))
        if not number:
            num_held = sum(each.numel() for each in _parameters() if id(each) not in before)
            if short is not None and short.rank == rank:
                _limit(worker, short.max_inputs)
    worker.finish()
    MegatronTrainer._open = open_batch  # type: ignore[method-assign]
    assert not host.errors, host.errors
    found = worker._opened
    assert found is not None
    told = Told(
        [
            {metric.name: metric.value for metric in answer.metrics}
            for answer in answers
            if isinstance(answer, BatchTrained)
        ],
        [tuple(_numpy(each) for each in (one.opening.values, one.advantages, one.returns)) for one in known],
        *_weights(found),
        num_held,
        found.trainer.max_tokens_per_micro_batch,
        [one.path for one in host.answers if isinstance(one, CheckpointWritten)],
    )
    close_groups()
    return told


def with_one_that_dies(
    rank: int, plan: LearnerPlan, num_ranks: int, commands: Sequence[LearnerCommand], doomed: int
) -> None:
    """Commands, in the last of which the process of a rank is killed. The others end as a rank of a learner does when
    it hears of that, and leave a file that says so."""
    host = Host()
    worker = MegatronWorker(plan, workers_of(rank, num_ranks), host, None)
    *before, last = commands
    for command in before:
        worker.carry_out(command)
    worker.settle()
    assert not host.errors, host.errors
    if rank == doomed:
        _at_second_layer(worker, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    try:
        worker.carry_out(last)
    except RuntimeError as error:
        if is_peer_lost(error):
            (Path(plan.checkpoints_folder) / f"noticed-{rank}").touch()
    os._exit(1)


def _limit(worker: MegatronWorker, max_inputs: int) -> None:
    def run_out(values: torch.Tensor) -> None:
        if values.shape[0] > max_inputs:
            raise torch.OutOfMemoryError(f"{values.shape[0]} inputs")

    _at_second_layer(worker, run_out)


def _at_second_layer(worker: MegatronWorker, act: Callable[[torch.Tensor], None]) -> None:
    """Of what this rank trains, in the backward pass."""

    def forward(_module: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        if output[0].requires_grad:
            output[0].register_hook(act)  # type: ignore[no-untyped-call]

    assert worker._opened is not None
    worker._opened.trainer._model.chunks[0].decoder.layers[1].register_forward_hook(forward)


def _weights(opened: OpenedLearner) -> tuple[dict[str, Any], dict[str, Any]]:
    policy = None if opened.policy is None else opened.policy.trainable
    critic = opened.critic.trainable if isinstance(opened.critic, OwnCritic) else None
    for trained in (policy, critic):
        if trained is not None:
            trained.gather_weights()
    of_each = (
        {} if one is None else {
            f"{number}/{name}": _numpy(weight)
            for number, chunk in enumerate(one.model.chunks)
            for name, weight in chunk.named_parameters()
        }
        for one in (policy, critic)
    )  # fmt: skip
    own, other = of_each
    return own, other


def _numpy(tensor: torch.Tensor | None) -> Any:  # noqa: ANN401 - an array
    assert tensor is not None
    return tensor.detach().float().numpy().copy()


def _parameters() -> list[nn.Parameter]:
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [each for each in tensors if isinstance(each, nn.Parameter) and each.untyped_storage().size()]
