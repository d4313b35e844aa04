"""Machines of their own for the nodes of a Ray, on this one: each has its network, its processes and its shared memory.

A machine is the first process of new namespaces. What runs on it sees no process, no port and no ``/dev/shm`` of the
others, so nothing can pass by accident but through the network and the file system that all of them share, as on a
cluster. They are joined by links to a router, which can be cut, and slowed. A machine that is killed loses all of its
processes at once, without a word, as one whose power fails.

Needs root, as the kernel does for new networks; :func:`refusal` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

BEGUN_S: Final = 20.0
UNSHARED: Final = ("unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
INIT: Final = """
hostname {name}
mount -t tmpfs -o size=512m tmpfs /dev/shm
echo $$ > {scratch}/begun
while :; do sleep 1000 & wait $!; done
"""
"""A shell, as it buries the orphans that come to it."""


def refusal() -> str:
    """Why there can be no such machines here; empty where there can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian's util-linux and iproute2 have them)"
    tried = subprocess.run(
        [*UNSHARED, "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link add a0 type veth peer name a1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"the kernel refuses namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """One machine, or the router between them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/tmp"))
        """Its ``TMPDIR``: short, as Ray puts sockets there."""
        self._init = subprocess.Popen(
            [*UNSHARED, "bash", "-c", INIT.format(name=name, scratch=self.scratch)], stdin=subprocess.DEVNULL
        )
        end_s = time.monotonic() + BEGUN_S
        while not (self.scratch / "begun").exists():
            assert self._init.poll() is None, f"{name} has not begun"
            assert time.monotonic() < end_s, f"{name} has not begun in time"
            time.sleep(0.02)  # between two looks at a file
        [first] = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self.pid = int(first)
        """Of its first process, as this machine counts them."""

    def through(self) -> list[str]:
        """What stands before a command that runs on it."""
        own = ("--net", "--mount", "--pid", "--uts")
        return ["nsenter", "--target", str(self.pid), *own, "--wd=" + os.getcwd(), "env", f"TMPDIR={self.scratch}"]

    def wire(self, *command: str) -> str:
        """Run it on this machine's network; what it complains of, or nothing."""
        entered = ["nsenter", "--target", str(self.pid), "--net", *command]
        done = subprocess.run(entered, capture_output=True, text=True, check=False)
        return f"{self.name}: {' '.join(command)}: {done.stderr.strip()}" if done.returncode else ""

    def ip(self, words: str) -> None:
        """``ip`` of this machine's network, which must work."""
        assert not (complaint := self.wire("ip", *words.split())), complaint

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Run it there beside the test."""
        with log.open("ab") as out:
            return subprocess.Popen([*self.through(), *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def kill(self) -> None:
        """All that runs on it ends at once."""
        self._init.kill()
        self._init.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


class Cluster:
    """Machines behind one router, and a Ray of theirs, started as a batch job starts it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.ray_folder = folder / "ray"
        self._router = Machine("router")
        stack.callback(self._router.kill)
        refused = self._router.wire("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        assert not refused, refused
        self._num_links = 0
        self.machines: dict[str, Machine] = {}
        self._links: dict[str, str] = {}
        self._hosts: dict[str, str] = {}

    def add(self, name: str, kind: str, *, num_gpus: int = 0) -> Machine:
        """A machine that is a node of Ray, ``head`` or ``worker``, with so many GPUs declared."""
        machine = Machine(name)
        self._stack.callback(machine.kill)
        self.machines[name] = machine
        self._link(machine)
        command = [sys.executable, "-m", "penstock.runtime.hosts.ray.node", kind, str(self.ray_folder)]
        machine.start([*command, f"--num-gpus={num_gpus}", "--timeout=120"], self._folder / f"{name}.log")
        return machine

    def _link(self, machine: Machine) -> None:
        self._num_links += 1
        net, ours, theirs = f"10.99.{self._num_links}", f"r{self._num_links}", f"m{self._num_links}"
        self._router.ip(f"link add {ours} type veth peer name {theirs}")
        self._router.ip(f"link set {theirs} netns {machine.pid}")
        self._router.ip(f"addr add {net}.1/24 dev {ours}")
        self._router.ip(f"link set {ours} up")
        machine.ip("link set lo up")
        machine.ip(f"addr add {net}.2/24 dev {theirs}")
        machine.ip(f"link set {theirs} up")
        machine.ip(f"route add default via {net}.1")
        self._links[machine.name], self._hosts[machine.name] = ours, f"{net}.2"

    def host(self, name: str) -> str:
        """Its address."""
        return self._hosts[name]

    def cut(self, name: str) -> None:
        """Nothing gets to this machine or from it any more."""
        self._router.ip(f"link set {self._links[name]} down")

    def mend(self, name: str) -> None:
        """The link is there again."""
        self._router.ip(f"link set {self._links[name]} up")

    def slow(self, name: str, how: str) -> str:
        """Shape what goes to this machine, by these words of ``tc``; why the kernel cannot, or nothing."""
        return self._router.wire("tc", "qdisc", "replace", "dev", self._links[name], "root", *how.split())

    def command(self, head: str, num_nodes: int) -> list[str]:
        """What stands before ``penstock run`` to run it on the head when so many nodes have come."""
        with_nodes = ["with", str(self.ray_folder), f"--num-nodes={num_nodes}", "--timeout=120", "--"]
        return [*self.machines[head].through(), sys.executable, "-m", "penstock.runtime.hosts.ray.node", *with_nodes]


@contextmanager
def cluster(folder: Path) -> Generator[Cluster]:
    """No machine of it outlives the block."""
    with ExitStack() as stack:
        yield Cluster(folder, stack)
