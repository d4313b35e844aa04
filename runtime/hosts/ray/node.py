"""The Ray of a batch job: one node of it, or a command that runs when all nodes are there.

``python -m penstock.runtime.hosts.ray.node head|worker FOLDER …`` is a node and lives as long as it;
``… with FOLDER --num-nodes N -- penstock run …`` waits for N nodes and gives the command their address. The folder is
on a file system that all nodes share, and is this attempt's alone.

Invariants:

* Each node takes a block of ports that nobody on its machine uses, out of the range that it was given, and holds its
  last one for as long as it lives; so two jobs on one machine never share one.
* Ray's sockets and objects lie in a folder that was made for this node, and go with it.
* Whoever joins must know the token, which is made anew for each attempt and stands in the folder alone. So no stranger
  gets in, and a run that was given this address gets into no stranger's cluster.
* A node ends all that it has started, and nothing else: ``ray stop`` would end every Ray of the user on the machine.

| waits for | who ends it |
|---|---|
| the file of the head | ``--timeout`` |
| the head's port, and nodes that join | ``--timeout`` |
| the end of Ray, or of the command | itself, or SIGTERM to this process |
"""

# Ray's own types are mostly unknown to a type checker; everything that leaves this module is typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from penstock.backends.processes.process_facts import be_subreaper
from penstock.backends.processes.temp_folders import remove_folder
from penstock.messages.errors import UserFault
from penstock.runtime.hosts.processes.descendants import kill_descendants
from penstock.runtime.hosts.ray.cluster import NUM_CPUS, OBJECT_STORE_BYTES, RAY_SETTINGS, SESSIONS, make_temp_folder
from penstock.runtime.hosts.ray.ray_start import RayFaults
from penstock.runtime.safe_text import terminal_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLUSTER_FILE: Final = "cluster.json"
ENDED_FILE: Final = "ended"
FAILED_FILE: Final = "failed"
"""Why a node has not come up or has ended before the job: so that nobody waits for it."""
BLOCK_PORTS: Final = 256
"""Of one node: those that Ray gives names to, those of its workers, and the last one, which says that it is taken."""
FIXED_PORTS: Final = (
    "--port",
    "--node-manager-port",
    "--object-manager-port",
    "--runtime-env-agent-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--metrics-export-port",
)
"""Options of ``ray start`` in the order of the ports of a block; workers have the others."""
TOKEN_MODE: Final = "RAY_AUTH_MODE"
TOKEN: Final = "RAY_AUTH_TOKEN"
PAUSE_S: Final = 0.25
END_TIMEOUT_S: Final = 10.0
LOST_HEAD_S: Final = "20"
"""A worker's Ray ends when its head is gone for so long; Ray's own default is a minute."""
HEALTH_CHECKS: Final = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}
"""How soon the head takes a node for lost: 4 s where nothing answers there any more, 24 s where nothing comes back at
all. Until then Ray goes on placing actors on it. Its own defaults are 15 and 65 s."""


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the head tells the others, in ``cluster.json``."""

    address: str
    """``host:port`` of Ray's control store."""
    token: str


def claim_ports(first: int, last: int, stack: ExitStack) -> int:
    """The first port of a block in which nobody on this machine uses a port that Ray needs.

    Args:
        first: of the range.
        last: of the range, inclusive.
        stack: holds the block's last port until it is closed.

    Raises:
        UserFault: no block is free.
    """
    for begin in range(first, last - BLOCK_PORTS + 2, BLOCK_PORTS):
        guard = socket.socket()
        try:
            guard.bind(("", begin + BLOCK_PORTS - 1))
            guard.listen(1)
        except OSError:
            guard.close()
            continue
        if all(_is_free(begin + offset) for offset in range(len(FIXED_PORTS))):
            stack.callback(guard.close)
            return begin
        guard.close()
    raise UserFault(
        f"ports {first}-{last} of {socket.gethostname()}: no {BLOCK_PORTS} of them are free for Ray; name another "
        "range with the key ports of the submit config"
    )


