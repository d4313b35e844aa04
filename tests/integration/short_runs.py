"""Overrides that make runs short, for tests of what happens in a run and not of what it learns."""

from __future__ import annotations

PATIENT = "runtime.heartbeat_timeout_s=60"
"""A test machine may be busy with other things."""
EVERY_GROUP = "filter.drop_zero_spread=false"
"""So short a warm start earns few rewards."""
SMALL_BATCHES = ("learner.groups_per_batch=8", EVERY_GROUP, PATIENT)
FEW_LINES = (
    "data.path=lines:200", "sampling.samples_per_group=4", "sampling.max_response_tokens=24", EVERY_GROUP,
    "learner.groups_per_batch=4", PATIENT,
)  # fmt: skip
"""Short lines to write, in batches of sixteen samples; the reward is the scenario's or a test's own."""
LINES_ALONE = (*FEW_LINES, "reward.function=lines", "evaluation.every=null")
NO_EVALUATION = (
    "evaluation.datasets=[]", "evaluation.every=null", "evaluation.before_first=false", "evaluation.at_end=false",
)  # fmt: skip
ONE_SMALL_ENGINE = (
    "model.make=xs", "data.path=lines:200", "learner.warm_start=null", "learner.groups_per_batch=4", "engines.count=1",
    "sampling.max_response_tokens=16", "observability.report=false",
)  # fmt: skip
