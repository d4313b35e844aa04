"""Which exports go and which stay, over the incarnations of a learner. Both transports follow it.

Invariants:

* What stays is always enough for an engine that starts now: the newest export is never chosen to go.
* A base, to which exports of adapters belong, goes with the last of these and never before: those of this incarnation
  stay, and of an earlier one as long as anything else of it does.
* Going back to a checkpoint makes older versions again. Until this incarnation has reached a version, what an earlier
  one exported for it stays, because engines may have been told of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence
    from pathlib import Path


class Export(NamedTuple):
    """One export, ordered by age."""

    epoch: int
    """Of the learner incarnation that made it."""
    version: int
    publish: int
    path: Path
    is_partial: bool = False
    """Its exporter was killed, or writes it now."""
    is_base: bool = False
    """Other exports of its incarnation are adapters that belong to it."""

    @classmethod
    def named(cls, name: re.Match[str], path: Path) -> Export:
        """What the name of this file tells, by the groups of its pattern."""
        epoch, version, publish = (int(name[field]) for field in ("epoch", "version", "publish"))
        return cls(epoch, version, publish, path, bool(name["partial"]), bool(name["base"]))


def superseded(inherited: Sequence[Export], exported_version: int) -> list[Export]:
    """Of the exports of earlier incarnations: those that an own export of this version replaces."""
    return _with_bases(
        inherited, [export for export in inherited if not export.is_base and export.version <= exported_version]
    )


def released(own: Sequence[Export], inherited: Sequence[Export], below_version: int) -> list[Export]:
    """What a release lets go; ``own`` in the order of the exports."""
    candidates = [export for export in (*inherited, *own) if not export.is_base]
    mine = [export for export in own if not export.is_base]
    highest = max(
        (export for export in inherited if not export.is_base),
        key=lambda export: (export.version, export.epoch, export.publish),
        default=None,
    )
    newest = mine[-1] if mine else highest
    going = [export for export in candidates if export.version < below_version and export is not newest]
    return _with_bases(inherited, going)


def _with_bases(inherited: Sequence[Export], going: list[Export]) -> list[Export]:
    """These, and the bases of earlier incarnations of which nothing else is left then."""
    needed = {export.epoch for export in inherited if not export.is_base and export not in going}
    return going + [export for export in inherited if export.is_base and export.epoch not in needed]
