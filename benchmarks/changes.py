"""Over the network a version of the weights takes at most 10 % of the bytes and 25 % of the time of the whole model, in
bfloat16 at a learning rate of 1e-6: an engine that has the version before is sent what has changed.

A model with random weights of the size that trained ones have, moved by AdamW in float32 with gradients drawn at
random, rounded to bfloat16 and published by the transport ``network``. Two engines take each version through a relay
that lets so many bits pass a second: one that has the version before, and one that has none. Until they have checked
the digest. At 1e-5, where more weights come out as another number, the figures are rows of their own.
"""

# torch is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.weights.network import Landing
from penstock.backends.weights.pushing import PushExporter
from penstock.backends.weights.service_messages import address_in
from penstock.benchmarks._harness import Benchmark, Measured, claim, figures, interleaved, pairs
from penstock.benchmarks._slow_link import SlowLink

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from penstock.messages.weights import WeightManifest

QUICK: Final = ("--parameters", "8", "--megabits", "400", "--repetitions", "2")
QUICK_S: Final = 20
RATES: Final = (1e-6, 1e-5)
MOST_BYTES: Final = 0.1
MOST_TIME: Final = 0.25
SCALE: Final = 0.02
"""Of the weights: the standard deviation with which models are initialised, which training hardly changes."""
MATRIX: Final = 1024
MEGA: Final = 1_000_000
WARM_UP_STEPS: Final = 3
"""AdamW's first steps are the largest."""


class Taken(NamedTuple):
    """One version, until an engine has it."""

    size_bytes: int
    taken_s: float


class Training:
    """Weights that move, and the learner's end of the transport."""

    def __init__(self, rate: float, num_parameters: int) -> None:
        num_matrices = max(1, num_parameters // MATRIX**2)
        self._generator = torch.Generator().manual_seed(0)
        self._weights = [self._drawn() * SCALE for _ in range(num_matrices)]
        self._optimizer = torch.optim.AdamW(self._weights, lr=rate)
        self._exporter = PushExporter("network", 1, "127.0.0.1")
        self._version = 0
        for _ in range(WARM_UP_STEPS):
            self.step()

    def step(self) -> WeightManifest:
        """Train once and publish."""
        for weight in self._weights:
            weight.grad = self._drawn()
        self._optimizer.step()
        self._version += 1
        tensors = {f"layers.{index}.weight": weight.bfloat16() for index, weight in enumerate(self._weights)}
        self._exporter.release(self._version - 1)
        return self._exporter.export(tensors, version=self._version, publish=self._version, canary=None)

    def close(self) -> None:
        self._exporter.close()

    def _drawn(self) -> torch.Tensor:
        return torch.randn(MATRIX, MATRIX, generator=self._generator)


def measure(given: argparse.Namespace) -> Measured:
    """Both engines in turn, at each learning rate."""
    torch.set_num_threads(1)
    measured = Measured([], [])
    for rate in RATES:
        training = Training(rate, int(given.parameters * MEGA))
        try:
            _measure(rate, training, given, measured)
        finally:
            training.close()
    return measured


def _measure(rate: float, training: Training, given: argparse.Namespace, into: Measured) -> None:
    first = training.step()
    with SlowLink(address_in(first), given.megabits * MEGA / 8) as link:
        kept = Landing()
        kept.land(first)

        def take(landing: Landing, manifest: WeightManifest) -> Taken:
            before, began_s = link.num_bytes, time.perf_counter()
            landed = landing.land(link.through(manifest))
            assert landed.digest == manifest.digest
            return Taken(link.num_bytes - before, time.perf_counter() - began_s)

        def take_changes() -> Taken:
            kept.land(training.step())  # beside the link, as the other engine's turn has brought a version in between
            return take(kept, training.step())

        turns = interleaved(
            {"whole": lambda: take(Landing(), training.step()), "changes": take_changes}, given.repetitions
        )
    named = f"learning rate {rate:g}: {{}}"
    sizes = figures(turns, "MB", lambda each: each.size_bytes / MEGA, named)
    times = figures(turns, "s until it is there", lambda each: each.taken_s, named)
    into.figures.extend((*sizes, *times))
    if rate == RATES[0]:
        into.claims.extend(
            (
                claim("bytes, changes ÷ whole", pairs(sizes[1], sizes[0]), at_most=MOST_BYTES),
                claim("time until it is there, likewise", pairs(times[1], times[0]), at_most=MOST_TIME),
            )
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--parameters", type=float, default=100.0, help="of the model, in millions (default: 100)")
    benchmark.option("--megabits", type=float, default=200.0, help="that the link lets pass a second (default: 200)")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
