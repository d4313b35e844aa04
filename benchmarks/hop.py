"""CPU time of one hop between two processes: ZMQ plain and with CURVE, against a Ray actor call and ray.util.queue.

How it is measured:

* A message is one group of 8 samples of 512 tokens, packed into one frame as the host packs it. Every arm carries
  these same bytes: ZMQ through the host's own ``Links``, Ray as the argument of a call, the queue as its item. What
  packing and typed decoding cost is the same for all of them; it stands apart.
* The driver sends, another process receives; ``WINDOW`` messages are on their way at most, for every arm alike.
* Counted is the CPU time of every process that takes part, all threads, user and system, as the kernel accounts it. So
  other load on the machine does not count. Arms take turns.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from penstock.backends.processes.curve import make_keys
from penstock.benchmarks._harness import Benchmark, Measured, claim, figures, interleaved, pairs
from penstock.benchmarks._hop import CALLEE, Callee, Taker, ZmqReceiver, message
from penstock.messages.inboxes import BufferWire
from penstock.messages.wire import InboxDecoder, encode_pack
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.ray.cluster import RayCluster, make_temp_folder, prepare_environment

if TYPE_CHECKING:
    import argparse

QUICK: Final = ("--messages", "3000")
QUICK_S: Final = 20
WINDOW: Final = 32
CODED: Final = 2000
ACK_TIMEOUT_MS: Final = 30_000
RAY_CALL: Final = "Ray actor call"
RAY_QUEUE: Final = "ray.util.queue"
ZMQ_PLAIN: Final = "ZMQ, plain"
ZMQ_CURVE: Final = "ZMQ, CURVE"


class Target(msgspec.Struct, frozen=True):
    """How many times cheaper one arm has to be than another."""

    arm: str
    than: str
    ratio: float


TARGETS: Final = (
    Target(ZMQ_PLAIN, RAY_CALL, 10.0),
    Target(ZMQ_CURVE, RAY_CALL, 5.0),
    Target(ZMQ_PLAIN, RAY_QUEUE, 40.0),
    Target(ZMQ_CURVE, RAY_QUEUE, 20.0),
)


class Arm(Protocol):
    """One way to carry messages."""

    @property
    def pids(self) -> list[int]:
        """Every process that takes part."""
        ...

    def carry(self, num_messages: int) -> None:
        """Carry so many messages; returns when all of them have arrived."""
        ...


class ZmqArm:
    """Through the host's links."""

    def __init__(self, ray: Any, *, encrypt: bool) -> None:  # noqa: ANN401 - Ray has no types
        self._keys = make_keys() if encrypt else None
        self._links = Links(client_keys=self._keys)
        self._frame = encode_pack([message()])
        back = Address("sender", 1, self._links.endpoint, self._links.server_key)
        self._receiver = ray.remote(ZmqReceiver).options(num_cpus=0).remote()
        keys = None if self._keys is None else (self._keys.public, self._keys.secret)
        pid, endpoint, server_key = ray.get(self._receiver.open.remote(keys, back.endpoint, back.server_key, WINDOW))
        self.pids = [os.getpid(), pid]
        self._links.connect(Address(CALLEE, 1, endpoint, server_key))
        self._result = self._receiver.serve.remote()

    def carry(self, num_messages: int) -> None:
        """The receiver acknowledges every half window, which costs a small fraction of a message."""
        half = WINDOW // 2
        allowed, sent, acknowledged = WINDOW, 0, 0
        while acknowledged < num_messages:
            while sent < min(allowed, num_messages):
                self._links.send(CALLEE, self._frame)
                sent += 1
            if not self._links.poller.poll(ACK_TIMEOUT_MS):
                raise TimeoutError("the receiver does not acknowledge")
            num_acks = len(self._links.receive(WINDOW))
            acknowledged += num_acks * half
            allowed += num_acks * half


