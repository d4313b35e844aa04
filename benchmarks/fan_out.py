"""Four engines that pass weights on to each other have a version in at most half the time that it takes when each takes
all of it from the learner, whose link carries the weights once instead of four times.

The transport ``network``, the whole of a model in bfloat16, random weights. The learner and every engine are processes
of their own; what each of them serves goes through a relay that lets so many bits pass a second, over all connections
together. From the word to fetch until the last engine has checked the digest. ``direct``: no sources are named;
``tree``: all engines are, as the WeightPublisher does.
"""

# torch is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import multiprocessing
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch

from penstock.backends.weights.network import Landing
from penstock.backends.weights.pushing import PushExporter
from penstock.backends.weights.service_messages import address_in, service_at
from penstock.benchmarks._harness import Benchmark, Measured, claim, figures, interleaved, pairs, plain_figure
from penstock.benchmarks._slow_link import SlowLink
from penstock.messages.weights import WeightManifest, WeightSource

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

QUICK: Final = ("--parameters", "32", "--megabits", "160", "--repetitions", "2")
QUICK_S: Final = 60
MOST_TIME: Final = 0.5
MOST_COPIES: Final = 1.1
MATRIX: Final = 1024
MEGA: Final = 1_000_000
ANSWER_S: Final = 600.0
END_S: Final = 10.0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's process is told to fetch."""

    manifest: WeightManifest


class Landed(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers."""

    digest: str
    num_detours: int


class Taken(NamedTuple):
    """One version, until the last engine has it."""

    taken_s: float
    learner_bytes: int
    """That the learner's link has carried."""


class EngineProcess:
    """The engine's end in a process of its own; a context manager."""

    def __init__(self, name: str, bytes_per_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._line, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, name, bytes_per_s), daemon=True)
        self._process.start()
        other.close()

    def anew(self) -> WeightSource:
        """Forget every version; where it serves what it will have."""
        self._line.send_bytes(b"")
        return WeightSource(self._name, 0, self._answer().decode())

    def fetch(self, manifest: WeightManifest) -> None:
        """Begin to."""
        self._line.send_bytes(msgspec.json.encode(Told(manifest=manifest)))

    def landed(self) -> Landed:
        """When it has."""
        return msgspec.json.decode(self._answer(), type=Landed)

    def _answer(self) -> bytes:
        if not self._line.poll(ANSWER_S):
            raise TimeoutError(f"{self._name} has not answered for {ANSWER_S:g} s")
        return self._line.recv_bytes()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()  # which ends it
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()


def _serve(line: Connection, name: str, bytes_per_s: float) -> None:
    torch.set_num_threads(1)
    landing, stack = Landing(), ExitStack()
    while True:
        try:
            told = line.recv_bytes()
        except EOFError:
            break
        if told:
            landed = landing.land(manifest := msgspec.json.decode(told, type=Told).manifest)
            num_detours = len(landing.detours_of(manifest.publish))
            line.send_bytes(msgspec.json.encode(Landed(digest=landed.digest, num_detours=num_detours)))
            continue
        stack.close()
        landing = Landing()
        address = service_at(landing.pass_on(name, "127.0.0.1"))
        stack.callback(landing.stop)
        line.send_bytes(stack.enter_context(SlowLink(address, bytes_per_s)).location.encode())
    stack.close()


class Learner:
    """The learner's end: versions of random weights."""

    def __init__(self, num_parameters: int) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._shape = (max(1, num_parameters // MATRIX), MATRIX)
        self._exporter = PushExporter("network", 1, "127.0.0.1")
        self._version = 0

    def publish(self) -> WeightManifest:
        """Another version."""
        self._version += 1
        weights = torch.randn(self._shape, generator=self._generator).bfloat16()
        self._exporter.release(self._version)
        return self._exporter.export({"weight": weights}, version=self._version, publish=self._version, canary=None)

    def close(self) -> None:
        self._exporter.close()


def measure(given: argparse.Namespace) -> Measured:
    """Both ways in turn."""
    torch.set_num_threads(1)
    bytes_per_s = given.megabits * MEGA / 8
    with ExitStack() as stack:
        learner = Learner(int(given.parameters * MEGA))
        stack.callback(learner.close)
        engines = [stack.enter_context(EngineProcess(f"engine/{index}", bytes_per_s)) for index in range(given.engines)]
        link = stack.enter_context(SlowLink(address_in(manifest := learner.publish()), bytes_per_s))

        def take(*, is_tree: bool) -> Taken:
            sources = tuple(engine.anew() for engine in engines)
            manifest = link.through(learner.publish())
            if is_tree:
                manifest = msgspec.structs.replace(manifest, sources=sources)
            before, began_s = link.num_bytes_out, time.perf_counter()
            for engine in engines:
                engine.fetch(manifest)
            landed = [engine.landed() for engine in engines]
            taken_s = time.perf_counter() - began_s
            assert all(each.digest == manifest.digest for each in landed)
            assert not any(each.num_detours for each in landed), "an engine was no help to another"
            return Taken(taken_s, link.num_bytes_out - before)

        arms = {"direct": lambda: take(is_tree=False), "tree": lambda: take(is_tree=True)}
        turns = interleaved(arms, given.repetitions)
    times = figures(turns, "s until the last engine has it", lambda each: each.taken_s)
    carried = figures(turns, "MB over the learner's link", lambda each: each.learner_bytes / MEGA)
    copies = [turn.value.learner_bytes / manifest.size_bytes for turn in turns["tree"]]
    alone = manifest.size_bytes / bytes_per_s
    return Measured(
        [*times, *carried, plain_figure("one copy over one link", "s", [alone])],
        [
            claim("time, tree ÷ direct", pairs(times[1], times[0]), at_most=MOST_TIME),
            claim("copies over the learner's link, tree", copies, at_most=MOST_COPIES),
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--parameters", type=float, default=50.0, help="of the model, in millions (default: 50)")
    benchmark.option("--megabits", type=float, default=80.0, help="that each link lets pass a second (default: 80)")
    benchmark.option("--engines", type=int, default=4, help="that take each version (default: 4)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
