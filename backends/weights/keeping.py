"""Which exports go and which stay, over the incarnations of a learner. Both transports follow it.

Invariants:

* What stays is always enough for an engine that starts now: the newest export is never chosen to go.
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


ExportT = TypeVar("ExportT", bound=Export)


def superseded(inherited: Sequence[ExportT], exported_version: int) -> list[ExportT]:
    """Of the exports of earlier incarnations: those that an own export of this version replaces."""
    return [export for export in inherited if export.version <= exported_version]


def released(own: Sequence[ExportT], inherited: Sequence[ExportT], below_version: int) -> list[ExportT]:
    """What a release lets go; ``own`` in the order of the exports."""
    highest = max(inherited, key=lambda export: (export.version, export.epoch, export.publish), default=None)
    newest = own[-1] if own else highest
    return [export for export in (*inherited, *own) if export.version < below_version and export is not newest]
