"""Models as distributed checkpoints of megatron-core, with config and tokenizer beside them: one of the Megatron
learner, or what another trainer on megatron-core has written where a ``config.json`` was put.

Invariants:

* megatron-core is not needed: a parameter has one name and one arrangement whatever the layout, and these follow from
  the tables of :mod:`~penstock.backends.learners.megatron.bridge.families`.
* One weight at a time is in memory, and the part of a file that it lies in.
* Nothing is unpickled but tensors and their descriptions, as :mod:`.dist_format` says.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.checkpoint.config_file import write_config
from penstock.backends.checkpoint.examine import Examined, named, tokenizer_problems
from penstock.backends.checkpoint.layers_beyond import keep_layers_beyond
from penstock.backends.checkpoint.model_format import Converted, digest_of_weight, planned_weights
from penstock.backends.checkpoint.tokenizer_files import copy_tokenizer
from penstock.backends.learners.checkpoints.folder import ALONE
from penstock.backends.learners.megatron.bridge.architecture import NoMtpLayersError, read_architecture
from penstock.backends.learners.megatron.bridge.families import MTP_BLOCK, Form
from penstock.backends.learners.megatron.bridge.weight_map import map_weights, mtp_copies, padded_vocab_size
from penstock.backends.learners.megatron.checkpoint.dist_format import DistReader, is_distributed
from penstock.backends.learners.megatron.checkpoint.dist_writer import WrittenPart, write_parts
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.checkpoint.model_format import ConversionPlan, OpenModel
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.bridge.weight_map import Parameter, WeightMap

POLICY: Final = "policy"
VOCAB_MULTIPLE: Final = 128
"""What the vocabulary is filled up to; a learner with another ``vocab_multiple`` reads it as well."""
CONTENT: Final = {"singleton_local_shards": False, "non_homogeneous_layers": True}
"""How the tensors of a model are named, for whoever reads them with megatron-core."""

_EXPERT: Final = re.compile(r"\.mlp\.experts\.(?P<layer>linear_fc[12])\.weight(?P<expert>\d+)")
_LAYER: Final = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.")


class _Place(NamedTuple):
    """Where a parameter lies: a tensor of the checkpoint, and the axes in front of those of the parameter."""

    name: str
    front: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


class MegatronFormat:
    """A distributed checkpoint in ``policy/``, or in the folder itself."""

    def matches(self, folder: Path) -> bool:
        return is_distributed(folder / POLICY) or is_distributed(folder)

    def examine(self, folder: Path) -> Examined:
        try:
            architecture = read_architecture(folder)
            model = MegatronModel(folder, architecture)
        except (UserFault, OSError) as error:
            return Examined((str(error),), (), "", (), 0, 0, 0)
        shapes, dtypes = model.shapes(), model.dtypes()
        return Examined(
            problems=(*model.problems(), *tokenizer_problems(folder)),
            remarks=(),
            architecture=f"megatron-core {architecture.family.model_type}",
            dtypes=tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()})),
            num_tensors=len(shapes),
            num_parameters=sum(math.prod(shape) for shape in shapes.values()),
            size_bytes=sum(math.prod(shapes[name]) * dtype.itemsize for name, dtype in dtypes.items()),
        )

    @contextmanager
    def open(self, folder: Path) -> Generator[OpenModel]:
        yield MegatronModel(folder, read_architecture(folder))

    def write(
        self, source: Path, model: OpenModel, target: Path, plan: ConversionPlan, report: Callable[[int], None]
    ) -> Converted:
        planned = planned_weights(model, plan)
        architecture = _with_further_layers(read_architecture(source), planned)
        _check_names(source, architecture, planned)
        digests: dict[str, str] = {}

        def read(name: str) -> Tensor:
            tensor = model[name].to(planned[name].dtype)
            digests[name] = digest_of_weight(tensor)
            report(tensor.nbytes)
            return tensor

        weights = _weight_map(architecture)
        num_experts = architecture.experts.count if architecture.experts else 0
        parts = [_part(parameter, weights, num_experts, planned, read) for parameter in weights.parameters.values()]
        folder = target / POLICY
        folder.mkdir()
        write_parts(folder, parts, {"content_metadata": dict(CONTENT)}, ALONE)
        write_config(source, target, plan.dtype)
        copy_tokenizer(source, target)
        keep_layers_beyond(source, target)
        self._read_back(target, architecture, digests)
        return Converted(
            num_tensors=len(digests),
            size_bytes=sum(planned[name].nbytes for name in digests),
            num_files=len(list(folder.glob("*.distcp"))),
        )

    def _read_back(self, target: Path, architecture: Architecture, digests: dict[str, str]) -> None:
        found = MegatronModel(target, architecture)
        if problems := (*found.problems(), *tokenizer_problems(target)):
            raise UserFault("; ".join(problems))
        for name, digest in digests.items():
            if digest_of_weight(found[name]) != digest:
                raise UserFault(f"{target}: {name} is not on disk as it was written; is the disk sound?")


class MegatronModel:
    """The weights of a distributed checkpoint by their names in Hugging Face format."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        """
        Raises:
            CheckpointError: it is not there, or damaged.
        """
        self._folder = folder / POLICY if is_distributed(folder / POLICY) else folder
        self._reader = DistReader(self._folder)
        if any(name.startswith(MTP_BLOCK) for name in self._reader.tensors):
            architecture = architecture.with_mtp()
        self._weights = _weight_map(architecture)
        self._copies = mtp_copies(architecture)
        """Of layers that predict further tokens, which a checkpoint has of the model's matrices."""
        self._num_layers = architecture.num_layers
        self._num_experts = architecture.experts.count if architecture.experts else 0
        self._places = {
            tensor.name: (parameter, index)
            for parameter in self._weights.parameters.values()
            for index, tensor in enumerate(parameter.tensors)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = {name: parameter.tensors[index].shape for name, (parameter, index) in self._places.items()}
        return own | {copy: own[name] for copy, name in self._copies.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        own = {name: self._dtype(parameter) for name, (parameter, _) in self._places.items()}
        return own | {copy: own[name] for copy, name in self._copies.items()}

    def __getitem__(self, name: str, /) -> Tensor:
        """
        Raises:
            UserFault: it cannot be read.
        """
        parameter, index = self._places[self._copies.get(name, name)]
        place = self._place(parameter)
        tensor = torch.empty(parameter.tensors[index].shape, dtype=self._dtype(parameter))
        for block in self._weights.blocks(parameter, 0):
            if block.tensor == index:
                own = tensor.narrow(block.axis, block.start, block.length)
                offset = tuple(block.place if axis == block.axis else 0 for axis in range(tensor.ndim))
                self._reader.read_into(place.name, own[(None,) * len(place.front)], (*place.front, *offset))
        return tensor

    def problems(self) -> list[str]:
        """Parameters that are missing, or of another shape."""
        missing: list[str] = []
        wrong: list[str] = []
        for parameter in self._weights.parameters.values():
            place = self._place(parameter)
            found = self._reader.tensors.get(place.name)
            if found is None:
                missing.append(parameter.name)
                continue
            wanted = (*place.lengths, *self._weights.part_shape(parameter))
            if parameter.form is Form.VOCABULARY and found.shape[0] >= parameter.tensors[0].shape[0]:
                wanted = (found.shape[0], *wanted[1:])  # filled up to another multiple
            if found.shape != wanted:
                wrong.append(
                    f"{self._folder}: {place.name} has shape {list(found.shape)}, and config.json says {list(wanted)}"
                )
        return ([f"{self._folder}: lacks {named(missing)} of the model in config.json"] if missing else []) + wrong

    def _dtype(self, parameter: Parameter) -> torch.dtype:
        found = self._reader.tensors.get(self._place(parameter).name)
        return torch.float32 if found is None else found.dtype

    def _place(self, parameter: Parameter) -> _Place:
        """Layers have names of their own, or are one tensor with an axis over them in front, as megatron-core's older
        checkpoints are."""
        place = _place_of(parameter.name, self._num_experts)
        if place.name not in self._reader.tensors and parameter.layer is not None:
            stacked = _LAYER.sub("decoder.layers.", place.name)
            if stacked in self._reader.tensors:
                return _Place(stacked, (parameter.layer, *place.front), (self._num_layers, *place.lengths))
        return place


def _weight_map(architecture: Architecture) -> WeightMap:
    padded = padded_vocab_size(architecture.vocab_size, multiple=VOCAB_MULTIPLE, num_tensor=1)
    return map_weights(architecture, num_tensor=1, num_expert_tensor=1, padded_vocab_size=padded)


def _place_of(name: str, num_experts: int) -> _Place:
    match = _EXPERT.search(name)
    if match is None:
        return _Place(name)
    return _Place(
        _EXPERT.sub(f".mlp.experts.experts.{match['layer']}.weight", name), (int(match["expert"]),), (num_experts,)
    )


def _part(
    parameter: Parameter,
    weights: WeightMap,
    num_experts: int,
    planned: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
) -> WrittenPart:
    """What is written of a parameter, put together when its turn comes."""
    place, own_shape = _place_of(parameter.name, num_experts), weights.part_shape(parameter)
    dtype = torch.float32 if parameter.is_buffer else planned[parameter.tensors[0].name].dtype

    def joined() -> Tensor:
        own = torch.zeros(own_shape, dtype=dtype)
        tensors = [read(tensor.name) for tensor in parameter.tensors]
        for block in weights.blocks(parameter, 0):
            values = tensors[block.tensor].narrow(block.axis, block.start, block.length)
            own.narrow(block.axis, block.place, block.length).copy_(values)
        return own[(None,) * len(place.front)]

    return WrittenPart(
        name=place.name,
        shape=(*place.lengths, *own_shape),
        offset=(*place.front, *(0 for _ in own_shape)),
        sizes=(*(1 for _ in place.front), *own_shape),
        dtype=dtype,
        read=joined,
    )


def _with_further_layers(architecture: Architecture, planned: Mapping[str, Tensor]) -> Architecture:
    """The same with the layers that predict further tokens, where the model has them whole."""
    try:
        found = architecture.with_mtp()
    except NoMtpLayersError:
        return architecture
    names = (tensor.name for parameter in _weight_map(found).parameters.values() for tensor in parameter.tensors)
    return found if all(name in planned for name in names) else architecture


def _check_names(source: Path, architecture: Architecture, planned: Mapping[str, Tensor]) -> None:
    """What the tables want and the model lacks; what it has beyond is of no use here, as a tied output head."""
    wanted = [
        tensor.name for parameter in _weight_map(architecture).parameters.values() for tensor in parameter.tensors
    ]
    if missing := [name for name in wanted if name not in planned]:
        raise UserFault(f"{source}: lacks {named(missing)} that the model in its config.json has")
