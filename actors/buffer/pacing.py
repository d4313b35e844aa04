"""How many groups are outstanding: the bound, the limits, and the target that adapts.

Invariants:

* What may be granted never exceeds ``(s + η + 1 − v)·B``, nor what the rest of the run can train. Over-sampling
  multiplies the part of it that is in no batch yet.
* The target is never below ``B``, so a run never starves by its own pacing.
"""

from __future__ import annotations

import math

import msgspec

from penstock.messages.base import Value


class PacingSettings(Value, frozen=True, kw_only=True):
    """What does not change during a run."""

    num_steps: int
    groups_per_batch: int
    target_outstanding: int | None
    """A fixed number of groups; None adapts."""
    engine_capacity_groups: int
    """How many groups fit on all engines at once, of those that the run begins with."""
    max_concurrent: int | None
    over_sampling: float


class AutoTarget(msgspec.Struct):
    """The adapting target: up when the Learner waited, down when whole batches lie ready.

    More than what the engines hold, plus a batch in training, plus a batch in the buffer, only queues; so it goes no
    higher than that, whatever the bound allows.
    """

    groups_per_batch: int
    ceiling: int
    value: int

    @staticmethod
    def of(settings: PacingSettings) -> AutoTarget:
        """Where the target starts: a batch in training and one being generated."""
        batch = settings.groups_per_batch
        target = AutoTarget(batch, 2 * batch, 2 * batch)
        target.engines_hold(settings.engine_capacity_groups)
        return target

    def engines_hold(self, num_groups: int) -> None:
        """So many groups fit on all engines at once from now on."""
        self.ceiling = max(2 * self.groups_per_batch, num_groups + 2 * self.groups_per_batch)
        self.value = min(self.value, self.ceiling)

    def learner_waited(self, bound: int) -> None:
        """A batch was wanted and none could be formed."""
        if self.value < bound:
            self.value = min(self.value + max(1, self.groups_per_batch // 2), self.ceiling)

    def batch_taken(self, num_ready: int) -> None:
        """A batch was formed; so many ready groups are left."""
        if num_ready >= self.groups_per_batch:
            self.value = max(self.value - max(1, self.groups_per_batch // 4), 2 * self.groups_per_batch)


def bound(*, announced: int, taken_at: int, num_leased: int, max_staleness: int, settings: PacingSettings) -> int:
    """The most groups that may be outstanding: those in the batch that is out, and enough for the batches that can
    still be taken in time, the first of them at version ``taken_at``."""
    batches = max(0, announced + max_staleness + 1 - taken_at)
    return num_leased + math.ceil(batches * settings.groups_per_batch * settings.over_sampling)


def num_grantable(
    *, limit: int, outstanding: int, in_generation: int, trained: int, num_left: int | None, settings: PacingSettings
) -> int:
    """How many groups may be granted now.

    Args:
        limit: what bound and policy allow to be outstanding.
        outstanding: granted and not terminal.
        in_generation: granted and not admitted.
        trained: groups trained so far, each as often as it was, and those of the batch that is out which were trained
            before: places of batches that no group will have.
        num_left: prompts that the dataset has left; None when it has no end.
        settings: of the run.
    """
    trainable = settings.num_steps * settings.groups_per_batch - trained
    limit = min(limit, math.ceil(trainable * settings.over_sampling))
    number = limit - outstanding
    if settings.max_concurrent is not None:
        number = min(number, settings.max_concurrent - in_generation)
    if num_left is not None:
        number = min(number, num_left)
    return max(0, number)
