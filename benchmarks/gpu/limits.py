"""What the device can do at best: products of matrices, copies of its memory, copies from and to the host.

The other stages are read beside these. A product of two square matrices of random numbers, a copy within the device
(bytes read and written), and copies between it and pinned memory of the host.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from penstock.benchmarks._harness import Measured, figures, interleaved
from penstock.benchmarks.gpu._stage import stage, stand_of

if TYPE_CHECKING:
    import argparse

    from penstock.benchmarks.gpu._stage import Stand

NUM_CALLS: Final = 10


def measure(given: argparse.Namespace) -> Measured:
    stand = stand_of(given)
    size, size_bytes = (8192, 2 << 30) if stand.is_real else (128, 1 << 20)
    left, right = (torch.randn(size, size, device=stand.device, dtype=stand.dtype) for _ in range(2))
    source, target = (torch.empty(size_bytes, dtype=torch.uint8, device=stand.device) for _ in range(2))
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=stand.is_real)
    product = partial(torch.mm, left, right)
    products = {f"products in {stand.dtype_name}": partial(_per_s, stand, 2.0 * size**3, product)}
    copies = {
        "copy within the device": partial(_per_s, stand, 2.0 * size_bytes, partial(target.copy_, source)),
        "copy from the host": partial(_per_s, stand, size_bytes, partial(target.copy_, host, non_blocking=True)),
        "copy to the host": partial(_per_s, stand, size_bytes, partial(host.copy_, source, non_blocking=True)),
    }
    return Measured(
        [
            *figures(interleaved(products, given.repetitions), "TFLOP/s", lambda rate: rate / 1e12),
            *figures(interleaved(copies, given.repetitions), "GB/s", lambda rate: rate / 1e9),
        ],
        [],
    )


def _per_s(stand: Stand, work: float, act: partial[torch.Tensor]) -> float:
    def again() -> None:
        for _ in range(NUM_CALLS):
            act()

    return NUM_CALLS * work / stand.timed(again)[1]


def main(argv: list[str] | None = None) -> int:
    return stage(__file__, __doc__, repetitions=5).run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
