"""What the WeightPublisher is told when it is built."""

from __future__ import annotations

from penstock.messages.base import Value


class WeightPublisherSettings(Value, frozen=True, kw_only=True):
    """Deadlines and tolerances."""

    start_timeout_s: float = 120.0
    """For an engine to open, from when its process is there, or from when it is its turn to."""
    share_devices: tuple[str, ...] = ()
    """Engines on the learner's devices, which open when it is their turn."""
    weightless: tuple[str, ...] = ()
    """Engines without weights, which answer with what rows hold. They take every version, and what they say of it
    proves nothing."""
    has_models: bool = True
    """Whether the run has other engines."""
    stage_timeout_s: float
    commit_timeout_s: float
    drain_timeout_s: float
    announce_fraction: float
    check_canary: bool
    canary_tolerance: float
    max_failed_publishes: int
    max_fetch_retries: int = 2
    """Of the newest weights by one engine; past it the engine is replaced."""
