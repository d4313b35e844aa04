"""Low-rank adapters: the model's matrices stay as they are, and ``s · B · A`` beside each of them is trained.

Hu et al., arXiv 2106.09685; the layers are those of ``peft``, put into the model in place.

Invariants:

* Nothing but the adapters has a gradient. They are float32, whatever the model computes in.
* ``B`` begins as 0, so version 0 is the base itself, and without adapters (:meth:`Adapters.switched_off`) the model is
  the base at any time, bit for bit.
* What is exported and saved as a model has the names, shapes and dtypes that it has without adapters: each adapted
  matrix is ``W + s · B · A``, added in float32 and rounded once.
* No dropout: the engine has none, and log-probs would differ.
"""

# torch, transformers and peft are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as AdaptedLinear
from safetensors.torch import save_file
from torch import nn

from penstock.backends.checkpoint.checkpoint_names import bare_name
from penstock.backends.learners.torch.model import ADAPTER_PREFIX as PREFIX
from penstock.backends.learners.torch.parallel import load_into
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.backends.learners.options import LoraOptions

NAME: Final = "default"
"""Of the one adapter that a layer has, for peft."""
MATRICES: Final = ("lora_A", "lora_B")
SAVED_PREFIX: Final = "base_model.model."
"""How every name in a file of peft begins."""
WEIGHTS_FILE: Final = "adapter_model.safetensors"


