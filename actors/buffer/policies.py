"""Staleness policies: the only code that knows a regime.

A policy is a small frozen object with pure methods. It paces (``target``) and ranks (``rank``); the Buffer enforces the
bound whatever a policy says. A policy of your own is a class with the same members in a file of yours, named in the
scenario as ``file.py:Name``; it is built with ``max_staleness``, ``update_mode`` and ``on_stale``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from penstock.messages.base import Value
from penstock.messages.errors import UserFault
from penstock.messages.training import OnStale, UpdateMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.messages.operator import PolicyChanged


class BufferState(Value, frozen=True, kw_only=True):
    """What a policy may look at. All counts are in groups but the versions."""

    version: int
    """v: batches trained."""
    announced_version: int
    """s: the newest version that enough engines serve."""
    groups_per_batch: int
    outstanding: int
    """Granted and neither trained nor otherwise terminal."""
    ready: int
    """Admitted and in no batch yet."""
    target_outstanding: int
    """What the scenario fixes, or where ``auto`` stands now."""


class RankedGroup(Value, frozen=True, kw_only=True):
    """A ready group as a policy sees it."""

    group_id: int
    deadline_version: int
    num_tokens: int


class StalenessPolicy(Protocol):
    """What a policy has to offer."""

    @property
    def max_staleness(self) -> int:
        """η, in versions."""
        ...

    @property
    def update_mode(self) -> UpdateMode: ...

    @property
    def on_stale(self) -> OnStale: ...

    def target(self, state: BufferState, /) -> int:
        """How many groups may be outstanding; the Buffer cuts it at the bound."""
        ...

    def rank(self, group: RankedGroup, /) -> tuple[int, ...]:
        """Ready groups are preferred in ascending order of this."""
        ...


class PolicyDefaults(Value, frozen=True, kw_only=True):
    """What a policy takes when the scenario leaves it open, and what it can be told."""

    policy: type[BuiltinPolicy]
    max_staleness: int
    update_mode: UpdateMode
    fixed_staleness: bool
    """The staleness is what makes this policy; a scenario cannot choose another."""
    update_modes: tuple[UpdateMode, ...]


class BuiltinPolicy(Value, frozen=True, kw_only=True):
    """Paces by the target; prefers groups in the order of their issue."""

    max_staleness: int
    update_mode: UpdateMode
    on_stale: OnStale = OnStale.WAIT

    def target(self, state: BufferState) -> int:
        """As many as the scenario's target says."""
        return state.target_outstanding

    def rank(self, group: RankedGroup) -> tuple[int, ...]:
        """Issue order."""
        return (group.group_id,)


class Sync(BuiltinPolicy, frozen=True, kw_only=True):
    """Generate a batch, train it, repeat: every token is made by the version that it trains."""


class OneStepOff(BuiltinPolicy, frozen=True, kw_only=True):
    """Generate the next batch while this one is trained."""


class FullyAsync(BuiltinPolicy, frozen=True, kw_only=True):
    """Generate all the time; a token may be ``max_staleness`` versions old."""

    def rank(self, group: RankedGroup) -> tuple[int, ...]:
        """Earliest deadline first, then issue order."""
        return (group.deadline_version, group.group_id)


BUILTIN: Mapping[str, PolicyDefaults] = MappingProxyType(
    {
        "sync": PolicyDefaults(
            policy=Sync,
            max_staleness=0,
            update_mode=UpdateMode.DRAIN,
            fixed_staleness=True,
            update_modes=(UpdateMode.DRAIN,),
        ),
        "one_step_off": PolicyDefaults(
            policy=OneStepOff,
            max_staleness=1,
            update_mode=UpdateMode.DRAIN,
            fixed_staleness=True,
            update_modes=(UpdateMode.DRAIN, UpdateMode.INTERRUPT, UpdateMode.IN_FLIGHT),
        ),
        "fully_async": PolicyDefaults(
            policy=FullyAsync,
            max_staleness=2,
            update_mode=UpdateMode.IN_FLIGHT,
            fixed_staleness=False,
            update_modes=(UpdateMode.IN_FLIGHT, UpdateMode.INTERRUPT, UpdateMode.DRAIN),
        ),
    }
)


def builtin_policy(name: str, *, max_staleness: int, update_mode: UpdateMode, on_stale: OnStale) -> StalenessPolicy:
    """A built-in policy by name.

    Raises:
        UserFault: there is none of this name, or it cannot be told this staleness.
    """
    defaults = BUILTIN.get(name)
    if defaults is None:
        raise UserFault(f"no policy is called {name!r}; there are {', '.join(BUILTIN)}, or file.py:Name")
    if defaults.fixed_staleness and max_staleness != defaults.max_staleness:
        raise UserFault(f"{name} has a max_staleness of {defaults.max_staleness}, got {max_staleness}")
    return defaults.policy(max_staleness=max_staleness, update_mode=update_mode, on_stale=on_stale)


def ranked(policy: StalenessPolicy, groups: list[RankedGroup]) -> list[RankedGroup]:
    """The groups in the order in which the policy prefers them; ties in issue order, so that it is always the same."""
    return sorted(groups, key=lambda group: (policy.rank(group), group.group_id))


def refusal(event: PolicyChanged, *, publish_every: int, max_uses: int = 1) -> str:
    """Why a running job cannot take this policy; empty when it can."""
    defaults = BUILTIN.get(event.policy)
    if defaults is None:
        return f"no policy is called {event.policy!r}"
    if defaults.fixed_staleness and event.max_staleness != defaults.max_staleness:
        return f"{event.policy} has a max_staleness of {defaults.max_staleness}, got {event.max_staleness}"
    if event.update_mode not in defaults.update_modes:
        return (
            f"{event.policy} cannot update engines by {event.update_mode}, only by {', '.join(defaults.update_modes)}"
        )
    if event.max_staleness < publish_every - 1:
        return f"publish_every is {publish_every}, that needs a max_staleness of at least {publish_every - 1}"
    if event.max_staleness < max_uses - 1:
        return f"staleness.reuse is {max_uses}, that needs a max_staleness of at least {max_uses - 1}"
    return ""
