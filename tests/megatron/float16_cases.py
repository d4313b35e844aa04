"""What ranks do in the tests of float16. Imported by ranks only."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from float16_plan import Burst, Trained
from trainer_cases import workers_of

sys.path.append(str(Path(__file__).parents[1] / "backends"))

from worker_host import Host

from penstock.backends.learners.megatron.critic import OwnCritic, SharedCritic
from penstock.backends.learners.megatron.model.build import close_groups
from penstock.backends.learners.megatron.worker import MegatronWorker
from penstock.messages.commands import Train
from penstock.messages.local import BatchTrained, CheckpointWritten

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from penstock.backends.learners.megatron.opened import OpenedLearner
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.messages.commands import LearnerCommand


class Bursting:
    """Multiplies a gradient while it is told to."""

    def __init__(self) -> None:
        self.is_on = False

    def watch(self, trainable: TrainableModel) -> None:
        """What goes back out of its first layer here."""
        trainable.model.chunks[0].decoder.layers[0].register_forward_hook(self._forward)

    def _forward(self, _module: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        if self.is_on and output[0].requires_grad:
            output[0].register_hook(lambda gradient: gradient * 2.0**30)  # type: ignore[no-untyped-call]


def carried_out(
    rank: int, plan: LearnerPlan, num_ranks: int, commands: Sequence[LearnerCommand], burst: Burst | None = None
) -> Trained:
    """Commands, the first of which opens the learner, and what became of them."""
    host, bursting = Host(), Bursting()
    worker = MegatronWorker(plan, workers_of(rank, num_ranks), host, None)
    opened: OpenedLearner | None = None
    trained: list[BatchTrained] = []
    weights: list[dict[str, Any]] = []
    for number, command in enumerate(commands):
        bursting.is_on = isinstance(command, Train) and burst is not None and command.version == burst.version
        answer = worker.carry_out(command)
        opened = worker._opened
        assert opened is not None
        if not number:
            weights.append(_weights(opened))
            if burst is not None and burst.rank == rank:
                bursting.watch(_trainables(opened)["critic" if burst.of_critic else "policy"])
        if isinstance(answer, BatchTrained):
            trained.append(answer)
            weights.append(_weights(opened))
    worker.finish()
    assert not host.errors, host.errors
    assert opened is not None
    told = Trained(
        [{metric.name: metric.value for metric in each.metrics} for each in trained],
        [text for each in trained for text in each.notices],
        weights,
        [opened.trainer.scale.value, opened.trainer.scale._good_steps],
        [one.path for one in host.answers if isinstance(one, CheckpointWritten)],
    )
    close_groups()
    return told


def _trainables(opened: OpenedLearner) -> dict[str, TrainableModel]:
    found = {} if opened.policy is None else {"policy": opened.policy.trainable}
    return found | ({"critic": opened.critic.trainable} if isinstance(opened.critic, OwnCritic) else {})


def _weights(opened: OpenedLearner) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, trainable in _trainables(opened).items():
        trainable.gather_weights()
        for number, chunk in enumerate(trainable.model.chunks):
            parameters = chunk.named_parameters()
            found |= {f"{name}/{number}/{key}": each.detach().float().numpy().copy() for key, each in parameters}
    if isinstance(opened.critic, SharedCritic):
        found |= {key: each.float().numpy().copy() for key, each in opened.critic.state().items()}
    return found
