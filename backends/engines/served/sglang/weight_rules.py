"""Which options of a server do not go with the weights that it gets: those in FP8, and those of a model that drafts.

Speculative decoding changes nothing that is drawn, and a draft needs no training for that. Its own layers stay as the
server was started with, unless they are of the model's own checkpoint and trained with it; embedding and head it shares
with the model, so these are new with each update. Weights from a folder a server loads into the draft as well, by their
names: matrices of the model would take the places of others there. What is pushed names the model alone (``selector:
target``) but where :mod:`.bucket_push` finds layers for such a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.options import take_turns
from penstock.backends.engines.served.sglang.server_options import ServerOptionError, merged
from penstock.backends.weights.spec import DISTRIBUTED, TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.engines.options import EngineGroupOptions, EnginesOptions
    from penstock.backends.engines.spec import Broken, KeyPath

ALGORITHM: Final = "speculative_algorithm"
DRAFT: Final = "speculative_draft_model_path"
BACKUP: Final = "enable_draft_weights_cpu_backup"
WITHOUT_DRAFT: Final = ("NGRAM",)
"""Ways to speculate without a model."""


def has_own_draft(group: EngineGroupOptions) -> bool:
    """Whether servers with these options draft with a model from a folder of its own."""
    try:
        given = merged(group.sglang)
    except ServerOptionError:  # another rule says so
        return False
    return given.get(ALGORITHM) not in (None, *WITHOUT_DRAFT) and given.get(DRAFT) is not None


def draft_transports(group: EngineGroupOptions) -> tuple[str, ...] | None:
    """The transports that leave a draft alone; None: there is none to be left alone."""
    return (DISTRIBUTED, TENSOR) if has_own_draft(group) else None


def weight_rules(path: KeyPath, group: EngineGroupOptions, options: EnginesOptions) -> Iterator[Broken]:
    """What is wrong with the block at this path."""
    if options.quantization is not None:
        yield from _quantized(path, group, options)
    algorithm = group.sglang.get(ALGORITHM)
    if algorithm is None:
        return
    if group.device == "cpu":
        yield (
            (*path, "sglang", ALGORITHM),
            "SGLang drafts and verifies with kernels (sgl_kernel.speculative) that its CPU build lacks; remove it, or "
            "take a GPU",
        )
    is_model = algorithm not in WITHOUT_DRAFT
    if is_model and take_turns(options) and group.sglang.get(BACKUP) is not True:
        yield (
            (*path, "sglang", BACKUP),
            "a server on the learner's GPUs lets go of its draft's weights while that trains, and no update brings "
            "them back; set it to true",
        )


def _quantized(path: KeyPath, group: EngineGroupOptions, options: EnginesOptions) -> Iterator[Broken]:
    if group.device == "cpu":
        yield (
            (*path, "device"),
            "SGLang computes FP8 on GPUs (compute capability 8.9 or higher) and on CPUs with AMX, which Penstock's CPU "
            "environment has no kernels for; take a GPU, or embedded engines (backend: torch)",
        )
    if group.sglang.get("quantization") is not None:
        yield (
            (*path, "sglang", "quantization"),
            "the configuration of engines.fp8_model says how its weights are quantized, and so are those that are "
            "published; remove it",
        )
    if not group.addresses and options.fp8_model is None:
        yield (
            ("engines", "fp8_model"),
            "SGLang servers take new weights in FP8 where they were started from a copy of the model in FP8; write one "
            "with `penstock convert MODEL COPY --dtype fp8` and name it",
        )
