"""The torch learner as the house knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.learners.spec import LearnerContext, LearnerSpec, open_ranks

if TYPE_CHECKING:
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import LearnerCommand


RANK: Final = "penstock.backends.learners.torch.worker:open_torch_worker"


def _open(context: LearnerContext) -> Backend[LearnerCommand]:
    """In the process that opens it, or over several of its own."""
    if context.plan.options.num_ranks > 1:
        return open_ranks(context, RANK)
    from penstock.backends.learners.torch.backend import open_torch_learner
    from penstock.backends.learners.worker_group.planned import open_export

    return open_torch_learner(context.plan, open_export(context.plan))


TORCH: Final = LearnerSpec(
    open=_open,
    together=lambda options: options.tensor_parallel,
    shares_gpu=True,
    has_engine_bits=True,
    parts_critic=True,
    sees_images=True,
    has_known_memory=True,
    can_record_steps=True,
    replays_kept=True,
    modules=(
        "penstock.backends.data.demonstrations",
        "penstock.backends.weights.renamed",
        "penstock.backends.learners.torch.backend",
        "penstock.backends.weights.transports",
    ),
)
