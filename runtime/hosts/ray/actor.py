"""What Ray starts: the process of an actor, and a small one on each node that ends others.

Invariants:

* ``run`` is synchronous and on the main thread: Ray's SIGTERM then raises ``SystemExit`` in it, and backends close.
* Nothing is unpickled on the way: what goes in and comes out is msgpack.

The module must stay importable by name: Ray starts it in another process.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec
import ray

from penstock.backends.processes import process_facts
from penstock.runtime.hosts.processes.actor_process import run_process
from penstock.runtime.hosts.processes.boot import OBSERVING, VISIBLE_DEVICES, Boot, load_wiring
from penstock.runtime.hosts.ray.node_ranks import RayRemoteRanks

if TYPE_CHECKING:
    from penstock.backends.processes.remote_ranks import RemoteRanks

HOLDER_TIMEOUT_S: Final = 60.0


class ActorProcess:
    """What Ray starts. One process runs one incarnation of one actor, once."""

    def warm_up(self, wiring: str) -> None:
        """Import what whatever actor this becomes needs in any case. What engines and learners run on is left out: it
        takes more memory than one should keep idle."""
        load_wiring(wiring)
        for name in OBSERVING:
            importlib.import_module(name)

    def run(self, boot: bytes, holder: Any = None, devices: slice | None = None) -> bytes:  # noqa: ANN401
        """Run until the end.

        Args:
            boot: A :class:`~penstock.runtime.hosts.processes.boot.Boot` as msgpack.
            holder: Handle of the :class:`~penstock.runtime.hosts.ray.groups.GpuHolder` whose GPUs this actor uses
                together with others; None where Ray has given it GPUs of its own, or none.
            devices: It sees these of them; None means all.

        Returns:
            A :class:`~penstock.runtime.hosts.processes.boot.ProcessEnd` as msgpack.
        """
        if holder is not None:
            held = str(ray.get(holder.devices.remote(), timeout=HOLDER_TIMEOUT_S)).split(",")  # pyright: ignore
            os.environ[VISIBLE_DEVICES] = ",".join(held if devices is None else held[devices])
        node_id = str(ray.get_runtime_context().get_node_id())
        end = run_process(
            msgspec.msgpack.decode(boot, type=Boot),
            node_id=node_id,
            node_host=_node_host(),
            remote_ranks=_other_nodes(),
        )
        return msgspec.msgpack.encode(end)


def _node_host() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # pyright: ignore


class NodeKiller:
    """Kills processes of another node; a small Ray actor, one a node, because the driver cannot signal them. It does
    several things at once."""

    def kill(self, pid: int, start_ticks: int) -> bool:
        """SIGKILL this very process; False when it is gone."""
        return process_facts.kill(pid, start_ticks)

    def end_left(self, marks: list[bytes]) -> list[int]:
        """End the servers with these marks that are on this node now; processes that would not go."""
        from penstock.backends.engines.served.base.left_servers import end_servers, left_servers

        return end_servers(left_servers(marks))

    def end_whole(self, process: tuple[int, int] | None, marks: list[list[bytes]]) -> list[int]:
        """End this process, by pid and start time, and what has one of these marks; processes that would not go."""
        from penstock.runtime.hosts.processes.whole_end import end_whole

        return end_whole(process, marks)


def _other_nodes() -> RemoteRanks | None:
    """The nodes of this actor's placement group but this one; None where there are none."""
    ranks = RayRemoteRanks()
    return ranks if ranks.num_nodes > 1 else None
