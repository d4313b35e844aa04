"""What can bind a run, and what is said of it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """What can bind."""

    FEW_ENGINES = "too few engines"
    SLOW_REWARD = "slow reward"
    SMALL_BOUND = "small staleness bound"
    LONG_TAIL = "long tail of responses"
    SLOW_PUBLISH = "slow publish of weights"
    HEAVY_LEARNER = "heavy learner"
    LOW_CONCURRENCY = "low concurrency"
    FILTER = "filter that rejects"
    SLOW_TOOL = "slow tool"
    SLOW_ROWS = "slow dataset"
    SLOW_ENGINE = "slow engine"
    EARLY_BOUND = "requests bound early"
    CHECKPOINTS = "frequent checkpoints"
    LOST_TIME = "actors that were down"
    EVALUATION = "evaluations"
    FEW_CORES = "too few cores"
    UNKNOWN = "not recorded"
    HARDWARE = "nothing but the hardware"


class Evidence(msgspec.Struct, frozen=True):
    """A figure and where it was read."""

    what: str
    value: float
    unit: str
    """``%`` of a share; ``s``, ``groups``, ``tokens/s``."""
    source: str


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, with what it costs."""

    cause: Cause
    who: str
    """Actor or resource."""
    cost_s: float
    """Of a step, at most."""
    share: float
    """Of the step's time."""
    binds: bool
    text: str
    evidence: tuple[Evidence, ...]
