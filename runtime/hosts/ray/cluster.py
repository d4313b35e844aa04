"""Ray: started for the run, or a cluster that is there already; and the launcher that starts processes on it.

Invariants:

* Ray's environment is set before Ray is imported: most of it is read then, and workers inherit it.
* ``start`` is called on the main thread. Ray's own processes end with the thread that started them.
* An embedded Ray ends with ``stop``, all of it, in milliseconds: nothing in it is worth an orderly end.
* A process is killed with SIGKILL by its pid. Ray's own kill leaves a stopped process alive for seconds.
"""

# Ray's own types are mostly unknown to a type checker; everything that leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import threading
from concurrent.futures import Future, wait
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.engines.served.base.left_servers import END_TIMEOUT_S
from penstock.backends.processes import process_facts as processes
from penstock.backends.processes.temp_folders import TEMP_PREFIX, make_folder, remove_folder
from penstock.messages.names import LEARNER, engine_index, is_engine
from penstock.runtime.hosts.processes.boot import Boot, EndKind, ProcessEnd
from penstock.runtime.hosts.processes.descendants import kill_descendants
from penstock.runtime.hosts.processes.ports import EndedProcess
from penstock.runtime.hosts.processes.prepare_process import PreparationProcess
from penstock.runtime.hosts.processes.wakeup import Wakeup
from penstock.runtime.hosts.ray.groups import PlacementGroups, gpus_of_nodes
from penstock.runtime.hosts.ray.ray_start import START, RayFaults, lean_head

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.runtime.hosts.processes.control import ProcessStarted
    from penstock.runtime.hosts.processes.job import DriverJob
    from penstock.runtime.run.gpu_needs import NodeGpus
    from penstock.runtime.run.placement import Placement

NUM_CPUS: Final = 2
"""Decides only how many workers Ray starts in advance, since every actor asks for none. More of them delay its own
start by more than they save later."""
OBJECT_STORE_BYTES: Final = 80 << 20
MAX_TEMP_PATH: Final = 40
"""Ray puts sockets below it, whose paths may have 107 bytes."""
KILL_TIMEOUT_S: Final = 2.0
NUM_KILLER_THREADS: Final = 4
"""A process is killed while servers end."""
GIVE_BACK_TIMEOUT_S: Final = 2 * END_TIMEOUT_S
"""For what an engine has left to end, on each node, before its GPUs go back to Ray."""
SPREAD: Final = "SPREAD"
SPARE: Final = "spare"
SESSIONS: Final = "/r"
"""Below the run's temporary folder. Ray opens the folder that it is given, and all below, to every user of the machine,
who could then rename the session and put another in its place; the folder above stays closed."""

