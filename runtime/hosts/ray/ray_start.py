"""How Ray is started for one run: with less beside it, and with errors of a kind."""

# Ray's own types are mostly unknown to a type checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault, first_line

if TYPE_CHECKING:
    from collections.abc import Generator

START: Final = (
    "see that this machine has memory, ports and room for temporary files left; or go without Ray, with "
    "runtime.host=local"
)
"""What to do about a Ray that does not start for a run, where its words say no better."""
_ADVICE: Final = (
    ("version mismatch", "start Penstock with the cluster's versions of both"),
    ("/dev/shm", "free some of it, or give the container more with --shm-size"),
    ("in use", "end what holds the port, such as another Ray of yours: ray stop"),
    ("token", "set RAY_AUTH_TOKEN to that of the cluster"),
)
_RAISED: Final = (RuntimeError, ConnectionError, OSError, ValueError, TimeoutError)
_log: Final = logging.getLogger(__name__)


class RayFaults:
    """A context manager around ``ray.init``: what that raises leaves the block as a :class:`.UserFault`, in Ray's words
    and with what to do. Where a node does not start in time Ray raises a bare ``Exception``. An error of our call stays
    what it is."""

    def __init__(self, where: str, advice: str) -> None:
        """``where``: what was tried; ``advice``: what to do, where Ray's words say no better."""
        self._where, self._advice = where, advice

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from ray.exceptions import RayError

        if error is None or not (kind is Exception or isinstance(error, (RayError, *_RAISED))):
            return
        _log.error("%s", self._where, exc_info=error)
        said = first_line(error)
        if said.endswith(":"):  # what matters stands in the lines after it
            said = " ".join(str(error).split())
        known = (advice for words, advice in _ADVICE if words in said.lower())
        raise UserFault(f"{self._where}: {said.removesuffix('.')}; {next(known, self._advice)}") from error


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
