"""The named components of the rewards of a batch, for an estimator that reads them one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.messages.errors import UserFault
from penstock.messages.samples import Loss

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.messages.base import Metric
    from penstock.messages.samples import Group

MAX_NAME_CHARS = 64


def component_rewards(groups: Sequence[Group], names: Collection[str]) -> NDArray[np.float64]:
    """What each sample earned by each component ``[S, K]``, in the order of the batch: group by group its samples, and
    then those that a filter dropped after the group's statistics. Samples that are imitated have 0 everywhere.

    Args:
        groups: of the batch.
        names: of the components.

    Raises:
        UserFault: the reward of a sample lacks one of them, or one is not finite.
    """
    rows = [row for group in groups for row in _rows(group, names)]
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), len(names))


def _rows(group: Group, names: Collection[str]) -> Iterator[list[float]]:
    for sample in group.samples:
        if sample.loss is Loss.SUPERVISED:
            yield [0.0] * len(names)
        else:
            reward = sample.outcome.reward
            yield _values(() if reward is None else reward.components, names, f"sample {sample.key}")
    for counted in group.counted:
        yield _values(counted.components, names, f"the dropped sample {counted.index} of group {group.group_id}")


def _values(components: tuple[Metric, ...], names: Collection[str], whose: str) -> list[float]:
    earned = {component.name: component.value for component in components}
    for name in names:
        if not math.isfinite(earned.get(name, math.nan)):
            found = ", ".join(repr(each[:MAX_NAME_CHARS]) for each in earned) or "none"
            story = f"is {earned[name]}" if name in earned else f"is missing; it has {found}"
            raise UserFault(
                f"learner.objective.component_weights: the component {name!r} of the reward of {whose} {story}. Every "
                "reward needs a finite number for each of them (docs/rewards.md)"
            )
    return [earned[name] for name in names]
