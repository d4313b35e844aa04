"""What the house knows of each kind of learner before one is opened, and the registry of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
    from penstock.backends.protocol import Backend, Timers
    from penstock.messages.base import Options
    from penstock.messages.commands import LearnerCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """Everything that a learner is opened with."""

    plan: LearnerPlan
    """The learner itself."""
    log_path: Callable[[str, int], Path]
    """Of a further process: what it is and its number."""
    further: FurtherNodes | None = None
    """The nodes that have ranks beside this one; None where all are here."""
    timers: Timers | None = None
    """The clock; given to learners that are modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """One kind of learner. It is looked at in the command line and in every actor, so its module imports nothing heavy:
    that is for :attr:`open` to do."""

    open: Callable[[LearnerContext], Backend[LearnerCommand]]
    """A learner that is not started yet. Raises UserFault where it cannot be; the message says why."""
    options: type[Options] | None = None
    """What ``learner.options`` holds; None: there is no such block."""
    is_modelled: bool = False
    """It says how long things take and trains nothing; on the virtual clock too."""
    has_engine_bits: bool = False
    """With ``true_on_policy`` its log-probs can have the bits of an engine's."""
    shares_gpu: bool = False
    """With one rank it works in its actor's process, and can share a GPU with engines that do so."""
    together: Callable[[LearnerOptions], int] = lambda options: 1
    """Ranks that say much to each other, and so have to be on one node."""
    has_layout: bool = False
    """Its block says how the model is divided over its ranks, which is checked and planned before the run."""
    parts_critic: bool = False
    """Its policy and its critic can lie on different ranks (``learner.critic_ranks``)."""
    sees_images: bool = False
    """It trains models on prompts with images."""
    has_known_memory: bool = False
    """What a rank of it needs on a GPU can be said before the run (:mod:`penstock.runtime.preflight.gpu_memory`)."""
    can_record_steps: bool = False
    """It heeds ``learner.dump`` and ``learner.profile``."""
    replays_kept: bool = False
    """It takes log-probs over the tokens that an engine drew from (``sampling.replay_kept``)."""
    modules: tuple[str, ...] = ()
    """What its process imports first with one rank, so that a host can have it ready."""


LEARNERS: Final = Registry(
    "learner",
    "penstock.learners",
    LearnerSpec,
    {
        "torch": "penstock.backends.learners.torch.spec:TORCH",
        "megatron": "penstock.backends.learners.megatron.spec:MEGATRON",
        "simulated": "penstock.backends.simulated.spec:SIMULATED_LEARNER",
    },
)


def is_modelled(options: LearnerOptions) -> bool:
    """Whether the learner only says how long things take."""
    return LEARNERS.spec(options.backend).is_modelled


def open_ranks(context: LearnerContext, rank: str) -> Backend[LearnerCommand]:
    """A learner over ``num_ranks`` processes of its own.

    Args:
        context: what it is opened with.
        rank: ``module:function`` that each of them imports and calls, a
            :class:`~penstock.backends.learners.worker_group.worker.RankOpener`.

    Raises:
        UserFault: demonstrations and ``options.warm_start`` do not go together.
    """
    from penstock.backends.learners.worker_group.backend import WorkerGroupBackend

    context.plan.check()
    plan = msgspec.structs.replace(
        context.plan,
        rank=rank,
        # A rank need not have the working directory of whoever started it.
        model_folder=str(Path(context.plan.model_folder).absolute()),
        checkpoints_folder=str(Path(context.plan.checkpoints_folder).absolute()),
    )
    return WorkerGroupBackend(plan, log_path=partial(context.log_path, "rank"), further=context.further)
