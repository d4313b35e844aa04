"""What ranks do in the tests of sleep and of optimizers on the host. Imported by ranks only."""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import training_plan as plan
from weight_cases import CPU

from penstock.backends.learners.checkpoints.record import LearnerFacts
from penstock.backends.learners.megatron.bridge.architecture import read_architecture
from penstock.backends.learners.megatron.checkpoint.checkpoint import POLICY, MegatronCheckpoints
from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.model.build import build_model, close_groups, open_groups
from penstock.backends.learners.megatron.optimizer.offload import SleepingMemory, optimizer_tensors
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
from penstock.backends.learners.megatron.weights.load import load_weights
from penstock.backends.learners.megatron_options import MegatronOptions
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.worker_group.workers import WorkerGroup

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.layout.model_config import Precision
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores
    from penstock.messages.local import CheckpointWritten

NUM_STEPS = 3
LARGE_BYTES = 2048


def small_options(keys: dict[str, Any]) -> MegatronOptions:
    given: dict[str, Any] = {**keys, "optimizer": {**keys.get("optimizer", {}), "adam_eps": plan.EPSILON}}
    return MegatronOptions(**given)


def built(rank: int, folder: str, options: MegatronOptions, num_ranks: int, precision: Precision) -> ParallelModel:
    """A model with its weights."""
    layout = layout_of(options, num_ranks)
    model = build_model(read_architecture(Path(folder)), layout, options, precision=precision, device=CPU)
    load_weights(model, Path(folder), rank=rank)
    return model


def trainable_model(model: ParallelModel, options: MegatronOptions) -> TrainableModel:
    return TrainableModel(
        model, options, betas=plan.BETAS, weight_decay=plan.WEIGHT_DECAY, max_grad_norm=plan.MAX_GRAD_NORM, device=CPU,
        temperature=plan.TEMPERATURE,
    )  # fmt: skip


def take_step(trainable: TrainableModel, rank: int, step: int) -> tuple[float, float]:
    layout = trainable.model.layout
    share = plan.NUM_MICRO_BATCHES // layout.data
    first = share * layout.place(rank).data
    batches = plan.micro_batches(step, trainable.model.architecture.vocab_size)
    count = plan.num_trained(batches)

    def loss(_: int, scores: VocabularyScores) -> torch.Tensor:
        return -(scores.logprobs.sum() + plan.ENTROPY_COEF * scores.entropy.sum()) / count

    result = trainable.step(batches[first : first + share], loss, learning_rate=plan.LEARNING_RATE)
    return result.loss, result.grad_norm


def everything(trainable: TrainableModel) -> list[torch.Tensor]:
    """What training goes on from, copied."""
    weights = [parameter for chunk in trainable.chunks for parameter in chunk.parameters()]
    return [tensor.detach().clone() for tensor in (*weights, *optimizer_tensors(trainable.optimizer))]


def slept(rank: int, folder: str, keys: dict[str, Any], num_ranks: int, precision: Precision) -> dict[str, Any]:
    """Train twice, with and without a sleep after each step; a reference that is only asked sleeps as well."""
    options = small_options(keys)
    open_groups(layout_of(options, num_ranks), seed=1)
    sleeps: list[dict[str, Any]] = []
    ends: list[list[torch.Tensor]] = []
    figures: list[list[tuple[float, float]]] = []
    for does_sleep in (False, True):
        trainable = trainable_model(built(rank, folder, options, num_ranks, precision), options)
        reference = built(rank, folder, options, num_ranks, precision)
        figures.append([])
        for step in range(NUM_STEPS):
            figures[-1].append(take_step(trainable, rank, step))
            if does_sleep:
                sleeps.append(slept_once(trainable, reference))
        trainable.gather_weights()
        ends.append([*everything(trainable), *(p.detach().clone() for c in reference.chunks for p in c.parameters())])
    close_groups()
    return {
        "figures": figures,
        "ends": [[tensor.float().numpy() for tensor in end] for end in ends],
        "sleeps": sleeps,
    }


