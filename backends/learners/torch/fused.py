"""Kernels of a model's blocks and of its log-probs that torch.compile makes, in place of transformers' one by one.

Between two matrix products, transformers runs a kernel for each addition, power and mean, each of which reads and
writes all of its numbers; what a norm or a gate keeps for the backward pass is kept several times over. Compiled they
are one kernel or two. Attention stays as it is: dynamo leaves it out, so a block is two graphs, before and after it.
Blocks that are alike share them, and sizes that change from one micro-batch to the next are symbols, so nothing is
compiled again.

Everything is compiled before the first step, on tokens made up: what the compiler refuses is said at once.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import time
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._triton import has_triton
from transformers import AttentionInterface

from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.compiling import is_compiled
from penstock.backends.learners.torch.attention import PACKED_ATTENTION, packed_attention
from penstock.backends.learners.torch.parallel import transformer_blocks
from penstock.backends.learners.torch.speed import DTYPE_NAMES, EXPERT_KEYS
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.worker_group.workers import WorkerGroup

_log: Final = logging.getLogger(__name__)
KEY: Final = "learner.compile"
INDUCTOR: Final[dict[str, str | int | bool | Callable[..., Any]]] = {"shape_padding": False}
"""Filling products up for their kernels tells apart numbers of tokens that eight divides and others, which are then
compiled one by one; what they are of divides anyway."""
PROBE_LENGTHS: Final = (37, 53)
"""Tokens of the sequences that are compiled on: no two sizes of a graph may be the same by chance."""


def fuse(model: PackedModel, workers: WorkerGroup, options: LearnerOptions) -> None:
    """Compile it in place, if that is wanted. After it was divided over the ranks; called by all of them.

    Raises:
        UserFault: there is no compiler, or it fails, and says why.
    """
    if not _is_wanted(model, workers, options):
        return
    from torch._dynamo.exc import TorchDynamoException  # brings the compiler

    began_s = time.monotonic()
    # A graph that held attention would be made anew for each micro-batch, whose layout is no tensor.
    left_out = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED_ATTENTION, left_out)
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)
    for block in transformer_blocks(model.model):
        block.compile(dynamic=True, options=INDUCTOR)
    model.compile_scores(INDUCTOR)
    try:
        _probe(model, options)
    except TorchDynamoException as error:
        cause: BaseException = getattr(
            error, "inner_exception", error
        )  # the compiler's own, without which it says little
        said = str(cause).strip().partition("\n")[0]
        raise UserFault(
            f"{KEY}: torch cannot compile {type(model.model).__name__}: {type(cause).__name__}: {said}; "
            f"set {KEY}: false"
        ) from error
    _log.info("kernels were compiled in %.0f s", time.monotonic() - began_s)


def _is_wanted(model: PackedModel, workers: WorkerGroup, options: LearnerOptions) -> bool:
    config = model.model.config.get_text_config()
    if model.layout == "padded" and not options.compile:
        return False  # transformers' loops over a recurrent state take the compiler long, and are not what it is for
    is_wanted = is_compiled(
        options,
        is_on_gpu=model.device.type == "cuda",
        dtype=DTYPE_NAMES.get(model.dtype, ""),
        num_weights=sum(parameter.numel() for parameter in model.model.parameters()),
        has_experts=any(getattr(config, key, None) for key in EXPERT_KEYS),
        num_ranks=workers.num_ranks,
    )
    if is_wanted and model.device.type == "cuda" and not has_triton():
        if options.compile:
            raise UserFault(f"{KEY}: kernels for GPUs are made by triton, which is not installed; pip install triton")
        _log.warning("kernels are not compiled: triton, which makes them for GPUs, is not installed")
        return False
    return is_wanted


def _probe(model: PackedModel, options: LearnerOptions) -> None:
    """What a step asks of the model, whose gradients are forgotten."""
    ids = [1 + index % (model.vocab_size - 1) for index in range(sum(PROBE_LENGTHS))]
    # They share a context, as samples of a group do: otherwise the rows of attention have as many places as there are
    # tokens, and a graph is made for that.
    sequences = [
        demonstration_sequence(ids[:7], ids[7:length], sample=number)._replace(prompt=0)
        for number, length in enumerate(PROBE_LENGTHS)
    ]
    packed, objective = pack(sequences), options.objective
    is_trained = any(parameter.requires_grad for parameter in model.model.parameters())
    if not is_trained or objective.old_logprobs != "engine":
        with torch.no_grad():
            model.logprobs(packed, temperature=1.0)
    if is_trained:
        scores = model.scores(packed, temperature=1.0, entropy_gradient=bool(objective.entropy_coef))
        torch.autograd.backward(scores.logprobs.sum())
        model.model.zero_grad(set_to_none=True)
