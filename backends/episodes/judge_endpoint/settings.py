"""What an embedded engine has to know to answer a judge."""

from __future__ import annotations

from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import SamplingOptions
from penstock.messages.base import Value


class JudgingSettings(Value, frozen=True, kw_only=True):
    """Of one engine."""

    engine: str
    run_folder: str
    model_folder: str
    host: str
    """This machine's address as the Scorer's sees it."""
    max_context: int
    num_slots: int
    """Questions that the engine answers side by side; it has so many places more than it has for samples."""
    samplings: tuple[SamplingOptions, ...]
    """How the answers of the run's judges are drawn."""
    first_dataset: int
    """The engine's number of the first of these ways; the others follow."""
    data: DataOptions
    """Whether there is a chat template, and its arguments."""
    seed: int
    timeout_s: float
    """Of a request: the longest that any judge waits for one."""
    canary_tolerance: float | None
    """None: canaries are not looked at."""
