"""The learner of megatron-core as the house knows it. It is always in processes of its own: what it needs where
there is no CUDA changes torch for a whole process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.spec import LearnerContext, LearnerSpec, open_ranks

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import LearnerCommand

RANK: Final = "penstock.backends.learners.megatron.rank:open_rank"


def _together(options: LearnerOptions) -> int:
    return math.lcm(options.megatron.tensor_parallel, options.megatron.expert_tensor_parallel)


def _open(context: LearnerContext) -> Backend[LearnerCommand]:
    return open_ranks(context, RANK)


MEGATRON: Final = LearnerSpec(
    open=_open,
    together=_together,
    has_layout=True,
    parts_critic=True,
    has_known_memory=True,
    can_record_steps=True,
    replays_kept=True,
)
