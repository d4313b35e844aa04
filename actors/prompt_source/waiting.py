"""What the PromptSource waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.prompt_source.leases import LeaseState
from penstock.actors.waits import several
from penstock.messages.names import BUFFER, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.waits import OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.actors.prompt_source.census import Census
    from penstock.actors.prompt_source.leases import Lease, LeaseTable


def lease_waits(table: LeaseTable, total: int) -> list[Wait]:
    """For prompts, engines, weights and samples; for a grant when there is nothing else to do."""
    issued: dict[str, list[Lease]] = {}
    needed: set[int] = set()
    """Versions, by samples that wait for an engine."""
    for group, lease in table.all_leases():
        if lease.state is LeaseState.QUEUED:
            needed.add(group.min_version)
        elif lease.state is LeaseState.ISSUED:
            issued.setdefault(lease.engine, []).append(lease)
    waits = several("prompt", OWN_BACKEND, [(g.group_id, 0) for g in table.groups.values() if g.prompt is None])
    for engine, leases in issued.items():
        waits += several("sample", engine, [(lease.key, _progress(lease)) for lease in leases])
    views = table.router.engines.values()
    if needed and not any(view.num_slots for view in views):
        waits += several("start of", SUPERVISOR, [(name, 0) for name in table.router.engines] or [("an engine", 0)])
    elif needed:
        newest = max(view.version for view in views)
        lacking = sorted(version for version in needed if version > newest)
        waits += several("weights of", WEIGHT_PUBLISHER, [(f"version {version}", 0) for version in lacking])
    if not table.groups:
        waits.append(Wait("grant", f"group {total}", BUFFER))
    return waits


def census_waits(census: Census) -> list[Wait]:
    """For the answers to an open census, and for what must be known to judge them."""
    if not census.is_open:
        return []
    subject = f"census {census.round}"
    waits = [Wait("answer to", subject, name) for name in census.missing()]
    waits += several("return of", SUPERVISOR, [(name, 0) for name in census.awaited()])
    return waits or [Wait("settlements for", subject, BUFFER)]


def _progress(lease: Lease) -> int:
    return (lease.attempt << 32) + lease.num_seen
