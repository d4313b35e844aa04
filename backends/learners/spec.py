"""What the house knows of each kind of learner before one is opened, and the registry of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.backends.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
    from penstock.backends.learners.worker_group.plan import ExportPlan
    from penstock.backends.protocol import Backend, Timers
    from penstock.messages.base import Options
    from penstock.messages.commands import LearnerCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """Everything that a learner is opened with."""

    model_folder: Path
    """A Hugging Face checkpoint, with its tokenizer."""
    checkpoints_folder: Path
    """Where ``SaveCheckpoint`` writes."""
    options: LearnerOptions
    temperature: float
    """Of the sampling; 0 means 1, as engines then report log-probs of temperature 1."""
    dtype: str
    """``float32`` or ``bfloat16``."""
    seed: int
    """Of the run."""
    num_steps: int
    """Batches of the run."""
    epoch: int
    """Of this incarnation of the learner; no two of one run have the same."""
    export: ExportPlan
    """Where weights are published."""
    demonstrations: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None
    """For the warm start: token ids of a prompt and of a response each. None: there is none."""
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
    shares_gpu: bool = False
    """With one rank it works in its actor's process, and can share a GPU with engines that do so."""
    together: Callable[[LearnerOptions], int] = lambda options: 1
    """Ranks that say much to each other, and so have to be on one node."""
    has_layout: bool = False
    """Its block says how the model is divided over its ranks, which is checked and planned before the run."""
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
    from penstock.backends.learners.worker_group.open import open_worker_group

    return open_worker_group(
        rank=rank,
        model_folder=context.model_folder,
        checkpoints_folder=context.checkpoints_folder,
        options=context.options,
        temperature=context.temperature,
        dtype=context.dtype,
        seed=context.seed,
        num_steps=context.num_steps,
        epoch=context.epoch,
        export=context.export,
        demonstrations=context.demonstrations,
        log_path=partial(context.log_path, "rank"),
        further=context.further,
    )
