"""Whether a torch learner's model is compiled; see :mod:`penstock.backends.learners.torch.fused`. Nothing here imports
torch, so that a dry run can tell as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions

LEAST_WEIGHTS: Final = 100_000_000
"""Of a model that is worth the seconds of its compilation where nobody has asked for it."""
HALF: Final = ("bfloat16", "float16")


def is_compiled(
    options: LearnerOptions, *, is_on_gpu: bool, dtype: str, num_weights: int, has_experts: bool, num_ranks: int
) -> bool:
    """As ``learner.compile`` says, or where it is known to pay: experts go another way each time, and blocks that are
    sharded or computed twice are entered from outside."""
    if options.compile is not None:
        return options.compile
    is_plain = num_ranks == 1 and not (options.activation_checkpointing or options.true_on_policy or has_experts)
    return is_on_gpu and dtype in HALF and num_weights >= LEAST_WEIGHTS and is_plain
