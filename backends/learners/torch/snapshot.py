"""The learner's state at one version, copied to memory of its own, so that training can go on while it is written.

Invariants:

* A snapshot is one atomic point: weights, optimizer and random state are copied between two steps.
* Nothing of it changes any more. The reference alone is not copied: nobody changes it.
* The learning rate is a function of the version, and the order in which a batch is gone through one of seed and
  version, so version, weights, optimizers and random state are all that the next step depends on.
"""

# torch's random state is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.models.terminal import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.device_memory import ParkedMemory
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.torch.trainer import PolicyTrainer

CPU_RANDOM: Final = "random/cpu"
CUDA_RANDOM: Final = "random/cuda"
"""Of the learner's own device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSnapshot:
    """What a checkpoint is written from."""

    version: int
    model: PackedModel
    """For its class and config only; its weights train on."""
    weights: dict[str, Tensor]
    """As the model's ``state_dict`` has them."""
    trainer: dict[str, Tensor]
    """Optimizer, critic and random state."""
    dtype: str
    trained_tokens: int
    canary: tuple[int, ...]
    reference: PackedModel | None

    @property
    def size_bytes(self) -> int:
        """Of the tensors; those that have several names count once."""
        tensors = {id(tensor): tensor for tensor in (*self.weights.values(), *self.trainer.values())}
        return sum(tensor.nbytes for tensor in tensors.values())

    def save_model(self, folder: Path) -> None:
        """Write config and weights in Hugging Face format."""
        with quiet_transformers():
            self.model.model.save_pretrained(folder, state_dict=dict(self.weights))


def take_snapshot(
    model: PackedModel,
    trainer: PolicyTrainer,
    reference: PackedModel | None,
    *,
    version: int,
    dtype: str,
    trained_tokens: int,
    canary: tuple[int, ...],
    parked: ParkedMemory | None = None,
) -> LearnerSnapshot:
    """Copy what the next step would change to memory of its own on the host; what is ``parked`` is there already."""
    return LearnerSnapshot(
        version=version,
        model=model,
        weights=_copied(model.model.state_dict(keep_vars=True), parked),
        trainer=_copied(trainer.state(), parked) | _random_state(model.device),
        dtype=dtype,
        trained_tokens=trained_tokens,
        canary=canary,
        reference=reference,
    )


def restore_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers of a snapshot; those of a GPU only where both had one."""
    torch.set_rng_state(tensors[CPU_RANDOM].clone())
    if device.type == "cuda" and CUDA_RANDOM in tensors:
        torch.cuda.set_rng_state(tensors[CUDA_RANDOM].clone(), device)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {CPU_RANDOM: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA_RANDOM] = torch.cuda.get_rng_state(device)
    return states


@torch.no_grad()
def _copied(tensors: Mapping[str, Tensor], parked: ParkedMemory | None) -> dict[str, Tensor]:
    """Names that stand for one tensor (tied embeddings) stand for one copy, as transformers expects."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in copies:
            source = tensor if parked is None else parked.on_host(tensor)
            copies[id(tensor)] = source.detach().to("cpu", copy=True)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}
