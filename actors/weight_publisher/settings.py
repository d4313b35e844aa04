"""What the WeightPublisher is told when it is built."""

from __future__ import annotations

# msgspec reads the annotation:
from penstock.actors.weight_publisher.options import WeightsOptions
from penstock.messages.base import Value


class WeightPublisherSettings(Value, frozen=True, kw_only=True):
    """Deadlines and tolerances."""

    options: WeightsOptions
    start_timeout_s: float = 120.0
    """For an engine to open, from when its process is there, or from when it is its turn to."""
    share_devices: tuple[str, ...] = ()
    """Engines on the learner's devices, which open when it is their turn."""
    lent: tuple[str, ...] = ()
    """Those of them to which these are lent only: nobody waits for them."""
    weightless: tuple[str, ...] = ()
    """Engines without weights, which answer with what rows hold. They take every version, and what they say of it
    proves nothing."""
    has_models: bool = True
    """Whether the run has other engines."""
    max_fetch_retries: int = 2
    """Of the newest weights by one engine; past it the engine is replaced."""