RAY_SETTINGS: Final = {
    "RAY_worker_niceness": "0",  # Ray runs workers at nice 15, where any busy neighbour starves them
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a scenario may name a GPU itself
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` Ray would build a second environment for its workers
    "RAY_worker_maximum_startup_concurrency": "8",
    "RAY_kill_worker_timeout_milliseconds": "200",
}
"""What Ray reads from its environment, for who connects to it and for the nodes that are started for a run."""


def prepare_environment(ray_address: str | None) -> None:
    """Set what Ray reads when it is imported, for this process and all that it starts."""
    assert "ray" not in sys.modules, "Ray was imported before its environment was set"
    os.environ.update(RAY_SETTINGS)
    if ray_address is None:
        # Ray listens on every interface, whatever address it is given: without a token anybody could run code here.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        os.environ.pop("RAY_ADDRESS", None)


def make_temp_folder() -> Path:
    """A folder that only this user may enter, for Ray's session, whose path in it is short enough for its sockets."""
    base = tempfile.gettempdir()
    if len(base) + len(f"/{TEMP_PREFIX}12345678") + len(SESSIONS) > MAX_TEMP_PATH:
        base = "/tmp"
    return make_folder(Path(base))


class RayCluster:
    """A connection to Ray, and Ray itself when nobody else has started it."""

    def __init__(self, *, address: str | None, temp_folder: Path) -> None:
        """Starts Ray or connects to it; takes seconds. Call ``prepare_environment`` first.

        Args:
            address: of a cluster; None starts Ray for this run alone.
            temp_folder: for an embedded Ray; removed by ``stop``.

        Raises:
            UserFault: with the reason.
        """
        import ray
        import ray._private.worker

        self._ray: Any = ray
        self.temp_folder = temp_folder
        self.is_embedded = address is None
        ray._private.worker._worker_logs_enabled = False  # a kilobyte on the terminal for each process that dies
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if address is None:
            processes.be_subreaper()  # Ray's agents outlive its raylet; as orphans they come here, for ``stop`` to find
            sessions = f"{temp_folder}{SESSIONS}"
            options |= {
                "address": "local",
                "num_cpus": NUM_CPUS,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": sessions,
                "_plasma_directory": str(temp_folder),  # leaves /dev/shm, 64 MB in a container, to the weights
            }
        else:
            options["address"] = address
        where, advice = "Ray could not be started", START
        if address is not None:
            where, advice = f"runtime.ray_address: {address}", f"see on this machine: ray status --address={address}"
        with RayFaults(where, advice), lean_head() if address is None else nullcontext():
            ray.init(**options)
        self._owned = self._owned_processes()
        self.node_id = str(ray.get_runtime_context().get_node_id())

    @property
    def node_host(self) -> str:
        """Address of this node that the others can reach."""
        return "127.0.0.1" if self.is_embedded else str(self._ray.util.get_node_ip_address())

    def nodes(self) -> list[NodeGpus]:
        """The living nodes with the GPUs that are free on them, this one first."""
        return gpus_of_nodes(self._ray, self.node_id)

    def broken(self) -> str:
        """Which part of an embedded Ray has died; empty while all of them live.

        Ray itself takes 16 s to notice the end of its raylet, and aborts the driver after the end of its GCS.
        """
        for name, process in self._owned:
            code = process.poll()  # reaps it: a zombie counts as alive for Ray
            if code is not None:
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                return f"Ray's {name} has died ({how}), and no actor lives without it"
        return ""

    def stop(self, *, is_orderly: bool = False, spare: Collection[int] = ()) -> list[int]:
        """End an embedded Ray, or the connection to a cluster.

        Args:
            is_orderly: let Ray take itself out of this process first, which takes a second. For a process that lives
                on or ends by itself; one that ends through ``os._exit`` needs none of it.
            spare: children that are left alone.

        Returns:
            Processes that could not be killed, which should be none.
        """
        if is_orderly or not self.is_embedded:
            self._ray.shutdown()
        if not self.is_embedded:
            return []
        left = kill_descendants(timeout_s=KILL_TIMEOUT_S, spare=spare)
        remove_folder(self.temp_folder)
        return left

    def _owned_processes(self) -> list[tuple[str, Any]]:
        if not self.is_embedded:
            return []
        found = self._ray._private.worker._global_node.all_processes
        return [(name, info.process) for name in ("gcs_server", "raylet") for info in found[name]]


class RayHost:
    """Ray, for one run. Implements ``penstock.runtime.hosts.processes.ports.ProcessHost``."""

    phase = "starting Ray"

    def __init__(self, address: str | None, temp_folder: Path, *, spare: Collection[int] = ()) -> None:
        """Starts nothing; the first two arguments are those of :class:`RayCluster`.

        Args:
            address: of the cluster; None: embedded.
            temp_folder: for an embedded one.
            spare: children of this process that :meth:`stop` leaves alone.
        """
        self._spare = spare
        self.is_embedded = address is None
        self._address = address
        self._temp_folder = temp_folder
        self._cluster: RayCluster | None = None

    @property
    def cluster(self) -> RayCluster:
        """Once it has started."""
        assert self._cluster is not None, "start() comes first"
        return self._cluster

    @property
    def node_host(self) -> str:
        """See :class:`~penstock.runtime.hosts.processes.ports.ProcessHost`, as for the other methods."""
        return self.cluster.node_host

    def prepare(self, job: DriverJob) -> PreparationProcess:
        return PreparationProcess.start(job)

    def start(self) -> None:
        prepare_environment(self._address)
        self._cluster = RayCluster(address=self._address, temp_folder=self._temp_folder)

    def nodes(self) -> list[NodeGpus]:
        return self.cluster.nodes()

    def launcher(self, placement: Placement) -> RayLauncher:
        return RayLauncher(self.cluster, placement)

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop(spare=self._spare)


class RayLauncher:
    """Starts each process as a Ray actor, and kills it. Implements :class:`.Launcher`."""

    def __init__(self, cluster: RayCluster, placement: Placement) -> None:
        """Reserves the GPUs of the run.

        Args:
            cluster: where the actors run.
            placement: who gets which GPUs.

        Raises:
            UserFault: somebody else has taken them meanwhile.
        """
        import ray

        from penstock.runtime.hosts.ray.actor import ActorProcess, NodeKiller

        self._ray: Any = ray
        self._cluster = cluster
        self._groups = PlacementGroups(ray, placement)
        self._ended: Wakeup[EndedProcess] = Wakeup()
        self._handles: dict[tuple[str, int], Any] = {}
        self._launched: set[str] = set()
        self._boot: Boot | None = None
        """The last; all are of one run."""
        self._actor_class: Any = ray.remote(ActorProcess)
        self._killer_class: Any = ray.remote(NodeKiller)
        self._killers: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        """The node of each actor that is there, or that another will follow."""
        self._spare: Any = None

    def fileno(self) -> int:
        """See :class:`~penstock.runtime.hosts.processes.ports.Launcher`, as for the other methods."""
        return self._ended.fileno()

    def launch(self, boot: Boot) -> None:
        seat = self._groups.seat_of(boot.name)
        if seat is not None:
            actor = self._actor(seat.num_gpus, seat.strategy)
        elif self._spare is not None and self._may_be_spare(boot.name):
            actor, self._spare = self._spare, None
        else:
            actor = self._actor(0, self._strategy(boot.name))
        self._launched.add(boot.name)
        self._boot = boot
        self._handles[boot.name, boot.epoch] = actor  # Ray ends an actor that nobody refers to
        holder, devices = (None, None) if seat is None else (seat.holder, seat.devices)
        result = actor.run.remote(msgspec.msgpack.encode(boot), holder, devices)
        result.future().add_done_callback(self._on_done(boot.name, boot.epoch))

    def reserve(self, name: str) -> None:
        self._groups.reserve(name, self._cluster.nodes)

    def lacks(self, name: str) -> str:
        return self._groups.lacks(name)

    def end_left(self, name: str) -> None:
        from penstock.runtime.hosts.processes.left_behind import end_left_here, marks_of

        boot = self._boot
        if boot is None:
            return
        ends: list[Future[Any]] = [end_left_here(name, boot)]
        marks = marks_of(name, boot)
        for killer in self._killers.values():  # an engine comes back on other nodes, so what it left may be on any
            ends.append(killer.end_left.remote(marks).future())
            ends[-1].add_done_callback(_on_left(name))
        self._give_back(name, ends)

    def _give_back(self, name: str, ends: list[Future[Any]]) -> None:
        """What was reserved for an engine of which nothing is left when these have ended, and a node that nobody else
        of the run is on: a small actor of ours would keep an autoscaler from taking it back."""
        node_id, group = self._places.pop(name, ""), self._groups.part_with(name)
        if group is None:
            return
        killer = None if node_id in self._places.values() else self._killers.pop(node_id, None)

        def give_back() -> None:
            wait(ends, GIVE_BACK_TIMEOUT_S)
            self._groups.remove(group)
            if killer is not None:
                self._ray.kill(killer, no_restart=True)

        threading.Thread(target=give_back, name=f"give-back-{name}", daemon=True).start()

    def end_whole(self, name: str, process: ProcessStarted) -> list[Future[list[int]]]:
        from penstock.runtime.hosts.processes.whole_end import end_whole_here, marks_of_actor

        assert self._boot is not None, "who is to end was launched"
        own, marks = (process.pid, process.start_ticks), marks_of_actor(name, self._boot)
        ends = [end_whole_here(own if self.is_local(process) else None, marks)]
        nodes = {process.node_id, *self._killers, *self._groups.further_nodes_of(name)} - {self._cluster.node_id}
        for node_id in nodes:
            there = own if node_id == process.node_id else None
            ends.append(_end_there(self._killer_of(node_id).end_whole.remote(there, marks)))
        return ends

    def make_spare(self) -> None:
        if self._spare is None and self._boot is not None:
            self._spare = self._actor(0, self._strategy(SPARE))
            self._spare.warm_up.remote(self._boot.wiring)

    def announced(self, process: ProcessStarted) -> None:
        self._places[process.address.name] = process.node_id
        if not self.is_local(process):
            self._killer_of(process.node_id)

    def is_local(self, process: ProcessStarted) -> bool:
        return process.node_id == self._cluster.node_id

    def kill(self, name: str, epoch: int, process: ProcessStarted | None) -> None:
        if process is not None:
            if self.is_local(process):
                processes.kill(process.pid, process.start_ticks)
            else:
                self._killer_of(process.node_id).kill.remote(process.pid, process.start_ticks)
        handle = self._handles.pop((name, epoch), None)
        if handle is not None:
            self._ray.kill(handle, no_restart=True)

    def ended(self) -> list[EndedProcess]:
        return self._ended.take()

    def broken(self) -> str:
        return self._cluster.broken()

    def _on_done(self, name: str, epoch: int) -> Callable[[Any], None]:
        def done(future: Any) -> None:  # noqa: ANN401 - a future of Ray's, on a thread of Ray's
            error = future.exception()
            if error is None:
                end = msgspec.msgpack.decode(future.result(), type=ProcessEnd)
            elif isinstance(error, self._ray.exceptions.RayTaskError):  # raised before the process could tell itself
                end = ProcessEnd(kind=EndKind.CRASHED, error=str(error.cause), traceback=str(error))
            else:
                end = None
            self._ended.put(EndedProcess(name, epoch, end))

        return done

    def _actor(self, num_gpus: float, strategy: Any) -> Any:  # noqa: ANN401 - types of Ray's
        return self._actor_class.options(
            num_cpus=0, num_gpus=num_gpus, max_restarts=0, scheduling_strategy=strategy
        ).remote()

    def _may_be_spare(self, name: str) -> bool:
        """Whether the spare process is where this actor belongs."""
        return self._cluster.is_embedded or not (is_engine(name) or name == LEARNER)

    def _strategy(self, name: str) -> Any:  # noqa: ANN401 - a type of Ray's
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if is_engine(name) or name == LEARNER:
            return self._spread(name)
        # The Buffer's ledger has to be on the driver's disk, and the rest of the control plane talks with it most.
        # All of it ends with the driver anyway, so another node would only add ways to fail.
        return NodeAffinitySchedulingStrategy(self._cluster.node_id, soft=False)

    def _spread(self, name: str) -> Any:  # noqa: ANN401 - a type of Ray's
        """Round and round over the nodes, the learner here: Ray's own SPREAD puts actors that ask for no CPU anywhere.
        It does choose for replacements, since a node that has just been lost may still be listed."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if name in self._launched:
            return SPREAD
        alive = [str(node["NodeID"]) for node in self._ray.nodes() if node["Alive"]]
        nodes = sorted(alive, key=lambda node: (node != self._cluster.node_id, node))
        place = engine_index(name) + 1 if is_engine(name) else 0
        return NodeAffinitySchedulingStrategy(nodes[place % len(nodes)], soft=False)

    def _killer_of(self, node_id: str) -> Any:  # noqa: ANN401 - an actor's handle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node_id not in self._killers:
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = {"num_cpus": 0, "max_concurrency": NUM_KILLER_THREADS, "scheduling_strategy": strategy}
            self._killers[node_id] = self._killer_class.options(**options).remote()
        return self._killers[node_id]


def _end_there(asked: Any) -> Future[list[int]]:  # noqa: ANN401 - a reference of Ray's
    """Who could not be ended on another node; nobody where the node is gone, and what was on it."""
    told: Future[list[int]] = Future()

    def done(future: Any) -> None:  # noqa: ANN401 - a future of Ray's, on a thread of Ray's
        told.set_result([] if future.exception() is not None else future.result())

    asked.future().add_done_callback(done)
    return told


def _on_left(name: str) -> Callable[[Any], None]:
    from penstock.runtime.hosts.processes.left_behind import tell_left

    def done(future: Any) -> None:  # noqa: ANN401 - a future of Ray's, on a thread of Ray's
        if future.exception() is None:  # else the node is gone, and what was on it
            tell_left(name, future.result())

    return done
