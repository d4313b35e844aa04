"""Rewards that a service gives: ``remote`` and ``judge``, as the process of a reward function sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.functions import GROUP_REWARD

if TYPE_CHECKING:
    from penstock.backends.rewards.wire import Launched


class Service(Protocol):
    """An ``async`` reward function with what it asks for."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arguments."""
        ...

    @property
    def concurrency(self) -> int:
        """Calls that run side by side."""
        ...

    async def __call__(self, **given: object) -> object:
        """The result for one sample, or for one group."""
        ...


def open_service(kind: str, spec: str, launched: Launched) -> Service:
    """The service of these options.

    Raises:
        UserCodeError: the options do not say enough, or the environment lacks the key.
    """
    is_group, options = kind == GROUP_REWARD, launched.function
    if spec == "remote":
        from penstock.backends.rewards.remote import RemoteReward

        assert options.remote is not None, "filled in by asked_functions"
        return RemoteReward(options.remote, is_group=is_group)
    from penstock.backends.rewards.judge import JudgeReward

    assert options.judge is not None, "filled in by asked_functions"
    if is_group:
        raise UserCodeError("reward.per_group: the reward 'judge' sees one sample; set it to false")
    return JudgeReward(options.judge, launched.surroundings)
