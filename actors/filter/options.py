"""The ``filter:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.messages.base import Options
from penstock.messages.option_keys import FilterKey, SampleFilterKey, SamplesHookKey


class FilterOptions(Options, frozen=True, kw_only=True):
    """Which groups are worth training on, and what happens to a group with a failed sample."""

    drop_zero_spread: bool | None = None
    """Turn away groups whose rewards are all equal. null: where the objective compares the samples of a group with each
    other, so that such a group gives no gradient, and not where it learns from one all the same (`ppo`,
    `reinforce_plus_plus`, anything with a teacher, weights of a likelihood, functions of yours for rewards or
    advantages)."""
    min_response_tokens: Annotated[int, Meta(ge=0)] = 0
    """Turn away groups in which every response is shorter."""
    max_response_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Turn away groups in which any response is longer."""
    function: FilterKey | None = None
    """``file.py:function``: a user's filter; gets the group, returns True, False, or (False, "cause")."""
    sample_function: SampleFilterKey | None = None
    """``file.py:function``: the same for each sample of a complete group, before anything else judges the group; what
    it drops is not drawn again."""
    drop_samples: Literal["before_statistics", "after_statistics"] = "before_statistics"
    """What ``sample_function`` drops. ``before_statistics``: leaves the group, whose mean and spread are those of the
    others. ``after_statistics``: its reward counts in mean and spread, and nothing of it is trained."""
    all_samples_hook: SamplesHookKey | None = None
    """``file.py:function``: is shown every group that is admitted or turned away, with all its samples and the cause;
    changes nothing, and its failures are counted."""
    keep_when_insufficient: Annotated[int, Meta(ge=1)] | None = None
    """When so many batches' worth of groups have been turned away since the last batch was formed, further ones are
    kept until a batch is formed, and so is what the last batch of a dataset that ends would lack; null: never."""
    on_failed_sample: Literal["refill", "shrink", "reject"] = "refill"
    """``refill``: draw another sample in its place; ``shrink``: go on with those that are left; ``reject``: turn the
    group away."""
    max_refills: Annotated[int, Meta(ge=0)] = 4
    """Per group; past it the group shrinks."""
    min_group_size: Annotated[int, Meta(ge=1)] = 2
    """A group that shrank below is turned away."""
