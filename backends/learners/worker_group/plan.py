"""What a rank's process is told at its start: which learner it is a part of. Nothing here needs torch."""

from __future__ import annotations

from msgspec import field

# msgspec reads the annotations:
from penstock.backends.learners.options import LearnerOptions
from penstock.messages.base import OptionValue, Value


class PackedDemonstration(Value, frozen=True, array_like=True):
    """A prompt and the response to imitate, as int32 ids."""

    prompt: bytes
    response: bytes


class ExportPlan(Value, frozen=True, kw_only=True):
    """Where weights are published; see :func:`~penstock.backends.weights.transports.open_exporter`."""

    transport: str
    run_id: str
    folder: str
    host: str
    names_function: str | None = None
    """Of the user's, for engines that call weights otherwise."""
    options: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Of the transport."""


class LearnerPlan(Value, frozen=True, kw_only=True):
    """One learner, the same for all of its ranks; see :func:`.open_torch_learner`.

    Paths are absolute: a rank need not have the working directory of whoever started it.
    """

    rank: str
    """Opens what works in a rank (:class:`.RankOpener`): ``module:function``."""
    model_folder: str
    checkpoints_folder: str
    options: LearnerOptions
    temperature: float
    dtype: str
    seed: int
    num_steps: int
    epoch: int
    export: ExportPlan
    demonstrations: tuple[PackedDemonstration, ...] = ()
