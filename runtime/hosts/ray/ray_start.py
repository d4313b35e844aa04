"""How Ray is started for one run: with less beside it, and with errors of a kind."""

# Ray's own types are mostly unknown to a type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


class BareErrors:
    """A context manager. Ray raises a bare ``Exception`` where a node does not start in time; it leaves the block as a
    RuntimeError with the same words."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception:
            raise RuntimeError(str(error)) from error


@contextmanager
def lean_head() -> Generator[None]:
    """Within the block Ray starts neither its autoscaler nor its log monitor nor the server of its dashboard: 250 MB
    and two seconds of CPU for services that a run on one machine does not use. Where a version of Ray starts them by
    other means, it just starts them."""
    from ray._private.node import Node

    names = [name for name in ("start_monitor", "start_log_monitor", "start_api_server") if hasattr(Node, name)]
    originals = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


def _start_nothing(node: object, **_options: object) -> None:
    """In place of a method of Ray's node. A node of a new cluster has no address of a dashboard until one starts."""
