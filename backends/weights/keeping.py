"""Which exports go and which stay, over the incarnations of a learner. Both transports follow it.

Invariants:

* What stays is always enough for an engine that starts now: the newest export is never chosen to go.
* A base, to which exports of adapters belong, goes with the last of these and never before: those of this incarnation
  stay, and of an earlier one as long as anything else of it does.
* Going back to a checkpoint makes older versions again. Until this incarnation has reached a version, what an earlier
  one exported for it stays, because engines may have been told of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Export(Protocol):
    """What the name of an export tells."""

    @property
    def epoch(self) -> int:
        """Of the learner incarnation that made it."""
        ...

    @property
    def version(self) -> int: ...

    @property
    def publish(self) -> int: ...

    @property
    def is_base(self) -> bool:
        """Other exports of its incarnation are adapters that belong to it."""
        ...


ExportT = TypeVar("ExportT", bound=Export)


def superseded(inherited: Sequence[ExportT], exported_version: int) -> list[ExportT]:
    """Of the exports of earlier incarnations: those that an own export of this version replaces."""
    return _with_bases(
        inherited, [export for export in inherited if not export.is_base and export.version <= exported_version]
    )


def released(own: Sequence[ExportT], inherited: Sequence[ExportT], below_version: int) -> list[ExportT]:
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


def _with_bases(inherited: Sequence[ExportT], going: list[ExportT]) -> list[ExportT]:
    """These, and the bases of earlier incarnations of which nothing else is left then."""
    needed = {export.epoch for export in inherited if not export.is_base and export not in going}
    return going + [export for export in inherited if export.is_base and export.epoch not in needed]
