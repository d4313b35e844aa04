"""The ``weights:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.messages.base import Options, OptionValue
from penstock.messages.option_keys import TrainingHookKey


class WeightsOptions(Options, frozen=True, kw_only=True):
    """How new weights reach the engines."""

    transport: str = "auto"
    """``shared_memory``: embedded engines on the learner's machine. ``disk``: any engine; SGLang servers load it in the
    background. ``distributed``: sent to SGLang servers by a process group each. ``tensor``: to SGLang servers on the
    learner's machine, as handles of GPU memory. ``network``: any engine takes what has changed from the learner, over
    links that may be slow. ``auto``: one of the first two, and ``disk`` on a Ray
    cluster that is there already (``runtime.ray_address``)."""
    fan_out: Literal["tree", "direct"] = "tree"
    """With ``network``. ``tree``: engines pass what they fetch on to each other, so that the learner's link carries a
    version about once; bytes that are late or wrong come from the learner after all. ``direct``: every engine takes all
    of it from the learner."""
    options: dict[str, OptionValue] = field(default_factory=dict[str, OptionValue])
    """Of a transport that another package brings, as that says (docs/extending.md)."""
    bucket_size_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20
    """So much is sent to an SGLang server at a time under ``distributed`` and ``tensor``."""
    names_function: TrainingHookKey | None = None
    """A function of yours that gives the name under which engines get a weight, for a model that they call otherwise:
    file.py:function (docs/hooks.md)."""
    publish_every: Annotated[int, Meta(ge=1)] = 1
    """Batches between two publishes; at most ``staleness.max_staleness + 1``."""
    stage_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """For an engine to fetch and check the weights; a later one is replaced."""
    commit_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """For an engine to swap, counted from when it is idle where it has to drain first."""
    drain_timeout_s: Annotated[float, Meta(gt=0)] = 3600.0
    """For an engine to become idle under ``drain``."""
    announce_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of the engines that must serve a version before it is announced; at least one."""
    canary: bool = True
    """Compare log-probs of the first engine with the learner's before the others follow."""
    canary_tolerance: Annotated[float, Meta(gt=0)] | None = None
    """Largest distance of its log-probs from the learner's, as a share of their spread; null: 1e-3 where the embedded
    engine computes in float32, which rounds to 1e-6, and 0.1 elsewhere: in bfloat16 right weights are off by about
    0.01."""
    max_failed_publishes: Annotated[int, Meta(ge=1)] = 3
    """A version whose canary failed so often stops the run."""
