"""Models as transformers and engines load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.checkpoint.config_file import write_config
from penstock.backends.checkpoint.examine import Examined, examine_model
from penstock.backends.checkpoint.fp8 import quantization_config
from penstock.backends.checkpoint.model_format import (
    FP8,
    ConversionPlan,
    Converted,
    OpenModel,
    digest_of_weight,
    planned_weights,
)
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.tiktoken_file import complete_tokenizer
from penstock.backends.checkpoint.tokenizer_files import copy_tokenizer
from penstock.backends.checkpoint.weight_files import WeightFiles
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor


class HuggingFaceFormat:
    """Safetensors with config and tokenizer, as transformers and engines load them."""

    def matches(self, folder: Path) -> bool:
        """Any folder that says which model it has."""
        return (folder / "config.json").is_file()

    def examine(self, folder: Path) -> Examined:
        return examine_model(folder)

    def open(self, folder: Path) -> AbstractContextManager[OpenModel]:
        return CheckpointTensors(folder)

    def write(
        self, source: Path, model: OpenModel, target: Path, plan: ConversionPlan, report: Callable[[int], None]
    ) -> Converted:
        planned = planned_weights(model, plan)
        digests: dict[str, str] = {}
        with WeightFiles(target, planned, max_file_bytes=plan.max_file_bytes) as files:
            for name, like in planned.items():
                tensor = model[name].to(like.dtype)
                digests[name] = digest_of_weight(tensor)
                files.write(name, tensor)
                report(tensor.nbytes)
            files.finish()
        write_config(source, target, plan.dtype, quantization_config(planned) if plan.dtype == FP8 else None)
        copy_tokenizer(source, target)
        complete_tokenizer(source, target)
        _read_back(target, planned, digests)
        return Converted(
            num_tensors=len(planned),
            size_bytes=sum(tensor.nbytes for tensor in planned.values()),
            num_files=len(list(target.glob("*.safetensors"))),
        )


def _read_back(folder: Path, planned: dict[str, Tensor], digests: dict[str, str]) -> None:
    with CheckpointTensors(folder) as tensors:
        if set(tensors) != set(planned):
            raise UserFault(f"{folder}: wrote {len(planned)} weights and read {len(tensors)} back")
        for name, like in planned.items():
            tensor = tensors[name]
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape) or digest_of_weight(tensor) != digests[name]:
                raise UserFault(f"{folder}: {name} is not on disk as it was written; is the disk sound?")
    if problems := examine_model(folder).problems:
        raise UserFault("; ".join(problems))