def slept_once(trainable: TrainableModel, reference: ParallelModel) -> dict[str, Any]:
    trainable.gather_weights()
    before = everything(trainable)
    wanted_bytes = training_bytes(trainable, reference)
    gc.collect()
    live_before = live_bytes()
    memory = SleepingMemory([trainable], [reference], device=CPU)
    gc.collect()
    live_asleep = live_bytes() - memory.kept_bytes - sum(tensor.nbytes for tensor in before)
    tensors = [parameter for chunk in trainable.chunks for parameter in chunk.parameters()]
    there = [*tensors, *optimizer_tensors(trainable.optimizer), *(p for c in reference.chunks for p in c.parameters())]
    there += gradients_of(tensors)
    left = max((tensor.untyped_storage().nbytes() for tensor in there if tensor.ndim), default=0)
    on_host = [memory.on_host(tensor.detach()).clone() for tensor in tensors]
    with memory.optimizer_on_host():
        on_host += [memory.on_host(tensor.detach()).clone() for tensor in optimizer_tensors(trainable.optimizer)]
    size_bytes = memory.size_bytes
    memory.restore()
    woken = everything(trainable)
    return {
        "size_bytes": size_bytes,
        "wanted_bytes": wanted_bytes,
        "left": left,
        "live_before": live_before - sum(tensor.nbytes for tensor in before),
        "live_asleep": live_asleep,
        "gradients": max(float(gradient.abs().max()) for gradient in gradients_of(tensors)),
        "woken_differs": sum(not torch.equal(a, b) for a, b in zip(before, woken, strict=True)),
        "host_differs": sum(not torch.equal(a, b) for a, b in zip(before, on_host, strict=True)),
    }


def training_bytes(trainable: TrainableModel, reference: ParallelModel) -> int:
    """Weights, gradients and optimizer, each piece of memory once."""
    own = [parameter for chunk in trainable.chunks for parameter in chunk.parameters()]
    other = [parameter for chunk in reference.chunks for parameter in chunk.parameters()]
    kept = (*own, *other, *gradients_of(own), *optimizer_tensors(trainable.optimizer))
    storages = [tensor.untyped_storage() for tensor in kept]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gradients_of(parameters: list[Any]) -> list[torch.Tensor]:
    """In megatron-core's buffers."""
    return [parameter.main_grad for parameter in parameters]


def live_bytes() -> int:
    """Of all larger tensors that this process has."""
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided and not tensor.is_meta]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for size in sizes.values() if size >= LARGE_BYTES)


def offloaded(rank: int, folder: str, keys: dict[str, Any], num_ranks: int, precision: Precision) -> dict[str, Any]:
    """A few steps with these options: what they reported, the optimizer's class, and the weights after them."""
    options = small_options(keys)
    open_groups(layout_of(options, num_ranks), seed=1)
    trainable = trainable_model(built(rank, folder, options, num_ranks, precision), options)
    figures = [take_step(trainable, rank, step) for step in range(NUM_STEPS)]
    trainable.gather_weights()
    weights = [p.detach().float().clone().numpy() for chunk in trainable.chunks for p in chunk.parameters()]
    chain: Any = trainable.optimizer
    inner = [member.optimizer for member in getattr(chain, "chained_optimizers", [chain])]
    moved = [copy for part in inner for copy in getattr(part, "gpu_params_map_cpu_copy", {}).values()]
    total = sum(tensor.numel() for part in inner for group in part.param_groups for tensor in group["params"])
    close_groups()
    return {
        "figures": figures,
        "weights": weights,
        "kinds": {type(part).__name__ for part in inner},
        "host_share": sum(tensor.numel() for tensor in moved) / total,
    }


def saved_twice(rank: int, folder: str, target: str, keys: dict[str, Any], num_ranks: int) -> list[str]:
    """After a step, a checkpoint of the learner awake and one asleep, with a reference: where they are."""
    options = MegatronOptions(**keys)
    open_groups(layout_of(options, num_ranks), seed=1)
    control = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
    workers = WorkerGroup(rank=rank, num_ranks=num_ranks, device=CPU, timeout_s=60.0, control=control)
    written: list[CheckpointWritten] = []
    failed: list[BaseException] = []
    checkpoints = MegatronCheckpoints(
        Path(target), epoch=1, model_folder=Path(folder), workers=workers, options=LearnerOptions(megatron=options),
        done=written.append, fail=failed.append,
    )  # fmt: skip
    trainable = trainable_model(built(rank, folder, options, num_ranks, "float32"), options)
    reference = built(rank, folder, options, num_ranks, "float32")
    take_step(trainable, rank, 0)
    for version in (1, 2):
        asleep = SleepingMemory([trainable], [reference], device=CPU) if version == 2 else None
        facts = LearnerFacts(version, "float32", 0, (), reference_version=version)
        checkpoints.begin_save({POLICY: trainable}, facts, reference=reference, asleep=asleep)
        if asleep is not None:
            asleep.restore()
            take_step(trainable, rank, 1)  # while it is written
    checkpoints.wait()
    assert not failed, failed
    close_groups()
    return [each.path for each in written]