class RayCallArm:
    """A method of a Ray actor."""

    def __init__(self, ray: Any) -> None:  # noqa: ANN401
        self._ray = ray
        self._callee = ray.remote(Callee).options(num_cpus=0).remote()
        self._data = encode_pack([message()])
        self.pids = [os.getpid(), ray.get(self._callee.pid.remote())]

    def carry(self, num_messages: int) -> None:
        pending: list[Any] = []
        for _ in range(num_messages):
            pending.append(self._callee.hear.remote(self._data))
            if len(pending) >= WINDOW:
                self._ray.get(pending[: WINDOW // 2])
                del pending[: WINDOW // 2]
        self._ray.get(pending)


class RayQueueArm:
    """Ray's queue, which is an actor between the two."""

    def __init__(self, ray: Any) -> None:  # noqa: ANN401
        from ray.util.queue import Queue

        self._ray = ray
        self._queue: Any = Queue(maxsize=WINDOW, actor_options={"num_cpus": 0})
        self._taker = ray.remote(Taker).options(num_cpus=0).remote(self._queue)
        self._data = encode_pack([message()])
        taker = ray.get(self._taker.pid.remote())
        worker = next(pid for pid in _children_named("_QueueActor"))
        self.pids = [os.getpid(), taker, worker]

    def carry(self, num_messages: int) -> None:
        done = self._taker.take.remote(num_messages)
        for _ in range(num_messages):
            self._queue.put(self._data)
        self._ray.get(done)


def _children_named(name: str) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True) if name in " ".join(child.cmdline())]


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, all threads, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost_us(arm: Arm, num_messages: int) -> float:
    """CPU time of one message in microseconds."""
    before_s = sum(cpu_s(pid) for pid in arm.pids)
    arm.carry(num_messages)
    return 1e6 * (sum(cpu_s(pid) for pid in arm.pids) - before_s) / num_messages


def codec_us() -> float:
    """CPU time of packing a message and decoding it against the union of the Buffer's inbox, in microseconds."""
    envelope = message()
    decoder: InboxDecoder[Any] = InboxDecoder(BufferWire)
    before_s = time.process_time()
    for _ in range(CODED):
        decoder.decode(encode_pack([envelope]))
    return 1e6 * (time.process_time() - before_s) / CODED


def measure(given: argparse.Namespace) -> Measured:
    """Every arm in turn. A Ray call carries a tenth of the messages of ZMQ and the queue a thirtieth: as long."""
    prepare_environment(None)
    cluster = RayCluster(address=None, temp_folder=make_temp_folder())
    try:
        import ray

        arms: dict[str, tuple[Arm, int]] = {
            ZMQ_PLAIN: (ZmqArm(ray, encrypt=False), given.messages),
            ZMQ_CURVE: (ZmqArm(ray, encrypt=True), given.messages),
            RAY_CALL: (RayCallArm(ray), max(100, given.messages // 10)),
            RAY_QUEUE: (RayQueueArm(ray), max(100, given.messages // 30)),
        }
        carried = {name: partial(cost_us, arm, count - count % WINDOW) for name, (arm, count) in arms.items()}
        found = figures(
            interleaved(carried, given.repetitions), f"CPU µs a message of {message_bytes():,} bytes", float
        )
    finally:
        cluster.stop(is_orderly=True)
    by_name = {figure.name: figure for figure in found}
    claims = [
        claim(f"{each.than} ÷ {each.arm}", pairs(by_name[each.than], by_name[each.arm]), at_least=each.ratio)
        for each in TARGETS
    ]
    coded = interleaved({"packing and decoding, whatever carries it": codec_us}, given.repetitions)
    return Measured(found + figures(coded, "CPU µs a message", float), claims)


def message_bytes() -> int:
    """Of one message, packed."""
    return len(encode_pack([message()]))


def main(argv: list[str] | None = None) -> int:
    """Measure and judge; 1 when a ratio is below what is wanted."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--messages", type=int, default=12_000, help="ZMQ messages in one repetition")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    sys.exit(main())