class Adapters:
    """Knows the adapted layers of one model."""

    def __init__(self, model: PreTrainedModel, options: LoraOptions) -> None:
        """Put adapters into the model, from torch's random numbers as they are.

        Raises:
            UserFault: a target is no matrix of the model, or cannot be adapted.
        """
        self._model = model
        targets = _targets(model, options)
        self._config = LoraConfig(
            r=options.rank,
            lora_alpha=cast("int", options.alpha),
            lora_dropout=0.0,
            bias="none",
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
        self._layers = _put_into(model, self._config, targets)
        for name, parameter in model.named_parameters():
            is_adapter = _is_adapter(name)
            parameter.requires_grad_(is_adapter)
            if is_adapter:
                parameter.data = parameter.data.float()
        cast("nn.Module", model).eval()  # what is new in it is not yet

    @contextmanager
    def switched_off(self) -> Generator[None]:
        """While the block runs, the model is the base. Nothing in it takes a gradient."""
        with torch.no_grad():
            self._switch(on=False)
            try:
                yield
            finally:
                self._switch(on=True)

    def merged(self, read: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer under its name in the model without adapters, with the adapter added
        in. One after the other; a tensor that has several names comes under the first.

        Args:
            read: where the values of a tensor are, if they are not in it.
        """
        for name, tensor in _kept(self._model):
            layer = self._layers.get(name.removesuffix(".base_layer.weight"))
            yield bare_name(name), read(tensor) if layer is None else _merged(layer, tensor, read)

    def base(self, read: Callable[[Tensor], Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """As :meth:`merged`, without the adapters."""
        known = read or torch.Tensor.detach
        return ((bare_name(name), known(tensor)) for name, tensor in _kept(self._model))

    @property
    def scale(self) -> float:
        """Of ``B · A``."""
        return float(next(iter(self._layers.values())).scaling[NAME])

    def matrices(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Of each adapted matrix: its name in the model without adapters, itself, ``A`` and ``B``; not copied."""
        for path, layer in self._layers.items():
            down, up = (cast("nn.Linear", matrices[NAME]).weight for matrices in (layer.lora_A, layer.lora_B))
            yield f"{path}.weight", cast("nn.Linear", layer.base_layer).weight, down, up

    def state(self) -> dict[str, Tensor]:
        """The adapters, not copied, each under ``adapter/…``."""
        return {f"{PREFIX}{name}": tensor for name, tensor in self._model.named_parameters() if _is_adapter(name)}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a copy of what ``state`` gave; entries of others are not looked at.

        Raises:
            UserFault: it is of no adapters, or of other ones.
        """
        mine = self.state()
        found = {key: list(tensor.shape) for key, tensor in tensors.items() if key.startswith(PREFIX)}
        expected = {key: list(tensor.shape) for key, tensor in mine.items()}
        if found != expected:
            example = next(iter(expected))
            held = f"{len(found)}, {example} of shape {found.get(example)}" if found else "none"
            raise UserFault(
                f"learner.lora: rank {self._config.r} makes {len(expected)} matrices, {example} of shape "
                f"{expected[example]}, and the checkpoint has {held}; resume with the learner.lora that it was "
                "written with, or start a new run from its model (model.path)"
            )
        for key, tensor in mine.items():
            load_into(tensor, tensors[key])

    def save(self, folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
        """Write them as ``peft`` reads them.

        Args:
            folder: new.
            tensors: copies of what ``state`` gave, whole.
            base: the model that they belong to, as ``PeftModel`` is to find it.
        """
        folder.mkdir()
        named = {
            f"{SAVED_PREFIX}{name.removeprefix(PREFIX).replace(f'.{NAME}.', '.')}": tensor.contiguous()
            for name, tensor in tensors.items()
            if name.startswith(PREFIX)
        }
        save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = copy.copy(self._config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(str(folder))

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers.values():
            layer.enable_adapters(on)


def _put_into(model: PreTrainedModel, config: LoraConfig, targets: list[str]) -> dict[str, AdaptedLinear]:
    """Layers with an adapter, by name.

    Raises:
        UserFault: peft adapts others than these. Of some mixtures it takes every matrix that is called as those of an
            expert are for the experts' own, and those of dense layers stand there without an adapter.
    """
    story = ""
    try:
        inject_adapter_in_model(config, cast("nn.Module", model), adapter_name=NAME)
    except ValueError as error:
        story = str(error)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    left = [name for name in targets if name not in layers]
    if "Mamba" in story:
        raise UserFault(f"learner.lora.target_modules: peft does not adapt {type(model).__name__} so: {story}")
    if story or left:
        raise UserFault(
            f"learner.lora.target_modules: {type(model).__name__} has experts, and peft takes "
            f"{left[0] if left else targets[0]} for one of theirs{story and f' ({story})'}; name matrices that experts "
            "do not have, such as [q_proj, k_proj, v_proj, o_proj]"
        )
    return layers


def _is_adapter(name: str) -> bool:
    return any(f".{matrix}." in name for matrix in MATRICES)


def _kept(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, without those of adapters."""
    persistent = model.state_dict(keep_vars=True)
    yield from ((name, parameter) for name, parameter in model.named_parameters() if not _is_adapter(name))
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


@torch.no_grad()
def _merged(layer: AdaptedLinear, weight: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    up, down = (read(cast("nn.Linear", matrices[NAME]).weight) for matrices in (layer.lora_B, layer.lora_A))
    base = read(weight)
    exact = base.to(torch.promote_types(base.dtype, torch.float32))
    scale = float(layer.scaling[NAME])
    return (exact + (up @ down) * scale).to(base.dtype)


def _is_taken_by_kernels(model: PreTrainedModel, name: str) -> bool:
    """The last matrix of a state-space layer: kernels read its weights past the module, and would miss an adapter."""
    parent, _, last = name.rpartition(".")
    return last == "out_proj" and hasattr(model.get_submodule(parent), "A_log")


def _targets(model: PreTrainedModel, options: LoraOptions) -> list[str]:
    """Full names of the matrices that get an adapter."""
    head = cast("nn.Module | None", model.get_output_embeddings())  # type: ignore[no-untyped-call]
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    inner = [name for name, module in matrices.items() if module is not head]
    if options.target_modules == "auto":
        found = [name for name in inner if not _is_taken_by_kernels(model, name)]
    else:
        found = []
        for wanted in options.target_modules:
            matching = [name for name in inner if name == wanted or name.endswith(f".{wanted}")]
            if not matching:
                known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in inner))
                raise UserFault(
                    f"learner.lora.target_modules: {wanted} is no matrix of {type(model).__name__} between the "
                    f"embedding and the output head; there are {known or 'none'}"
                )
            found += matching
    if not found:
        raise UserFault(f"learner.lora: {type(model).__name__} has no matrix that could be adapted; remove the block")
    return list(dict.fromkeys(found))