def ray_command(kind: str, temp_folder: Path, port: int, *, num_gpus: int, address: str) -> list[str]:
    """``ray start`` of a node that stays in the foreground.

    Args:
        kind: ``head`` or ``worker``.
        temp_folder: its own.
        port: the first of its block.
        num_gpus: of the node.
        address: of a head ``host:port``, its own; of a worker that of the head.
    """
    sessions = f"{temp_folder}{SESSIONS}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--temp-dir={sessions}", f"--plasma-directory={temp_folder}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--num-cpus={NUM_CPUS}", f"--num-gpus={num_gpus}"]
    command += [f"{option}={port + offset}" for offset, option in enumerate(FIXED_PORTS) if offset or kind == "head"]
    command += [f"--min-worker-port={port + len(FIXED_PORTS)}", f"--max-worker-port={port + BLOCK_PORTS - 2}"]
    if kind == "worker":
        return [*command, f"--address={address}"]
    host = address.rpartition(":")[0]
    return [*command, "--head", f"--node-ip-address={host}", "--include-dashboard=false", "--include-log-monitor=false"]


def run_node(kind: str, folder: Path, ports: tuple[int, int], *, num_gpus: int, timeout_s: float) -> int:
    """Be a node until it ends or SIGTERM comes; the exit code, which is 0 where the job has ended.

    Raises:
        UserFault: no ports are free, or no head came.
    """
    be_subreaper()  # Ray's agents outlive its raylet; as orphans they come here, to be ended
    with ExitStack() as stack:
        temp_folder = make_temp_folder()
        stack.callback(remove_folder, temp_folder)
        stack.callback(kill_descendants, timeout_s=END_TIMEOUT_S)
        port = claim_ports(*ports, stack)
        if kind == "head":
            found = ClusterFile(address=f"{_own_host()}:{port}", token=secrets.token_hex(32))
        else:
            found = await_head(folder, timeout_s)
        command = ray_command(kind, temp_folder, port, num_gpus=num_gpus, address=found.address)
        settings = {**RAY_SETTINGS, **HEALTH_CHECKS, "RAY_gcs_rpc_server_reconnect_timeout_s": LOST_HEAD_S}
        environment = {**os.environ, **settings, TOKEN_MODE: "token", TOKEN: found.token}
        environment.pop("RAY_ADDRESS", None)
        ray = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        _hand_on_signals(ray, signal.SIGKILL)  # its own end takes seconds, and a scheduler's patience may be shorter
        if kind == "head":
            _await(lambda: _is_heard(found.address) or ray.poll() is not None, timeout_s, "Ray's head did not start")
            if ray.poll() is None:
                _write(folder, found)
        code = ray.wait()
    if (folder / ENDED_FILE).exists():
        return 0
    note_failed(folder, f"Ray's {kind} on {socket.gethostname()} has ended with exit code {code}; its log says why")
    return code or 1


