"""How a model is given the tokens of a micro-batch, chosen once with its loaded weights.

* ``packed``: laid end to end in one row, which only our attention tells apart (:mod:`.attention`).
* ``padded``: a row for each sequence, filled up at its end, with transformers' own attention. For models whose tokens
  see each other outside of attention: a recurrent state, or a convolution, runs from one packed sequence into the next.
  What stands behind a sequence reaches nothing in it, as in any causal model.

Invariants:

* Either way the log-probs of a sequence are those that transformers computes for it alone, by its plain attention; this
  is measured on tokens made up before anything is trained, and an architecture for which neither holds is refused.
* Every rank measures the same numbers, and so chooses the same layout.

Axis letters: ``N`` input tokens, ``B`` rows, ``P`` positions of the longest, ``T`` trained tokens, ``H`` width.
"""

# torch.from_numpy and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

import torch

from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.checkpoints.record import CheckpointError
from penstock.backends.learners.torch.attention import PACKED_ATTENTION
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.torch.model import PackedModel

Layout = Literal["packed", "padded"]

LEAK_TOLERANCE: Final = 1e-5
"""Nats by which the tokens of another sequence may change one: shapes are the same, so nothing is rounded otherwise."""
SHIFT_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Mean nats between a sequence alone and beside another, where products of other shapes round otherwise."""
PROBE_TOKENS: Final = (12, 20)
"""Of the sequence that is looked at, and of the one beside it."""
NUM_CONTEXT_TOKENS: Final = 4

_log: Final = logging.getLogger(__name__)


@contextmanager
def kept_places(model: PreTrainedModel, places: Tensor) -> Generator[None]:
    """While the block runs, the output head is given ``[1, T, H]`` of these places of all rows, and not ``[B, P, H]``.

    Raises:
        CheckpointError: the model does not call its output head as a module.
    """
    head = cast("nn.Module | None", model.get_output_embeddings())  # type: ignore[no-untyped-call]
    if head is None:
        raise CheckpointError(
            f"{type(model).__name__} does not show its output head, and has to be trained on padded rows, of which "
            "only the trained places go through it; use another model (model.path)"
        )

    def keep(_head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1).index_select(0, places)[None], *inputs[1:])

    # Before whoever else looks at what the head is given.
    handle = head.register_forward_pre_hook(keep, prepend=True)
    try:
        yield
    finally:
        handle.remove()


class _Found(NamedTuple):
    """A layout on trial."""

    leak: float
    """Largest difference that the tokens of another sequence make, in nats."""
    shift: float
    """Mean difference to the sequence alone, in nats."""
    story: str = ""
    """Why it cannot be tried at all; empty: it was."""

    def is_good(self, dtype: torch.dtype) -> bool:
        return not self.story and self.leak <= LEAK_TOLERANCE and self.shift <= SHIFT_TOLERANCE[dtype]

    def told(self, how: str) -> str:
        return self.story or (
            f"the log-probs of a sequence change by {self.shift:.2g} nats when another one is {how}, and by "
            f"{self.leak:.2g} with the tokens of that one"
        )


@torch.no_grad()
def choose_layout(model: PackedModel) -> str:
    """Set ``model.layout``, and transformers' attention with it, to the first that computes what the model computes for
    one sequence alone; called by all ranks.

    Returns:
        What people should know of it; empty: it is packed.

    Raises:
        CheckpointError: neither does, or numbers are beyond float16.
    """
    probe, other = PROBE_TOKENS
    last = _probe(model, start=0, num_tokens=probe)
    sees = model.eyes is not None  # whose text has our attention, whatever is set
    with _experts_row_by_row(model.model):
        _set(model, "packed" if sees else "padded", "eager")
        alone = model.logprobs(pack([last]), temperature=1.0)
        _check_numbers(model, alone)
        _set(model, "packed", PACKED_ATTENTION)
        packed = _tried(model, alone, [[_probe(model, start, probe), last] for start in (1, 2)])
        if packed.is_good(model.dtype):
            _log.info("packed tokens: log-probs within %.2g nats of those of a sequence alone", packed.shift)
            return ""
        name = type(model.model).__name__
        padded = packed
        for attention in ("sdpa", "eager") if not sees else ():
            if attention == "sdpa" and not getattr(model.model, "_supports_sdpa", False):
                continue
            _set(model, "padded", attention)
            padded = _tried(model, alone, [[_probe(model, start, other), last] for start in (1, 2)])
            if padded.is_good(model.dtype):
                return _notice(name, packed, padded)
    raise CheckpointError(
        f"{name}: {packed.told('packed before it')}; this architecture cannot be trained on packed tokens"
        + ("" if sees else f", nor on padded rows: {padded.told('in the batch')}")
        + "; use a causal decoder such as Qwen3 or Llama"
    )


def _notice(name: str, packed: _Found, padded: _Found) -> str:
    return (
        f"{name} cannot be trained on packed tokens: {packed.told('packed before it')}. It is trained on padded rows "
        f"instead, a sequence in each, by transformers' own layers, which takes more time and memory the more lengths "
        f"differ; log-probs are within {padded.shift:.2g} nats of those of a sequence alone"
    )


def _set(model: PackedModel, layout: Layout, attention: str) -> None:
    model.layout = layout
    if model.eyes is None:
        with quiet_transformers():
            model.model.set_attn_implementation(attention)


def _tried(model: PackedModel, alone: Tensor, pairs: Sequence[Sequence[TrainSequence]]) -> _Found:
    """The log-probs of the last sequence of each pair, compared with each other and with it alone."""
    try:
        beside, beside_other = (model.logprobs(pack(pair), temperature=1.0)[-len(alone) :] for pair in pairs)
    except UserFault as error:  # our attention says what it does not compute
        return _Found(0.0, 0.0, str(error))
    return _Found(float((beside - beside_other).abs().max()), float((beside - alone).abs().mean()))


def _check_numbers(model: PackedModel, logprobs: Tensor) -> None:
    if model.dtype == torch.float16 and not bool(logprobs.isfinite().all()):
        raise CheckpointError(
            f"{type(model.model).__name__}: what it computes is larger than float16 holds (65504), and log-probs "
            "are no numbers; set model.dtype: bfloat16"
        )


def _probe(model: PackedModel, start: int, num_tokens: int) -> TrainSequence:
    ids = [(7 + 31 * index + 13 * start) % model.vocab_size for index in range(num_tokens)]
    return demonstration_sequence(ids[:NUM_CONTEXT_TOKENS], ids[NUM_CONTEXT_TOKENS:], sample=start)


@contextmanager
def _experts_row_by_row(model: PreTrainedModel) -> Generator[None]:
    """Experts, where the model has some, are computed in products whose shapes are the same whatever the other rows
    are. In those of training, as many rows stand together as go to one expert, and are rounded accordingly."""
    usual = model.get_experts_implementation()
    if usual[""] != "grouped_mm":
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(usual)
