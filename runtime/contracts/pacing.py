"""The contract of a staleness policy."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, cast

from penstock.actors.buffer.policies import BufferState, RankedGroup, StalenessPolicy
from penstock.backends.processes.user_code import load_object
from penstock.messages.errors import UserFault
from penstock.messages.training import OnStale
from penstock.runtime.contracts.checks import check_same

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.training import UpdateMode
    from penstock.runtime.contracts.checks import Checks


def check_policy(checks: Checks) -> None:
    """Of pacing and ranking."""
    built: list[StalenessPolicy] = []

    def build() -> None:
        make = cast("Callable[..., StalenessPolicy]", load_object(checks.spec))
        if not isinstance(make, type):
            raise UserFault(f"is {type(make).__name__}; expected a class")
        built.append(make(max_staleness=2, update_mode=_mode(), on_stale=OnStale.WAIT))

    if not checks.run("it is built from max_staleness, update_mode and on_stale", build):
        return
    policy = built[0]
    checks.run("it keeps what it is built from", lambda: _check_kept(policy))
    checks.run("target is a whole number for every state", lambda: _check_targets(policy))
    checks.run("rank orders every group", lambda: _check_ranks(policy))


def _mode() -> UpdateMode:
    from penstock.messages.training import UpdateMode

    return next(iter(UpdateMode))


def _check_kept(policy: StalenessPolicy) -> None:
    for name, wanted in (("max_staleness", 2), ("update_mode", _mode()), ("on_stale", OnStale.WAIT)):
        found = getattr(policy, name, None)
        if found != wanted:
            raise UserFault(f"was built with {name} {wanted!r} and has {found!r}")


def _check_targets(policy: StalenessPolicy) -> str | None:
    never_more = True
    for version, lag, outstanding, ready in product((0, 1, 7), (0, 2), (0, 8, 24), (0, 8)):
        state = BufferState(
            version=version,
            announced_version=max(0, version - lag),
            groups_per_batch=8,
            outstanding=outstanding,
            ready=min(ready, outstanding),
            target_outstanding=16,
        )
        found = cast("object", policy.target(state))
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise UserFault(f"target({state}) returned {found!r}; expected a whole number from 0 on")
        check_same(found, policy.target(state))
        never_more = never_more and found <= 0
    if never_more:
        raise UserFault("target is 0 in every state, so nothing would ever be generated")
    return None


def _check_ranks(policy: StalenessPolicy) -> None:
    groups = [
        RankedGroup(group_id=group_id, deadline_version=deadline, num_tokens=tokens)
        for group_id, (deadline, tokens) in enumerate(product((0, 3, 5), (0, 1, 100_000)))
    ]
    ranks: list[tuple[int, ...]] = []
    for group in groups:
        returned = cast("object", policy.rank(group))
        parts = cast("tuple[object, ...]", returned) if isinstance(returned, tuple) else None
        if parts is None or not all(isinstance(part, int) for part in parts):
            raise UserFault(f"rank({group}) returned {returned!r}; expected a tuple of whole numbers")
        check_same(parts, policy.rank(group))
        ranks.append(cast("tuple[int, ...]", parts))
    sorted(ranks)