def note_failed(folder: Path, why: str) -> None:
    """Tell whoever waits in this attempt that a node will not come."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / FAILED_FILE).write_text(f"{why}\n", encoding="utf-8")


def await_head(folder: Path, timeout_s: float) -> ClusterFile:
    """What the head of this attempt has written.

    Raises:
        UserFault: it has written nothing within ``timeout_s``.
    """
    file = folder / CLUSTER_FILE
    _await(file.exists, timeout_s, f"{file}: the head of Ray has not come up; its log says why", folder)
    return msgspec.json.decode(file.read_bytes(), type=ClusterFile)


def run_with(folder: Path, command: Sequence[str], *, num_nodes: int, address: str | None, timeout_s: float) -> int:
    """Run a command with ``runtime.ray_address=…`` behind it once all nodes are there; its exit code.

    Args:
        folder: of this attempt.
        command: to run.
        num_nodes: to wait for.
        address: of a cluster that somebody else starts for this job alone; None: that of the folder's head.
        timeout_s: to wait.

    Raises:
        UserFault: fewer nodes have come.
    """
    if address is None:
        found = await_head(folder, timeout_s)
        address = found.address
        os.environ.update({TOKEN_MODE: "token", TOKEN: found.token})
        os.environ.pop("RAY_ADDRESS", None)
    await_nodes(address, num_nodes, timeout_s, folder)
    child = subprocess.Popen([*command, f"runtime.ray_address={address}"])
    _hand_on_signals(child)
    code = child.wait()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENDED_FILE).write_text(f"{code}\n", encoding="utf-8")
    return 128 - code if code < 0 else code


def await_nodes(address: str, num_nodes: int, timeout_s: float, folder: Path) -> None:
    """Wait until so many nodes of this cluster live.

    Args:
        address: of the cluster.
        num_nodes: to wait for.
        timeout_s: to wait.
        folder: of this attempt.

    Raises:
        UserFault: they have not come within ``timeout_s``, or one of them has failed.
    """
    os.environ.update(RAY_SETTINGS)
    import ray

    def num_alive() -> int:
        nodes = cast("list[dict[str, Any]]", ray.nodes())  # type: ignore[no-untyped-call]
        return sum(bool(node["Alive"]) for node in nodes)

    with RayFaults(f"{address}: Ray of this job cannot be reached", "the logs of its nodes say why"):
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    try:
        what = f"{address}: fewer than {num_nodes} nodes have joined Ray; the logs of the others say why"
        _await(lambda: num_alive() >= num_nodes, timeout_s, what, folder)
    finally:
        ray.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.runtime.hosts.ray.node")
    parser.add_argument("kind", choices=("head", "worker", "with"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ports", type=_range, default=(20000, 31999), metavar="FIRST-LAST")
    parser.add_argument("--num-gpus", type=int, default=0)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--address")
    parser.add_argument("--timeout", type=float, default=600.0)
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    asked = parser.parse_args(given[:split])
    folder, timeout_s = Path(asked.folder).absolute(), float(asked.timeout)
    try:
        if asked.kind == "with":
            command = given[split + 1 :]
            return run_with(folder, command, num_nodes=int(asked.num_nodes), address=asked.address, timeout_s=timeout_s)
        return run_node(asked.kind, folder, asked.ports, num_gpus=int(asked.num_gpus), timeout_s=timeout_s)
    except UserFault as error:
        if asked.kind != "with":
            note_failed(folder, str(error))
        sys.stderr.write(terminal_lines(f"penstock: {error}\n"))
        return 2


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)


def _own_host() -> str:
    """Address of this machine that the other nodes can reach, as Ray finds it."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _is_heard(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _await(what: Callable[[], bool], timeout_s: float, complaint: str, folder: Path | None = None) -> None:
    """Until it is true, or a node of the attempt in this folder has failed. It is looked at now and then, as nothing
    tells of a file, a port or a node that comes."""
    end_s = time.monotonic() + timeout_s
    while not what():
        if folder is not None and (folder / FAILED_FILE).is_file():
            raise UserFault((folder / FAILED_FILE).read_text(encoding="utf-8").strip())
        if time.monotonic() > end_s:
            raise UserFault(f"{complaint} (waited for {timeout_s:g} s)")
        time.sleep(PAUSE_S)


def _hand_on_signals(child: subprocess.Popen[bytes], instead: int | None = None) -> None:
    """From now on what would end this process ends the child first, by the same signal or by another one; the wait for
    it then returns."""

    def hand_on(number: int, _frame: object) -> None:
        child.send_signal(instead or number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, hand_on)


def _write(folder: Path, found: ClusterFile) -> None:
    """The head's file, whole, for this user only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = folder / f".{CLUSTER_FILE}.{os.getpid()}"
    scratch.touch(mode=0o600)
    scratch.write_bytes(msgspec.json.encode(found))
    scratch.replace(folder / CLUSTER_FILE)


if __name__ == "__main__":
    sys.exit(main())
