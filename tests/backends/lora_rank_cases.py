"""What the ranks of a learner do in tests of adapters and references; jobs for :mod:`rank_cases`."""

# torch.manual_seed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from learner_cases import make_groups

from penstock.backends.learners.options import LearnerOptions, LoraOptions, ObjectiveOptions
from penstock.backends.learners.torch.adapter_publishing import AdapterPublisher
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import parallelize, replica, whole
from penstock.backends.learners.torch.publishing import GatheredWeights
from penstock.backends.learners.torch.reference import frozen, new_reference, refresh
from penstock.backends.learners.torch.sharded_load import load_divided
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.weights.disk import DiskExporter
from penstock.backends.weights.transports import open_fetcher

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


def publish_adapters(
    workers: WorkerGroup, folder: Path, target: Path, parallel: Parallel, dtype: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The base and the adapters as the first rank has published them, and the merged weights of every rank."""
    options = LearnerOptions(lora=LoraOptions(rank=4, alpha=8, publish="adapter"), parallel=parallel)
    assert options.lora is not None
    torch.manual_seed(7)
    model = load_divided(folder, workers, options, dtype=dtype, lora=options.lora)
    assert model.adapters is not None
    with torch.no_grad():
        for number, tensor in enumerate(model.adapters.state().values()):
            tensor.add_(0.01 * (number + 1))
    base = new_reference(model, options, workers)
    assert base is not None
    exporter = DiskExporter(target, 1) if workers.is_first else None
    publisher = AdapterPublisher(workers, exporter)
    manifests = [publisher.publish(model, base, version=v, publish=v, canary=None) for v in range(2)]
    merged = {name: whole(tensor, model.dtype).clone() for name, tensor in model.weights()}
    manifest = manifests[-1]
    if manifest is None:
        return {}, {}, merged
    assert manifest.base is not None
    found = [dict(open_fetcher().fetch(each).tensors) for each in (manifest.base, manifest)]
    return found[0], found[1], merged


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
