"""CPU time of one hop between two processes: ZMQ plain and with CURVE, against a Ray actor call and ray.util.queue.

How it is measured:

* A message is one group of 8 samples of 512 tokens, packed into one frame as the host packs it. Every arm carries
  these same bytes: ZMQ through the host's own ``Links``, Ray as the argument of a call, the queue as its item. What
  packing and typed decoding cost is the same for all of them; it stands apart.
* The driver sends, another process receives; ``WINDOW`` messages are on their way at most, for every arm alike.
* Counted is the CPU time of every process that takes part, all threads, user and system, as the kernel accounts it. So
  other load on the machine does not count. Arms are interleaved; the medians over the repetitions are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.backends.processes.curve import make_keys
from penstock.benchmarks._hop import CALLEE, Callee, Taker, ZmqReceiver, message
from penstock.benchmarks._progress import repeated
from penstock.messages.inboxes import BufferWire
from penstock.messages.wire import InboxDecoder, encode_pack
from penstock.runtime.hosts.processes.control import Address
from penstock.runtime.hosts.processes.links import Links
from penstock.runtime.hosts.ray.cluster import RayCluster, make_temp_folder, prepare_environment

WINDOW: Final = 32
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


class HopReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    message_bytes: int
    median_us: dict[str, float]
    """CPU time of a message, by arm."""
    all_us: dict[str, list[float]]
    codec_us: float
    """CPU time of packing and decoding the message once."""


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


def codec_us(num_messages: int) -> float:
    """CPU time of packing a message and decoding it against the union of the Buffer's inbox, in microseconds."""
    envelope = message()
    decoder: InboxDecoder[Any] = InboxDecoder(BufferWire)
    before_s = time.process_time()
    for _ in range(num_messages):
        decoder.decode(encode_pack([envelope]))
    return 1e6 * (time.process_time() - before_s) / num_messages


def measure(*, repetitions: int, num_messages: int) -> HopReport:
    """Every arm in turn, several times.

    Args:
        repetitions: of each arm.
        num_messages: of ZMQ; a Ray call carries a tenth of them and the queue a thirtieth, which take as long.
    """
    prepare_environment(None)
    cluster = RayCluster(address=None, temp_folder=make_temp_folder())
    try:
        import ray

        arms: dict[str, tuple[Arm, int]] = {
            ZMQ_PLAIN: (ZmqArm(ray, encrypt=False), num_messages),
            ZMQ_CURVE: (ZmqArm(ray, encrypt=True), num_messages),
            RAY_CALL: (RayCallArm(ray), max(100, num_messages // 10)),
            RAY_QUEUE: (RayQueueArm(ray), max(100, num_messages // 30)),
        }
        for arm, _ in arms.values():
            arm.carry(WINDOW)
        found: dict[str, list[float]] = {name: [] for name in arms}
        for _, name in repeated(repetitions, arms):
            arm, count = arms[name]
            found[name].append(cost_us(arm, count - count % WINDOW))
    finally:
        cluster.stop(is_orderly=True)
    return HopReport(
        message_bytes=len(encode_pack([message()])),
        median_us={name: statistics.median(costs) for name, costs in found.items()},
        all_us=found,
        codec_us=codec_us(num_messages),
    )


def _print(report: HopReport, console: Console) -> bool:
    table = Table(title=f"one hop with {report.message_bytes:,} bytes")
    table.add_column("")
    for heading in ("CPU µs, median", "least", "most"):
        table.add_column(heading, justify="right")
    for name, median in report.median_us.items():
        costs = report.all_us[name]
        table.add_row(name, f"{median:,.0f}", f"{min(costs):,.0f}", f"{max(costs):,.0f}")
    console.print(table)
    console.print(f"packing and decoding the message: {report.codec_us:.1f} µs, with whatever carries it")
    is_met = True
    for target in TARGETS:
        ratio = report.median_us[target.than] / report.median_us[target.arm]
        is_met &= ratio >= target.ratio
        verdict = "[green]met[/]" if ratio >= target.ratio else "[red]missed[/]"
        console.print(f"{target.arm} against {target.than}: {ratio:.1f}×, wanted {target.ratio:.0f}× {verdict}")
    return is_met


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON; 1 when a ratio is below what is wanted."""
    parser = argparse.ArgumentParser(prog="penstock bench hop", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--messages", type=int, default=12_000, help="ZMQ messages in one repetition")
    parser.add_argument("--output", type=Path, default=None, help="write the report here as JSON")
    options = parser.parse_args(argv)
    began_s = time.monotonic()
    report = measure(repetitions=options.repetitions, num_messages=options.messages)
    console = Console()
    is_met = _print(report, console)
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    console.print(f"[dim]{time.monotonic() - began_s:.0f} s[/]")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
