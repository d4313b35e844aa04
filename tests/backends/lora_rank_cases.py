"""What the ranks of a learner do in tests of adapters and references; jobs for :mod:`rank_cases`."""

# torch.manual_seed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from learner_cases import make_groups

from penstock.backends.learners.options import LearnerOptions, LoraOptions, ObjectiveOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import parallelize, replica, whole
from penstock.backends.learners.torch.publishing import GatheredWeights
from penstock.backends.learners.torch.reference import frozen, new_reference, refresh
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.trainer import PolicyTrainer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.worker_group.workers import WorkerGroup

Parallel = Literal["fsdp", "ddp"]


def train_adapters(
    workers: WorkerGroup, folder: Path, parallel: Parallel, dtype: str
) -> tuple[dict[str, Tensor], list[float]]:
    """Three batches; the merged weights and the KL of each."""
    options = LearnerOptions(
        learning_rate=1e-3,
        lora=LoraOptions(rank=4, alpha=8),
        objective=ObjectiveOptions(kl_coef=0.1),
        max_tokens_per_micro_batch=16,
        parallel=parallel,
    )
    assert options.lora is not None
    torch.manual_seed(7)
    model = load_divided(folder, workers, options, dtype=dtype, lora=options.lora)
    trainer = PolicyTrainer(
        model,
        options,
        temperature=1.0,
        num_steps=10,
        reference=new_reference(model, options, workers),
        check_stop=lambda: None,
        workers=workers,
    )
    divergences: list[float] = []
    for version in (1, 2, 3):
        result = trainer.train(make_groups(), version=version, min_token_version=0)
        divergences.append({metric.name: metric.value for metric in result.metrics}["train/kl_loss"])
    merged = {name: whole(tensor, model.dtype).clone() for name, tensor in model.weights()}
    published = dict(GatheredWeights(model, workers).tensors())
    if workers.is_first:
        assert published.keys() == merged.keys()
        assert all(torch.equal(published[name], merged[name]) for name in merged)
    return merged, divergences


def refresh_divided(workers: WorkerGroup, folder: Path, parallel: Parallel) -> bool:
    """Whether a reference is what the policy has become, after a refresh and not before."""
    options = LearnerOptions(parallel=parallel)
    model = PackedModel.load(folder, dtype="float32", device=workers.device)
    parallelize(model, workers, options)
    reference = frozen(replica(model, workers, options))
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.add_(0.5)

    def is_same() -> bool:
        weights = {name: whole(tensor) for name, tensor in model.model.named_parameters()}
        return all(torch.equal(whole(tensor), weights[name]) for name, tensor in reference.model.named_parameters())

    was_same = is_same()
    refresh(reference, model)
    return is_same() and not was_same
