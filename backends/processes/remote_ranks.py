"""Where the further processes of something over several nodes are started: what a backend needs of its host.

A server over ``num_nodes`` nodes is that many commands, one on each node; so are the launchers of a learner's ranks.
Rank 0 is started where the backend is, by the backend itself; this starts the others. Each sees the GPUs of its node's
share only.

Invariants, which every implementation keeps:

* A rank ends, with every process that it has started, when ``stop`` is called, when the backend's process ends in
  any way, and when whatever started it ends.
* A rank's end is told once, by ``ended``, unless ``stop`` has asked for it.

| waits for | who ends it |
|---|---|
| ``start`` | the rank's process runs; ``START_TIMEOUT_S`` |
| ``ended`` | the end of a rank; meant to last as long as the server. Cancel it |
| ``stop`` | the ends of the ranks; ``STOP_TIMEOUT_S`` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START_TIMEOUT_S: Final = 60.0
"""For a process on another node to be there; what it then loads has the engine's own deadline."""
STOP_TIMEOUT_S: Final = 10.0


class RemoteRankError(RuntimeError):
    """A rank could not be started: its node is lost, or the command is not there."""


class RankEnded(NamedTuple):
    """The process of a rank is over."""

    rank: int
    reason: str
    """For people: exit code or signal, or the loss of its node."""
    last_lines: tuple[str, ...]
    """Last lines that the rank printed."""


class RemoteRanks(Protocol):
    """The other nodes of one engine, or of the learner. Used from one event loop."""

    @property
    def num_nodes(self) -> int:
        """The backend's own included."""
        ...

    @property
    def host(self) -> str:
        """Address of this node that the other nodes can reach: for ``--dist-init-addr``."""
        ...

    async def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log_path: str) -> int:
        """Start the command of a rank from 1 up; its pid.

        Args:
            rank: which of the nodes.
            command: the server's; its paths are valid on that node.
            environment: variables that are set, or replaced, in that node's environment. ``CUDA_VISIBLE_DEVICES`` is
                that of the node's share and must not be among them.
            log_path: on that node; appended to.

        Raises:
            RemoteRankError: it could not be started.
        """
        ...

    async def ended(self) -> RankEnded:
        """The next rank that ends."""
        ...

    async def stop(self) -> None:
        """End all of them, for good. They may be started again."""
        ...
