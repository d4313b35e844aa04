"""What a model folder in Hugging Face format holds, and whether it is what its ``config.json`` says.

Invariants:

* transformers itself says which weights of the architecture are missing and which it does not know, with the names that
  it translates on loading; no weight is read for that.
* Every problem is one sentence that names the file or the weight, what was found and what was expected.
* Who has seen no problem can load the folder with transformers.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from penstock.backends.checkpoint.fp8 import SCALE, find_blocks, problems_of
from penstock.backends.checkpoint.huggingface_classes import auto_class
from penstock.backends.checkpoint.open_config import open_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.checkpoint.tiktoken_file import tiktoken_problem
from penstock.backends.checkpoint.tokenizer_files import CONVERT, has_tiktoken_only
from penstock.messages.errors import UserFault
from penstock.messages.texts import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SHOWN_NAMES = 3


class Examined(NamedTuple):
    """A model folder that was looked at."""

    problems: tuple[str, ...]
    """What keeps it from being loaded, or from being the model that ``config.json`` describes."""
    remarks: tuple[str, ...]
    """What is unusual about the folder and does no harm."""
    architecture: str
    """Empty if there is none."""
    dtypes: tuple[str, ...]
    num_tensors: int
    num_parameters: int
    size_bytes: int


def examine_model(folder: Path) -> Examined:
    """Look at a model folder; the bytes of its weights are read only where the same weight is stored twice."""
    if not (folder / "config.json").is_file():
        return _unreadable(f"{folder}: no config.json there; expected a folder in Hugging Face format")
    try:
        with CheckpointTensors(folder) as tensors:
            return _examined(folder, tensors)
    except UserFault as error:
        return _unreadable(str(error))


def _examined(folder: Path, tensors: CheckpointTensors) -> Examined:
    problems: list[str] = []
    remarks: list[str] = []
    dtypes = tensors.dtypes()
    architecture = ""
    try:
        blocks = find_blocks(folder)
        problems += problems_of(tensors.shapes(), dtypes, blocks) if blocks else []
        model, found = _load_without_memory(folder)
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        problems.append(f"{folder}: transformers cannot open it as a causal model: {error}")
    else:
        architecture = type(model).__name__
        problems += _weight_problems(folder, model, found)
        problems += _tie_problems(folder, model, tensors)
        if unknown := _unknown(model, found):
            remarks.append(
                f"{folder}: has {named(unknown)} that {architecture} does not know, which transformers leaves aside"
            )
    problems += tokenizer_problems(folder)
    remarks += [f"{folder}: {CONVERT}"] if has_tiktoken_only(folder) else []
    shapes = tensors.shapes()
    return Examined(
        problems=tuple(problems),
        remarks=tuple(remarks),
        architecture=architecture,
        dtypes=tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()})),
        num_tensors=len(tensors),
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        size_bytes=sum(math.prod(shapes[name]) * dtype.itemsize for name, dtype in dtypes.items()),
    )


def _load_without_memory(folder: Path) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    with quiet_transformers():
        config: Any = open_config(folder)
        if hasattr(config, "quantization_config"):  # else transformers asks for the GPU that computes in it
            del config.quantization_config
        loaded = auto_class(folder).from_pretrained(
            folder, config=config, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
        )
    return cast("tuple[PreTrainedModel, Mapping[str, Any]]", loaded)


def _weight_problems(folder: Path, model: PreTrainedModel, found: Mapping[str, Any]) -> Iterator[str]:
    architecture = type(model).__name__
    if missing := sorted(cast("set[str]", found["missing_keys"])):
        head = {name for name in missing if name.startswith("lm_head.")}
        hint = "; config.json says that the output head is not tied to the embeddings" if head else ""
        yield f"{folder}: lacks {named(missing)} of {architecture}{hint}"
    for name, in_file, wanted in sorted(found["mismatched_keys"]):
        yield f"{folder}: {name} has shape {list(in_file)}, and config.json says {list(wanted)}"


def _tie_problems(folder: Path, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Weights that config.json makes one, and that the folder has twice with other values."""
    for name, first in _ties(model).items():
        if first in tensors and name in tensors and not torch.equal(tensors[first], tensors[name]):
            yield (
                f"{folder}: config.json ties {name} to {first}, and the folder has other values for the one than for "
                "the other; set tie_word_embeddings to false in config.json, or remove the one that is wrong"
            )


def _ties(model: PreTrainedModel) -> Mapping[str, str]:
    """What config.json makes one: name → name of the other."""
    return cast("Mapping[str, str]", model.get_expanded_tied_weights_keys())


def _unknown(model: PreTrainedModel, found: Mapping[str, Any]) -> list[str]:
    """Weights that belong nowhere; a tied one that is stored as well belongs to the other."""
    unknown = cast("set[str]", found["unexpected_keys"]) - set(_ties(model))
    return sorted(name for name in unknown if not name.endswith(SCALE))


def tokenizer_problems(folder: Path) -> Iterator[str]:
    """Why transformers cannot load the tokenizer of a folder; nothing of one that only has to be written anew."""
    if has_tiktoken_only(folder):
        if problem := tiktoken_problem(folder):
            yield problem
        return
    try:
        with quiet_transformers():
            AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, StrictDataclassError) as error:
        first_line = str(error).partition("\n")[0]
        yield f"{folder}: its tokenizer cannot be loaded: {first_line}; copy the tokenizer's files beside the weights"


def _unreadable(problem: str) -> Examined:
    return Examined((problem,), (), "", (), 0, 0, 0)


def named(names: list[str]) -> str:
    """Some of them, and how many there are."""
    shown = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
    return f"{counted(len(names), 'weight')} ({shown})"
